"""What a measurement depends on: versions, layout, pinning, memory speed. Gathered from every rank, printed above."""

import ctypes
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dcoll
from dcoll import _C
from dcoll.job import world


def last_level_cache_bytes() -> int:
    """The largest cache of CPU 0, so the same on every rank of a node; 32 MiB when the system does not tell."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [32 << 20]
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    found = [entry.read_text().strip() for entry in folder.glob("index*/size")]
    return max([int(text[:-1]) * units[text[-1]] for text in found if text[-1:] in units] or sizes)


def mpi_library() -> str:
    """The version text of the MPI library in this process, asked from the library itself."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return "unknown"
    for path in sorted({line.split(maxsplit=5)[-1] for line in maps if "/libmpi" in line}):
        library = ctypes.CDLL(path)
        if hasattr(library, "MPI_Get_library_version"):
            text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
            library.MPI_Get_library_version(text, ctypes.byref(length))
            return text.value.decode(errors="replace").splitlines()[0].split(",")[0]
    return "none loaded"


def affinity() -> str:
    """This rank's allowed CPUs, like 0-3,8."""
    ranges: list[list[int]] = []
    for cpu in sorted(os.sched_getaffinity(0)):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def memcpy_gbps(nbytes: int) -> float:
    """Best of five copies of a block that no cache holds, all ranks at once; bytes copied, counted once, per second."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    best = float("inf")
    for _ in range(5):
        dcoll.barrier()
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return nbytes / best / 1e9


def describe() -> dict[str, Any]:
    """The environment of the whole job, the same dict on every rank."""
    comm = world.communicator()
    mine = {
        "host": platform.node(),
        "cpu": cpu_model(),
        "affinity": affinity(),
        "memcpy_gbps": memcpy_gbps(2 * last_level_cache_bytes()),
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dcoll": dcoll.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mpi": mpi_library(),
        "command": " ".join(sys.argv),
        "ranks": comm.size,
        "nodes": comm.num_nodes,
        "node_of_rank": list(comm.nodes),
        "transports_of_rank_0": dcoll.broadcast_object(list(comm.transports), root_rank=0),
        "torch_threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "settings": {name: value for name, _, _, _, value in _C.settings()},
        "simd": _C.kernels.active_isa(),
        "per_rank": dcoll.allgather_object(mine),
    }


def header(env: dict[str, Any]) -> str:
    """The comment lines above the table."""
    ranks = env["per_rank"]
    cpus = ", ".join(sorted({rank["cpu"] for rank in ranks}))
    lines = [
        f"{env['date']}  dcoll {env['dcoll']}, torch {env['torch']}, {env['mpi']}, Python {env['python']}",
        f"{env['ranks']} rank(s) on {env['nodes']} node(s), {env['torch_threads']} torch thread(s) each; {cpus}; "
        f"kernels {env['simd']}; last-level cache {env['last_level_cache_bytes'] >> 20} MiB",
    ]
    for number, (rank, node, transport) in enumerate(
        zip(ranks, env["node_of_rank"], env["transports_of_rank_0"], strict=True)
    ):
        lines.append(f"rank {number:3d}  node {node} ({rank['host']})  CPUs {rank['affinity']:8s}  "
                     f"from rank 0: {transport:5s}  memcpy {rank['memcpy_gbps']:5.1f} GB/s")  # fmt: skip
    total = sum(rank["memcpy_gbps"] for rank in ranks)
    lines.append(f"memcpy of all ranks at once: {total:.1f} GB/s, bytes counted once")
    changed = {name: env["settings"][name] for name, fallback, *_ in _C.settings() if env["settings"][name] != fallback}
    if changed:
        lines.append("settings: " + " ".join(f"{name}={value}" for name, value in changed.items()))
    return "\n".join("# " + line for line in lines)
