"""Latency and bandwidth of the other collectives, in the conventions of bench/all_reduce.py.

    mpirun -n 2 --bind-to core python bench/collectives.py
    mpirun -n 2 --bind-to core python bench/collectives.py --collective allgather -b 64K -e 64M --peer mpi4py

Size is what each rank brings (broadcast: what the root brings), in float32. The calls are those of a script: `dcoll`'s
functions, whose results are new tensors where there are results. mpi4py is given buffers made once. Time is the
largest, over the ranks, of the rank's median call; all columns of a row are measured in turns.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from all_reduce import MEMORY, ROUNDS, say, time_calls
from arguments import at_least, check_sizes, parse_size, step_factor
from environment import describe, header

import dcoll

COLLECTIVES = ("barrier", "broadcast", "allgather", "reducescatter", "alltoall")
BUDGET_S = 0.1  # of each column and row, when -n is 0

Run = Callable[[], Any]


def value(rank: int, count: int) -> torch.Tensor:
    """What a rank brings: small integers that tell rank and place."""
    return ((torch.arange(count) * 7 + rank * 5) % 11).to(torch.float32)


def dcoll_call(collective: str, tensor: torch.Tensor) -> Run:
    return {
        "barrier": dcoll.barrier,
        "broadcast": lambda: dcoll.broadcast_(tensor, root_rank=0),
        "allgather": lambda: dcoll.allgather(tensor),
        "reducescatter": lambda: dcoll.reducescatter(tensor, op=dcoll.Sum),
        "alltoall": lambda: dcoll.alltoall(tensor),
    }[collective]


def mpi4py_call(collective: str, tensor: torch.Tensor) -> Run:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    send, size = tensor.numpy(), comm.size
    rows = {"allgather": len(send) * size, "reducescatter": len(send) // size}.get(collective, len(send))
    receive = torch.zeros(rows).numpy()
    return {
        "barrier": comm.Barrier,
        "broadcast": lambda: comm.Bcast(send, root=0),
        "allgather": lambda: comm.Allgather(send, receive),
        "reducescatter": lambda: comm.Reduce_scatter_block(send, receive),
        "alltoall": lambda: comm.Alltoall(send, receive),
    }[collective]


def expected(collective: str, count: int) -> torch.Tensor:
    rank, size = dcoll.rank(), dcoll.size()
    if collective == "broadcast":
        return value(0, count)
    brought = torch.stack([value(peer, count) for peer in range(size)])
    if collective == "allgather":
        return brought.flatten()
    shares = brought.view(size, size, count // size)[:, rank]
    return shares.sum(0) if collective == "reducescatter" else shares.flatten()


def count_wrong(collective: str, tensor: torch.Tensor) -> int:
    if collective == "barrier":
        return 0
    tensor.copy_(value(dcoll.rank(), len(tensor)))
    result = dcoll_call(collective, tensor)()
    return int(torch.count_nonzero(result != expected(collective, len(tensor))))


def measure(collective: str, memory: str, count: int, args: argparse.Namespace) -> dict[str, Any]:
    make = dcoll.empty if memory == "mapped" else torch.empty
    tensor = make((count,), dtype=torch.float32)
    wrong = count_wrong(collective, tensor)
    calls = {"dcoll": dcoll_call(collective, tensor)}
    if "mpi4py" in args.peer:
        calls["mpi4py"] = mpi4py_call(collective, torch.zeros(count))
    times: dict[str, list[float]] = {name: [] for name in calls}
    iters = {}
    for name, call in calls.items():
        dcoll.barrier()
        warm = max(args.warmup_iters, 0 if args.iters else 2)
        first = time_calls(lambda *_, call=call: call(), [(tensor, tensor)], warm, 0)
        fit = args.iters or min(max(BUDGET_S / max(statistics.median(first), 1e-7), 10), 2000)
        iters[name] = dcoll.broadcast_object(int(fit), root_rank=0)
    for turn in range(ROUNDS):
        for name, call in calls.items():
            share = iters[name] // ROUNDS + (turn < iters[name] % ROUNDS)
            dcoll.barrier()
            times[name] += time_calls(lambda *_, call=call: call(), [(tensor, tensor)], share, 0)
    gathered = dcoll.allgather_object((wrong, {name: statistics.median(mine) for name, mine in times.items()}))
    row: dict[str, Any] = {"collective": collective, "size": 4 * count, "count": count, "memory": memory}
    row["wrong"] = sum(one for one, _ in gathered)
    for name in calls:
        row[name] = {"time_us": 1e6 * max(medians[name] for _, medians in gathered), "iters": iters[name]}
    return row


def head(args: argparse.Namespace) -> str:
    peers = "".join(f"{name + ' (us)':>14s}{'ratio':>8s}" for name in args.peer)
    return f"#{'collective':>14s}{'size (B)':>13s}{'memory':>9s}{'time (us)':>12s}{'GB/s':>8s}{'#wrong':>8s}{peers}"


def line(row: dict[str, Any], args: argparse.Namespace) -> str:
    own = row["dcoll"]["time_us"]
    text = f" {row['collective']:>14s}{row['size']:13d}{row['memory']:>9s}{own:12.2f}{row['size'] / own / 1e3:8.2f}"
    text += f"{row['wrong']:8d}"
    return text + "".join(f"{row[name]['time_us']:14.2f}{row[name]['time_us'] / own:7.2f}x" for name in args.peer)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="collectives.py", description=str(__doc__).split("\n", 1)[0])
    add = parser.add_argument
    add("--collective", action="append", choices=COLLECTIVES, help="may be repeated (default: all)")
    add("-b", "--minbytes", type=parse_size, default=8, metavar="SIZE", help="smallest operand (default 8), but "
        "an element for each rank at least")  # fmt: skip
    add("-e", "--maxbytes", type=parse_size, default=64 << 20, metavar="SIZE", help="largest operand (default 64M)")
    add("-f", "--stepfactor", type=step_factor, default=8.0, metavar="X", help="from size to size (default 8)")
    add("-n", "--iters", type=at_least(0), default=0, help="timed calls; 0 (default): as many as fit in 0.1 s")
    add("-w", "--warmup_iters", type=at_least(0), default=5, help="calls before the timed ones (default 5); without "
        "-n at least 2")  # fmt: skip
    add("--mapped", choices=tuple(MEMORY), default="both", help="as in all_reduce.py (default both)")
    add("--peer", action="append", choices=("mpi4py",), default=[], help="time this library too, on ordinary memory")
    add("--json", type=Path, metavar="FILE", help="write everything measured there (rank 0)")
    args = parser.parse_args()
    check_sizes(parser, args)
    args.collective = args.collective or list(COLLECTIVES)
    args.peer = list(dict.fromkeys(args.peer))
    return args


def counts(args: argparse.Namespace) -> list[int]:
    """Elements, in whole rows for each rank, so that all collectives can share them evenly; at least a row, also where
    that is more than -e.
    """
    unit, found, size = dcoll.size(), [], float(args.minbytes)
    while size <= args.maxbytes:
        count = max(int(size) // 4 // unit, 1) * unit
        if count not in found:
            found.append(count)
        size = max(size * args.stepfactor, 4.0)
    return found


def main() -> int:
    args = parse()
    torch.set_num_threads(1)  # a rank is one thread on one core, as in training
    if "mpi4py" in args.peer:
        from mpi4py import MPI  # noqa: F401  (it asks MPI for the thread level that sharing MPI with dcoll takes)
    dcoll.init()
    environment = describe()
    say(header(environment))
    say(head(args))
    rows = []
    for collective in args.collective:
        for count in counts(args) if collective != "barrier" else [dcoll.size()]:
            for memory in MEMORY[args.mapped] if collective != "barrier" else ["plain"]:
                rows.append(measure(collective, memory, count, args))
                say(line(rows[-1], args))
    if args.json and dcoll.rank() == 0:
        arguments = {name: value for name, value in vars(args).items() if name != "json"}
        document = {"environment": environment, "arguments": arguments, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
