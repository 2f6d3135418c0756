"""What a command shows while it works: a bar on a terminal, plain lines elsewhere, nothing if another rank prints.

One task is under way at a time. The bar shows every update of it in place; a log gets one line every few seconds.
"""

import math
import os
import sys
import time
from typing import TextIO

from unisono.console.options import is_installed

_SECONDS_BETWEEN_LINES = 5.0
_REFRESHES_PER_SECOND = 8


class Progress:
    """Shows nothing: for processes other than the first."""

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def begin(self, task: str, total: int | None = None) -> None:
        """Show that a task begins, which has so many parts (None: not known)."""

    def update(self, task: str, done: int, total: int | None, text: str, details: str = "") -> None:
        """Show how many parts of a task are done, with a text beside them and details below."""

    def close(self) -> None:
        """Take away what does not stay."""


class Lines(Progress):
    """For pipes, files and logs: each line is written out at once.

    The first update is written, and then one of those that come five seconds after the last line about a task.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._next_line_at = 0.0

    def say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def begin(self, task: str, total: int | None = None) -> None:
        self._next_line_at = time.monotonic() + _SECONDS_BETWEEN_LINES
        self.say(f"{task} ...")

    def update(self, task: str, done: int, total: int | None, text: str, details: str = "") -> None:
        now = time.monotonic()
        if now >= self._next_line_at:
            self._next_line_at = now + _SECONDS_BETWEEN_LINES
            self.say(f"  {task}, {text}{f' ({details})' if details else ''}")


class Bar(Progress):
    """For terminals: what stays scrolls up, and below it is a bar. It takes standard output and error until closed.

    epoch 3/10: train loss 0.1620, test accuracy 0.9778, 3.1 s of training
    epoch 4/10 ━━━━━━━━━━━━━━━━━━━━━━━━ step 7/12: loss 0.0921, 412 rows/s
    cpu 60 rows 140 ms, cpu 60 rows 142 ms
    """

    def __init__(self, out: TextIO | None = None) -> None:
        from rich.console import Console, Group  # slow to load, and not needed for lines
        from rich.live import Live
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Columns
        from rich.text import Text

        self._console = Console(file=out)
        self._bar = Columns(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
        )
        self._task = self._bar.add_task("", text="", visible=False)
        self._details = ""
        self._live = Live(
            console=self._console,
            get_renderable=lambda: Group(self._bar, Text(self._details, style="dim")),
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )
        self._live.start()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def begin(self, task: str, total: int | None = None) -> None:
        self.update(task, 0, total, "")  # without a total the bar moves to and fro

    def update(self, task: str, done: int, total: int | None, text: str, details: str = "") -> None:
        self._details = details
        self._bar.tasks[0].total = total  # `update` would leave it alone where it is None
        self._bar.update(self._task, description=task, completed=done, text=text, visible=True)

    def close(self) -> None:
        self._live.stop()


def for_stdout() -> Progress:
    """Return what suits standard output: a bar on a terminal, if rich is installed."""
    return Bar() if is_terminal(sys.stdout) and is_installed("rich") else Lines()


def for_stderr() -> Progress:
    """Return what shows progress beside a program's own output: a bar on a terminal, else nothing."""
    return Bar(sys.stderr) if is_terminal(sys.stderr) and is_installed("rich") else Progress()


def is_terminal(out: TextIO) -> bool:
    """Return whether what is written can be replaced later: on a terminal that can move its cursor."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


class Task:
    """A task whose parts end one after the other, with an estimate of the time that is left.

    Parts count by their expected seconds, and the time left follows from how long those so far have really taken.
    """

    def __init__(self, progress: Progress, name: str, expected_s: float) -> None:
        self._progress, self._name, self._total_s = progress, name, expected_s
        self._done_s, self._began = 0.0, time.monotonic()
        progress.begin(name, round(expected_s))

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self._progress.say(line)

    def advance(self, text: str, expected_s: float) -> None:
        """Show that one more part has ended, a text about it, and how much time is left."""
        self._done_s += expected_s
        left_s = (self._total_s - self._done_s) * (time.monotonic() - self._began) / self._done_s
        self._progress.update(self._name, round(self._done_s), round(self._total_s), f"{text}; {duration(left_s)} left")


def duration(seconds: float) -> str:
    """Return about how long something takes, in words.

    >>> duration(50), duration(150), duration(9000)
    ('less than a minute', 'about 3 minutes', 'about 2.5 hours')
    """
    if seconds < 60:
        return "less than a minute"
    minutes = math.ceil(seconds / 60)
    return f"about {minutes} minutes" if minutes < 90 else f"about {minutes / 60:.1f} hours"
