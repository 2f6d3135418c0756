"""The measurement: whose turn it is, what becomes of a contender that fails, and whether the losses agree."""

import contextlib
import os
import signal
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from unisono.bench import measure, memory
from unisono.bench.contender_processes import ContenderFailedError, ContenderProcesses
from unisono.bench.contenders import CONTENDERS, Contender, is_installed
from unisono.bench.results import Line, Workload
from unisono.bench.serving import Ready, StepTimes
from unisono.console.progress import Silent

TINY = "unisono.bench.workloads:tiny"


class Imagined(contextlib.nullcontext["Imagined"]):
    """A `ContenderProcesses` that takes no time, and may fail in its n-th turn after it was started with the others."""

    turns: list[str]  # of all of them, in order
    fails_in_turn: dict[str, int]

    def __init__(self, contender: Contender, target: str) -> None:
        super().__init__(self)
        self.contender = contender
        self._turn = 0

    def wait_until_ready(self) -> None:
        self.ready = [Ready(8, 100, False)] * self.contender.num_programs

    def take(self, num_untimed: int, num_timed: int) -> list[StepTimes]:
        self._turn += 1
        self.turns.append(f"{self.contender.name} {num_untimed}+{num_timed}")
        if self._turn == self.fails_in_turn.get(self.contender.name):
            raise ContenderFailedError("as asked")
        taken = StepTimes(0.1 * num_timed, [1.0] * (num_untimed + num_timed))
        return [taken] * self.contender.num_programs


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> type[Imagined]:
    monkeypatch.setattr(Imagined, "turns", [], raising=False)
    monkeypatch.setattr(Imagined, "fails_in_turn", {}, raising=False)
    monkeypatch.setattr(measure, "ContenderProcesses", Imagined)
    monkeypatch.setattr(measure, "close_all", lambda started, patient: None)
    monkeypatch.setattr(memory, "peak", lambda started, num_steps: 5)
    return Imagined


THREE = [Contender("plain", 1), Contender("ddp", 2), Contender("threads", 2)]


def test_contenders_take_turns(imagined: type[Imagined]):
    """There and back again, so that none always follows the same one."""
    workload = measure.measure("name", TINY, THREE, rounds=2, seconds=0.5, progress=Silent())
    there = ["plain 1+5", "ddp 1+5", "threads 1+5"]
    assert imagined.turns[-6:] == [*there, *reversed(there)]
    assert [line.turns_s for line in workload.lines] == [[pytest.approx(0.1)] * 2] * 3
    assert (workload.num_parameters, workload.lines[1].memory_bytes) == (100, 5)


@pytest.mark.parametrize("turn", [1, 3])
def test_a_contender_that_fails_does_so_alone(imagined: type[Imagined], turn: int):
    """When it is there alone, or later, between turns that it has taken."""
    imagined.fails_in_turn["ddp"] = turn
    progress = Mock()
    workload = measure.measure("name", TINY, THREE, rounds=3, seconds=0.5, progress=progress)
    assert [line.failure for line in workload.lines] == ["", "as asked", ""]
    assert [len(line.turns_s) for line in workload.lines] == [3, 0, 3]
    assert any("ddp, 2 replicas: as asked" in str(call) for call in progress.update.mock_calls)


@pytest.mark.parametrize(
    ("losses", "workload", "differs"),
    [
        ({"ddp": [3.0, 2.0, 1.1], "threads": [3.0, 2.0, 1.00001]}, {}, ["loss 1.1 in step 3, where plain has 1", ""]),
        ({"limit": [3.0, 2.5, 1.5]}, {}, [""]),  # its programs learn by themselves
        ({"limit": [3.1, 2.5, 1.5]}, {}, ["loss 3.1 in step 1, where plain has 3"]),
        ({"ddp": [3.0, 2.1, 1.1]}, {"rows": 7}, [""]),  # means of means, with uneven rows
        (  # with batch norm plain is another computation
            {"ddp": [3.5, 2.0, 1.0], "threads": [3.5, 2.0, 1.2]},
            {"normalises_shards": True},
            ["", "loss 1.2 in step 3, where ddp has 1"],
        ),
    ],
)
def test_losses_that_differ_are_told(losses: dict[str, list[float]], workload: dict[str, Any], differs: list[str]):
    lines = [Line("plain", 1, losses=[3.0, 2.0, 1.0]), *(Line(name, 2, losses=each) for name, each in losses.items())]
    measure._compare_losses(Workload("name", lines, **{"rows": 8, **workload}))
    assert [line.differs for line in lines] == ["", *differs]


# ---- with real processes -------------------------------------------------------------------------


def test_programs_take_steps_and_end():
    with ContenderProcesses(Contender("limit", 2), TINY) as limit:
        limit.wait_until_ready()
        assert [ready.rows for ready in limit.ready] == [32, 32]
        first, second = limit.take(1, 2)
        assert first.seconds > 0
        assert len(first.losses) == len(second.losses) == 3
        assert first.losses[0] != second.losses[0]  # other rows
        assert memory.peak(limit, 2) > 50 * 2**20
        processes = [psutil.Process(pid) for pid in limit.process_ids]

        os.kill(limit.process_ids[1], signal.SIGKILL)
        with pytest.raises(ContenderFailedError, match="its process was ended by SIGKILL"):
            limit.take(0, 1)
    assert psutil.wait_procs(processes, timeout=20)[1] == []


def test_a_target_that_cannot_be_built():
    with (
        ContenderProcesses(Contender("plain", 1), "unisono.bench.workloads:nothing") as started,
        pytest.raises(ContenderFailedError, match=r"there is no nothing in unisono\.bench\.workloads"),
    ):
        started.wait_until_ready()


@pytest.mark.slow
def test_all_contenders_agree():
    """On what takes no time; those of the larger workloads agree in test_contenders.py, also with batch norm."""
    names = [name for name in CONTENDERS if is_installed(name)]
    contenders = [Contender(name, 1 if name == "plain" else 2) for name in names]
    measured = Workload("name", [Line(contender.name, contender.replicas) for contender in contenders])
    runners = measure.each_alone(measured, TINY, contenders, Silent())
    assert [(line.contender, line.failure, line.differs) for line in measured.lines] == [
        (contender.name, "", "") for contender in contenders
    ]
    assert all(line.memory_bytes > 0 for line in measured.lines)
    assert len(runners) == len(contenders)
