"""A bar on a terminal, lines elsewhere."""

import io
import sys

import pytest

from unisono.console import progress
from unisono.console.progress import Bar, Lines, Task


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def test_a_task_shows_its_parts_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line when it begins, then one each five seconds; the time left is that of the parts so far."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    task = Task(Lines(out), "measuring", 100.0)
    for text, at_s in (("too soon for a line", 4.0), ("plain: 5.0 ms a step", 60.0)):
        now[0] = at_s
        task.advance(text, 10.0)
    assert out.getvalue() == "measuring ...\n  measuring, plain: 5.0 ms a step; about 4 minutes left\n"


def test_the_bar_shows_texts_as_they_are(terminal: Terminal) -> None:
    bar = Bar(terminal)
    bar.begin("compiling the model")
    bar.update("epoch 1/3", 7, 12, "step 7/12: loss 0.5432, 1,200 rows/s", "cpu 60 rows 50 ms, cpu 60 rows 60 ms")
    bar.say("epoch 1/3: [done] :rocket:")
    bar.close()
    shown = terminal.getvalue()
    assert "step 7/12: loss 0.5432, 1,200 rows/s" in shown
    assert "cpu 60 rows 50 ms, cpu 60 rows 60 ms" in shown
    assert "epoch 1/3: [done] :rocket:\n" in shown


def test_a_terminal_gets_a_bar_and_a_pipe_lines(monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    assert isinstance(progress.for_stdout(), Lines)
    monkeypatch.setattr(sys, "stdout", terminal)
    bar = progress.for_stdout()
    bar.close()
    assert isinstance(bar, Bar)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress.for_stdout(), Lines)
