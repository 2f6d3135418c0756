import io

import pytest
import torch
from rich.console import Console

from manyhands.training import display
from manyhands.training.bar import Bar
from manyhands.training.display import Lines
from manyhands.training.metrics import StepRecord
from manyhands.training.work import Share, StepReport

CPU = torch.device("cpu")


def report(step: int) -> StepReport:
    record = StepRecord(step, 1, loss=0.54321, learning_rate=0.1, rows=120, seconds=0.1)
    return StepReport(record, 3, step, 12, [Share(CPU, 60, 0.05), Share(CPU, 60, 0.06)])


def test_lines_show_the_first_step_and_then_only_some() -> None:
    out = io.StringIO()
    lines = Lines(out)
    for step in range(1, 13):
        lines.step(report(step))
    lines.say("epoch 1/3: done")
    lines.close()
    assert out.getvalue() == (
        "  epoch 1/3, step 1/12: loss 0.5432, 1,200 rows/s (cpu 60 rows 50 ms, cpu 60 rows 60 ms)\nepoch 1/3: done\n"
    )


def test_lines_show_a_step_again_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 104.0, 106.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(times))
    out = io.StringIO()
    lines = Lines(out)
    for step in (1, 2, 3):
        lines.step(report(step))
    assert [line.split(":")[0].strip() for line in out.getvalue().splitlines()] == [
        "epoch 1/3, step 1/12",
        "epoch 1/3, step 3/12",
    ]


def test_lines_show_each_download_once() -> None:
    out = io.StringIO()
    lines = Lines(out)
    for name, total in (("images.gz", 2_500_000), ("labels.gz", None)):
        for done in (0, 1000, 2000):
            lines.download(name, done, total)
    assert out.getvalue() == "downloading images.gz (2.5 MB)\ndownloading labels.gz\n"


def test_what_takes_long_is_shown_until_the_next_step() -> None:
    out = io.StringIO()
    Lines(out).busy("compiling the model")
    assert out.getvalue() == "compiling the model ...\n"
    bar = Bar(Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100))
    bar.busy("compiling the model")
    (task,) = bar._bar.tasks
    assert (task.description, task.total, task.visible) == ("compiling the model", None, True)
    bar.step(report(7))
    assert (task.description, task.total, task.completed) == ("epoch 1/3", 12, 7)
    bar.close()


def test_the_bar_shows_loss_speed_and_each_replica() -> None:
    out = io.StringIO()
    bar = Bar(Console(file=out, force_terminal=True, color_system=None, width=100))
    bar.download("images.gz", 1_000_000, 2_500_000)
    bar.step(report(7))
    bar.say("epoch 1/3: [done]")
    bar.close()
    shown = out.getvalue()
    for expected in (
        "epoch 1/3",
        "7/12  loss 0.5432  1,200 rows/s",
        "cpu 60 rows 50 ms, cpu 60 rows 60 ms",
        "epoch 1/3: [done]\n",
    ):
        assert expected in shown


def test_a_pipe_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(display.for_stdout(), Lines)
