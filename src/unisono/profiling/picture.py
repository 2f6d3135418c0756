"""A profile as a PNG: some steps on a time axis, one lane a replica, and the share of each phase in a step."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from unisono.console import charts
from unisono.console.charts import INK
from unisono.profiling.steps import OUTSIDE, PHASES, ProfiledStep, lanes_of
from unisono.runtime.timeline import WAIT, Span

_COLORS = {
    "scatter": "#61988e", "replicate": "#edc46f", "forward": charts.BLUE, "gather": "#6fb3d2",
    "backward": charts.RED, "reduce": charts.ORANGE, "wait": "#d9d9d9", OUTSIDE: "#f4f4f4",
}  # fmt: skip
_NUM_STEPS = 3  # on the time axis
_LEAST_LABEL = 0.06  # shares below this have no label: there is no room


def draw(path: Path, steps: Sequence[ProfiledStep], title: str) -> None:
    """Draw the picture."""
    lanes = lanes_of(steps)
    height = 0.45 * max(1, len(lanes))
    figure = charts.new(11, 2.6 + 2 * height, title)
    above, below = figure.subplots(2, 1)
    shown = _typical(steps)
    _draw_steps(above, shown, list(lanes))
    _draw_shares(below, lanes)
    used = [phase for phase in PHASES if any(phase in of_lane for of_lane in lanes.values())]
    handles = [above.barh(0, 0, color=_COLORS[phase], label=phase) for phase in used]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(used), frameon=False, labelcolor=INK)
    path.write_bytes(charts.png(figure))


def _typical(steps: Sequence[ProfiledStep]) -> Sequence[ProfiledStep]:
    """Return consecutive steps that together take about as long as such steps do: their sum is the median one."""
    windows = [steps[i : i + _NUM_STEPS] for i in range(max(1, len(steps) - _NUM_STEPS + 1))]
    seconds = [sum(step.seconds for step in window) for window in windows]
    return windows[seconds.index(statistics.median_low(seconds))]


def _draw_steps(axes: Axes, steps: Sequence[ProfiledStep], lanes: Sequence[str]) -> None:
    first = steps[0].began if steps else 0.0
    for step in steps:
        waits = [Span(WAIT, began, ended) for _, began, ended in step.passes]
        for lane, spans in step.lanes.items():
            shown = [*waits, *spans]  # a lane waits where nothing is drawn over it
            bars = [(1000 * (began - first), 1000 * (ended - began)) for _, began, ended in shown]
            colors = [_COLORS[phase] for phase, _, _ in shown]
            axes.broken_barh(bars, (lanes.index(lane) - 0.4, 0.8), facecolors=colors, linewidth=0)
        axes.axvline(1000 * (step.began - first), color=INK, linewidth=0.6)
    several = f"{len(steps)} steps" if len(steps) != 1 else "1 step"
    charts.style(axes, f"{several} of about the median time", "milliseconds", grid="x")
    _name_lanes(axes, lanes)
    axes.margins(x=0)


def _draw_shares(axes: Axes, lanes: Mapping[str, Mapping[str, float]]) -> None:
    for number, of_lane in enumerate(lanes.values()):
        total, left = sum(of_lane.values()), 0.0
        for phase, seconds in of_lane.items():
            share = seconds / total if total else 0.0
            axes.barh(number, share, 0.8, left, color=_COLORS[phase])
            if share >= _LEAST_LABEL:
                light = phase in ("wait", OUTSIDE, "replicate")
                text = f"{share:.0%}"
                axes.text(left + share / 2, number, text, ha="center", va="center", color=INK if light else "white")
            left += share
    charts.style(axes, "Where a step spends its time, medians of all steps", "share of a step", grid="x")
    _name_lanes(axes, list(lanes))
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _name_lanes(axes: Axes, lanes: Sequence[str]) -> None:
    axes.set_yticks(range(len(lanes)), lanes, color=INK)
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
