"""`unisono bench`: what it prints and saves, and how it ends."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.commands import assert_misused, status_of
from helpers.forked import forked
from unisono.bench import measure as measure_module
from unisono.bench.contenders import Contender
from unisono.bench.results import Line, Workload
from unisono.cli import main

pytestmark = pytest.mark.only_on("linux", "macos", because="its programs are process groups")

SCRIPT = """\
import torch
from torch import nn

def build():
    return nn.Linear(5, 4), torch.randn(12, 5)
"""


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    Path("own.py").write_text(SCRIPT)


def run(*arguments: str) -> int:
    return status_of("bench", *arguments)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[Contender], int, float]]:
    """What would have been measured, which takes no time."""
    calls = []

    def measure(name, target, contenders, rounds, seconds, task, workloads):
        calls.append((name, target, contenders, rounds, seconds))
        times = {"plain": 0.2, "limit": 0.1, "ddp": 0.15, "torchrun": 0.14, "threads": 0.11}
        lines = [Line(c.name, c.replicas, [times[c.name]] * rounds, 2**20) for c in contenders]
        workloads.append(Workload(name, lines, 8, 24))

    monkeypatch.setattr(measure_module, "measure", measure)
    return calls


def test_everything_of_ours(measured: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("unisono.bench.machine.num_cores", lambda: 2)
    assert run() == 0
    assert [(name, target) for name, target, *_ in measured] == [
        (name, f"unisono.bench.workloads:{name}") for name in ("resnet", "mlp", "gpt", "tiny")
    ]
    _, _, contenders, rounds, seconds = measured[0]
    assert list(map(str, contenders)) == [
        "plain",
        *(f"{c} on 2 replicas" for c in ("limit", "ddp", "torchrun", "threads")),
    ]
    assert (rounds, seconds) == (5, 2.0)
    out = capsys.readouterr().out
    saved = Path("runs/bench/results.md").read_text()
    assert saved in out
    assert "| unisono, threads  |    9.09 |     110.0 | 110.0 to 110.0 |           1.36 |           0.91 |" in saved
    assert saved.count("is fastest here") == 4
    assert Path("runs/bench/results.png").stat().st_size > 1000
    assert len(json.loads(Path("runs/bench/results.json").read_text())["workloads"]) == 4


def test_a_model_of_the_callers(measured: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("unisono.bench.machine.num_cores", lambda: 6)
    assert run("own:build", "--output", ".") == 0
    ((name, target, contenders, *_),) = measured
    assert (name, target) == ("own:build", "own:build")
    assert [str(c) for c in contenders if c.name == "threads"] == [f"threads on {n} replicas" for n in (2, 4, 6)]
    out = capsys.readouterr().out
    assert 'DataParallel(model, ["cpu"] * 2)` is fastest here' in out


def test_replicas_as_told(measured: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What it takes is said first: with two cores, three times six processes start in five waves."""
    monkeypatch.setattr("unisono.bench.measure.num_cores", lambda: 2)
    assert run("tiny", "--replicas", "4,2", "--seconds-per-turn", "1") == 0
    ((_, _, contenders, _, seconds),) = measured
    assert [c.replicas for c in contenders if c.name == "threads"] == [2, 4]
    assert seconds == 1
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("this takes about 3 minutes, or longer if a step takes more than 0.25 s; 21 processes")


def test_a_default_suits_the_rows(measured: list, monkeypatch: pytest.MonkeyPatch):
    """Where a batch has fewer of them than the machine has cores."""
    monkeypatch.setattr("unisono.bench.machine.num_cores", lambda: 64)
    assert run("own:build") == 0
    assert [c.replicas for c in measured[0][2] if c.name == "threads"] == [2, 4]


def test_what_is_stopped_prints_the_turns_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def measure(name, target, contenders, rounds, seconds, task, workloads):
        workloads.append(Workload(name, [Line("plain", 1, [0.2, 0.3]), Line("ddp", 2, [0.1]), Line("threads", 2)]))
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_module, "measure", measure)
    assert run("own:build") == 130
    out = capsys.readouterr().out
    assert "own:build, the 3 turns until it was stopped:" in out
    assert "| plain      |" in out
    assert "| ddp        |" in out
    assert not Path("runs").exists()


@pytest.mark.parametrize(("more", "expected"), [([], (3, 0.5)), (["--seconds-per-turn", "9"], (3, 9))])
def test_a_quick_look(more: list[str], expected: tuple[int, float], measured: list):
    assert run("own:build", "--quick", *more) == 0
    assert measured[0][3:] == expected


def test_without_matplotlib_the_picture_is_left_out(
    measured: list, without_package: Any, capsys: pytest.CaptureFixture[str]
):
    without_package("matplotlib")
    assert run("own:build") == 0
    out = capsys.readouterr().out
    assert "is fastest here" in out
    assert out.splitlines()[-1].startswith("no picture: matplotlib not installed: pip install matplotlib")
    assert "results.png" not in Path("runs/bench/results.md").read_text()
    assert sorted(os.listdir("runs/bench")) == ["results.json", "results.md"]


def test_a_contender_that_fails_is_a_failure(measured: list, monkeypatch: pytest.MonkeyPatch):
    failed = Workload("tiny", [Line("plain", 1, [0.1]), Line("ddp", 2, failure="for some reason")])
    monkeypatch.setattr(measure_module, "measure", lambda *args: args[-1].append(failed))
    assert run("tiny") == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["tiny", "tinyy"], "tinyy: expected a built-in model (resnet, mlp, gpt, tiny), or package.module:build for"),
        (["--seconds-per-turn", "61"], "--seconds-per-turn: expected a number from 0.01 to 60; got '61'"),
        (["--replicas", "1,2"], "argument --replicas: expected a whole number from 2 to 256; got '1'"),
        (["--output", "own.py"], "own.py is not a folder; give another one"),
        (["missing:build"], "missing:build: cannot find module missing"),
        (
            ["own:build", "--replicas", "2,99"],
            "--replicas 99: own:build: a batch of 12 rows (samples) is enough",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], error: str, measured: list, capsys: pytest.CaptureFixture[str]):
    assert assert_misused(["bench", *arguments], error, capsys) == ""
    assert measured == []


@pytest.mark.slow
def test_with_programs_of_its_own(capsys: pytest.CaptureFixture[str]):
    assert run("own:build", "--quick", "--replicas", "2", "--seconds-per-turn", "0.01") == 0
    assert "**" in capsys.readouterr().out
    saved = json.loads(Path("runs/bench/results.json").read_text())
    assert {line["failure"] for line in saved["workloads"][0]["lines"]} == {""}


@pytest.mark.only_on("linux", "macos", because="signals that another process sends")
@pytest.mark.slow
def test_ctrl_c_ends_everything():
    """In the middle of the turns, when all contenders are there."""
    with forked(main, ["bench", "own:build", "--replicas", "2", "--seconds-per-turn", "5"], cwd=Path()) as program:
        program.wait_for("ms a step")
        started = psutil.Process(program.pid).children(recursive=True)
        os.kill(program.pid, signal.SIGINT)
        assert program.wait() == 130
        assert program.err == "unisono bench: error: stopped at once\n"
    assert started
    assert psutil.wait_procs(started, timeout=30)[1] == []
