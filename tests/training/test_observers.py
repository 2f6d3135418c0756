"""Observers of small trainings. The oracles are metrics.jsonl, and the weights of a run that nobody observes."""

import asyncio
import contextlib
import inspect
import io
import json
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import assert_misused, run_captured
from helpers.ranks import run_ranks
from unisono.cli import main
from unisono.console.errors import DivergedError, Interrupted
from unisono.training import observers
from unisono.training.loop import train
from unisono.training.metrics import EpochRecord, Metrics, Record, StepRecord
from unisono.training.observers import Observer
from unisono.training.options import Options
from unisono.training.run import Run
from unisono.training.run_folder import RunFolder

SMALL = Options(model="mlp", devices="cpu*2", epochs=2)  # 12 steps an epoch
TRAIN = ["train", "--model", "mlp", "--devices", "cpu*2", "--epochs", "1", "--output", "out"]


class Notebook(Observer):
    """Keeps what it is told; after a step, or at the start for step 0, it does something more."""

    def __init__(self, after_step: int | None = None, do: Callable[[], object] = lambda: None) -> None:
        self.after_step, self.do = after_step, do
        self.told: list[Record] = []
        self.endings: list[BaseException | None] = []

    def started(self, folder: Path, config: Any, earlier: Sequence[Record]) -> None:
        self.folder, self.config, self.earlier = folder, config, list(earlier)
        if self.after_step == 0:
            self.do()

    def step(self, record: StepRecord) -> None:
        self.told.append(record)
        if record.step == self.after_step:
            self.do()

    def epoch(self, record: EpochRecord) -> None:
        assert (self.folder / "curves.png").exists()
        self.told.append(record)

    def ended(self, error: BaseException | None) -> None:
        self.endings.append(error)


class Bad(Observer):
    """A test gives it a method that raises."""


class Printer(Observer):
    def __init__(self) -> None:
        print("made")

    def epoch(self, record: EpochRecord) -> None:
        print("told of epoch", record.epoch)

    def ended(self, error: BaseException | None) -> None:
        print("ended with", error)


class Hanging(Printer):
    def step(self, record: StepRecord) -> None:
        ctrl_c()
        print("finishing the step")
        ctrl_c()
        print("still there")


class Needy(Observer):
    def __init__(self, project: str) -> None:
        pass


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


pytestmark = pytest.mark.usefixtures("own_folder")


def records_of(folder: Path) -> list[Record]:
    return Metrics((folder / "metrics.jsonl").read_bytes()).records


@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["losses at once", "losses a step later"])
def test_each_record_is_told_once(tmp_path: Path, steps_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """T7: also those of a run that is stopped, and resumed."""
    monkeypatch.setattr(Run, "steps_ahead", steps_ahead)
    folder = RunFolder(tmp_path / "run")
    first = Notebook(after_step=14, do=ctrl_c)
    with pytest.raises(Interrupted) as stopped:
        train(SMALL, folder, observers={"first": first})
    assert (first.folder, first.earlier, first.endings) == (folder.path, [], [stopped.value])
    assert first.config == json.loads(folder.config.read_text())
    assert first.told == records_of(folder.path)
    assert len(first.told) == 14 + 1 + steps_ahead

    second, third = Notebook(), Notebook()
    train(SMALL, folder, resume=True, observers={"second": second, "third": third})
    assert second.earlier == first.told
    assert [*second.earlier, *second.told] == records_of(folder.path)
    assert (third.told, third.endings) == (second.told, [None])


@pytest.mark.parametrize(
    ("notebook", "lr", "ends"), [(Notebook(0, ctrl_c), 0.05, Interrupted), (Notebook(), 1e20, DivergedError)]
)
def test_how_a_run_ends_is_told(tmp_path: Path, notebook: Notebook, lr: float, ends: type[Exception]) -> None:
    """T7: a loss that is no number; Ctrl-C in `started`, which stops the run before its first step."""
    with pytest.raises(ends) as ended:
        train(replace(SMALL, lr=lr), RunFolder(tmp_path / "run"), observers={"notebook": notebook})
    assert notebook.endings == [ended.value]


@pytest.fixture(scope="module")
def unobserved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run without observers."""
    with contextlib.chdir(tmp_path_factory.mktemp("unobserved")), contextlib.redirect_stdout(io.StringIO()):
        assert main(TRAIN) == 0
        return Path("out/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        ("started", OSError("no answer\nfrom the server"), "OSError: no answer"),
        ("step", SystemExit(3), "SystemExit: 3"),
        ("step", ValueError("\N{ROCKET} is gone"), "ValueError: \\U0001f680 is gone"),
        ("epoch", BrokenPipeError("gone"), "BrokenPipeError: gone"),
        ("epoch", asyncio.CancelledError("gone"), "CancelledError: gone"),
        ("ended", GeneratorExit("gone"), "GeneratorExit: gone"),
    ],
)
def test_an_observer_that_raises_is_named_and_left(method, error, text, unobserved, monkeypatch, capsys):
    """T7: whatever it raises, also what is no Exception, or has a letter that the output cannot encode."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Bad, method, fail)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main([*TRAIN, "--observer", f"{__name__}:Bad", "--observer", f"{__name__}:Printer"]) == 0
    assert capsys.readouterr().err == ""
    lines = out.buffer.getvalue().decode("ascii").splitlines()
    (line,) = [line for line in lines if "observer" in line and "raised" in line]
    assert line.startswith(f"--observer {__name__}:Bad: {method}() raised {text} (")
    assert re.search(r"test_observers.py, line \d+\); the training goes on without this observer$", line)
    assert "ended with None" in lines
    assert Path("out/model.safetensors").read_bytes() == unobserved


def test_ctrl_c_twice_ends_a_run_whose_observer_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    """T7: the second one is raised in the observer, which is not called again."""
    assert main([*TRAIN, "--observer", f"{__name__}:Hanging"]) == 130
    captured = capsys.readouterr()
    assert "finishing the step\n" in captured.out
    assert "still there" not in captured.out
    assert "ended" not in captured.out
    assert captured.err.endswith("unisono train: error: stopped at once\n")


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("track\ners:Tracker", "track ers:Tracker: expected package.module:Class, a class derived from"),
        (f"{__name__}:Path", f"{__name__}:Path is another class: expected package.module:Class, a class"),
        (f"{__name__}:TRAIN", f"{__name__}:TRAIN is a value of type list: expected package.module:Class"),
        (f"{__name__}:Needy", f"{__name__}:Needy raised TypeError: Needy.__init__() missing 1 required"),
    ],
)
def test_an_observer_that_cannot_be_had_is_one_line(target, error, capsys):
    """T7: before anything is loaded or written."""
    assert assert_misused([*TRAIN, "--observer", target], f"--observer {error}", capsys) == ""
    assert list(Path().iterdir()) == []


def test_of_several_processes_the_first_observes(tmp_path: Path) -> None:
    """T7: and says, for all of them, which observer cannot be had."""
    imports = "from unisono.training.observers import EpochRecord, Observer\n"
    Path("trackers.py").write_text(imports + inspect.getsource(Printer))
    one_device = [*TRAIN, "--devices", "1", "--observer"]
    first, second = run_ranks(2, run_captured, tmp_path, *one_device, "trackers:Nobody")
    error = f"--observer trackers:Nobody: there is no Nobody in trackers ({tmp_path}/trackers.py)"
    assert first == (2, "", f"unisono train: error: {error}\n")
    assert second == (2, "", "")
    first, second = run_ranks(2, run_captured, tmp_path, *one_device, "trackers:Printer")
    assert (first[0], second) == (0, (0, "", ""))
    assert first[1].count("made\n") == first[1].count("told of epoch 1\n") == 1


def test_the_tracker_in_the_documentation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """T7: observers.py has one to start from; a run that is resumed makes its table whole."""
    (code,) = re.findall(r"`unisono train --observer trackers:Table`:\n\n(.*)", observers.__doc__, re.DOTALL)
    Path("trackers.py").write_text(textwrap.dedent(code))
    monkeypatch.delitem(sys.modules, "trackers", raising=False)
    assert main([*TRAIN, "--observer", "trackers:Table"]) == 0
    assert main(["train", "--resume", "out", "--epochs", "2", "--observer", "trackers:Table"]) == 0
    epochs = Metrics(Path("out/metrics.jsonl").read_bytes()).epochs
    rows = [f"{record.epoch},{record.test_loss},{record.test_accuracy}" for record in epochs]
    assert Path("out/table.csv").read_text().splitlines() == ["epoch,test_loss,test_accuracy", *rows]
    assert "observer" not in capsys.readouterr().out
