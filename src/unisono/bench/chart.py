"""results.png: the speed of every contender as a bar, relative to the limit of the machine."""

from typing import Any

from unisono.bench import machine
from unisono.bench.contenders import CONTENDERS, label
from unisono.bench.results import Results
from unisono.console import charts
from unisono.console.charts import INK

_COLORS = {
    "plain": charts.GREY, "limit": "#7d7d7d", "ddp": charts.RED, "torchrun": "#61988e",
     "threads": charts.BLUE,
}  # fmt: skip


def png(results: Results) -> bytes:
    """Return the picture.

    A group of bars for each workload and number of replicas. Their height is the speed relative to `limit`, or to the
    fastest if `limit` was not measured; the thin lines show the ranges.
    """
    groups = [(w, n) for w in results.workloads for n in w.replica_counts() if any(w.measured())]
    references = [w.line("limit", n) or min(w.measured(), key=lambda line: line.step_s) for w, n in groups]
    caption = machine.in_one_line(results.machine)
    if noisy := [w.name for w in results.workloads if w.disturbance]:
        caption += f". Other programs kept cores busy: do not rely on {', '.join(noisy)}"
    figure = charts.new(max(8.0, 1.5 + 3 * len(groups)), 4.8, "Training speed on the CPU", caption)
    axes = figure.subplots()
    names = [name for name in CONTENDERS if any(w.line(name, n) for w, n in groups)]
    width = 0.88 / max(1, len(names))
    for number, name in enumerate(names):
        found = [(place, line) for place, (w, n) in enumerate(groups) if (line := w.line(name, n))]
        places = [place + (number + 0.5) * width - 0.44 for place, _ in found]
        speeds = [line.speed_of(references[place]) for place, line in found]
        below = [speed * (1 - line.step_s / line.range_s[1]) for speed, (_, line) in zip(speeds, found, strict=True)]
        above = [speed * (line.step_s / line.range_s[0] - 1) for speed, (_, line) in zip(speeds, found, strict=True)]
        ranges: dict[str, Any] = {"yerr": [below, above], "error_kw": {"ecolor": INK, "elinewidth": 0.8}}
        bars = axes.bar(places, speeds, width * 0.94, label=label(name), color=_COLORS[name], **ranges)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8, color=INK, bbox=white)
    labels = [f"{w.name}\n{n} replicas" if n > 1 else w.name for w, n in groups]
    axes.set_xticks(range(len(groups)), labels, color=INK, parse_math=False)
    axes.axhline(1, color=INK, linewidth=0.8, zorder=0.9)
    of_limit = all(workload.line("limit", replicas) for workload, replicas in groups)
    reference = "processes that do not communicate" if of_limit else "the fastest"
    charts.style(axes, "", ylabel=f"speed; 1 = {reference}")
    if names:
        num_columns = len(names) if len(groups) > 2 else 3
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=num_columns, frameon=False, labelcolor=INK)
    return charts.png(figure)
