"""The command line of bench/all_reduce.py, in the conventions of nccl-tests. Needs neither torch nor dcoll."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# What -t accepts: nccl-tests' names, then torch's.
DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
DTYPE_BYTES = {
    "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
OPS = ("sum", "avg", "min", "max", "prod")
PEERS = ("mpi4py", "gloo")
MPI_DTYPES = ("int8", "uint8", "int32", "int64", "float32", "float64")  # MPI has no portable 16-bit float


def parse_size(text: str) -> int:
    """Bytes from '8', '64K', '128M', '1G' (powers of 1024)."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a size: allowed are bytes, or a number with K, M or G (powers of 1024), like 64K"
        )
    return int(match[1]) * UNITS[match[2]]


def format_size(nbytes: int) -> str:
    for unit in ("G", "M", "K"):
        if nbytes and nbytes % UNITS[unit] == 0:
            return f"{nbytes // UNITS[unit]}{unit}"
    return str(nbytes)


def parse_dtype(text: str) -> str:
    name = DTYPE_ALIASES.get(text.lower(), text.lower())
    if name not in DTYPE_BYTES:
        allowed = ", ".join([*DTYPE_BYTES, *DTYPE_ALIASES])
        raise argparse.ArgumentTypeError(f"'{text}' is not a data type: allowed are {allowed}")
    return name


def at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"'{text}' is not valid: allowed is a whole number of at least {low}")
        return value

    return parse


def above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not valid: allowed is a number greater than 0")
    return value


def step_factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"'{text}' is not valid: allowed is a number greater than 1")
    return value


def add_sizes(parser: argparse.ArgumentParser, smallest: int, largest: int, factor: int) -> None:
    """-b, -e and -f with these defaults, for messages of float32."""
    add = parser.add_argument
    add("-b", "--minbytes", type=parse_size, default=smallest, metavar="SIZE", help=f"smallest message (default "
        f"{format_size(smallest)})")  # fmt: skip
    add("-e", "--maxbytes", type=parse_size, default=largest, metavar="SIZE", help=f"largest message (default "
        f"{format_size(largest)})")  # fmt: skip
    add("-f", "--stepfactor", type=step_factor, default=factor, metavar="X", help="each size is X times the one before "
        f"(default {factor})")  # fmt: skip
    parser.set_defaults(datatype="float32", stepbytes=None)


def check_sizes(parser: argparse.ArgumentParser, args: argparse.Namespace, allows_empty: bool = True) -> None:
    """allows_empty: a message may have no elements."""
    if args.minbytes > args.maxbytes:
        smallest, largest = format_size(args.minbytes), format_size(args.maxbytes)
        parser.error(f"-b {smallest} is more than -e {largest}: allowed is at most -e")
    element = 0 if allows_empty else DTYPE_BYTES[args.datatype]
    if args.minbytes < element:
        parser.error(f"-b {args.minbytes} is less than one {args.datatype}: allowed is at least {element}")


def message_sizes(args: argparse.Namespace) -> list[int]:
    """From --minbytes to --maxbytes, rounded down to whole elements, without repeats."""
    element = DTYPE_BYTES[args.datatype]
    sizes, size = [], float(args.minbytes)
    while size <= args.maxbytes:
        rounded = int(size) // element * element
        if rounded not in sizes:
            sizes.append(rounded)
        if args.stepbytes:
            size += args.stepbytes
        else:  # from 0 a factor leads nowhere: go on with one element
            size = max(size * args.stepfactor, element)
    return sizes


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="all_reduce.py",
        description="All-reduce latency and bandwidth, in the conventions of nccl-tests. Run it under mpirun.",
    )
    add = parser.add_argument
    add("-b", "--minbytes", type=parse_size, default=8, metavar="SIZE", help="smallest message (default 8)")
    add("-e", "--maxbytes", type=parse_size, default=128 << 20, metavar="SIZE", help="largest message (default 128M)")
    add("-f", "--stepfactor", type=step_factor, metavar="X", help="each size is X times the one before (default 2)")
    add("-i", "--stepbytes", type=parse_size, metavar="SIZE", help="each size is SIZE more than the one before")
    add("-n", "--iters", type=at_least(0), default=0, help="timed calls per size; 0 (default): as many as fit in "
        "0.2 s, 20 to 2000")  # fmt: skip
    add("-w", "--warmup_iters", type=at_least(0), default=5, help="calls before the timed ones (default 5); without "
        "-n at least 2")  # fmt: skip
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="compare results exactly, before timing (default 1)")
    add("-t", "--datatype", type=parse_dtype, default="float32", help="element type (default float32)")
    add("-o", "--op", choices=OPS, default="sum", help="reduction (default sum)")
    add("--algo", default="", metavar="NAME", help="all-reduce algorithm instead of the one dcoll selects")
    add("--mapped", choices=("0", "1", "both"), default="both", help="1: buffers from dcoll.empty(), which the node's "
        "ranks can read directly; 0: ordinary memory; both (default): a row for each")  # fmt: skip
    add("--call", choices=("core", "python"), help="time the core's entry point (default) or dcoll.allreduce and "
        "dcoll.allreduce_ (default with --peer, whose calls are a script's too); the former of these allocates its "
        "result in every call")  # fmt: skip
    add("--peer", action="append", choices=PEERS, default=[], help="time this library too, in place on ordinary "
        "memory, its calls interleaved with dcoll's; may be repeated")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write everything measured there (rank 0)")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.stepfactor is not None and args.stepbytes is not None:
        parser.error("-f and -i were both given: allowed is one of them")
    if args.stepbytes == 0:
        parser.error("-i is 0: allowed is a step of at least 1 byte")
    args.stepfactor = args.stepfactor or 2.0
    check_sizes(parser, args)
    if "mpi4py" in args.peer and args.datatype not in MPI_DTYPES:
        parser.error(f"--peer mpi4py has no {args.datatype}: allowed with it are {', '.join(MPI_DTYPES)}")
    args.peer = list(dict.fromkeys(args.peer))
    args.call = args.call or ("python" if args.peer else "core")
    return args
