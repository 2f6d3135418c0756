"""curves.png: loss and accuracy by epoch, the picture of a run."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from unisono.console import charts
from unisono.console.charts import INK
from unisono.console.files import replaced
from unisono.training.metrics import EpochRecord

_TRAIN, _TEST = charts.BLUE, charts.RED


def draw(path: Path, epochs: Sequence[EpochRecord], *, title: str, last_epoch: int) -> None:
    """Draw the picture and put it in the place of the one before; up to `last_epoch` it fills from left to right."""
    last_epoch = max(last_epoch, epochs[-1].epoch)  # a run may be resumed for fewer epochs than it has had
    figure = charts.new(10, 4.2, title)
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    for axes, name, color in (
        (loss_axes, "train_loss", _TRAIN),
        (loss_axes, "test_loss", _TEST),
        (accuracy_axes, "test_accuracy", _TEST),
    ):
        numbers, values = zip(*((record.epoch, getattr(record, name)) for record in epochs), strict=True)
        label = name.split("_")[0]
        axes.plot(numbers, values, color=color, label=label, linewidth=2, marker="o", markersize=4, clip_on=False)

    margin = 0.02 * max(1, last_epoch - 1)
    for axes, text in ((loss_axes, "Loss"), (accuracy_axes, f"Test accuracy: {epochs[-1].test_accuracy:.4f}")):
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

    with replaced(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=150)
