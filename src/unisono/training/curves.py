"""curves.png: loss and accuracy by epoch, the picture of a run."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from unisono.console import charts
from unisono.console.charts import INK
from unisono.training.metrics import EpochRecord
from unisono.training.run_folder import replaced

_TRAIN, _TEST = charts.BLUE, charts.RED


def draw(path: Path, epochs: Sequence[EpochRecord], *, title: str, last_epoch: int) -> None:
    """Draw the picture and put it in the place of the one before.

    Args:
        path: where the PNG goes.
        epochs: what has been measured so far, at least one.
        title: above both plots.
        last_epoch: where the run ends, so that the picture fills from left to right while it works.
    """
    figure = Figure(figsize=(10, 4.2), facecolor="white", layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, color=INK, parse_math=False)  # "$" is a "$"

    numbers = [record.epoch for record in epochs]
    _line(loss_axes, numbers, [record.train_loss for record in epochs], _TRAIN, "train")
    _line(loss_axes, numbers, [record.test_loss for record in epochs], _TEST, "test")
    _line(accuracy_axes, numbers, [record.test_accuracy for record in epochs], _TEST, "test")

    _style(loss_axes, "Loss", last_epoch)
    _style(accuracy_axes, "Test accuracy", last_epoch)
    _scale_loss(loss_axes)
    accuracy_axes.set_ylim(min(record.test_accuracy for record in epochs) - 0.02, 1)
    loss_axes.legend(frameon=False, labelcolor=INK)
    _note_last(accuracy_axes, epochs[-1], last_epoch)

    with replaced(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=150)


def _line(axes: Axes, numbers: Sequence[int], values: Sequence[float], color: str, label: str) -> None:
    axes.plot(numbers, values, color=color, label=label, linewidth=2, marker="o", markersize=4, clip_on=False)


def _style(axes: Axes, title: str, last_epoch: int) -> None:
    charts.style(axes, title, "epoch", grid="both")
    margin = 0.02 * max(1, last_epoch - 1)
    axes.set_xlim(1 - margin, max(2, last_epoch) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _scale_loss(axes: Axes) -> None:
    """Show the loss on a logarithmic scale.

    Batch norm's running statistics are far off in the first epochs of a short run, so that its test loss falls over
    several powers of ten: on a linear scale nothing else could be seen.
    """
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _note_last(axes: Axes, record: EpochRecord, last_epoch: int) -> None:
    """Write the last accuracy beside its point: on its right while the run goes on, below it at the end."""
    has_ended = record.epoch == last_epoch and last_epoch > 1
    axes.annotate(
        f"{record.test_accuracy:.4f}",
        (record.epoch, record.test_accuracy),
        xytext=(0, -12) if has_ended else (9, 0),
        textcoords="offset points",
        ha="right" if has_ended else "left",
        va="top" if has_ended else "center",
        color=_TEST,
        fontweight="bold",
    )
