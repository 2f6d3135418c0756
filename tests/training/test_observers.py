"""Observers of small trainings. The oracles are metrics.jsonl, and the weights of a run that nobody observes."""

import contextlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from helpers.commands import assert_misused
from helpers.ranks import run_ranks
from unisono.cli import main
from unisono.console.errors import DivergedError, Interrupted
from unisono.training import observers
from unisono.training.loop import train
from unisono.training.metrics import EpochRecord, Record, StepRecord
from unisono.training.observers import Observer
from unisono.training.options import Options
from unisono.training.run import Run
from unisono.training.run_folder import RunFolder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SMALL = Options(model="mlp", devices="cpu*2", epochs=2)  # 12 steps an epoch
TRAIN = ["train", "--model", "mlp", "--devices", "cpu*2", "--epochs", "1", "--output", "out"]


class Notebook(Observer):
    """Keeps what it is told; after a step it does something more."""

    def __init__(self, after_step: int = 0, do: Callable[[], object] = lambda: None) -> None:
        self.after_step, self.do = after_step, do
        self.told: list[Record] = []
        self.endings: list[BaseException | None] = []

    def started(self, folder: Path, config: Any, earlier: Sequence[Record]) -> None:
        self.folder, self.config, self.earlier = folder, config, list(earlier)

    def step(self, record: StepRecord) -> None:
        self.told.append(record)
        if record.step == self.after_step:
            self.do()

    def epoch(self, record: EpochRecord) -> None:
        assert (self.folder / "curves.png").exists()
        self.told.append(record)

    def ended(self, error: BaseException | None) -> None:
        self.endings.append(error)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let trackers.py of each test be its own."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "trackers", raising=False)


def trackers(code: str) -> None:
    """Write trackers.py."""
    Path("trackers.py").write_text("from unisono.training.observers import Observer\n" + code)
    sys.modules.pop("trackers", None)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lines_for(records: Sequence[Record]) -> list[dict[str, Any]]:
    kinds = {StepRecord: "step", EpochRecord: "epoch"}
    return [{"kind": kinds[type(record)], **asdict(record)} for record in records]


@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["losses at once", "losses a step later"])
def test_each_record_is_told_once(tmp_path: Path, steps_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """T7: also those of a run that is stopped, and resumed."""
    monkeypatch.setattr(Run, "steps_ahead", steps_ahead)
    folder = RunFolder(tmp_path / "run")
    first = Notebook(after_step=14, do=lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted) as stopped:
        train(SMALL, folder, observers={"first": first})
    assert (first.folder, first.earlier, first.endings) == (folder.path, [], [stopped.value])
    assert first.config == json.loads(folder.config.read_text())
    assert lines_for(first.told) == lines_of(folder.path)
    assert len(first.told) == 14 + 1 + steps_ahead

    second, third = Notebook(), Notebook()
    train(SMALL, folder, resume=True, observers={"second": second, "third": third})
    assert lines_for(second.earlier) == lines_for(first.told)
    assert lines_for([*second.earlier, *second.told]) == lines_of(folder.path)
    assert (third.told, third.endings) == (second.told, [None])


class StoppedAtOnce(Notebook):
    def started(self, folder: Path, config: Mapping[str, Any], earlier: Sequence[Record]) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("notebook", "lr", "ends"), [(StoppedAtOnce(), 0.05, Interrupted), (Notebook(), 1e20, DivergedError)]
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
        ("started", "OSError('no answer\\nfrom the server')", "OSError: no answer"),
        ("step", "SystemExit(3)", "SystemExit: 3"),
        ("epoch", "BrokenPipeError('gone')", "BrokenPipeError: gone"),
        ("epoch", "asyncio.CancelledError('gone')", "CancelledError: gone"),
        ("ended", "GeneratorExit('gone')", "GeneratorExit: gone"),
    ],
)
def test_an_observer_that_raises_is_named_and_left(method, error, text, unobserved, capsys):
    """T7: whatever it raises, also what is no Exception."""
    trackers(
        f"""
import asyncio

class Bad(Observer):
    def {method}(self, *arguments):
        raise {error}

class Good(Observer):
    def ended(self, error):
        print("good until the end:", error)
"""
    )
    assert main([*TRAIN, "--observer", "trackers:Bad", "--observer", "trackers:Good"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    (line,) = [line for line in captured.out.splitlines() if "observer" in line]
    assert line.startswith(f"--observer trackers:Bad: {method}() raised {text} (")
    assert line.endswith("trackers.py, line 7); the training goes on without this observer")
    assert "good until the end: None\n" in captured.out
    assert Path("out/model.safetensors").read_bytes() == unobserved


def test_what_the_output_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """T7: an error that has such a letter costs no training."""
    trackers(
        """
class Bad(Observer):
    def step(self, record):
        raise ValueError("\N{ROCKET} is gone")
"""
    )
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main([*TRAIN, "--observer", "trackers:Bad"]) == 0
    assert b"step() raised ValueError: \\U0001f680 is gone (" in out.buffer.getvalue()


def test_ctrl_c_twice_ends_a_run_whose_observer_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    """T7: the second one is raised in the observer, which is not called again."""
    trackers(
        """
import os, signal

class Hanging(Observer):
    def step(self, record):
        os.kill(os.getpid(), signal.SIGINT)
        print("finishing the step")
        os.kill(os.getpid(), signal.SIGINT)
        print("still there")

    def ended(self, error):
        print("ended")
"""
    )
    assert main([*TRAIN, "--observer", "trackers:Hanging"]) == 130
    captured = capsys.readouterr()
    assert "finishing the step\n" in captured.out
    assert "still there" not in captured.out
    assert "ended" not in captured.out
    assert captured.err.endswith("unisono train: error: stopped at once\n")


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("nowhere:Tracker", "--observer nowhere:Tracker: there is no module nowhere in "),
        ("track\ners:Tracker", "--observer track ers:Tracker: expected package.module:Class, a class derived from"),
        ("trackers:Other", "--observer trackers:Other is another class: expected package.module:Class, a class"),
        ("trackers:number", "--observer trackers:number is a value of type int: expected package.module:Class"),
        ("trackers:Needy", "--observer trackers:Needy raised TypeError: Needy.__init__() missing 1 required"),
    ],
)
def test_an_observer_that_cannot_be_had_is_one_line(target, error, capsys):
    """T7: before anything is loaded or written."""
    trackers(
        """
class Needy(Observer):
    def __init__(self, project):
        pass

class Other:
    pass

number = 3
"""
    )
    assert assert_misused([*TRAIN, "--observer", target], error, capsys) == ""
    assert sorted(path.name for path in Path().iterdir()) == ["trackers.py"]


def observed_rank(rank: int, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run `unisono train` in this process; return its status and what it has written."""
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(out),
    ):
        status = main([*TRAIN, "--devices", "1", *arguments])
    return status, out.getvalue()


def test_of_several_processes_the_first_observes(tmp_path: Path) -> None:
    """T7: and says, for all of them, which observer cannot be had."""
    trackers(
        """
class Printer(Observer):
    def __init__(self):
        print("made")

    def epoch(self, record):
        print("told of epoch", record.epoch)
"""
    )
    first, second = run_ranks(2, observed_rank, tmp_path, "--observer", "trackers:Nobody")
    error = f"--observer trackers:Nobody: there is no Nobody in trackers ({tmp_path}/trackers.py)"
    assert first == (2, f"unisono train: error: {error}\n")
    assert second == (2, "")
    first, second = run_ranks(2, observed_rank, tmp_path, "--observer", "trackers:Printer")
    assert (first[0], second) == (0, (0, ""))
    assert first[1].count("made\n") == first[1].count("told of epoch 1\n") == 1


def test_the_tracker_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    """T7: docs/training-command.md has one to start from; a run that is resumed makes its table whole."""
    page = Path(observers.__file__).parents[3] / "docs" / "training-command.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    Path("trackers.py").write_text(code)
    assert main([*TRAIN, "--observer", "trackers:Table"]) == 0
    assert main(["train", "--resume", "out", "--epochs", "2", "--observer", "trackers:Table"]) == 0
    epochs = [line for line in lines_of(Path("out")) if line["kind"] == "epoch"]
    rows = [f"{line['epoch']},{line['test_loss']},{line['test_accuracy']}" for line in epochs]
    assert Path("out/table.csv").read_text().splitlines() == ["epoch,test_loss,test_accuracy", *rows]
    assert "observer" not in capsys.readouterr().out
