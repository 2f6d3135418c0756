"""Tracks, by a clock of the test's own."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from unisono.runtime import devices
from unisono.runtime.devices import DeviceClock
from unisono.runtime.timeline import Span, Track


class FakeEvent:
    """An event of a device whose own clock, in milliseconds, is a count of the events that were recorded."""

    recorded = 0
    waited_for: ClassVar[list[int]] = []

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing
        self.device = device

    def record(self, stream: SimpleNamespace) -> None:
        assert stream.device == self.device
        FakeEvent.recorded += 1
        self.at_ms = FakeEvent.recorded

    def synchronize(self) -> None:
        self.waited_for.append(self.at_ms)

    def elapsed_time(self, end: "FakeEvent") -> float:
        return float(end.at_ms - self.at_ms)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device has streams, and its events are fake ones."""
    monkeypatch.setattr(FakeEvent, "recorded", 0)
    monkeypatch.setattr(FakeEvent, "waited_for", [])
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(devices, "_spare_events", {})
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(devices, "has_streams", lambda device: True)


@pytest.mark.usefixtures("events")
def test_on_an_accelerator_time_is_the_devices(clock: SimpleNamespace) -> None:
    """P4: events on the thread's stream, which nothing waits for before the times are asked for."""
    clock.now = 100.0
    track = Track(DeviceClock(torch.device("cuda", 1)))
    assert FakeEvent.waited_for == [1]  # the clock's zero
    clock.now = 500.0  # the host's time does not matter any more
    track.enter("forward")
    track.leave()
    track.enter("backward")
    track.leave()
    assert FakeEvent.waited_for == [1]
    assert track.spans() == [Span("forward", 100.001, 100.002), Span("backward", 100.003, 100.004)]
    assert not track.is_of_host


@pytest.mark.usefixtures("events", "clock")
def test_times_of_an_accelerator_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: torch has the time between two events in single precision."""
    rounded = FakeEvent.elapsed_time
    monkeypatch.setattr(FakeEvent, "elapsed_time", lambda self, end: torch.tensor(float(rounded(self, end))).item())
    track = Track(DeviceClock(torch.device("cuda", 1)))
    monkeypatch.setattr(FakeEvent, "recorded", 7_200_000)  # milliseconds: two hours later
    for _ in range(3):
        track.enter("forward")
        monkeypatch.setattr(FakeEvent, "recorded", FakeEvent.recorded - 1 + 0.1)
        track.leave()
    assert [span.ended - span.began for span in track.spans()] == pytest.approx([1e-4] * 3, abs=2e-6)
