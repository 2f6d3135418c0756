"""plan.png: efficiency by number of devices for each all-reduce, and the parts of the time of a step."""

import io
import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unisono.console import charts
from unisono.console.charts import INK
from unisono.plan.allreduce import ALGORITHMS
from unisono.plan.plans import GOOD, ScalingPlan
from unisono.plan.prediction import COUNTS

_COLORS = {"ring": charts.BLUE, "tree": charts.ORANGE, "two-level": "#4f9d69"}
_MACHINE = "#f6f6f6"


def png(plan: ScalingPlan, title: str) -> bytes:
    """Return the picture."""
    figure = Figure(figsize=(11, 5), facecolor="white", layout="constrained")
    efficiency_axes, time_axes = figure.subplots(1, 2)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, color=INK, parse_math=False)
    _efficiency(efficiency_axes, plan)
    _time(time_axes, plan)
    figure.supxlabel(textwrap.fill(plan.assumptions(), 175), fontsize=7, color=INK, parse_math=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _efficiency(axes: Axes, plan: ScalingPlan) -> None:
    places = range(len(COUNTS))
    axes.axhline(100 * GOOD, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    one_machine = math.log2(plan.cluster.devices_per_machine)
    if 0 < one_machine < places[-1]:
        axes.axvspan(-0.4, one_machine + 0.4, color=_MACHINE, zorder=0)
        axes.text(-0.3, 2, "one machine", color=INK, fontsize=8)
    for name, width in zip(ALGORITHMS, (4, 2.8, 1.6), strict=True):  # so that no line hides another
        values = [100 * one.efficiency for one in plan.with_algorithm(name)]
        axes.plot(places, values, color=_COLORS[name], linewidth=width, marker="o", markersize=4, label=name)
    without = [100 * one.efficiency_without_overlap for one in plan.predictions]
    axes.plot(places, without, color=INK, linewidth=1, linestyle="--", label=f"{plan.algorithm}, without overlap")
    _style(axes, "Efficiency: speed by device, one device = 100 %")
    axes.set_ylim(0, 104)
    axes.set_xlim(-0.4, places[-1] + 0.4)
    axes.legend(frameon=False, labelcolor=INK, loc="best")


def _time(axes: Axes, plan: ScalingPlan) -> None:
    places = range(len(COUNTS))
    below = [0.0] * len(COUNTS)
    parts: Sequence[tuple[str, str, list[float]]] = (
        ("computing", charts.GREY, [one.compute_s for one in plan.predictions]),
        ("reducing gradients, after backward has ended", charts.RED, [one.exposed_s for one in plan.predictions]),
    )
    for label, color, seconds in parts:
        heights = [1000 * value for value in seconds]
        axes.bar(places, heights, 0.7, bottom=below, color=color, label=label)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    _style(axes, "Time of a step, ms")
    axes.set_ylim(0, 1.25 * max(below))
    axes.legend(frameon=False, labelcolor=INK, loc="best")


def _style(axes: Axes, title: str) -> None:
    charts.style(axes, title, "devices")
    axes.set_xticks(range(len(COUNTS)), [f"{count:,}" for count in COUNTS])
