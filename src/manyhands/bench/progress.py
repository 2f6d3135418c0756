"""What a benchmark shows while it works: a bar on a terminal, plain lines anywhere else."""

import os
import sys
import time
from typing import TextIO

from manyhands.bench.measure import Progress

_SECONDS_BETWEEN_LINES = 5.0


class Shown(Progress):
    """Progress that takes the screen until it is closed."""

    def close(self) -> None:
        """Take away what does not stay."""


def for_stdout() -> "Shown":
    """Return what suits standard output."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return Lines()
    return Bar()


class Lines(Shown):
    """For pipes, files and logs: a line for each beginning, and then one every few seconds."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._last_line_at = 0.0
        self._done, self._num_parts = 0, 0

    def begin(self, what: str, num_parts: int) -> None:
        """Write a line."""
        print(what, file=self._out, flush=True)
        self._done, self._num_parts = 0, num_parts
        self._last_line_at = time.monotonic()

    def part(self, what: str) -> None:
        """Write a line, if the last one is some seconds old."""
        self._done += 1
        now = time.monotonic()
        if now - self._last_line_at >= _SECONDS_BETWEEN_LINES:
            self._last_line_at = now
            print(f"  {self._done}/{self._num_parts}  {what}", file=self._out, flush=True)


class Bar(Shown):
    """For terminals: one bar, with what was measured last beside it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Columns

        self._bar = Columns(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[last]}", markup=False),
            transient=True,
        )
        self._task = self._bar.add_task("", last="", visible=False)
        self._bar.start()

    def begin(self, what: str, num_parts: int) -> None:
        """Begin the bar anew."""
        self._bar.update(self._task, description=what, completed=0, total=num_parts, last="", visible=True)

    def part(self, what: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, advance=1, last=what)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()
