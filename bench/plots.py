"""The plots of docs/performance.md, drawn again from bench/results: python bench/plots.py [FOLDER]."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from interleaved.plot import plot as plot_peers
from interleaved.report import size_text

RESULTS = Path(__file__).resolve().parent / "results"
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "plots"
# Okabe and Ito's colours, which those who see few colours can tell apart too.
OWN, SECOND, THIRD, FOURTH = "#d55e00", "#0072b2", "#009e73", "#999999"


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def panels(count: int, width: float = 5.2, height: float = 4.2) -> tuple[Any, Any]:
    """A figure and its axes, side by side."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width * count, height), squeeze=False)
    return figure, axes[0]


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def over_bytes(axes: Any, sizes: Sequence[int], below: str, title: str) -> None:
    """What all plots over sizes have in common."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)[:: 2 if len(sizes) > 9 else 1]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(round(value))))
    axes.set_xlabel("bytes")
    axes.set_ylabel(below)
    axes.set_title(title)
    axes.grid(which="major", alpha=0.3)


def faster_than_peers(path: Path) -> None:
    """How many times faster than the fastest peer of each size, by number of ranks."""
    figure, columns = panels(3)
    for axes, ranks in zip(columns, (2, 4, 8), strict=True):
        rows = load(f"zen4-peers-{ranks}-ranks")["rows"]
        sizes = [row["size"] for row in rows]
        for name, label, line in (("dcoll mapped", "mapped memory", "-"), ("dcoll plain", "ordinary memory", "--")):
            ratios = [row["peer_over"][name][row["fastest_peer"]] for row in rows]
            axes.plot(sizes, ratios, line, color=OWN, marker="o", markersize=4, label=label)
        axes.axhline(1, color=FOURTH, linewidth=1.2, label="the fastest peer")
        over_bytes(axes, sizes, "times faster than the fastest peer", f"{ranks} ranks on 2 cores")
        axes.set_ylim(0.7, 12)
        axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.set_yticks([], minor=True)
    columns[0].legend(fontsize=8)
    save(figure, path)


def between_nodes(path: Path) -> None:
    """The chosen algorithm beside the least that the links allow, Gloo and Open MPI."""
    figure, columns = panels(3)
    for axes, name in zip(columns, ("network-4x1", "network-4x2", "network-2x1-10g"), strict=True):
        document = load(name)
        rows, result = document["summary"]["rows"], document["result"]
        sizes = [row["bytes"] for row in rows]
        lines = (("dcoll auto", "dcoll", OWN), ("Gloo", "Gloo", SECOND), ("Open MPI", "Open MPI", THIRD))
        for column, label, color in lines:
            if column in rows[0]["median_s"]:
                times = [1e3 * row["median_s"][column] for row in rows]
                axes.plot(sizes, times, color=color, marker="o", markersize=4, label=label)
        axes.plot(sizes, [1e3 * row["bound_s"] for row in rows], "k:", label="what the links allow")
        rate = document["rate"].replace("gbit", " Gbit/s")
        over_bytes(axes, sizes, "ms per all-reduce (median)",
                   f"{result['nodes']} hosts x {result['ranks_per_node']} ranks, {rate}")  # fmt: skip
        axes.set_ylim(bottom=1e-2)
        axes.legend(fontsize=8)
    save(figure, path)


def training(path: Path) -> None:
    """What communication adds to a step: paired differences from no communication."""
    runs = {
        "Zen 3, batch 2": "overlap-2-ranks-batch-2", "Zen 3, batch 8": "overlap-2-ranks",
        "Zen 4, batch 2": "zen4-overlap-2-ranks-batch-2", "Zen 4, batch 8": "zen4-overlap-2-ranks",
    }  # fmt: skip
    figure, (axes,) = panels(1, width=7)
    kinds = (("barrier", "a barrier alone", FOURTH), ("dcoll", "dcoll", OWN), ("ddp-gloo", "DDP over Gloo", SECOND))
    for place, (kind, label, color) in enumerate(kinds):
        shares = [100 * load(name)["jobs"][kind]["exposed_share"] for name in runs.values()]
        axes.bar([i + 0.27 * (place - 1) for i in range(len(runs))], shares, 0.25, label=label, color=color)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(runs)), list(runs))
    axes.set_ylabel("% of a step beyond no communication")
    axes.set_title("Training a GPT of 10.8 M parameters on 2 ranks")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


def compression(path: Path) -> None:
    """64 MiB between 4 hosts by codec and rate of the links."""
    rows = [row for row in load("compression-lab")["rows"] if row["bytes"] == 64 << 20]
    figure, (axes,) = panels(1, width=7)
    for place, (codec, color) in enumerate((("bf16", FOURTH), ("fp16", SECOND), ("int8", THIRD), ("topk", OWN))):
        places = [i + 0.2 * (place - 1.5) for i in range(len(rows))]
        bars = axes.bar(places, [row["times_faster"][codec] for row in rows], 0.18, color=color,
                        label="top-1 %" if codec == "topk" else codec)  # fmt: skip
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    rates = [row["rate"].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s") for row in rows]
    axes.set_xticks(range(len(rows)), rates)
    axes.set_ylabel("times faster than uncompressed")
    axes.set_title("All-reduce of 64 MiB between 4 hosts")
    axes.legend(fontsize=8)
    save(figure, path)


PLOTS: dict[str, Callable[[Path], None]] = {
    "one-node": lambda path: plot_peers(load("zen4-peers-2-ranks"), path),
    "faster-than-peers": faster_than_peers,
    "between-nodes": between_nodes,
    "training": training,
    "compression": compression,
}


def main(argv: Sequence[str] | None = None) -> int:
    import matplotlib as mpl

    parser = argparse.ArgumentParser(description="Draw the plots of docs/performance.md from bench/results.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="where to; default: docs/plots")
    folder = parser.parse_args(argv).folder
    mpl.use("Agg")
    # Text as text, and the same numbers give the same file: no ids drawn at random, no date.
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "dcoll", "font.size": 9}
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PLOTS.items():
        draw(folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
