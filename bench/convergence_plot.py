"""The plot of bench/convergence.py: a column per task, above the losses, below how far they are from plain's."""

import statistics
from pathlib import Path
from typing import Any

from convergence_methods import METHODS, PLAIN

Curves = dict[int, dict[int, float]]
"""Seed -> step -> loss."""


def curves_of(document: dict[str, Any], task: str, method: str) -> Curves:
    runs = [run for run in document["runs"] if (run["task"], run["method"]) == (task, method)]
    return {run["seed"]: dict(run["curve"]) for run in runs}


def by_step(curves: Curves) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for curve in curves.values():
        for step, loss in curve.items():
            found.setdefault(step, []).append(loss)
    return found


def percent_from_plain(curves: Curves, plain: Curves) -> Curves:
    """In % of the mean, over the seeds, of plain's loss at that step."""
    shared = sorted(set(curves) & set(plain))
    means = {step: statistics.fmean(losses) for step, losses in by_step({seed: plain[seed] for seed in shared}).items()}
    return {
        seed: {step: 100 * (loss - plain[seed][step]) / means[step] for step, loss in curves[seed].items()}
        for seed in shared
    }


def draw(axes: Any, name: str, curves: Curves) -> None:
    """The mean over the seeds."""
    found = by_step(curves)
    axes.plot(list(found), [statistics.fmean(at) for at in found.values()], "--" if "no-feedback" in name else "-",
              color=METHODS[name].color, label=name, linewidth=2.2 if name == PLAIN else 1.2)  # fmt: skip


def shade(axes: Any, found: dict[int, list[float]]) -> None:
    """From the least to the greatest."""
    low, high = [min(at) for at in found.values()], [max(at) for at in found.values()]
    axes.fill_between(list(found), low, high, color=METHODS[PLAIN].color, alpha=0.12, linewidth=0)


def plot(document: dict[str, Any], titles: dict[str, str], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    tasks = list(document["summary"])
    figure, panels = plt.subplots(2, len(tasks), figsize=(7.5 * len(tasks), 9), squeeze=False, sharex="col",
                                  height_ratios=(3, 2))  # fmt: skip
    for column, task in enumerate(tasks):
        above, below = panels[0][column], panels[1][column]
        curves = {name: found for name in METHODS if (found := curves_of(document, task, name))}
        plain = curves.get(PLAIN, {})
        for name, found in curves.items():
            draw(above, name, found)
            draw(below, name, percent_from_plain(found, plain))
        if plain:
            shade(above, by_step(plain))
            means = {step: statistics.fmean(losses) for step, losses in by_step(plain).items()}
            shade(below, {s: [100 * (x / means[s] - 1) for x in losses] for s, losses in by_step(plain).items()})
        above.set_yscale("log")
        for axis in (above.yaxis.set_major_formatter, above.yaxis.set_minor_formatter):
            axis(FuncFormatter(lambda value, _: f"{value:g}"))
        below.set_yscale("symlog", linthresh=1)
        below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        below.set_xlabel("steps")
        above.set_ylabel("loss on data held out")
        below.set_ylabel("difference from plain, %")
        above.set_title(f"{task}: {titles[task]}")
        above.legend(fontsize=8)
        for axes in (above, below):
            axes.grid(which="major", alpha=0.3)
    figure.suptitle(f"{document['ranks']} ranks, means over the seeds; shaded: plain's seeds, least to greatest")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
