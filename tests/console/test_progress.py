"""A bar on a terminal, lines elsewhere; and what a training run shows on them."""

import io
import sys

import pytest
import torch

from manyhands.console import progress
from manyhands.console.progress import Bar, Lines, Silent, Task
from manyhands.training.display import Display
from manyhands.training.metrics import StepRecord
from manyhands.training.work import Share, StepReport

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
    return StepReport(record, 3, step, 12, [Share(CPU, 60, 0.05), Share(CPU, 60, 0.06)])


def test_lines_show_the_first_step_and_then_only_some(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 104.0, 106.0, 107.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    out = io.StringIO()
    display = Display(Lines(out))
    for step in (1, 2, 3, 4):
        display.step(report(step))
    display.say("epoch 1/3: done")
    display.close()
    figures = "loss 0.5432, 1,200 rows/s (cpu 60 rows 50 ms, cpu 60 rows 60 ms)"
    assert out.getvalue().splitlines() == [
        f"  epoch 1/3, step 1/12: {figures}",
        f"  epoch 1/3, step 3/12: {figures}",
        "epoch 1/3: done",
    ]


def test_lines_show_that_a_task_begins_and_its_parts_after_some_seconds() -> None:
    out = io.StringIO()
    lines = Lines(out)
    task = Task(lines, "mlp: speed", 2)
    task.advance("too soon for a line")
    lines._next_line_at -= 6
    task.advance("round 1, plain: 5.0 ms a step")
    assert out.getvalue() == "mlp: speed ...\n  mlp: speed, 2/2: round 1, plain: 5.0 ms a step\n"


def test_lines_show_each_download_once() -> None:
    out = io.StringIO()
    display = Display(Lines(out))
    for name, total in (("images.gz", 2_500_000), ("labels.gz", None)):
        for done in (0, 1000, 2000):
            display.download(name, done, total)
    assert out.getvalue() == "downloading images.gz (2.5 MB) ...\ndownloading labels.gz ...\n"


def test_the_bar_moves_to_and_fro_until_the_next_step(terminal: Terminal) -> None:
    bar = Bar(terminal)
    display = Display(bar)
    display.begin("compiling the model")
    (task,) = bar._bar.tasks
    assert (task.description, task.total, task.visible) == ("compiling the model", None, True)
    display.step(report(7))
    assert (task.description, task.total, task.completed) == ("epoch 1/3", 12, 7)
    display.close()


def test_the_bar_shows_loss_speed_and_each_replica(terminal: Terminal) -> None:
    display = Display(Bar(terminal))
    display.download("images.gz", 1_000_000, 2_500_000)
    display.step(report(7))
    display.say("epoch 1/3: [done]")
    display.close()
    shown = terminal.getvalue()
    assert "step 7/12: loss 0.5432, 1,200 rows/s" in shown
    assert "cpu 60 rows 50 ms, cpu 60 rows 60 ms" in shown
    assert "epoch 1/3: [done]\n" in shown


def test_a_terminal_gets_a_bar_and_a_pipe_lines(monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    assert isinstance(progress.for_stdout(), Lines)
    monkeypatch.setattr(sys, "stdout", terminal)
    bar = progress.for_stdout()
    bar.close()
    assert isinstance(bar, Bar)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress.for_stdout(), Lines)


def test_a_silent_progress_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Silent()
    silent.say("a line")
    Task(silent, "mlp: speed", 2).advance("5.0 ms a step")
    silent.close()
    assert capsys.readouterr().out == ""
