"""What a run shows while it works: a progress bar on a terminal, plain lines anywhere else.

Both are told the same things. The bar shows every step in place; the lines show the first step, so that it is seen
at once that the run has begun, and after that one every few seconds. Of several processes one shows them.
"""

import os
import sys
import time
from typing import Protocol, TextIO

from manyhands.training.work import StepReport

_SECONDS_BETWEEN_LINES = 5.0


class Display(Protocol):
    """Shows a run to whoever started it."""

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def busy(self, what: str) -> None:
        """Show that something has begun that may take long, and whose end is not known."""

    def step(self, report: StepReport) -> None:
        """Show a finished step, as long as nothing newer is there."""

    def download(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        """Show how far a download is."""

    def close(self) -> None:
        """Take away what does not stay."""


def for_stdout() -> Display:
    """Return the display that suits standard output."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return Lines()
    from manyhands.training.bar import Bar  # rich takes its time to load

    return Bar()


class Lines:
    """A display for pipes, files and logs: each line is written out at once."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._last_line_at = -_SECONDS_BETWEEN_LINES
        self._downloading = ""

    def say(self, line: str) -> None:
        """Write a line."""
        print(line, file=self._out, flush=True)

    def busy(self, what: str) -> None:
        """Write a line."""
        self.say(f"{what} ...")

    def step(self, report: StepReport) -> None:
        """Write a line for the first step, and when the last such line is some seconds old."""
        now = time.monotonic()
        if now - self._last_line_at < _SECONDS_BETWEEN_LINES:
            return
        self._last_line_at = now
        self.say(
            f"  epoch {report.record.epoch}/{report.epochs}, step {report.step_in_epoch}/{report.steps_per_epoch}: "
            f"loss {report.record.loss:.4f}, {report.rows_per_second:,.0f} rows/s ({report.replicas})"
        )

    def download(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        """Write a line when a file is begun."""
        if name != self._downloading:
            self._downloading = name
            self.say(f"downloading {name}" + (f" ({_megabytes(total_bytes)})" if total_bytes else ""))

    def close(self) -> None:
        """Do nothing: lines stay."""


class Silent:
    """A display for processes other than the first: it shows nothing."""

    def say(self, line: str) -> None:
        """Do nothing."""

    def busy(self, what: str) -> None:
        """Do nothing."""

    def step(self, report: StepReport) -> None:
        """Do nothing."""

    def download(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
