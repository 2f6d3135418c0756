"""What a training run shows: its steps, its downloads, and lines that stay. Only rank 0 shows them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.console.progress import Progress, Silent
from unisono.training.metrics import StepRecord


@dataclass
class Share:
    """The rows of one replica in a step, and the seconds of their forward and backward pass.

    On an accelerator these are the seconds until the work was queued: waiting for it would leave the device idle.
    """

    device: torch.device
    rows: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.device} {self.rows} rows {1000 * self.seconds:.0f} ms"


@dataclass(frozen=True)
class StepReport:
    """A finished step, its place in the run, and the share of each replica of this process."""

    record: StepRecord
    epochs: int
    steps_per_epoch: int
    shares: Sequence[Share]

    @property
    def step_in_epoch(self) -> int:
        """The number of the step in its epoch, from 1."""
        return (self.record.step - 1) % self.steps_per_epoch + 1


class Display:
    """Shows a run.

    Args:
        progress: how it is shown (default: not at all).
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress or Silent()
        self._downloading = ""

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self._progress.say(line)

    def begin(self, task: str) -> None:
        """Show that something begins that may take long."""
        self._progress.begin(task)

    def step(self, report: StepReport) -> None:
        """Show a finished step."""
        record, step, steps = report.record, report.step_in_epoch, report.steps_per_epoch
        text = f"step {step}/{steps}: loss {record.loss:.4f}, {record.rows_per_second:,.0f} rows/s"
        replicas = ", ".join(map(str, report.shares))
        self._progress.update(f"epoch {record.epoch}/{report.epochs}", step, steps, text, replicas)

    def download(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        """Show how far a download is."""
        task = f"downloading {name}{f' ({total_bytes / 1e6:.1f} MB)' if total_bytes else ''}"
        if name != self._downloading:
            self._downloading = name
            self._progress.begin(task, total_bytes)
        self._progress.update(task, done_bytes, total_bytes, f"{done_bytes / 1e6:.1f} MB")

    def close(self) -> None:
        """Take away what does not stay."""
        self._progress.close()
