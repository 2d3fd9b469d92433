"""The table of bench/all_reduce.py, as nccl-tests prints it, and its footer."""

import argparse
import math
import statistics
from typing import Any

Row = dict[str, Any]
"""size, count, memory; then per column a dict with time_us, algbw, busbw and, for dcoll's own, wrong."""
OWN_COLUMNS = ("out_of_place", "in_place")


def head(args: argparse.Namespace) -> str:
    peers = "".join(f"{name:>10s}    ratio" for name in args.peer)
    peer_units = "".join(f"{'(us)':>10s}         " for _ in args.peer)
    group = f"{'time':>10s}{'algbw':>8s}{'busbw':>8s}{'#wrong':>8s}"
    units = f"{'(us)':>10s}{'(GB/s)':>8s}{'(GB/s)':>8s}{'':8s}"
    lines = [
        f"#{'':52s}{'out-of-place':^34s}{'in-place':^34s}" + ("in place, and its time / dcoll's" if peers else ""),
        f"#{'size':>13s}{'count':>13s}{'type':>10s}{'redop':>7s}{'memory':>9s}{group}{group}{peers}",
        f"#{'(B)':>13s}{'(elements)':>13s}{'':26s}{units}{units}{peer_units}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def line(row: Row, args: argparse.Namespace) -> str:
    text = f" {row['size']:13d}{row['count']:13d}{args.datatype:>10s}{args.op:>7s}{row['memory']:>9s}"
    for name in OWN_COLUMNS:
        part = row[name]
        wrong = "N/A" if part["wrong"] is None else str(part["wrong"])
        text += f"{part['time_us']:10.2f}{part['algbw']:8.2f}{part['busbw']:8.2f}{wrong:>8s}"
    for name in args.peer:
        text += f"{row[name]['time_us']:10.2f}{row[name]['ratio']:8.2f}x"
    return text


def count_wrong(rows: list[Row]) -> int:
    return sum(row[name]["wrong"] or 0 for row in rows for name in OWN_COLUMNS)


def footer(rows: list[Row], args: argparse.Namespace) -> str:
    wrong = count_wrong(rows)
    state = "not checked" if not args.check else f"{wrong} {'FAILED' if wrong else 'OK'}"
    busbw = statistics.fmean(row[name]["busbw"] for row in rows for name in OWN_COLUMNS)
    lines = [f"# Out of bounds values : {state}", f"# Avg bus bandwidth    : {busbw:g}"]
    for name in args.peer:
        ratio = math.exp(statistics.fmean(math.log(row[name]["ratio"]) for row in rows))
        lines.append(f"# {name} time / dcoll in-place time, geometric mean : {ratio:.2f}")
    return "\n".join(lines)
