"""What small calls from Python cost, beside each other and beside mpi4py and Gloo.

    mpirun -n 2 --bind-to core python bench/calls.py
    mpirun -n 2 --bind-to core python bench/calls.py --only async --json calls.json

inline   allreduce_ of 4 B, on ordinary tensors, on those of dcoll.empty, on numpy; mpi4py's Allreduce.
async    allreduce_async + synchronize of 4 B, in order and by name; the first use of names and the later ones; 50 by
         name at once, then all synchronized; Gloo's all_reduce(async_op=True).
grouped  groups of 100 tensors of 4 KiB, as one operation, beside one tensor of 400 KiB and beside 100 calls; and what
         the 100 results take that all but those in place have to make.

The kinds of a group take turns, some calls each, so that what the machine does meanwhile meets all of them. A figure is
the median over the turns of the time of a call, of the slowest rank; a ratio or difference is the median of those
within a turn. "against" is the kind that a line is compared with.
"""  # fmt: skip

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import join_gloo

import dcoll as hvd

Call = Callable[[], object]
GROUPS = ("inline", "async", "grouped")
MANY = 50  # operations by name at once
TENSORS, TENSOR_FLOATS = 100, 1024  # of a group


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="calls.py",
        description="The cost of small calls from Python. Run it under mpirun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--only", choices=GROUPS, action="append", default=argparse.SUPPRESS,
        help="this group of kinds; may be repeated (default: all three)",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=41, help="how often each kind has its turn")
    parser.add_argument("--ms", type=float, default=4.0, help="about how long a turn takes, in milliseconds")
    parser.add_argument("--no-gloo", action="store_true", help="leave torch.distributed out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there (rank 0)")
    args = parser.parse_args(argv)
    if args.turns < 1 or args.ms <= 0:
        parser.error(f"--turns {args.turns} --ms {args.ms}: allowed are at least 1 turn and more than 0 ms")
    args.only = vars(args).get("only") or list(GROUPS)
    return args


def inline_kinds() -> dict[str, Call]:
    plain, mapped, array = torch.ones(1), hvd.empty(1), np.ones(1, np.float32)
    mapped.fill_(1)
    kinds: dict[str, Call] = {
        "allreduce_ torch": lambda: hvd.allreduce_(plain, op=hvd.Max),
        "allreduce_ dcoll.empty": lambda: hvd.allreduce_(mapped, op=hvd.Max),
        "allreduce_ numpy": lambda: hvd.allreduce_(array, op=hvd.Max),
        "allreduce torch": lambda: hvd.allreduce(plain, op=hvd.Max),
    }
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return kinds
    comm, sent, received = MPI.COMM_WORLD, np.ones(1, np.float32), np.ones(1, np.float32)
    kinds["mpi4py Allreduce"] = lambda: comm.Allreduce(sent, received, MPI.MAX)
    kinds["mpi4py Allreduce in place"] = lambda: comm.Allreduce(MPI.IN_PLACE, received, MPI.MAX)
    return kinds


def async_kinds(gloo: bool) -> dict[str, Call]:
    tensor = torch.ones(1)
    tensors = [torch.ones(1) for _ in range(MANY)]
    names = [f"x{i}" for i in range(MANY)]
    fresh = iter(range(1 << 60))

    def each(start: Callable[[int], Any], wait: Callable[[Any], object]) -> Call:
        def run() -> None:
            for handle in [start(i) for i in range(MANY)]:
                wait(handle)

        return run

    def in_order() -> None:
        hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Max))

    def by_name() -> None:
        hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Max, name="x"))

    def by_a_new_name() -> None:
        hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Max, name=f"new {next(fresh)}"))

    kinds: dict[str, Call] = {
        "in order": in_order,
        "by name": by_name,
        "by a new name": by_a_new_name,
        f"{MANY} in order": each(lambda i: hvd.allreduce_async_(tensors[i], op=hvd.Max), hvd.synchronize),
        f"{MANY} by name": each(lambda i: hvd.allreduce_async_(tensors[i], op=hvd.Max, name=names[i]), hvd.synchronize),
    }
    if gloo:
        reduce, largest = torch.distributed.all_reduce, torch.distributed.ReduceOp.MAX
        kinds["gloo"] = lambda: reduce(tensor, largest, async_op=True).wait()
        kinds[f"{MANY} gloo"] = each(lambda i: reduce(tensors[i], largest, async_op=True), lambda work: work.wait())
    return kinds


def grouped_kinds() -> dict[str, Call]:
    def ones(make: Callable[[int], torch.Tensor], count: int) -> torch.Tensor:
        return make(count).fill_(1)

    kinds: dict[str, Call] = {}
    for memory, make in (("", torch.empty), (" mapped", hvd.empty)):
        one = ones(make, TENSORS * TENSOR_FLOATS)
        many = [ones(make, TENSOR_FLOATS) for _ in range(TENSORS)]
        kinds[f"allreduce_ 400 KiB{memory}"] = lambda one=one: hvd.allreduce_(one, op=hvd.Max)
        kinds[f"grouped_allreduce_{memory}"] = lambda many=many: hvd.grouped_allreduce_(many, op=hvd.Max)
        if memory:
            continue
        kinds["allreduce 400 KiB"] = lambda one=one: hvd.allreduce(one, op=hvd.Max)
        kinds["100 x torch.empty_like"] = lambda many=many: [torch.empty_like(t) for t in many]
        kinds["grouped_allreduce"] = lambda many=many: hvd.grouped_allreduce(many, op=hvd.Max)
        kinds["100 x allreduce_"] = lambda many=many: [hvd.allreduce_(t, op=hvd.Max) for t in many]
        kinds["grouped_allgather"] = lambda many=many: hvd.grouped_allgather(many)
        kinds["100 x allgather"] = lambda many=many: [hvd.allgather(t) for t in many]
        kinds["grouped_reducescatter"] = lambda many=many: hvd.grouped_reducescatter(many, op=hvd.Max)
        kinds["100 x reducescatter"] = lambda many=many: [hvd.reducescatter(t, op=hvd.Max) for t in many]
    return kinds


AGAINST = {
    "allreduce_ torch": "mpi4py Allreduce in place",
    "allreduce_ dcoll.empty": "mpi4py Allreduce in place",
    "allreduce_ numpy": "mpi4py Allreduce in place",
    "allreduce torch": "mpi4py Allreduce",
    "in order": "gloo",
    "by name": "in order",
    "by a new name": "in order",
    f"{MANY} in order": f"{MANY} gloo",
    f"{MANY} by name": f"{MANY} gloo",
    "grouped_allreduce_": "allreduce_ 400 KiB",
    "grouped_allreduce_ mapped": "allreduce_ 400 KiB mapped",
    "grouped_allreduce": "allreduce 400 KiB",
    "100 x allreduce_": "grouped_allreduce_",
    "100 x allgather": "grouped_allgather",
    "100 x reducescatter": "grouped_reducescatter",
}


def turn(call: Call, calls: int) -> float:
    """Microseconds of a call, of the slowest rank."""
    hvd.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    mine = (time.perf_counter() - begin) / calls * 1e6
    return float(hvd.allreduce(torch.tensor([mine], dtype=torch.float64), op=hvd.Max))


def measure(kinds: dict[str, Call], turns: int, ms: float) -> dict[str, list[float]]:
    calls = {}
    for kind, call in kinds.items():
        turn(call, 3)
        calls[kind] = max(2, int(ms * 1e3 / turn(call, 5)))
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(turns):
        for kind, call in kinds.items():
            times[kind].append(turn(call, calls[kind]))
    return times


def show(times: dict[str, list[float]]) -> None:
    for kind, measured in times.items():
        text = f"{kind:>26} {statistics.median(measured):10.2f} {min(measured):10.2f}"
        other = AGAINST.get(kind, "")
        if other in times:
            pairs = list(zip(measured, times[other], strict=True))
            difference = statistics.median(a - b for a, b in pairs)
            text += f" {difference:+10.2f} {statistics.median(a / b for a, b in pairs):8.2f}   {other}"
        print(text, flush=True)


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    gloo = not args.no_gloo and "async" in args.only
    if gloo:
        join_gloo()
    makers: dict[str, Callable[[], dict[str, Call]]] = {
        "inline": inline_kinds,
        "async": lambda: async_kinds(gloo),
        "grouped": grouped_kinds,
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if hvd.rank() == 0:
        print(f"# {hvd.size()} ranks, {cores} core(s) for rank 0, torch {torch.__version__}, dcoll {hvd.__version__}")
        print(f"{'kind':>26} {'median us':>10} {'least us':>10} {'difference':>10} {'ratio':>8}   against")
    found = {}
    for group in args.only:
        times = measure(makers[group](), args.turns, args.ms)
        found[group] = times
        if hvd.rank() == 0:
            print(f"# {group}")
            show(times)
    if args.json is not None and hvd.rank() == 0:
        args.json.write_text(json.dumps({"ranks": hvd.size(), "microseconds": found}, indent=1) + "\n")
    if gloo:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
