"""All-reduce on clusters of up to 65,535 ranks that nobody has to own: time against ranks and against bytes.

python bench/simulate.py                                      # up to 16,384 ranks, 8 per node, the default constants
python bench/simulate.py --ranks-per-node 4 --rails 2 --network 5,1,25 --compression 4 --plot out.png --json out.json
python bench/simulate.py --nodes-per-rack 32 --oversubscription 4
python bench/simulate.py --anchor horovod-512                 # against published scaling efficiencies

The schedules are those dcoll executes and the costs those it selects by (csrc/plan/simulate.h): LogGP with cards and
uplinks as queues. Hierarchical is a composition of three phases, one after the other; the engine may overlap them.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import arguments
import horovod_anchor
import simulate_plot

from dcoll import _C

FLAT = ("ring", "tree", "halving_doubling", "recursive_doubling")
ALGORITHMS = (*FLAT, "hierarchical")
US_PER_BYTE_OF_1_GBIT = 8e-3
US_PER_BYTE_OF_1_GB = 1e-3


def counts(text: str) -> list[int]:
    """'8,64,512' -> [8, 64, 512]"""
    return [arguments.at_least(1)(part) for part in text.split(",")]


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not valid: allowed is a number of at least 0")
    return value


def factor(text: str) -> float:
    value = positive(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not valid: allowed is a number of at least 1")
    return value


def link(text: str) -> tuple[float, float, float]:
    """'5,0.5,100': alpha and overhead in microseconds, and the rate, in Gbit/s or GB/s as the option says."""
    parts = [positive(part) for part in text.split(",")]
    if len(parts) != 3 or parts[2] == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a link: allowed is ALPHA,OVERHEAD,RATE like 5,0.5,100")
    return parts[0], parts[1], parts[2]


def make_parser() -> argparse.ArgumentParser:
    description = "All-reduce time of large clusters, simulated."
    parser = argparse.ArgumentParser(prog="simulate.py", description=description)
    add = parser.add_argument
    add("--ranks", type=counts, default=[8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384], metavar="N,N,..",
        help="ranks of the sweep over ranks (default 8 to 16384)")  # fmt: skip
    add("--at", type=arguments.parse_size, default=64 << 20, metavar="SIZE", help="its size (default 64M)")
    add("-b", "--minbytes", type=arguments.parse_size, default=1 << 10, metavar="SIZE", help="smallest (default 1K)")
    add("-e", "--maxbytes", type=arguments.parse_size, default=1 << 30, metavar="SIZE", help="largest (default 1G)")
    add("-f", "--stepfactor", type=arguments.step_factor, default=4.0, metavar="X", help="each size is X times the one "
        "before (default 4)")  # fmt: skip
    add("--at-ranks", type=arguments.at_least(1), default=4096, metavar="N", help="ranks of the sweep over bytes "
        "(default 4096)")  # fmt: skip
    add("--ranks-per-node", type=arguments.at_least(1), default=8, metavar="N", help="(default 8)")
    add("--rails", type=arguments.at_least(1), default=1, metavar="N", help="network cards per node (default 1)")
    add("--nodes-per-rack", type=arguments.at_least(0), default=0, metavar="N", help="0 (default): one switch for all")
    add("--oversubscription", type=factor, default=1.0, metavar="X", help="a rack's uplink carries what its cards do, "
        "divided by this (default 1)")  # fmt: skip
    add("--spine-alpha", type=positive, default=0.0, metavar="US", help="further latency between racks (default 0)")
    add("--memory", type=link, default=(0.5, 0.2, 10.0), metavar="ALPHA,OVERHEAD,GB/s", help="within a node (default "
        "0.5,0.2,10)")  # fmt: skip
    add("--network", type=link, default=(5.0, 0.5, 100.0), metavar="ALPHA,OVERHEAD,GBIT/s", help="a card (default "
        "5,0.5,100)")  # fmt: skip
    add("--reduce", type=positive, default=20.0, metavar="GB/s", help="a rank's reductions and copies (default 20)")
    add("--compression", type=factor, default=1.0, metavar="RATIO", help="messages between nodes are so many times "
        "shorter; without and with is shown (default 1: without)")  # fmt: skip
    add("--encode", type=positive, default=10.0, metavar="GB/s", help="with --compression (default 10)")
    add("--decode", type=positive, default=20.0, metavar="GB/s", help="with --compression (default 20)")
    add("--slice", type=arguments.parse_size, default=256 << 10, metavar="SIZE", help="longest message (default 256K)")
    add("--algo", action="append", choices=ALGORITHMS, default=[], help="only this one; may be repeated (default: all)")
    add("--anchor", choices=(*horovod_anchor.ANCHORS, "all"), help="published scaling efficiencies instead of sweeps")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--plot", type=Path, metavar="FILE", help="write a PNG there (needs matplotlib)")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.anchor:
        given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
        if idle := sorted(given - {"anchor", "json", "plot"}):
            options = ", ".join("--" + name.replace("_", "-") for name in idle)
            parser.error(f"with --anchor, whose clusters are the published ones, there is no {options}")
    if args.minbytes > args.maxbytes or args.minbytes == 0:
        smallest, largest = arguments.format_size(args.minbytes), arguments.format_size(args.maxbytes)
        parser.error(f"-b {smallest} and -e {largest}: allowed is 1 to -e bytes")
    if args.slice == 0:
        parser.error("--slice is 0: allowed is at least 1 byte")
    for ranks in (*args.ranks, args.at_ranks):
        if ranks > args.ranks_per_node and ranks % args.ranks_per_node:
            parser.error(f"{ranks} ranks do not fill nodes of {args.ranks_per_node}: give multiples of it, or fewer")
    args.algo = list(dict.fromkeys(args.algo)) or list(ALGORITHMS)
    return args


def cluster(args: argparse.Namespace, ranks: int, compressed: bool) -> dict[str, Any]:
    """The keywords of _C.plan.simulate. Fewer ranks than a node has are one node, fewer nodes than a rack one rack."""
    per_node = min(ranks, args.ranks_per_node)
    nodes = ranks // per_node
    rack = args.nodes_per_rack if args.nodes_per_rack < nodes else 0
    alpha, overhead, rate = args.memory
    card_alpha, card_overhead, card_rate = args.network
    found = {
        "nodes": nodes,
        "ranks_per_node": per_node,
        "rails": args.rails,
        "nodes_per_rack": rack,
        "oversubscription": args.oversubscription,
        "spine_alpha_us": args.spine_alpha,
        "memory": (alpha, overhead, US_PER_BYTE_OF_1_GB / rate, 0.02),
        "network": (card_alpha, card_overhead, US_PER_BYTE_OF_1_GBIT / card_rate, 0.05),
        "gamma_us_per_byte": US_PER_BYTE_OF_1_GB / args.reduce if args.reduce else 0.0,
        "slice_bytes": args.slice,
    }
    if compressed:
        found["compression"] = args.compression
        found["encode_us_per_byte"] = US_PER_BYTE_OF_1_GB / args.encode if args.encode else 0.0
        found["decode_us_per_byte"] = US_PER_BYTE_OF_1_GB / args.decode if args.decode else 0.0
    return found


def predict(algo: str, nbytes: int, where: dict[str, Any]) -> dict[str, Any]:
    """us, method, events and, for hierarchical, the algorithm between nodes that was fastest."""
    if algo != "hierarchical":
        return _C.plan.simulate("all_reduce", algo, bytes=nbytes, **where)
    found = [
        {"inner": inner, **_C.plan.simulate("all_reduce", inner, hierarchical=True, bytes=nbytes, **where)}
        for inner in FLAT
    ]
    return min(found, key=lambda each: each["us"])


def point(args: argparse.Namespace, algo: str, ranks: int, nbytes: int, compressed: bool) -> dict[str, Any]:
    result = predict(algo, nbytes, cluster(args, ranks, compressed))
    bus_bytes = 2 * (ranks - 1) / ranks * nbytes
    return {
        "algo": algo,
        "ranks": ranks,
        "bytes": nbytes,
        "compressed": compressed,
        **result,
        "busbw_GBps": bus_bytes / result["us"] / 1e3 if result["us"] else 0.0,
    }


def sweeps(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    sizes, size = [], float(args.minbytes)
    while size <= args.maxbytes:
        sizes.append(int(size))
        size *= args.stepfactor
    forms = (False, True) if args.compression > 1 else (False,)
    return {
        "ranks": [point(args, a, n, args.at, c) for c in forms for n in args.ranks for a in args.algo],
        "bytes": [point(args, a, args.at_ranks, s, c) for c in forms for s in sizes for a in args.algo],
    }


def table(rows: list[dict[str, Any]], along: str, algos: list[str]) -> str:
    """One line per place of the sweep, one column per algorithm: microseconds, the fastest marked."""
    lines = [f"{along:>12s}" + "".join(f"{name:>20s}" for name in algos)]
    places = dict.fromkeys((row["compressed"], row[along]) for row in rows)
    for compressed, place in places:
        found = {row["algo"]: row["us"] for row in rows if (row["compressed"], row[along]) == (compressed, place)}
        best = min(found.values())
        label = arguments.format_size(place) if along == "bytes" else str(place)
        marks = "".join(f"{found[name]:>19.1f}{'*' if found[name] == best else ' '}" for name in algos)
        lines.append(f"{label + (' comp' if compressed else ''):>12s}{marks}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    began = time.perf_counter()
    document: dict[str, Any] = {"arguments": dict(vars(args))}
    try:
        if args.anchor:
            names = list(horovod_anchor.ANCHORS) if args.anchor == "all" else [args.anchor]
            document["anchors"] = [horovod_anchor.reproduce(name) for name in names]
            print("\n\n".join(horovod_anchor.table(anchor) for anchor in document["anchors"]))
        else:
            document |= sweeps(args)
            print(f"# microseconds per all-reduce of {arguments.format_size(args.at)} against ranks; * is the fastest")
            print(table(document["ranks"], "ranks", args.algo))
            print(f"\n# against bytes, on {args.at_ranks} ranks")
            print(table(document["bytes"], "bytes", args.algo))
    except _C.ArgumentError as error:
        print(f"simulate.py: {error}", file=sys.stderr)
        return 2
    document["seconds"] = time.perf_counter() - began
    document["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n# simulated in {document['seconds']:.1f} s, {document['peak_mib']:.0f} MiB at most")
    if args.json:
        args.json.write_text(json.dumps(document, indent=1, default=str) + "\n")
    if args.plot:
        draw = simulate_plot.anchors if args.anchor else simulate_plot.sweeps
        draw(document, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
