"""Look at the schedules and at the choice between them. Nothing here communicates; no mpirun is needed.

python -m dcoll.plan list
python -m dcoll.plan show --algo ring -n 4 [--collective all_reduce] [--rank 0]
python -m dcoll.plan verify --algo tree -n 64
python -m dcoll.plan explain --bytes 16M -n 8 [--ranks-per-node 4]
"""

import argparse
import sys
from collections.abc import Sequence

from dcoll import _C

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
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


def explain(collective: str, n: int, nbytes: int, ranks_per_node: int) -> str:
    """What the cost model chooses, and the predicted time of every candidate."""
    choice = _C.plan.select(collective, n, nbytes, ranks_per_node)
    fastest = choice["candidates"][0][1]
    lines = [choice["why"], f"  {choice['name']} is for: {choice['reason']}"]
    for name, predicted_us in choice["candidates"]:
        factor = f"{predicted_us / fastest:6.2f}x" if fastest > 0 else ""
        lines.append(f"  {name:<10} {predicted_us:>12.1f} us {factor}")
    lines.append("  (model constants are defaults, not measured on this machine)")
    return "\n".join(lines)


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
    command.add_argument("-n", type=_positive, default=4, help="number of ranks (default 4)")
    command.add_argument("--ranks-per-node", type=_positive, default=None, help="default: all on one node")
    return parser


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
            print(explain(args.collective, args.n, args.bytes, args.ranks_per_node or 0))
        else:
            message = verify(args.collective, args.algo, args.n, args.root)
            print(message or f"{args.collective} {args.algo} on {args.n} ranks is right")
            return 1 if message else 0
    except _C.ArgumentError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
