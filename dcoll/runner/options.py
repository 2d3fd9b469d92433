"""The command line of dcollrun: horovodrun's, as far as it means something here."""

import argparse
import functools
import math
import os
import shlex
from pathlib import Path
from typing import Any

# horovodrun's options that need nothing here: accepted, so that a command line goes on working, and explained.
WITH_VALUE = {
    "--cycle-time-ms": "there is no cycle: a collective starts when it is called",
    "--cache-capacity": "buckets need no negotiation, so there is no cache of responses",
    "--autotune-log-file": "there is no autotuning",
    "--autotune-warmup-samples": "there is no autotuning",
    "--autotune-steps-per-sample": "there is no autotuning",
    "--autotune-bayes-opt-max-samples": "there is no autotuning",
    "--autotune-gaussian-process-noise": "there is no autotuning",
    "--num-nccl-streams": "NCCL chooses its own streams",
    "--gloo-timeout-seconds": "dcoll does not use Gloo; DCOLL_TIMEOUT is the deadline of a wait",
    "--start-timeout": "dcoll's ranks meet within DCOLL_TIMEOUT, or say who is missing",
}
NOT_NEEDED = WITH_VALUE | {
    "--disable-cache": "dcollrun caches nothing",
    "--hierarchical-allgather": "dcoll chooses the algorithm",
    "--no-hierarchical-allgather": "dcoll chooses the algorithm",
    "--autotune": "the cost model chooses, and buckets follow the order in which gradients become ready",
    "--no-autotune": "there is no autotuning",
    "--mpi": "dcollrun always starts ranks with MPI's mpirun",
    "--mpi-threads-disable": "dcoll needs no more than MPI_THREAD_SERIALIZED",
    "--no-mpi-threads-disable": "dcoll needs no more than MPI_THREAD_SERIALIZED",
    "--tcp": "NCCL chooses its own network; --mpi-args chooses MPI's network",
}

# horovodrun's options that cannot be had: the error says what to do instead.
_FIXED_RANKS = "the ranks of a job are those that mpirun starts; use -np, -H and --hostfile"
REFUSED = {
    "--gloo": "dcollrun starts ranks with MPI's mpirun; without MPI start the script with torchrun",
    "--jsrun": "start the script with jsrun itself; dcoll finds its ranks through MPI",
    "--host-discovery-script": _FIXED_RANKS,
    **dict.fromkeys(("--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--elastic-timeout"), _FIXED_RANKS),
    "--slots-per-host": "name the slots with the hosts: -H host1:4,host2:4",
    "--reset-limit": "dcoll.elastic.run ends after 10 failures without a commit in between",
    "--blacklist-cooldown-range": _FIXED_RANKS,
}


class _NotNeeded(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert option_string is not None
        namespace.notes.append(f"{option_string} needs nothing here: {NOT_NEEDED[option_string]}")


class _Refused(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert option_string is not None
        parser.error(f"{option_string}: {REFUSED[option_string]}")


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _number(text: str, most: float = math.inf, what: str = "MiB from 0 on") -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}")
    return value


_seconds = functools.partial(_number, most=1e9, what="seconds")


def _cores(text: str) -> str:
    if not all(word.isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of cores, one per rank of a host, like 2,6")
    return text


def _switch(group: Any, dest: str, on: list[str], off: list[str], help: str) -> None:
    """Options that say yes, and others that say no: the last one counts, as those of a config file come first."""
    group.add_argument(*on, dest=dest, action="store_const", const=True, help=help)
    group.add_argument(*off, dest=dest, action="store_const", const=False, help=argparse.SUPPRESS)


def _algorithm(args: argparse.Namespace) -> str | None:
    asked = (args.hierarchical_allreduce, args.torus_allreduce)
    if True in asked:
        return "hierarchical"
    # "No" takes back what a variable asks for, and leaves every other algorithm.
    takes_back = False in asked and os.environ.get("DCOLL_ALGO", "") in ("", "hierarchical")
    return "auto" if takes_back else None


def settings(args: argparse.Namespace) -> dict[str, str]:
    """The DCOLL_* variables that the options set for all ranks."""
    given = {
        "DCOLL_BUCKET_MB": args.fusion_threshold_mb,
        "DCOLL_ALGO": _algorithm(args),
        "DCOLL_THREAD_AFFINITY": args.thread_affinity,
        "DCOLL_TIMELINE": args.timeline_filename,
        "DCOLL_TIMELINE_MARK_CYCLES": args.timeline_mark_cycles,
        "DCOLL_STALL_CHECK_DISABLE": None if args.stall_check is None else not args.stall_check,
        "DCOLL_STALL_CHECK_TIME": args.stall_check_warning_time_seconds,
        "DCOLL_STALL_SHUTDOWN_TIME": args.stall_check_shutdown_time_seconds,
        "DCOLL_LOG_LEVEL": args.log_level,
        "DCOLL_LOG_HIDE_TIME": args.log_hide_time,
    }
    return {name: f"{value:g}" if isinstance(value, bool | float) else value for name, value in given.items()
            if value is not None}  # fmt: skip


def _add_settings(core: argparse._ArgumentGroup) -> None:
    """Options that stand for a DCOLL_* variable."""
    core.add_argument("--fusion-threshold-mb", type=_number, metavar="MIB",
                      help="DCOLL_BUCKET_MB; 0: one bucket per parameter")  # fmt: skip
    _switch(core, "hierarchical_allreduce", on=["--hierarchical-allreduce"], off=["--no-hierarchical-allreduce"],
            help="DCOLL_ALGO=hierarchical")  # fmt: skip
    _switch(core, "torus_allreduce", on=["--torus-allreduce"], off=["--no-torus-allreduce"],
            help="the same")  # fmt: skip
    core.add_argument("--thread-affinity", type=_cores, metavar="CORE,...",
                      help="DCOLL_THREAD_AFFINITY: a core per rank of a host, for its background thread")  # fmt: skip
    core.add_argument("--timeline-filename", metavar="FILE", help="DCOLL_TIMELINE; with {rank}: a file of every rank")
    _switch(core, "timeline_mark_cycles", on=["--timeline-mark-cycles"], off=["--no-timeline-mark-cycles"],
            help="DCOLL_TIMELINE_MARK_CYCLES=1")  # fmt: skip
    _switch(core, "stall_check", on=["--stall-check"], off=["--no-stall-check"], help="DCOLL_STALL_CHECK_DISABLE=0")
    core.add_argument("--stall-check-warning-time-seconds", type=_seconds, metavar="S", help="DCOLL_STALL_CHECK_TIME")
    core.add_argument("--stall-check-shutdown-time-seconds", type=_seconds, metavar="S",
                      help="DCOLL_STALL_SHUTDOWN_TIME")  # fmt: skip
    _switch(core, "log_hide_time", on=["--log-hide-timestamp", "--log-without-timestamp"],
            off=["--no-log-hide-timestamp", "--log-with-timestamp"], help="DCOLL_LOG_HIDE_TIME=1")  # fmt: skip
    levels = ["trace", "debug", "info", "notice", "warning", "error", "fatal"]
    core.add_argument("--log-level", type=str.lower, metavar="LEVEL", choices=levels, help="DCOLL_LOG_LEVEL")


def parser() -> argparse.ArgumentParser:
    """horovodrun's options: those that work, those that need nothing, and those that are refused with a reason."""
    p = argparse.ArgumentParser(
        prog="dcollrun",
        description="Start a training script on several ranks: with the mpirun of the MPI that dcoll was built with, "
        "else the first on PATH, else the one beside this Python.",
        epilog="dcollrun -np 4 -H host1:2,host2:2 python train.py",
        allow_abbrev=False,
    )
    p.set_defaults(notes=[])
    p.add_argument("-v", "--version", action="store_true", help="print dcoll's version")
    p.add_argument("-cb", "--check-build", action="store_true", help="print what is built in, and which MPI is found")
    p.add_argument("-np", "-n", "--num-proc", type=_positive, metavar="N", help="number of ranks")
    p.add_argument("--verbose", action="store_true", help="print the launcher's command line")
    p.add_argument("--config-file", type=Path, metavar="FILE", help="horovodrun's YAML file of options")
    p.add_argument("--dry-run", action="store_true", help="print the launcher's command line and start nothing")

    where = p.add_argument_group("hosts")
    hosts = where.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and how many ranks each takes")
    hosts.add_argument("-hostfile", "--hostfile", type=Path, metavar="FILE", help="lines of 'host slots=N'")
    where.add_argument("-p", "--ssh-port", type=_positive, metavar="PORT")
    where.add_argument("-i", "--ssh-identity-file", metavar="FILE")
    where.add_argument("--network-interfaces", "--network-interface", metavar="NAME,...",
                       help="network interfaces that MPI and NCCL use between hosts")  # fmt: skip

    out = p.add_argument_group("output")
    out.add_argument("--no-prefix", action="store_true", help="do not begin lines with the rank they come from")
    out.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true")
    out.add_argument("--output-filename", type=Path, metavar="FOLDER", help="also write each rank's output there")

    mpi = p.add_argument_group("MPI")
    mpi.add_argument("--binding-args", type=shlex.split, metavar="ARGS", help="instead of one core for each rank")
    mpi.add_argument("--mpi-args", type=shlex.split, default=[], metavar="ARGS", help="more arguments for mpirun")

    _add_settings(p.add_argument_group("dcoll"))
    for option in NOT_NEEDED:
        p.add_argument(
            option, action=_NotNeeded, nargs=None if option in WITH_VALUE else 0, help=argparse.SUPPRESS, dest="notes"
        )
    for option in REFUSED:
        p.add_argument(option, action=_Refused, nargs="?", help=argparse.SUPPRESS, dest="notes")
    p.add_argument("command", nargs=argparse.REMAINDER, metavar="command ...", help="what every rank runs")
    return p
