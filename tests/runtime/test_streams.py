"""Copies beside computation: on the host at once; on accelerators in an order that a model of streams checks.

The model knows what torch promises of streams, no more: what is queued on one runs in that order, events and
`wait_stream` order two of them, and the host waits for neither unless it says so. Vector clocks check the order.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from unisono.runtime import streams
from unisono.runtime.streams import Copies, wait_for_maker

CPU = torch.device("cpu")
A, B = torch.device("cuda", 0), torch.device("cuda", 1)  # names only

Clock = Counter[int]  # by stream: how many of its operations have come before; `|` merges, `<=` is before


class Stream:
    """A queue. `clock` is what everything that is queued from now on comes after."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock = Clock()

    def operation(self) -> Clock:
        """Queue one operation; return what it comes after, itself included."""
        self.clock = self.clock + Clock([id(self)])
        return self.clock

    def wait_stream(self, other: Stream) -> None:
        Event(other).let_wait(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.clock = stream.operation()
        self.waited_for = False
        Machine.events.append(self)

    def let_wait(self, stream: Stream) -> None:
        stream.clock = stream.clock | self.clock

    def wait(self) -> None:
        self.waited_for = True


@dataclass
class Tensor:
    """Memory: its writes and reads, its stream, and the streams that the allocator knows of."""

    device: torch.device
    written: Clock
    allocated_on: Stream | None = None
    pinned: bool = False
    reads: list[tuple[Clock, Stream | None]] = field(default_factory=list)
    recorded: list[Stream] = field(default_factory=list)

    def is_pinned(self) -> bool:
        return self.pinned

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream)

    def copy_(self, other: Tensor) -> Tensor:
        return self

    def read_on(self, stream: Stream) -> None:
        assert self.written <= stream.clock, "read before it was written"
        self.reads.append((stream.operation(), stream))

    def may_be_freed(self) -> bool:
        """Whether its memory can go back to its stream although others may still be reading it."""
        return all(stream in (self.allocated_on, *self.recorded) for _, stream in self.reads)


class Machine:
    """Two accelerators, each with the stream on which the caller computes."""

    events: ClassVar[list[Event]] = []

    def __init__(self) -> None:
        self.events.clear()
        self.computing = {A: Stream(A), B: Stream(B)}
        self.current = dict(self.computing)

    def current_streams(self, devices: Any) -> list[Stream]:
        return [self.current[device] for device in dict.fromkeys(devices) if device != CPU]

    @contextlib.contextmanager
    def using(self, device: torch.device, streams: list[Stream]) -> Iterator[None]:
        before = dict(self.current)
        self.current.update((stream.device, stream) for stream in streams)
        yield
        self.current = before

    def copied_to(self, tensor: Tensor, device: torch.device, *, wait: bool) -> Tensor:
        """As torch: on the source's stream, and each of both streams waits for the other."""
        assert not wait
        there = self.current[device]
        if tensor.device == CPU:
            assert tensor.pinned, "torch would wait for all that the stream has queued"
            done = there.operation()
            tensor.reads.append((done, None))
        else:
            here = self.current[tensor.device]
            here.wait_stream(there)
            tensor.read_on(here)
            there.wait_stream(here)
            done = there.operation()
        return Tensor(device, written=done, allocated_on=there)

    def computed_on(self, device: torch.device) -> Tensor:
        stream = self.computing[device]
        return Tensor(device, stream.operation(), allocated_on=stream)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(streams._devices, "has_streams", lambda device: device != CPU)
    for name in ("current_streams", "using", "copied_to"):
        monkeypatch.setattr(streams._devices, name, getattr(machine, name))
    monkeypatch.setattr(streams._devices, "Event", Event)
    monkeypatch.setattr(streams, "is_plain", lambda tensor: True)
    monkeypatch.setattr(streams, "_streams", {})
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: machine.current[device])
    monkeypatch.setattr(
        torch, "empty_like", lambda tensor, pin_memory: Tensor(CPU, written=tensor.written, pinned=pin_memory)
    )
    return machine


def test_the_model_detects_missing_order() -> None:
    one, other = Stream(A), Stream(A)
    tensor = Tensor(A, one.operation(), allocated_on=one)
    with pytest.raises(AssertionError, match="before it was written"):
        tensor.read_on(other)
    other.wait_stream(one)
    tensor.read_on(other)
    assert not tensor.may_be_freed()


@pytest.mark.parametrize("target", [A, B], ids=["same device", "other device"])
def test_between_accelerators(machine: Machine, target: torch.device) -> None:
    """S11: a copy is made after its source, and read after it; the source can be written into, the memory reused."""
    batch = machine.computed_on(A)
    with Copies([A, target]) as copies:
        copy = copies.to(batch, 1)
        assert streams.copy_stream(A) is not machine.computing[A]
        copies.wait_copies(1)
        copy.read_on(machine.computing[target])
    assert copy.may_be_freed()
    assert batch.may_be_freed()
    written_again = machine.computing[A].operation()
    assert all(read <= written_again for read, _ in batch.reads)


def test_computation_does_not_wait_for_another_readers_copy(machine: Machine) -> None:
    """S11: replica 0 runs while shard 1 is still on its way, on the same device even."""
    shards = [Tensor(CPU, Clock(), pinned=True) for _ in range(2)]
    with Copies([A, A]) as copies:
        first, second = (copies.to(shard, reader) for reader, shard in enumerate(shards))
        copies.wait_copies(0)
        first.read_on(machine.computing[A])
        assert not second.written <= machine.computing[A].clock
        copies.wait_copies(1)
        second.read_on(machine.computing[A])


def test_a_copy_from_the_host_does_not_wait_for_queued_work(machine: Machine) -> None:
    """S11: the batch travels while the step before is still computed."""
    busy = machine.computed_on(A)
    with Copies([A]) as copies:
        copy = copies.to(Tensor(CPU, Clock()), 0)
    assert not busy.written <= copy.written


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_the_callers_host_memory(machine: Machine, pinned: bool) -> None:
    """S11: pinned memory has been read when the call returns; pageable memory is read at once, into memory of ours.

    The host waits for nothing else, such as parameters that come behind what the step before still computes.
    """
    shard, before = Tensor(CPU, Clock(), pinned=pinned), machine.computed_on(A)
    with Copies([A]) as copies:
        copies.to(shard, 0)
        copies.to(before, 0)
    assert bool(shard.reads) == pinned
    waited_for = [event for event in machine.events if event.waited_for]
    assert all(any(read <= event.clock for event in waited_for) for read, _ in shard.reads)
    assert not any(before.written <= event.clock for event in waited_for)


def test_a_copy_that_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: what the caller gets is torch's own error."""

    def no_memory(tensor: Tensor, device: torch.device, *, wait: bool) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(streams._devices, "copied_to", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no room"), Copies([A]) as copies:
        copies.to(Tensor(CPU, Clock(), pinned=True), 0)


def test_memory_that_computation_never_reads_is_free_again_soon(machine: Machine) -> None:
    """N10: what is only added to something beside computation is not held until computation has come as far."""
    far = machine.computed_on(B)
    with Copies([A, B]) as copies:
        part, _ = copies.pass_on(far, copies.keep(far), 0)
        with copies.on_copy_stream(0):
            part.read_on(machine.current[A])
    assert part.recorded == []
    assert part.may_be_freed()


def test_tensors_that_another_thread_makes_on_a_stream_of_its_own(machine: Machine) -> None:
    """N5, R14: as the statistics of a replica whose branch is on a side stream."""
    side = Stream(A)
    tensor = Tensor(A, side.operation(), allocated_on=side)
    wait_for_maker(side, [tensor])
    tensor.read_on(machine.computing[A])
    assert tensor.may_be_freed()
    wait_for_maker(machine.computing[A], [tensor])
    assert len(machine.events) == 1


def test_sums_beside(machine: Machine) -> None:
    """N1: `on_copy_stream` work runs after the copies and what it waits for; `wait_copies` waits for it too."""
    own, far = machine.computed_on(A), machine.computed_on(B)
    with Copies([A, B]) as copies:
        copies.wait_made(copies.keep(own), 0)
        part, _ = copies.pass_on(far, copies.keep(far), 0)
        with copies.on_copy_stream(0):
            for tensor in (own, part):
                tensor.read_on(machine.current[A])
            total = Tensor(A, machine.current[A].operation(), allocated_on=machine.current[A])
        copies.record_stream(total, 0)
        copies.wait_copies(0)
        total.read_on(machine.computing[A])
    assert all(tensor.may_be_freed() for tensor in (part, total))
    # What is kept stays until the block ends. Then what is freed is free at once, however far the host is ahead.
    assert own.recorded == far.recorded == []
    for tensor in (own, far):
        assert all(read <= machine.computing[tensor.device].operation() for read, _ in tensor.reads)


def test_reads_are_queued_on_the_stream_that_computes(machine: Machine) -> None:
    """`read` queues on the stream that computes, whatever is current, behind what has been copied."""
    with Copies([A]) as copies:
        part = copies.to(machine.computed_on(B), 0)
        with machine.using(A, [Stream(A)]), copies.read(0):
            part.read_on(machine.current[A])
            assert machine.current[A] is machine.computing[A]
