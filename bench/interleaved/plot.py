"""Time against size, both logarithmic, with the hardware's limits drawn in."""

from pathlib import Path
from typing import Any

OWN = {"dcoll mapped": ("#c1121f", "-"), "dcoll plain": ("#c1121f", "--")}
LIMITS = {"memcpy": ("#000000", ":"), "bare": ("#555555", "-.")}
PEERS = ("#0077b6", "#2a9d8f", "#e09f3e", "#7b2cbf", "#6c757d", "#8d6e63", "#00b4d8")


def plot(document: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    from interleaved.report import size_text

    figure, axes = plt.subplots(figsize=(9, 6))
    colors = iter(PEERS * 4)
    for name, column in document["columns"].items():
        points = [(row["size"], row["columns"][name]) for row in document["rows"] if row["columns"].get(name)]
        if not points:
            continue
        color, line = OWN.get(name) or LIMITS.get(name) or (next(colors), "-")
        own = column["kind"] == "own"
        sizes, times = [size for size, _ in points], [found["time_us"] for _, found in points]
        marker = None if column["kind"] == "limit" else "o"
        axes.plot(sizes, times, line, color=color, label=column["label"], marker=marker, markersize=4,
                  linewidth=2.2 if own else 1.2, zorder=3 if own else 2)  # fmt: skip
        if own:
            low, high = [found["p10_us"] for _, found in points], [found["p90_us"] for _, found in points]
            axes.fill_between(sizes, low, high, color=color, alpha=0.1, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row["size"] for row in document["rows"]])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(round(value))))
    axes.set_xlabel("bytes")
    axes.set_ylabel("microseconds per call (median)")
    arguments = document["arguments"]
    axes.set_title(f"All-reduce, {arguments['ranks']} ranks, {arguments['dtype']} sum in place, in turns")
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
