"""Profiles: what is read off the recorded steps, and the files."""

import concurrent.futures
import copy
import json
import pickle
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono.testing
from helpers.as_accelerators import simulated_as_accelerators
from unisono import DataParallel
from unisono.profiling import profile as profile_module
from unisono.profiling.steps import ProfiledStep, lanes_of
from unisono.runtime import timeline
from unisono.runtime.devices import DeviceClock
from unisono.runtime.timeline import Span


def train(model: nn.Module, rows: int = 8) -> None:
    model(torch.randn(rows, 5)).sum().backward()


@pytest.fixture
def model() -> DataParallel:
    return DataParallel(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), ["cpu"] * 2)


def step(passes: list[Span], lane: list[Span], ended: float = 10.0) -> ProfiledStep:
    return ProfiledStep(0.0, ended, passes, {"lane": lane}, {})


@pytest.mark.parametrize(
    ("lane", "expected"),
    [
        ([Span("forward", 1, 3), Span("wait", 3, 4)], {"forward": 2, "wait": 3, "outside": 5}),
        ([Span("forward", 8, 10), Span("backward", 10, 14)], {"forward": 2, "backward": 4, "wait": 0, "outside": 4}),
        ([Span("forward", 4, 10), Span("backward", 10, 15)], {"forward": 6, "backward": 5, "wait": 0, "outside": 0}),
    ],
    ids=["host", "behind the host", "never idle"],
)
def test_the_phases_make_up_the_step(lane: list[Span], expected: dict[str, float]) -> None:
    """P1, P4: of a step of 10 s, 5 s of which the host is in passes; a device may lag, and need more than the step."""
    assert step([Span("forward", 0, 4), Span("backward", 6, 7)], lane).phases("lane") == expected


def test_medians_of_the_steps() -> None:
    """P5: one slow step, such as the first one, does not count."""
    steps = [step([Span("forward", 0, seconds)], [Span("forward", 0, seconds)]) for seconds in (9, 2, 3)]
    assert lanes_of(steps)["lane"]["forward"] == 3


@pytest.mark.parametrize("devices", [["cpu"], None, ["cpu"] * 2])
def test_steps_that_were_not_split_are_left_out(
    devices: list[str] | None, no_accelerators: None, tmp_path: Path
) -> None:
    """P3: on one device, where the plain module runs, and with overridden verbs; the table says what shows these."""

    class Scatters(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return super().scatter(inputs, kwargs, device_ids)

    model = Scatters(nn.Linear(5, 3), devices)
    with model.profile() as profile:
        train(model)
    assert profile.steps() == []
    assert str(profile).startswith("nothing was profiled: this thread did not call the model on several devices")
    assert "torch.profiler" in str(profile)
    profile.save(tmp_path / "empty.json")


def test_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: the host has a lane of its own, and each replica one of its device, by whose clock it is."""

    class Late(DeviceClock):
        """Each moment is 100 s later than the one before; the host's take less than that."""

        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self._moments = 0

        def now(self) -> float:
            self._moments += 1
            return 1e6 + 100.0 * self._moments

    monkeypatch.setattr(profile_module, "DeviceClock", Late)
    with unisono.testing.simulated_accelerators(2), simulated_as_accelerators(monkeypatch):
        model = DataParallel(nn.Linear(5, 3).to("sim:0"))
        with model.profile() as profile:
            for _ in range(3):
                model(torch.randn(4, 5, device="sim:0")).sum().backward()
    assert len(profile.steps()) == 3
    for step in profile.steps():
        assert list(step.lanes) == ["host", "replica 0, sim:0", "replica 1, sim:1"]
        assert {"scatter", "replicate", "gather", "reduce"} <= {span.phase for span in step.lanes["host"]}
        for lane in ("replica 0, sim:0", "replica 1, sim:1"):
            seconds = step.phases(lane)
            assert (seconds["forward"], seconds["backward"]) == (100.0, 100.0)


def test_two_profiles_of_one_model(model: DataParallel) -> None:
    """P3: an error, and the first one goes on; after it there can be another."""
    with model.profile() as profile:
        train(model)
        with pytest.raises(RuntimeError, match="is already being profiled"), model.profile():
            pass
        train(model)
    with model.profile() as other:
        train(model)
    assert [len(each.steps()) for each in (profile, other)] == [2, 1]
    assert not timeline.recording


def test_a_block_that_raises(model: DataParallel) -> None:
    """P3: what was recorded can be read."""
    profiles = []

    def run() -> None:
        with model.profile() as profile:
            profiles.append(profile)
            train(model)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run()
    [step] = profiles[0].steps()
    train(model)
    assert profiles[0].steps() == [step]  # it has ended with the block
    assert not timeline.recording


def test_copies_of_a_model_are_not_profiled(model: DataParallel) -> None:
    """P6: deepcopy and pickle, also while it is profiled."""
    with model.profile() as profile:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            train(other)
        assert profile.steps() == []


def test_the_last_steps_are_kept(model: DataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: so many that a long training can be profiled."""
    monkeypatch.setattr(profile_module, "_MOST_STEPS", 3)
    with model.profile() as profile:
        for rows in (2, 4, 6, 8, 10):
            train(model, rows)
    assert [sum(step.rows.values()) for step in profile.steps()] == [6, 8, 10]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table() -> None:
    """P5: one line a replica, with its rows, and one column a phase."""
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    model = DataParallel(module, ["cpu"] * 2, shares=[3, 1])
    with model.profile() as profile:
        train(model)
    assert profile._repr_markdown_() == str(profile)  # a notebook shows the table, too
    title, _, head, _, *lines = str(profile).splitlines()
    assert repr(profile) == f"<profile of {title.partition(';')[0]}>"
    assert title.startswith("Sequential: 1 step, ")
    phases = ["scatter", "replicate", "forward", "gather", "backward", "reduce", "wait", "outside"]
    assert cells(head) == ["", "rows", *phases]
    assert [cells(line)[:2] for line in lines] == [["replica 0, cpu", "6"], ["replica 1, cpu", "2"]]
    own = profile.lanes()["replica 0, cpu"]
    assert cells(lines[0])[2:] == [f"{1000 * own.get(phase, 0.0):.2f}" for phase in phases]
    assert len({len(line) for line in (head, *lines)}) == 1


def test_the_trace(model: DataParallel, tmp_path: Path) -> None:
    """P5: every span is an event of its lane, in microseconds from the first step on."""
    with model.profile() as profile:
        train(model)
        train(model)
    profile.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "replica 0, cpu", 1: "replica 1, cpu"}
    steps = profile.steps()
    for lane, name in names.items():
        found = [event for event in events if event["ph"] == "X" and event["tid"] == lane]
        spans = [span for step in steps for span in step.lanes[name]]
        assert [event["name"] for event in found] == [span.phase for span in spans]
        assert [event["ts"] for event in found] == [1e6 * (span.began - steps[0].began) for span in spans]
        assert [event["dur"] for event in found] == [1e6 * (span.ended - span.began) for span in spans]
        assert {event["args"]["step"] for event in found} == {0, 1}
        assert {event["args"]["rows"] for event in found} == {4}


def test_the_picture(model: DataParallel, tmp_path: Path) -> None:
    """P5: a PNG, of no steps too; with eight replicas it is higher."""
    image = pytest.importorskip("matplotlib.image")
    with model.profile() as profile:
        pass
    profile.draw(tmp_path / "empty.png")
    with model.profile() as profile:
        for _ in range(5):
            train(model)
    profile.draw(tmp_path / "two.png")
    many = DataParallel(nn.Linear(5, 3), ["cpu"] * 8)
    with many.profile() as profile:
        train(many)
    profile.draw(tmp_path / "eight.png")
    heights = [image.imread(tmp_path / f"{name}.png").shape[0] for name in ("empty", "two", "eight")]
    assert heights == sorted(set(heights))


def test_without_matplotlib(model: DataParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: the error says what to install, and no file is left."""
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "unisono.profiling.picture", raising=False)
    monkeypatch.delattr("unisono.profiling.picture", raising=False)
    with model.profile() as profile:
        train(model)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        profile.draw(tmp_path / "step.png")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(model: DataParallel, tmp_path: Path) -> None:
    """P5: the system's error, and nothing is left of it."""
    with model.profile() as profile:
        train(model)
    for write in (profile.save, profile.draw):
        with pytest.raises(OSError, match="No such file"):
            write(tmp_path / "missing" / "file")
    assert list(tmp_path.iterdir()) == []


def test_it_is_read_while_the_model_runs(model: DataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: in another thread, with as many steps as are kept, so that old ones go while it is read."""
    monkeypatch.setattr(profile_module, "_MOST_STEPS", 20)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            assert all(step.seconds > 0 for step in profile.steps())

    try:
        with model.profile() as profile, concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            for _ in range(200):
                model(torch.zeros(2, 5))
            ended.set()
            reading.result()
    finally:
        sys.setswitchinterval(before)
    assert len(profile.steps()) == 20


def test_steps_of_another_thread_are_left_out(model: DataParallel) -> None:
    """P3: those of the thread that has opened the block are profiled."""
    with model.profile() as profile, concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(train, model, 6).result()
        train(model, 8)
    assert [sum(step.rows.values()) for step in profile.steps()] == [8]
