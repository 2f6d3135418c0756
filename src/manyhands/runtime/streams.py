"""Copies to other devices that are made beside what the devices compute.

A copy that is queued on the stream on which a device computes waits for what was queued there before it, and holds up
what comes after. So each accelerator gets streams for copies only, one for those from the host, one for all others:

    compute (the caller's)   ── batch made ──┐             ┌── replica reads copy ──     ┌── caller writes batch
                                             ▼ (1)     (2) ▲                         (3) ▲
    copies                                   └─── copy ────┴─────────────────────────────┘

    (1) A copy waits for what its source's device had been given until then; one from the host waits for nothing.
    (2) `wait_copies`: its reader waits for it, and for no later one.
    (3) When the block ends, the sources may be written into again. Pinned memory of the caller's is waited for.

From pageable memory the driver would copy in the calling thread, after all that the stream has queued; such tensors go
through pinned memory of our own. On devices that compute on the host there are no streams, and a copy is made at once.

Guarantees
    - Whoever follows (1) to (3) reads and writes as if everything ran in one order.
    - Memory is not used again before every stream is done with it.

Assumes that what is copied needs no gradient, and is not written into before the block ends; and that what the host has
in pinned memory is there, not still being written by a device.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from manyhands.runtime import devices as _devices
from manyhands.runtime.buckets import is_plain


class Copies:
    """Copies for some readers, one a replica, each on a device. Any thread may call any of its methods.

        with Copies(devices) as copies:
            shards = [copies.to(part, reader) for reader, part in enumerate(parts)]
            ...     in each reader's thread: copies.arrive(reader)

    Args:
        devices: one a reader; the calling thread's streams are those on which the readers' threads will compute.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._computing = {stream.device: stream for stream in _devices.current_streams(devices)}
        self._lock = threading.RLock()  # around what is queued on a stream for copies and the event behind it
        self._last: dict[tuple[int, bool], torch.Event] = {}  # behind a reader's last copy from the host, and of others
        self._sources: dict[torch.device, torch.Stream] = {}  # streams that copies have been taken from
        self._of_callers_memory: list[torch.Event] = []  # behind copies of what the host has given in pinned memory

    def to(self, tensor: torch.Tensor, reader: int) -> torch.Tensor:
        """Return a copy of `tensor` on the reader's device, for its computation; it may still be under way."""
        copy = self.to_add(tensor, reader)
        if is_plain(copy) and _devices.has_streams(copy.device):
            copy.record_stream(self._computing[copy.device])
        return copy

    def to_add(self, tensor: torch.Tensor, reader: int) -> torch.Tensor:
        """Return a copy of `tensor` on the reader's device for work on the copy stream; it may still be in flight."""
        target, source = self._devices[reader], tensor.device
        if not _devices.has_streams(target) or not is_plain(tensor):
            return _devices.copied_to(tensor, target)
        from_host = _devices.is_cpu(source)
        of_caller = from_host and tensor.is_pinned()
        if from_host:
            if not of_caller:
                tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        else:
            self._read_from(source, tensor)
        with self._on_copy_streams(reader, target if from_host else source, from_host):
            copy = _devices.copied_to(tensor, target, wait=False)
            if of_caller:
                self._of_callers_memory.append(copy_stream(target, from_host).record_event())
        return copy

    def _read_from(self, source: torch.device, tensor: torch.Tensor) -> None:
        """Let the stream that copies from a device wait for what the calling thread has queued there."""
        stream = copy_stream(source)
        stream.wait_stream(torch.accelerator.current_stream(source))  # (1)
        tensor.record_stream(stream)
        with self._lock:
            self._sources[source] = stream

    @contextlib.contextmanager
    def _on_copy_streams(self, reader: int, other: torch.device, from_host: bool = False) -> Iterator[None]:
        """Queue what the block queues on streams for copies: of the reader's device and of another."""
        target = self._devices[reader]
        streams = [copy_stream(d, from_host) for d in {target, other} if _devices.has_streams(d)]
        with self._lock, _devices.using(target, streams):
            yield
            if _devices.has_streams(target):
                self._last[reader, from_host] = copy_stream(target, from_host).record_event()

    def on_copy_stream(self, reader: int) -> AbstractContextManager[None]:
        """Queue what the block queues on the reader's device behind the copies, and before `wait_copies`."""
        return self._on_copy_streams(reader, self._devices[reader])

    def wait_compute(self, reader: int) -> None:
        """Let what is queued for a reader from now on wait for what the calling thread has queued on its device."""
        target = self._devices[reader]
        if _devices.has_streams(target):
            copy_stream(target).wait_stream(torch.accelerator.current_stream(target))

    @contextlib.contextmanager
    def read(self, reader: int) -> Iterator[None]:
        """Queue what the block queues on the stream on which the reader's device computes, behind the copies."""
        target = self._devices[reader]
        streams = [self._computing[target]] if _devices.has_streams(target) else []
        with _devices.using(target, streams):
            self.wait_copies(reader)
            yield

    def wait_copies(self, reader: int) -> None:
        """Let the calling thread's stream on the reader's device wait for what has been queued for it."""
        with self._lock:
            events = [event for (other, _), event in self._last.items() if other == reader]
        for event in events:
            torch.accelerator.current_stream(self._devices[reader]).wait_event(event)  # (2)

    def __enter__(self) -> "Copies":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            sources = list(self._sources.items())
        for source, stream in sources:
            torch.accelerator.current_stream(source).wait_stream(stream)  # (3)
        for event in self._of_callers_memory:
            event.synchronize()

    def record_stream(self, tensor: torch.Tensor, reader: int) -> None:
        """Keep the memory of a tensor on the reader's device until computation and copies are done with it."""
        target = self._devices[reader]
        if _devices.has_streams(target):
            tensor.record_stream(copy_stream(target))
            tensor.record_stream(self._computing[target])


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the calling thread's stream on a device; None where there are none."""
    return torch.accelerator.current_stream(device) if _devices.has_streams(device) else None


def join_streams(streams: Iterable[torch.Stream | None], tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Let the calling thread's stream on `device` wait for others of the device, on which tensors were made."""
    here = current_stream(device)
    others = [stream for stream in streams if stream is not None and stream != here]
    for stream in others:
        assert here is not None
        here.wait_stream(stream)
    for tensor in tensors if others else ():
        tensor.record_stream(here)  # type: ignore[arg-type]


def wait_for_streams(device: torch.device, others: Iterable[torch.device]) -> None:
    """Let the calling thread's stream on `device` wait for its streams on other devices."""
    here = current_stream(device)
    for other in set(others) - {device} if here is not None else ():
        stream = current_stream(other)
        if stream is not None:
            here.wait_stream(stream)  # type: ignore[union-attr]


_streams: dict[tuple[torch.device, bool], torch.Stream] = {}
_streams_lock = threading.Lock()


def copy_stream(device: torch.device, from_host: bool = False) -> torch.Stream:
    """Return the stream of an accelerator for copies from the host, or for all others."""
    with _streams_lock:
        if (device, from_host) not in _streams:
            _streams[device, from_host] = torch.Stream(device)
        return _streams[device, from_host]
