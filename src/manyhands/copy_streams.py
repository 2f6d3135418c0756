"""Copies to other devices that are made beside what the devices compute.

A copy that is queued on the stream on which a device computes waits for what was queued there before it, and holds up
what comes after. So each accelerator gets one more stream, for copies only:

    compute (the caller's)   ── batch made ──┐             ┌── replica reads copy ──     ┌── caller writes batch
                                             ▼ (1)     (2) ▲                         (3) ▲
    copies (one a device)                    └─── copy ────┴─────────────────────────────┘

    (1) A copy waits for what its source's device had been given until then.
    (2) `arrive`: its reader waits for it, and for no later one.
    (3) When the block ends, the sources may be written into again. Pinned memory of the caller's is waited for.

From pageable memory the driver would copy in the calling thread, after all that the stream has queued; such tensors go
through pinned memory of our own. On devices that compute on the host there are no streams, and a copy is made at once.

Guarantees
    - Whoever follows (1) to (3) reads and writes as if everything ran in one order.
    - Memory is not used again before both streams are done with it.

Assumes that a tensor that is to be copied does not need a gradient.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from manyhands import devices as _devices


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
        self._last: dict[int, torch.Event] = {}  # by reader, recorded behind its last copy
        self._lock = threading.Lock()  # around what is queued for a reader and the event behind it
        self._sources: dict[torch.device, torch.Stream] = {}  # streams that copies have been taken from
        self._of_callers_memory: set[int] = set()  # readers of what the host has given in pinned memory

    def to(self, tensor: torch.Tensor, reader: int) -> torch.Tensor:
        """Return a copy of `tensor` on the reader's device, which may still be under way."""
        target = self._devices[reader]
        if _devices.computes_on_host(target) or not is_plain(tensor):
            return _devices.copied_to(tensor, target)
        source = tensor.device
        if source.type == "cpu":
            if tensor.is_pinned():
                self._of_callers_memory.add(reader)
            else:
                tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        else:
            from_stream = copy_stream(source)
            from_stream.wait_stream(torch.accelerator.current_stream(source))  # (1)
            self._sources[source] = from_stream
            tensor.record_stream(from_stream)
        with self.behind(reader, source):
            copy = _devices.copied_to(tensor, target, wait=False)
        copy.record_stream(self._computing[target])
        return copy

    @contextlib.contextmanager
    def behind(self, reader: int, *others: torch.device) -> Iterator[None]:
        """Queue what the block queues, on the reader's device and on `others`, behind the copies; see `arrive`."""
        target = self._devices[reader]
        accelerators = [device for device in {target, *others} if not _devices.computes_on_host(device)]
        with self._lock, _devices.using(target, [copy_stream(device) for device in accelerators]):
            yield
            if accelerators:
                self._last[reader] = copy_stream(target).record_event()

    def follow(self, reader: int) -> None:
        """Let what is queued for a reader from now on wait for what the calling thread has queued on its device."""
        target = self._devices[reader]
        if not _devices.computes_on_host(target):
            copy_stream(target).wait_stream(torch.accelerator.current_stream(target))

    @contextlib.contextmanager
    def read(self, reader: int) -> Iterator[None]:
        """Queue what the block queues on the stream on which the reader's device computes, behind the copies."""
        target = self._devices[reader]
        streams = [] if _devices.computes_on_host(target) else [self._computing[target]]
        with _devices.using(target, streams):
            self.arrive(reader)
            yield

    def arrive(self, reader: int) -> None:
        """Let the calling thread's stream on the reader's device wait for what has been queued for it."""
        if reader in self._last:
            torch.accelerator.current_stream(self._devices[reader]).wait_event(self._last[reader])  # (2)

    def __enter__(self) -> "Copies":
        return self

    def __exit__(self, *_: object) -> None:
        for source, from_stream in self._sources.items():
            torch.accelerator.current_stream(source).wait_stream(from_stream)  # (3)
        for reader in self._of_callers_memory:
            self._last[reader].synchronize()

    def lend(self, tensor: torch.Tensor, reader: int) -> None:
        """Keep the memory of a tensor on the reader's device until both of its streams are done with it."""
        target = self._devices[reader]
        if not _devices.computes_on_host(target):
            tensor.record_stream(copy_stream(target))
            tensor.record_stream(self._computing[target])


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's entries, as they lie in memory, are all there is to it."""
    of_no_class = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return of_no_class and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


_streams: dict[torch.device, torch.Stream] = {}
_streams_lock = threading.Lock()


def copy_stream(device: torch.device) -> torch.Stream:
    """Return the stream of an accelerator that is for copies."""
    with _streams_lock:
        if device not in _streams:
            _streams[device] = torch.Stream(device)
        return _streams[device]
