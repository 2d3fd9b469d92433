"""The plots of bench/simulate.py."""

from pathlib import Path
from typing import Any

COLORS = {
    "ring": "#0077b6", "tree": "#2a9d8f", "halving_doubling": "#e09f3e", "recursive_doubling": "#7b2cbf",
    "hierarchical": "#c1121f",
}  # fmt: skip


def _figure(columns: int) -> tuple[Any, Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(6.5 * columns, 5.5), squeeze=False)
    return plt, figure, axes[0]


def sweeps(document: dict[str, Any], path: Path) -> None:
    """Time against ranks and against bytes; dashed: compressed between nodes."""
    plt, figure, panels = _figure(2)
    arguments = document["arguments"]
    titles = {
        "ranks": f"{int(arguments['at']) / (1 << 20):g} MiB",
        "bytes": f"{arguments['at_ranks']} ranks",
    }
    for axes, along in zip(panels, ("ranks", "bytes"), strict=True):
        rows = document[along]
        for algo in dict.fromkeys(row["algo"] for row in rows):
            for compressed in (False, True):
                found = [row for row in rows if row["algo"] == algo and row["compressed"] == compressed]
                if not found:
                    continue
                label = algo + (", compressed" if compressed else "")
                axes.plot([row[along] for row in found], [row["us"] for row in found], "--" if compressed else "-",
                          color=COLORS[algo], marker="o", markersize=3, label=label)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(along)
        axes.set_ylabel("microseconds (simulated)")
        axes.set_title(titles[along])
        axes.grid(which="major", alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.suptitle(f"All-reduce, {arguments['ranks_per_node']} ranks and {arguments['rails']} cards per node")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def anchors(document: dict[str, Any], path: Path) -> None:
    """Published and predicted scaling efficiency side by side."""
    plt, figure, panels = _figure(len(document["anchors"]))
    for axes, anchor in zip(panels, document["anchors"], strict=True):
        rows = anchor["rows"]
        places = range(len(rows))
        axes.bar([p - 0.2 for p in places], [100 * row["published"] for row in rows], 0.4, label="published",
                 color="#6c757d")  # fmt: skip
        axes.bar([p + 0.2 for p in places], [100 * row["predicted"] for row in rows], 0.4, label="predicted",
                 color="#0077b6")  # fmt: skip
        axes.set_xticks(list(places), [row["model"] for row in rows])
        axes.set_ylabel("scaling efficiency, %")
        axes.set_title(anchor["title"])
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
