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

    for axes, name, color in (
        (loss_axes, "train_loss", _TRAIN),
        (loss_axes, "test_loss", _TEST),
        (accuracy_axes, "test_accuracy", _TEST),
    ):
        numbers, values = zip(*((record.epoch, getattr(record, name)) for record in epochs), strict=True)
        label = name.split("_")[0]
        axes.plot(numbers, values, color=color, label=label, linewidth=2, marker="o", markersize=4, clip_on=False)

    margin = 0.02 * max(1, last_epoch - 1)
    for axes, text in ((loss_axes, "Loss"), (accuracy_axes, "Test accuracy")):
        charts.style(axes, text, "epoch", grid="both")
        axes.set_xlim(1 - margin, max(2, last_epoch) + margin)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # Batch norm's running statistics are far off in the first epochs of a short run, so that its test loss falls over
    # several powers of ten: on a linear scale nothing else could be seen.
    loss_axes.set_yscale("log")
    loss_axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    loss_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    loss_axes.yaxis.set_minor_locator(NullLocator())
    loss_axes.legend(frameon=False, labelcolor=INK)
    accuracy_axes.set_ylim(min(record.test_accuracy for record in epochs) - 0.02, 1)
    _note_last(accuracy_axes, epochs[-1], last_epoch)

    with replaced(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=150)


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
