"""plan.png: efficiency by number of devices, for each all-reduce."""

import math

from unisono.console import charts
from unisono.console.charts import INK
from unisono.plan.allreduce import ALGORITHMS
from unisono.plan.plans import GOOD, ScalingPlan

_LINES = {"ring": (charts.BLUE, 4), "tree": (charts.ORANGE, 2.8), "two-level": ("#4f9d69", 1.6)}  # none hides another


def png(plan: ScalingPlan, title: str) -> bytes:
    """Return the picture."""
    places = range(len(plan.counts))
    figure = charts.new(8, 5, title, plan.assumptions())
    axes = figure.subplots()
    charts.style(axes, "", "devices", "efficiency: speed by device, % of one device's speed")
    axes.axhline(100 * GOOD, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    one_machine = math.log2(plan.cluster.devices_per_machine)
    if 0 < one_machine < places[-1]:
        axes.axvspan(-0.4, one_machine + 0.4, color="#f6f6f6", zorder=0)
        axes.text(-0.3, 2, "one machine", color=INK, fontsize=8)
    for name in ALGORITHMS:
        color, width = _LINES[name]
        values = [100 * one.efficiency for one in plan.with_algorithm(name)]
        axes.plot(places, values, color=color, linewidth=width, marker="o", markersize=4, label=name)
    without = [100 * one.efficiency_without_overlap for one in plan.predictions]
    axes.plot(places, without, color=INK, linewidth=1, linestyle="--", label=f"{plan.algorithm}, without overlap")
    axes.set_xticks(places, [f"{count:,}" for count in plan.counts])
    axes.set(xlim=(-0.4, places[-1] + 0.4), ylim=(0, 104))
    axes.legend(frameon=False, labelcolor=INK, loc="best")
    return charts.png(figure)
