"""plan.png: efficiency by number of devices for each all-reduce, and what the time of a step consists of."""

import io
import logging
import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manyhands.plan.allreduce import ALGORITHMS
from manyhands.plan.plans import GOOD, ScalingPlan
from manyhands.plan.prediction import COUNTS

_COLORS = {"ring": "#2a6f97", "tree": "#e08e45", "two-level": "#4f9d69"}
_COMPUTING, _EXPOSED = "#b8b8b8", "#d1495b"
_INK = "#3d3d3d"
_GRID = "#e6e6e6"
_MACHINE = "#f6f6f6"

# On its first use matplotlib lists the machine's fonts, and logs that it does.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def png(plan: ScalingPlan, title: str) -> bytes:
    """Return the picture."""
    figure = Figure(figsize=(11, 5), facecolor="white", layout="constrained")
    efficiency_axes, time_axes = figure.subplots(1, 2)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, color=_INK, parse_math=False)
    _efficiency(efficiency_axes, plan)
    _time(time_axes, plan)
    figure.supxlabel(textwrap.fill(plan.assumptions(), 175), fontsize=7, color=_INK, parse_math=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _efficiency(axes: Axes, plan: ScalingPlan) -> None:
    places = range(len(COUNTS))
    axes.axhline(100 * GOOD, color=_INK, linewidth=0.8, linestyle=(0, (2, 2)))
    one_machine = math.log2(plan.cluster.devices_per_machine)
    if 0 < one_machine < places[-1]:
        axes.axvspan(-0.4, one_machine + 0.4, color=_MACHINE, zorder=0)
        axes.text(-0.3, 2, "one machine", color=_INK, fontsize=8)
    for name, width in zip(ALGORITHMS, (4, 2.8, 1.6), strict=True):  # so that none hides another one
        values = [100 * one.efficiency for one in plan.with_algorithm(name)]
        axes.plot(places, values, color=_COLORS[name], linewidth=width, marker="o", markersize=4, label=name)
    without = [100 * one.efficiency_without_overlap for one in plan.predictions]
    axes.plot(places, without, color=_INK, linewidth=1, linestyle="--", label=f"{plan.algorithm}, without overlap")
    _dress(axes, "Efficiency: speed by device, one device = 100 %")
    axes.set_ylim(0, 104)
    axes.set_xlim(-0.4, places[-1] + 0.4)
    axes.legend(frameon=False, labelcolor=_INK, loc="best")


def _time(axes: Axes, plan: ScalingPlan) -> None:
    places = range(len(COUNTS))
    below = [0.0] * len(COUNTS)
    parts: Sequence[tuple[str, str, list[float]]] = (
        ("computing", _COMPUTING, [one.compute_s for one in plan.predictions]),
        ("reducing gradients, after backward has ended", _EXPOSED, [one.exposed_s for one in plan.predictions]),
    )
    for label, color, seconds in parts:
        heights = [1000 * value for value in seconds]
        axes.bar(places, heights, 0.7, bottom=below, color=color, label=label)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    _dress(axes, "Time of a step, ms")
    axes.set_ylim(0, 1.25 * max(below))
    axes.legend(frameon=False, labelcolor=_INK, loc="best")


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("devices", color=_INK)
    axes.set_xticks(range(len(COUNTS)), [f"{count:,}" for count in COUNTS])
    axes.tick_params(colors=_INK, length=0)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
