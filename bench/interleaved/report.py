"""From the medians of turns to times, paired ratios and Markdown. Plain data in, plain data out.

A sample is one turn: the largest, over the ranks, of the rank's median time per call in that turn; calls that are too
short to read a clock around each are timed several at once. A time is the median of the samples. A ratio is the median,
over the rounds, of the ratio of the two samples of the same round: what the machine does in a round hits both.
"""

import math
import statistics
from typing import Any

from arguments import format_size

Samples = dict[int, dict[str, list[float | None]]]
"""Bytes -> column -> seconds by round; None where the engine had no turn (it failed)."""
Row = dict[str, Any]
LIMITS = (
    "bare: the two-shot loop over mapped buffers in C, without a library. memcpy: every rank copies as many private "
    "bytes; that moves what an all-reduce in place moves, but from one buffer to another, so it leaves the caches "
    "at half the size."
)


def paired_ratio(over: list[float | None], under: list[float | None]) -> float | None:
    """Median of over/under by round; None without a round in which both had a turn."""
    ratios = [a / b for a, b in zip(over, under, strict=True) if a is not None and b is not None]
    return statistics.median(ratios) if ratios else None


def spread(samples: list[float | None]) -> dict[str, Any] | None:
    """Median, 10th and 90th percentile in microseconds."""
    found = sorted(1e6 * sample for sample in samples if sample is not None)
    if not found:
        return None
    last = len(found) - 1
    low, high = found[math.floor(0.1 * last)], found[math.ceil(0.9 * last)]
    return {"time_us": statistics.median(found), "p10_us": low, "p90_us": high, "rounds": len(found)}


def summarize(samples: Samples, own: list[str], peers: list[str]) -> list[Row]:
    """A row per size: each column's time; every peer's time over each of ours; which peer is the fastest."""
    rows = []
    for nbytes, columns in samples.items():
        times = {name: spread(values) for name, values in columns.items()}
        row: Row = {"size": nbytes, "columns": times, "fastest_peer": None, "peer_over": {}, "limit_over": {}}
        present = {name: times[name]["time_us"] for name in peers if times.get(name)}
        if present:
            row["fastest_peer"] = min(present, key=lambda name: present[name])
        for mine in own:
            if times.get(mine):
                row["peer_over"][mine] = {name: paired_ratio(columns[name], columns[mine]) for name in present}
                limits = (name for name in ("bare", "memcpy") if times.get(name))
                row["limit_over"][mine] = {name: paired_ratio(columns[name], columns[mine]) for name in limits}
        rows.append(row)
    return rows


def size_text(nbytes: int) -> str:
    text = format_size(nbytes)
    return text if text.isdecimal() else f"{text[:-1]} {text[-1]}i"


def time_text(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.3g}"


def ratio_text(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def markdown(document: dict[str, Any]) -> str:
    """The whole report of a run."""
    rows, columns = document["rows"], document["columns"]
    own = [name for name in columns if columns[name]["kind"] == "own"]
    parts = [heading(document), "Median microseconds per call:", times_table(rows, columns)]
    if own and any(row["fastest_peer"] for row in rows):
        parts += [
            "Times faster than the fastest peer, and share of the hardware's limit reached "
            "(medians of the ratios of paired turns):",
            fastest_table(rows, own),
            f"Time of each peer over that of {' / '.join(own)}:",
            ratios_table(rows, columns, own),
        ]
    return "\n\n".join([*parts, LIMITS, notes(document)]) + "\n"


def heading(document: dict[str, Any]) -> str:
    env, arguments = document["environment"], document["arguments"]
    buffers = "buffers that exceed the caches in turn" if arguments["rotate"] else "the same buffer again and again"
    pinned = ", ".join(map(str, arguments["cpus"]))
    pinning = f"pinned to CPUs {pinned}" if pinned else "not pinned (more ranks than CPUs)"
    return (
        f"# All-reduce of {arguments['ranks']} ranks: dcoll and its peers, in turns\n\n"
        f"{env['date']}, {env.get('cpu', 'unknown CPU')}, {arguments['dtype']} sum in place, {buffers}; "
        f"ranks {pinning}; {arguments['rounds']} rounds of {1e3 * arguments['turn_s']:.0f} ms per engine and size."
    )


def table(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])


def times_table(rows: list[Row], columns: dict[str, Any]) -> str:
    def cell(row: Row, name: str) -> str:
        found = row["columns"].get(name)
        return time_text(found and found["time_us"])

    lines = [[size_text(row["size"]), *(cell(row, name) for name in columns)] for row in rows]
    return table(["bytes", *(columns[name]["label"] for name in columns)], lines)


def fastest_table(rows: list[Row], own: list[str]) -> str:
    header = ["bytes", "fastest peer", *own]
    limits = [limit for limit in ("bare", "memcpy") if any(limit in r["limit_over"].get(own[0], {}) for r in rows)]
    header += [f"{limit} / {own[0]}" for limit in limits]
    lines = []
    for row in rows:
        peer = row["fastest_peer"]
        cells = [ratio_text(row["peer_over"].get(mine, {}).get(peer)) for mine in own]
        shares = [row["limit_over"].get(own[0], {}).get(limit) for limit in limits]
        lines.append([size_text(row["size"]), peer or "-", *cells,
                      *("-" if share is None else f"{share:.0%}" for share in shares)])  # fmt: skip
    return table(header, lines)


def ratios_table(rows: list[Row], columns: dict[str, Any], own: list[str]) -> str:
    peers = [name for name in columns if columns[name]["kind"] == "peer"]
    lines = []
    for row in rows:
        cells = [" / ".join(ratio_text(row["peer_over"].get(mine, {}).get(peer)) for mine in own) for peer in peers]
        lines.append([size_text(row["size"]), *cells])
    return table(["bytes", *(columns[peer]["label"] for peer in peers)], lines)


def notes(document: dict[str, Any]) -> str:
    """What is missing and what may mislead; always there, so that nothing is left out in silence."""
    lines = [f"- {name}: left out: {reason}" for name, reason in document["left_out"].items()]
    for name, at in document["wrong"].items():
        sizes = ", ".join(f"{wrong} elements at {size_text(int(size))} bytes" for size, wrong in at.items())
        lines.append(f"- {name}: WRONG RESULTS: {sizes}")
    lines += [
        f"- {name}: used {share:.0%} of a core while others were measured"
        for name, share in document["idle_cpu_share"].items()
        if share > 0.05
    ]
    return "\n".join(lines or ["Every engine ran, and every result was exact."])
