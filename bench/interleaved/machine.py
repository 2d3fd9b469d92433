"""The machine as the coordinator sees it: which cores the ranks get, what to write down."""

import os
import platform
from pathlib import Path
from typing import Any


def cores_for(ranks: int) -> tuple[int, ...]:
    """A CPU for each rank, other physical cores first; empty when there are fewer CPUs than ranks."""
    allowed = sorted(os.sched_getaffinity(0))
    if ranks > len(allowed):
        return ()
    return tuple(sorted(spread_over_cores(allowed, siblings)[:ranks]))


def spread_over_cores(cpus: list[int], siblings_of: Any) -> list[int]:
    """The CPUs, the first thread of every physical core before any second one."""
    seen: dict[str, int] = {}
    order = []
    for cpu in cpus:
        core = siblings_of(cpu)
        order.append((seen.get(core, 0), cpu))
        seen[core] = seen.get(core, 0) + 1
    return [cpu for _, cpu in sorted(order)]


def siblings(cpu: int) -> str:
    """The hardware threads that share this CPU's core, as the system writes them."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def describe_machine() -> dict[str, Any]:
    """What does not need a job. The dcoll job adds bench/environment.py's description of itself."""
    import environment

    return {
        "host": platform.node(),
        "cpu": environment.cpu_model(),
        "cpus_allowed": environment.affinity(),
        "last_level_cache_bytes": environment.last_level_cache_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "malloc": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
    }
