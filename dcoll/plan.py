"""Look at the schedules and at the choice between them. Needs no mpirun; under one, `explain` is about that very job.

python -m dcoll.plan list
python -m dcoll.plan show --algo ring -n 4 [--collective all_reduce] [--rank 0]
python -m dcoll.plan verify --algo tree -n 64
python -m dcoll.plan explain --bytes 16M -n 8 [--ranks-per-node 4] [--rate 10gbit] [--latency 20us]
python -m dcoll.plan explain --bytes 16M --nodes 4 --ranks-per-node 2
python -m dcoll.plan explain --bytes 16M --ranks-per-node 3,1,2
python -m dcoll.plan explain --bytes 16M --nodes 4 --rate 1gbit --compression
mpirun -n 8 python -m dcoll.plan explain --bytes 16M [--compression] [--dtype float16] [--op adasum] [--memory mapped]
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from dcoll import _C
from dcoll.collectives.tensors import DTYPE_NAMES
from dcoll.job.find_launcher import find_launcher
from dcoll.ops import ReduceOp

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_OPS = {op.name.lower(): op.value for op in ReduceOp}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """16M -> 16777216. Suffixes K, M, G (KB, KiB likewise) are powers of 1024."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in ("K", "M", "G") else ""
    try:
        value = float(number.removesuffix(unit)) * _UNITS[unit]
        whole = int(value)
    except (ValueError, OverflowError):
        whole = -1
    if whole < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write a number of bytes, or e.g. 64K, 16M, 1G")
    return whole


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def parse_ranks_per_node(text: str) -> list[int]:
    """2 -> [2], of every node; 3,1,2 -> [3, 1, 2], of each."""
    ranks = text.split(",")
    if not all(one.isdecimal() and int(one) >= 1 for one in ranks):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: write e.g. 2, or 3,1,2 for three nodes")
    return [int(one) for one in ranks]


def show(collective: str, algo: str, n: int, rank: int | None, root: int) -> str:
    """The steps of one rank, or of all, one line each."""
    lines = []
    for r in range(n) if rank is None else (rank,):
        channels = _C.plan.build(collective, algo, n, r, root)
        steps = [step for channel in channels for step in channel]
        sent = sum(step["sends_to"] is not None for step in steps)
        lines.append(f"rank {r}: {len(steps)} steps per round, {sent} messages sent")
        for c, channel in enumerate(channels):
            for i, step in enumerate(channel):
                label = f"channel {c}" if i == 0 else ""
                crossing = step["send_channel"] not in (None, c)
                lane = f" (on channel {step['send_channel']})" if crossing else ""
                lines.append(f"  {label:<10} {i:>3}  {step['op']:<17} {step['text']}{lane}")
    return "\n".join(lines)


def verify(collective: str, algo: str, n: int, root: int) -> str:
    """Empty when the schedules are right for slot depths 1 and 2, in and out of place; else what is wrong."""
    for slot_depth in (1, 2):
        for in_place in (False, True):
            if in_place and collective == "all_to_all":
                continue
            message = _C.plan.verify(collective, algo, n, slot_depth, 2, in_place, root)
            if message:
                return message
    return ""


def parse_rate(text: str) -> float:
    """10gbit -> microseconds per byte."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text.lower())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: write e.g. 200mbit or 10gbit")
    return 8e6 / (float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]])


def parse_time(text: str) -> float:
    """20us -> 20.0"""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms)", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write e.g. 20us or 1ms")
    return float(match[1]) * {"us": 1.0, "ms": 1e3}[match[2]]


def blocks(ranks_of_nodes: Sequence[int]) -> list[int]:
    """The node of each rank, where the first ranks are on node 0, and so on: [3, 1] -> [0, 0, 0, 1]"""
    return [node for node, ranks in enumerate(ranks_of_nodes) for _ in range(ranks)]


def explain(
    collective: str,
    nbytes: int,
    node_of_rank: Sequence[int],
    constants: dict[str, Any] | None = None,
    source: str = "built in",
    slice_bytes: int | None = None,
) -> str:
    """What the cost model chooses, the predicted time of every candidate, and the numbers it follows from."""
    constants = constants or _C.plan.constants()
    nodes = len(set(node_of_rank))
    if slice_bytes is None:
        slice_bytes = slice_bytes_of_job(several_nodes=nodes > 1)
    two_levels = collective == "all_reduce" and 1 < nodes < len(node_of_rank)
    # On two levels the network sees one all-reduce between nodes, whose slices are shared out to the ranks of each.
    asked = range(nodes) if two_levels else node_of_rank
    choice = _C.plan.select(collective, nbytes, asked, slice_bytes, constants)
    fastest = min(candidate[1] for candidate in choice["candidates"])
    lines = [choice["why"], f"  {choice['name']} is for: {choice['reason']}"]
    if two_levels:
        lines.insert(0, _C.plan.hierarchical(nbytes, node_of_rank, slice_bytes, constants)["why"])
    lines.append(f"  {'algorithm':<20} {'predicted':>14} {'':>7}  slices")
    for name, predicted_us, best_slice, _ in choice["candidates"]:
        factor = f"{predicted_us / fastest:6.2f}x" if fastest > 0 else ""
        lines.append(f"  {name:<20} {predicted_us:>11.1f} us {factor:>7}  {best_slice >> 10} KiB")
    for level in ("memory", "network")[: 1 + (nodes > 1)]:
        link = constants[level]
        lines.append(
            f"  {level}: {link['alpha_us']:.2f} us + {2 * link['overhead_us']:.2f} us of CPU per message, "
            f"{1e-3 / max(link['beta_us_per_byte'], 1e-12):.3f} GB/s, crowding {link['fan_in']:.2f}"
            + (f", {link['burst_bytes'] / 1024:.0f} KiB at once after a pause" if link["burst_bytes"] > 0 else "")
        )
    if nodes > 1 and constants["handshake_us"] >= 0:
        lines.append(f"  handshake of all ranks: {constants['handshake_us']:.1f} us, measured")
    lines.append(f"  reduction: {1e-3 / max(constants['gamma_us_per_byte'], 1e-12):.2f} GB/s; constants: {source}")
    return "\n".join(lines)


CODECS = ("fp16", "bf16", "int8", "topk 0.01")
SMALL_BYTES = 64 << 10
"""All-reduces up to this long are not encoded."""


def explain_compression(
    nbytes: int,
    node_of_rank: Sequence[int],
    codings: dict[str, tuple[float, float]],
    constants: dict[str, Any] | None = None,
    slice_bytes: int = _C.plan.DEFAULT_SLICE_BYTES,
) -> str:
    """What Compression.auto would choose for an all-reduce of so many bytes of float32, for each loss allowed.

    codings: of each codec the microseconds to encode, and to decode, a byte of float32.
    """
    nodes = len(set(node_of_rank))
    if nodes == 1:
        return "  compression: nothing is compressed inside one node, where memory is faster than any encoder"
    two_levels = nodes < len(node_of_rank)
    lines = [f"  {'codec':<20} {'predicted':>14} {'times faster':>13}  Compression.auto, where this loss is allowed"]
    for codec, speed in codings.items():
        found = _C.plan.encoded(codec, nbytes, node_of_rank, *speed, slice_bytes, constants or {}, two_levels)
        faster = found["plain_us"] / found["encoded_us"]
        pays = found["pays"] and nbytes > SMALL_BYTES
        chosen = codec if pays else "in full" + (": it is too short" if nbytes <= SMALL_BYTES else "")
        if found["close"] and nbytes > SMALL_BYTES:
            chosen = f"probably {chosen}: close, so the first calls are timed either way"
        coding = " and ".join(f"{1e-3 / one:.1f}" for one in speed)
        lines.append(f"  {codec:<20} {found['encoded_us']:>11.1f} us {faster:>12.2f}x  {chosen} (coding {coding} GB/s)")
    return "\n".join(lines)


def explain_job(
    collective: str, nbytes: int, dtype: str, op: str, memory: str, compression: bool = False
) -> str | None:
    """How that call goes in the job this process is a rank of; None on all ranks but the first. Collective."""
    import torch

    from dcoll.collectives import on_communicator, reductions
    from dcoll.job import world

    world.init()
    comm = world.communicator()
    # The first large all-reduce between nodes measures, or reads what was measured.
    reductions.allreduce(torch.zeros(1 << 16), name="dcoll.plan")
    for codec in CODECS if compression else ():
        on_communicator.allreduce_sync(
            comm, torch.zeros(1 << 16), ReduceOp.Sum, "", codec=f"auto {codec}", in_place=True
        )
    text = None
    if comm.rank == 0:
        text = explain(
            collective,
            nbytes,
            comm.nodes,
            comm.constants(),
            comm.constants_source(),
            slice_bytes_of_job(several_nodes=comm.num_nodes > 1),
        )
        path = comm.describe_path(collective, nbytes, DTYPE_NAMES[dtype], _OPS[op], memory)
        text = f"{collective} of {nbytes} bytes of {dtype}, {memory} memory: {path}\n{text}"
        if comm.num_nodes == 1:
            text += (
                "\n  All ranks share memory, so the schedules are what DCOLL_TRANSPORT=mpi would have to choose from."
            )
        if compression:
            codings = {codec: speed for codec in CODECS if (speed := comm.coding(f"auto {codec}")) is not None}
            slices = slice_bytes_of_job(several_nodes=True)
            text += "\n" + explain_compression(nbytes, comm.nodes, codings, comm.constants(), slices)
    world.shutdown()
    return text


def slice_bytes_of_job(several_nodes: bool) -> int:
    """The longest message of a job."""
    name = "DCOLL_SLICE_KB"
    given = os.environ.get(name) or next(row[1] for row in _C.settings() if row[0] == name)
    return int(given) << 10 or (_C.plan.DEFAULT_SLICE_BYTES if several_nodes else 64 << 10)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dcoll.plan", description="Show, prove and explain schedules.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every algorithm, and what it is for")
    for name, text in (("show", "the steps of a schedule"), ("verify", "prove a schedule right")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--collective", choices=COLLECTIVES, default="all_reduce")
        command.add_argument("--algo", required=True, help="its name, see 'list'")
        command.add_argument("-n", type=_positive, default=4, help="number of ranks (default 4)")
        command.add_argument("--root", type=int, default=0, help="broadcast: the rank that has the data")
        if name == "show":
            command.add_argument("--rank", type=int, help="only this rank (default: all)")
    command = commands.add_parser("explain", help="which algorithm is chosen, and why")
    command.add_argument("--collective", choices=COLLECTIVES, default="all_reduce")
    command.add_argument("--bytes", type=parse_bytes, required=True, help="size of the buffer: 8, 64K, 16M, 1G")
    command.add_argument("-n", type=_positive, default=None, help="number of ranks (default 4, or the job's)")
    command.add_argument("--nodes", type=_positive, default=None, help="number of nodes, instead of -n")
    command.add_argument(
        "--ranks-per-node",
        type=parse_ranks_per_node,
        default=None,
        help="2, or 3,1,2 where nodes differ (default: all on one node)",
    )
    of_job = "of this job, under mpirun:"
    command.add_argument("--dtype", choices=list(DTYPE_NAMES), help=f"{of_job} of the elements (default float32)")
    command.add_argument(
        "--op", choices=list(_OPS), help=f"{of_job} of an all_reduce or a reduce_scatter (default sum)"
    )
    command.add_argument(
        "--memory",
        choices=["ordinary", "mapped", "device"],
        help=f"{of_job} mapped: from dcoll.empty(), as gradients are; device: of a GPU (default ordinary)",
    )
    command.add_argument(
        "--compression", action="store_true", help="also: which codecs would be faster, and what Compression.auto takes"
    )
    command.add_argument("--rate", type=parse_rate, help="of the links between nodes: 1gbit, 100gbit")
    command.add_argument("--latency", type=parse_time, help="of a short message between nodes: 20us")
    return parser


def _ranks_of_nodes(args: argparse.Namespace) -> list[int]:
    """How many ranks each node of a described job has."""
    told: list[int] = args.ranks_per_node or []
    if len(told) > 1:
        ranks = told
    elif args.nodes is not None:
        ranks = args.nodes * (told or [(args.n or args.nodes) // args.nodes])
    else:
        n: int = args.n or 4
        full, rest = divmod(n, told[0] if told else n)
        ranks = full * (told or [n]) + [rest] * (rest > 0)
    if args.n not in (None, sum(ranks)) or args.nodes not in (None, len(ranks)):
        options = {"-n": args.n, "--nodes": args.nodes, "--ranks-per-node": ",".join(map(str, told))}
        given = ", ".join(f"{option} {value}" for option, value in options.items() if value)
        raise _C.ArgumentError(f"{given} do not fit each other: leave one of them out")
    return ranks


def _explained(args: argparse.Namespace) -> str | None:
    described = (args.n, args.nodes, args.ranks_per_node, args.rate, args.latency)
    if args.compression and args.collective != "all_reduce":
        raise _C.ArgumentError(f"--compression is of an all_reduce, but --collective is {args.collective}")
    launcher = find_launcher(os.environ)
    if launcher is not None and launcher.size != 1 and all(value is None for value in described):
        memory = args.memory or "ordinary"
        dtype, op = args.dtype or "float32", args.op or "sum"
        return explain_job(args.collective, args.bytes, dtype, op, memory, args.compression)
    if given := [name for name in ("dtype", "op", "memory") if getattr(args, name) is not None]:
        raise _C.ArgumentError(
            f"--{given[0]} is of a call in a job, and there is none that has been described: start it under mpirun, "
            "without -n, --nodes, --ranks-per-node, --rate and --latency"
        )
    constants, source = _C.plan.constants(), "built in, not measured on any machine"
    if args.rate is not None:
        constants["network"]["beta_us_per_byte"] = args.rate
        source = "built in but for what was given"
    if args.latency is not None:
        constants["network"]["alpha_us"] = args.latency
        source = "built in but for what was given"
    nodes = blocks(_ranks_of_nodes(args))
    text = explain(args.collective, args.bytes, nodes, constants, source)
    if not args.compression:
        return text
    codings = {codec: _C.plan.coding(codec) for codec in CODECS}
    return f"{text}\n{explain_compression(args.bytes, nodes, codings, constants)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command in ("show", "verify") and not 0 <= args.root < args.n:
        parser.error(f"--root {args.root} does not exist: {args.n} ranks are numbered 0 to {args.n - 1}")
    if args.command == "show" and args.rank is not None and not 0 <= args.rank < args.n:
        parser.error(f"--rank {args.rank} does not exist: {args.n} ranks are numbered 0 to {args.n - 1}")
    try:
        if args.command == "list":
            for collective, name, reason in _C.plan.algorithms():
                print(f"{collective:<15} {name:<9} {reason}")
        elif args.command == "show":
            print(show(args.collective, args.algo, args.n, args.rank, args.root))
        elif args.command == "explain":
            text = _explained(args)
            if text is not None:
                print(text)
        else:
            message = verify(args.collective, args.algo, args.n, args.root)
            print(message or f"{args.collective} {args.algo} on {args.n} ranks is right")
            return 1 if message else 0
    except _C.ArgumentError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
