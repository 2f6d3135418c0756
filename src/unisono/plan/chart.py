"""plan.png: efficiency by number of devices for each all-reduce, and the parts of the time of a step."""

import math

from matplotlib.axes import Axes

from unisono.console import charts
from unisono.console.charts import INK
from unisono.plan.allreduce import ALGORITHMS
from unisono.plan.plans import GOOD, ScalingPlan
from unisono.plan.prediction import COUNTS

_COLORS = {"ring": charts.BLUE, "tree": charts.ORANGE, "two-level": "#4f9d69"}
_MACHINE = "#f6f6f6"
_PLACES = range(len(COUNTS))


def png(plan: ScalingPlan, title: str) -> bytes:
    """Return the picture."""
    figure = charts.new(11, 5, title, plan.assumptions())
    efficiency_axes, time_axes = figure.subplots(1, 2)
    _efficiency(efficiency_axes, plan)
    _time(time_axes, plan)
    for axes in (efficiency_axes, time_axes):
        axes.set_xticks(_PLACES, [f"{count:,}" for count in COUNTS])
        axes.legend(frameon=False, labelcolor=INK, loc="best")
    return charts.png(figure)


def _efficiency(axes: Axes, plan: ScalingPlan) -> None:
    charts.style(axes, "Efficiency: speed by device", "devices", "% of one device's speed")
    axes.axhline(100 * GOOD, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    one_machine = math.log2(plan.cluster.devices_per_machine)
    if 0 < one_machine < _PLACES[-1]:
        axes.axvspan(-0.4, one_machine + 0.4, color=_MACHINE, zorder=0)
        axes.text(-0.3, 2, "one machine", color=INK, fontsize=8)
    for name, width in zip(ALGORITHMS, (4, 2.8, 1.6), strict=True):  # so that no line hides another
        values = [100 * one.efficiency for one in plan.with_algorithm(name)]
        axes.plot(_PLACES, values, color=_COLORS[name], linewidth=width, marker="o", markersize=4, label=name)
    without = [100 * one.efficiency_without_overlap for one in plan.predictions]
    axes.plot(_PLACES, without, color=INK, linewidth=1, linestyle="--", label=f"{plan.algorithm}, without overlap")
    axes.set_ylim(0, 104)
    axes.set_xlim(-0.4, _PLACES[-1] + 0.4)


def _time(axes: Axes, plan: ScalingPlan) -> None:
    charts.style(axes, "Time of a step", "devices", "milliseconds")
    computing, exposed = (
        [1000 * getattr(one, name) for one in plan.predictions] for name in ("compute_s", "exposed_s")
    )
    axes.bar(_PLACES, computing, 0.7, color=charts.GREY, label="computing")
    after = "reducing gradients, after backward has ended"
    axes.bar(_PLACES, exposed, 0.7, bottom=computing, color=charts.RED, label=after)
    axes.set_ylim(0, 1250 * max(one.step_s for one in plan.predictions))
