"""The measurement: whose turn it is, and what becomes of a contender that fails."""

import contextlib
import io
import itertools
import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from helpers.forked import forked
from helpers.programs import until
from unisono.bench import measure, programs
from unisono.bench.contenders import Contender
from unisono.bench.machine import num_cores
from unisono.bench.programs import ContenderFailedError, ContenderProcesses, Ready
from unisono.bench.tasks import Step
from unisono.console.progress import Lines, Task

TINY = "unisono.bench.workloads:tiny"


class Imagined:
    """A `ContenderProcesses` that takes no time, and may fail when it takes steps for the n-th time."""

    turns: list[str]  # of all of them, in order
    fails_in_turn: dict[str, int]

    def __init__(self, contender: Contender, target: str) -> None:
        self.contender = contender
        self._turn = 0

    def start(self) -> list[Ready]:
        return [Ready(8, 100, False)] * self.contender.num_programs

    def take(self, num_steps: int) -> list[list[float]]:
        self._turn += 1
        self.turns.append(f"{self.contender.name} {num_steps}")
        if self._turn == self.fails_in_turn.get(self.contender.name):
            raise ContenderFailedError("as asked")
        seconds = [0.01, *[0.1] * (num_steps - 2), 0.1 if num_steps == 3 else 9.0]  # the last one was disturbed
        return [seconds] * self.contender.num_programs

    def peak_memory_bytes(self, num_steps: int) -> int:
        return 5

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None: ...


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> type[Imagined]:
    monkeypatch.setattr(Imagined, "turns", [], raising=False)
    monkeypatch.setattr(Imagined, "fails_in_turn", {}, raising=False)
    monkeypatch.setattr(measure, "ContenderProcesses", Imagined)
    return Imagined


def task(out: io.StringIO | None = None) -> Task:
    return Task(Lines(out or io.StringIO()), "measuring", 100.0)


THREE = [Contender("plain", 1), Contender("ddp", 2), Contender("threads", 2)]


def test_contenders_take_turns(imagined: type[Imagined]):
    """There and back again, so that none always follows the same one."""
    workload = measure.measure("name", TINY, THREE, rounds=2, seconds=0.5, task=task())
    there = ["plain 6", "ddp 6", "threads 6"]
    assert imagined.turns[-6:] == [*there, *reversed(there)]
    assert [line.turns_s for line in workload.lines] == [[pytest.approx(0.1)] * 2] * 3
    assert (workload.num_parameters, workload.lines[1].memory_bytes) == (100, 5)


@pytest.mark.parametrize("turn", [1, 3])
def test_a_contender_that_fails_does_so_alone(imagined: type[Imagined], turn: int, monkeypatch: pytest.MonkeyPatch):
    """When it starts, or later, between turns that it has taken."""
    imagined.fails_in_turn["ddp"] = turn
    monkeypatch.setattr("unisono.console.progress._SECONDS_BETWEEN_LINES", 0.0)
    out = io.StringIO()
    workload = measure.measure("name", TINY, THREE, rounds=3, seconds=0.5, task=task(out))
    assert [line.failure for line in workload.lines] == ["", "as asked", ""]
    assert [len(line.turns_s) for line in workload.lines] == [3, 0, 3]
    failed_in = {
        1: "  measuring, name, ddp on 2 replicas: as asked; less than a minute left",
        3: "name, ddp on 2 replicas: as asked",
    }
    assert failed_in[turn] in out.getvalue().splitlines()
    assert "name, plain: turn 3 of 3, 100.0 ms a step" in out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("busy", "own", "said"),
    [(2.0, 1.5, "other programs use 0.5 of 2 cores"), (2.0, 1.9, ""), (1.0, 0.5, "")],
)
def test_other_programs_that_keep_cores_busy_are_told(
    busy: float, own: float, said: str, imagined: type[Imagined], monkeypatch: pytest.MonkeyPatch
):
    """Cores that are all busy, and a fifth of them not with our work."""
    times, clock = itertools.count(), itertools.count()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(clock), process_time=lambda: 0.0))
    monkeypatch.setattr(measure, "busy_cores", lambda: busy)
    monkeypatch.setattr(Imagined, "cpu_seconds", lambda self: next(times) * own)
    monkeypatch.setattr(measure, "num_cores", lambda: 2)
    workload = measure.measure("name", TINY, THREE, rounds=2, seconds=0.5, task=task())
    assert workload.disturbance == said


def test_steps_in_this_process_are_judged_alike(monkeypatch: pytest.MonkeyPatch):
    """In one turn, whose first step is not counted."""
    monkeypatch.setattr(measure, "busy_cores", lambda: 2.0)
    monkeypatch.setattr(measure, "num_cores", lambda: 2)
    times = itertools.count()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(times), process_time=lambda: 0.0))
    steps = [Step(torch.zeros(()), 0.1, 0.2, float(number)) for number in range(1, 12)]
    following = iter(steps)
    taken, disturbance = measure.measure_here(lambda: next(following), seconds=7.0)
    assert taken == steps[4:11]  # after three, and the first of the turn
    assert disturbance == "other programs use 2.0 of 2 cores"


# ---- with real processes -------------------------------------------------------------------------


@pytest.mark.only_on("linux", "macos", because="its programs are process groups")
def test_programs_take_steps_and_end():
    with contextlib.closing(ContenderProcesses(Contender("limit", 2), TINY)) as limit:
        assert [ready.rows for ready in limit.start()] == [32, 32]
        first, second = limit.take(3)
        assert min(first + second) > 0
        assert len(first) == len(second) == 3
        assert limit.peak_memory_bytes(2) > 50 * 2**20
        assert limit.cpu_seconds() > 0
        processes = [psutil.Process(process.pid) for process in limit._processes]

        os.kill(processes[1].pid, signal.SIGKILL)
        with pytest.raises(ContenderFailedError, match="its process was ended by SIGKILL"):
            limit.take(1)
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def test_as_many_processes_start_at_a_time_as_there_are_cores(monkeypatch: pytest.MonkeyPatch):
    """They started all at once, and each takes seconds and memory to import torch."""
    events: list[str] = []

    def started(self: ContenderProcesses, log: Path) -> None:
        events.append("started")
        self._connections.append(SimpleNamespace(send=lambda _: None, close=lambda: None))

    def replied(self: ContenderProcesses, connections: list[object]) -> list[Ready]:
        events.append(f"{len(connections)} replied")
        return [Ready(8, 100, False)] * len(connections)

    monkeypatch.setattr(ContenderProcesses, "_start", started)
    monkeypatch.setattr(ContenderProcesses, "_replies", replied)
    monkeypatch.setattr(programs, "num_cores", lambda: 2)
    with contextlib.closing(ContenderProcesses(Contender("ddp", 5), TINY)) as processes:
        assert len(processes.start()) == 5
    assert events == [*["started", "started", "2 replied"] * 2, "started", "1 replied"]


BUILDS_FOR_EVER = """\
import os, threading

def build():
    print(os.getpid(), file=open(f"pid-{os.getpid()}", "w"))
    threading.Event().wait()
"""


def start_what_builds_for_ever() -> None:
    tempfile.tempdir = os.getcwd()
    ContenderProcesses(Contender("limit", 2), "for_ever:build").start()


@pytest.mark.only_on("linux", "macos", because="its programs are process groups")
def test_no_process_outlives_a_benchmark_that_is_killed(tmp_path: Path):
    """While they still build the model, or wait for others, they did. They take the benchmark's folder with them."""
    (tmp_path / "for_ever.py").write_text(BUILDS_FOR_EVER)
    with forked(start_what_builds_for_ever, cwd=tmp_path) as program:
        assert until(lambda: len([*tmp_path.glob("pid-*")]) == min(2, num_cores()))
        started = psutil.Process(program.pid).children(recursive=True)
        os.kill(program.pid, signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL
    assert started
    assert psutil.wait_procs(started, timeout=30)[1] == []
    assert [*tmp_path.glob("unisono-bench-*")] == []


@pytest.mark.only_on("linux", "macos", because="its programs are process groups")
def test_a_target_that_cannot_be_built():
    with (
        contextlib.closing(ContenderProcesses(Contender("plain", 1), "unisono.bench.workloads:nothing")) as started,
        pytest.raises(ContenderFailedError, match=r"there is no nothing in unisono\.bench\.workloads"),
    ):
        started.start()
