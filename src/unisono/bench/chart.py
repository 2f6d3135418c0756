"""results.png: the speed of every contender as a bar, relative to the limit of the machine."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unisono.bench import machine
from unisono.bench.contenders import CONTENDERS
from unisono.bench.results import Line, Results, Workload
from unisono.console import charts
from unisono.console.charts import INK

_COLORS = {
    "plain": charts.GREY, "limit": "#7d7d7d", "ddp": charts.RED, "accelerate": charts.ORANGE, "fabric": "#edc46f",
    "torchrun": "#61988e", "threads": "#6fb3d2", "processes": charts.BLUE,
}  # fmt: skip


def draw(path: Path, results: Results) -> None:
    """Draw the picture.

    A group of bars for each workload and number of replicas. Their height is the speed relative to `limit`, or to the
    fastest if `limit` was not measured; the thin lines reach from the lowest to the highest round.
    """
    groups = [(w, n) for w in results.workloads for n in w.replica_counts() or [1] if any(w.measured())]
    width_inches = max(8.0, 1.5 + 2.4 * len(groups))
    figure = Figure(figsize=(width_inches, 4.6), facecolor="white", layout="constrained")
    axes = figure.subplots()
    names = [name for name in CONTENDERS if any(w.line(name, n) for w, n in groups)]
    width = 0.84 / max(1, len(names))
    for place, name in enumerate(names):
        _bars(axes, groups, name, place * width - 0.42 + width / 2, width)
    several = len({n for _, n in groups}) > 1
    labels = [f"{w.name}\n{n} replicas" if several else w.name for w, n in groups]
    axes.set_xticks(range(len(groups)), labels, color=INK)
    axes.axhline(1, color=INK, linewidth=0.8)
    known = all(workload.line("limit", replicas) for workload, replicas in groups)
    reference = "processes that do not communicate" if known else "the fastest"
    charts.style(axes, f"Training speed on the CPU, relative to {reference}")
    if names:
        figure.legend(loc="outside lower center", ncols=len(names), frameon=False, labelcolor=INK, fontsize=9)
    caption = textwrap.fill(machine.in_one_line(results.machine), round(16 * width_inches))
    axes.set_xlabel(caption, fontsize=7, color=INK, labelpad=8, parse_math=False)
    figure.savefig(path, format="png", dpi=150)


def _bars(axes: Axes, groups: Sequence[tuple[Workload, int]], name: str, offset: float, width: float) -> None:
    places, heights, below, above = [], [], [], []
    for group, (workload, replicas) in enumerate(groups):
        line = workload.line(name, replicas)
        if line is None:
            continue
        reference = _reference(workload, replicas)
        speeds = [theirs / own for own, theirs in zip(line.turns_s, reference.turns_s, strict=True)]
        places.append(group + offset)
        heights.append(line.speed_of(reference))
        below.append(heights[-1] - min(speeds))
        above.append(max(speeds) - heights[-1])
    axes.bar(places, heights, width * 0.92, label=name, color=_COLORS[name])
    axes.errorbar(places, heights, [below, above], fmt="none", ecolor=INK, elinewidth=0.6)
    for place, height in zip(places, heights, strict=True):
        text = f"{height:.2f}"
        axes.annotate(text, (place, 0), (0, 3), textcoords="offset points", ha="center", fontsize=6, color="white")


def _reference(workload: Workload, replicas: int) -> Line:
    return workload.line("limit", replicas) or min(workload.measured(), key=lambda line: line.step_s)
