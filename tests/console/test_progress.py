"""A bar on a terminal, lines elsewhere; and what a training run shows on them."""

import io
import sys

import pytest
import torch

from unisono.console import progress
from unisono.console.progress import Bar, Lines, Task
from unisono.training.display import Display, Share, StepReport
from unisono.training.metrics import StepRecord

CPU = torch.device("cpu")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def report(step: int) -> StepReport:
    record = StepRecord(step, 1, loss=0.54321, learning_rate=0.1, rows=120, seconds=0.1)
    return StepReport(record, 3, 12, [Share(CPU, 60, 0.05), Share(CPU, 60, 0.06)])


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


def test_lines_show_each_download_once() -> None:
    out = io.StringIO()
    display = Display(Lines(out))
    for name, total in (("images.gz", 2_500_000), ("images.gz", 2_500_000), ("labels.gz", None)):
        display.download(name, 1000, total)
    assert out.getvalue() == "downloading images.gz (2.5 MB) ...\ndownloading labels.gz ...\n"


def test_the_bar_shows_loss_speed_and_each_replica(terminal: Terminal) -> None:
    display = Display(Bar(terminal))
    display.download("images.gz", 1_000_000, 2_500_000)
    display.begin("compiling the model")
    display.step(report(7))
    display.say("epoch 1/3: [done] :rocket:")
    display.close()
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
