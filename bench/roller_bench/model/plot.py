"""Plot a document of `roller bench model --json`: predicted against measured times, and regret curves.

    python -m roller_bench.model.plot RESULT.json OUT_PREFIX

writes OUT_PREFIX-times.png and OUT_PREFIX-regret.png. matplotlib comes with the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from roller_bench.model.run import measured_s

Json = dict[str, Any]

COLUMNS = 6  # of the grid of plots
NEAR = 0.15  # the goal of |ln(predicted / measured)|, drawn as a band
MIN_SPAN = 100  # ratio of an axis's bounds: two decades, so that it has a tick
INK, MUTED, GRID = "#222222", "#6b6b6b", "#dddddd"
RANKED, DRAWN = "#1f5fa8", "#d9822b"  # distinguishable in greyscale and with colour blindness
CURVES = (("p90", "p90", "-", DRAWN), ("mean", "mean", "-", RANKED), ("random", "mean of a random order", "--", MUTED))
GOALS = ((1, 0.05, "mean 5 %"), (1, 0.12, "p90 12 %"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="the document")
    parser.add_argument("prefix", help="what the plots' names begin with")
    options = parser.parse_args()
    document = json.loads(options.result.read_text(encoding="utf-8"))
    for name, figure in (("times", times(document)), ("regret", regrets(document))):
        figure.savefig(f"{options.prefix}-{name}.png", dpi=110)
        plt.close(figure)


def times(document: Json) -> Figure:
    """Plot predicted over measured seconds, one small plot per class."""
    classes = sorted(document["classes"])
    rows = math.ceil(len(classes) / COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(2.3 * COLUMNS, 2.7 * rows), squeeze=False, layout="constrained")
    for axes, cls in zip(grid.flat, classes, strict=False):
        _scatter(axes, points(document, cls))
        found = document["classes"][cls]
        spearman = "-" if found["spearman"] is None else f"{found['spearman']:.2f}"
        axes.set_title(f"{cls} ({found['cases']})\nρ {spearman}, |ln| {found['median_abs_log_ratio']:.2f}", fontsize=8, color=INK)
    for axes in list(grid.flat)[len(classes) :]:
        axes.axis("off")
    kinds = [
        grid.flat[0].scatter([], [], s=14, color=colour, label=label)
        for colour, label in ((RANKED, "the model's first"), (DRAWN, "random others"))
    ]
    figure.legend(handles=kinds, loc="outside lower right", ncols=len(kinds), frameon=False, fontsize=9)
    figure.suptitle(f"Predicted beside measured seconds, {_subject(document)}")
    figure.supxlabel("measured seconds", fontsize=9)
    figure.supylabel("predicted seconds", fontsize=9)
    return figure


def points(document: Json, cls: str) -> list[tuple[float, float, bool]]:
    """Return (measured, predicted, whether drawn at random) of all timed plans of a class."""
    return [
        (measured_s(plan), plan["predicted_s"], plan["drawn"])
        for row in document["cases"]
        if row["cls"] == cls and not row["error"]
        for plan in row["candidates"]
        if plan["error"] is None
    ]


def _scatter(axes: Axes, found: list[tuple[float, float, bool]]) -> None:
    low = min(min(measured, predicted) for measured, predicted, _ in found)
    high = max(max(measured, predicted) for measured, predicted, _ in found)
    margin = max(1.5, math.sqrt(MIN_SPAN * low / high))
    ends = (low / margin, high * margin)
    axes.fill_between(ends, [end * math.exp(-NEAR) for end in ends], [end * math.exp(NEAR) for end in ends], color=GRID, lw=0)
    axes.plot(ends, ends, color=MUTED, lw=0.8)
    for drawn, colour in ((True, DRAWN), (False, RANKED)):
        some = [(measured, predicted) for measured, predicted, random in found if random is drawn]
        if some:
            axes.scatter(*zip(*some, strict=True), s=6, alpha=0.6, color=colour, lw=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    _plain(axes)


def regrets(document: Json) -> Figure:
    """Plot the regret of the best of the model's first k plans beside that of a random order."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    curve = document["overall"]["regret_curve"]
    first = [point["first"] for point in curve]
    for which, label, dashes, colour in CURVES:
        axes.plot(first, [100 * point[which] for point in curve], dashes, color=colour, lw=1.8, label=label)
    for first_k, regret, label in GOALS:
        axes.plot([first_k], [100 * regret], marker="_", ms=14, mew=2, color=INK)
        axes.annotate(f"goal: {label}", (first_k, 100 * regret), (9, 3), textcoords="offset points", fontsize=8)
    axes.set(xlim=(0.5, 20.5), ylim=(0, None), xticks=(1, 5, 10, 15, 20))
    axes.set_xlabel("plans that are tried, in the model's order")
    axes.set_ylabel("slower than the best plan measured, %")
    axes.set_title(f"Regret over {document['overall']['cases']} cases, {_subject(document)}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    _plain(axes)
    return figure


def _plain(axes: Axes) -> None:
    axes.grid(color=GRID, lw=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7, colors=MUTED)


def _subject(document: Json) -> str:
    machine, threads = document["machine"], document["settings"]["threads"]
    return f"{machine['cpu']}, {document['settings']['target']}, {threads} thread{'s' * (threads > 1)}"


if __name__ == "__main__":
    main()
