"""What a training run shows: its steps, its downloads, and lines that stay. Only rank 0 shows them."""

from unisono.console.progress import Progress, Silent
from unisono.training.work import StepReport


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
        text = (
            f"step {report.step_in_epoch}/{report.steps_per_epoch}: loss {report.record.loss:.4f}, "
            f"{report.record.rows_per_second:,.0f} rows/s"
        )
        epoch = f"epoch {report.record.epoch}/{report.epochs}"
        self._progress.update(epoch, report.step_in_epoch, report.steps_per_epoch, text, report.replicas)

    def download(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        """Show how far a download is."""
        size = f" ({_megabytes(total_bytes)})" if total_bytes else ""
        if name != self._downloading:
            self._downloading = name
            self._progress.begin(f"downloading {name}{size}", total_bytes)
        self._progress.update(f"downloading {name}{size}", done_bytes, total_bytes, _megabytes(done_bytes))

    def close(self) -> None:
        """Take away what does not stay."""
        self._progress.close()


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
