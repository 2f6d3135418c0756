"""Copies between devices that overlap with computation.

A copy on the stream on which a device computes waits for everything queued before it, and delays everything queued
after it. So each accelerator gets streams for copies only, one for copies from the host and one for all others:

    compute (the caller's)   ── batch made ──┐             ┌── replica reads copy ──     ┌── caller writes batch
                                             ▼ (1)     (2) ▲                         (3) ▲
    copies                                   └─── copy ────┴─────────────────────────────┘

    (1) A copy waits for the work queued on its source's device so far; a copy from the host waits for nothing.
    (2) `wait_copies`: the reader waits for its copies, and for no later ones.
    (3) When the block ends, the sources may be written into again. The host waits for copies from the caller's pinned
        memory.

`fill` copies into memory that stays. The copy waits for the events that its owner gives: those after the last readers.
For several readers the copies go along a chain, so that each link carries the values once, whatever the number of
devices. A device receives on one stream and sends on another, both at once:

    values ──► device 1: piece k arrives ──► device 2: piece k - 1 ──► device 3: piece k - 2

The driver would copy pageable memory in the calling thread, after everything that the stream has queued; such tensors
are first copied into pinned memory of our own. Devices that compute on the host have no streams: they copy at once.

Guarantees
    - Code that follows (1) to (3) reads and writes as if everything ran in one order.
    - Memory is not used again before every stream is done with it.

Assumes that what is copied needs no gradient, and is not written into before the block ends; and that no device still
writes into the caller's pinned memory.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import torch

from unisono.runtime import devices as _devices
from unisono.runtime.buckets import is_plain
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import note_failure_after

# That a device sends on at once: short beside the whole, long beside the launch of a copy. To queue a piece takes the
# host some 30 us for each device.
_PIECE_BYTES, _MOST_PIECES = 4 << 20, 32

Made: TypeAlias = tuple[_devices.Event, torch.Stream]  # the moment when something is there, and where it is made


class _Hop(NamedTuple):
    """A device on the way of values along a chain."""

    reader: int
    device: torch.device
    memory: Sequence[torch.Tensor]
    arrives_on: torch.Stream


class Copies:
    """Copies for some readers, one a replica, each on a device. Any thread may call any of its methods.

        with Copies(devices) as copies:
            shards = [copies.to(part, reader) for reader, part in enumerate(parts)]
            ...     in each reader's thread: copies.wait_copies(reader)

    Args:
        devices: one a reader; the calling thread's streams are those on which the readers' threads will compute.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._computing = {stream.device: stream for stream in _devices.current_streams(devices)}
        self._lock = threading.RLock()  # around a copy on a copy stream and the event after it
        self._last: dict[tuple[int, bool], _devices.Event] = {}  # after a reader's last copy, from the host or not
        # The copy streams for which the calling thread's streams on these devices wait when the block ends.
        self._at_end: dict[torch.device, torch.Stream] = {}
        self._of_callers_memory: list[_devices.Event] = []  # after copies from the caller's pinned memory
        # What was made to be copied, with the stream on which it was made; kept until the block ends.
        self._made: list[tuple[torch.Stream, Sequence[torch.Tensor]]] = []
        self._sent: list[torch.Tensor] = []  # by `pass_on`; kept until the block ends

    def to(self, tensor: torch.Tensor, reader: int) -> torch.Tensor:
        """Return a copy of `tensor` on the reader's device, for its computation; it may still be in flight."""
        target, source = self._devices[reader], tensor.device
        if not _devices.has_streams(target) or not is_plain(tensor):
            return _devices.copied_to(tensor, target)
        from_host = _devices.is_cpu(source)
        of_caller = from_host and tensor.is_pinned()
        if not from_host:
            tensor.record_stream(self._read_from(source))
        elif not of_caller:
            tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        with self._on_copy_streams(reader, target if from_host else source, from_host):
            copy = _devices.copied_to(tensor, target, wait=False)
            if of_caller:
                self._of_callers_memory.append(_devices.Event(copy_stream(target, from_host)))
        copy.record_stream(self._computing[target])
        return copy

    def keep(self, tensor: torch.Tensor) -> "Made | None":
        """Keep what the calling thread has made on a device, for work on that device's copy stream.

        It stays until the block ends, when the stream that is current waits for that work. So a host that runs ahead
        takes no new memory for the next one, as it would where only the allocator knows of the work. Returns what
        `wait_made` waits for; None where nothing has to be.
        """
        device = tensor.device
        if not _devices.has_streams(device):
            return None
        here = torch.accelerator.current_stream(device)
        self._made.append((here, [tensor]))
        with self._lock:
            self._at_end[device] = copy_stream(device)
        return _devices.Event(here), here

    def wait_made(self, made: "Made | None", reader: int) -> None:
        """Let the reader, and its copy stream, wait until something is there on its device, and for nothing later."""
        if made is None:
            return
        (event, made_on), target = made, self._devices[reader]
        if made_on != copy_stream(target):
            event.let_wait(copy_stream(target))
        # The reader has to wait, too, if nothing is copied after this. The caller may have made it on the copy stream:
        # a device has few streams, and gives each of them to several who ask for one.
        if made_on != self._computing[target]:
            with self._lock:
                self._last[reader, False] = _devices.Event(copy_stream(target))

    def pass_on(self, tensor: torch.Tensor, made: "Made | None", reader: int) -> tuple[torch.Tensor, "Made | None"]:
        """Return a copy, for the reader's copy stream, of what has been made on another device; and when it is there.

        The other device sends on a stream of its own, which waits for no more than that.
        """
        source, target = tensor.device, self._devices[reader]
        streams = []
        if made is not None:
            streams = [_send_stream(source)]
            made[0].let_wait(streams[0])
            self._sent.append(tensor)
        if not _devices.has_streams(target):
            with _devices.using(source, streams):
                return _devices.copied_to(tensor, target), None
        with self._lock, _devices.using(target, [*streams, copy_stream(target)]):
            copy = _devices.copied_to(tensor, target, wait=False)
            self._last[reader, False] = _devices.Event(copy_stream(target))
            self._at_end[target] = copy_stream(target)
        return copy, self.last_of(reader)

    def last_of(self, reader: int) -> "Made | None":
        """Return when the reader's copies, and the work on its copy stream, are done; None where nothing is queued."""
        event = self._last.get((reader, False))
        return None if event is None else (event, copy_stream(self._devices[reader]))

    def fill(
        self,
        memories: Sequence[Sequence[torch.Tensor]],
        values: Sequence[torch.Tensor],
        readers: Sequence[int],
        readers_before: Sequence[Iterable[_devices.Event]],
    ) -> None:
        """Copy plain tensors into memory on each reader's device; the copies may still be in flight.

        No call takes new memory because earlier copies have not run yet: the memory stays, and `values` stay until the
        block ends, when the stream that made them, the calling thread's, waits for the copies.

        Args:
            memories: of each reader: tensors of the forms of the values.
            values: all on one device, and made for this.
            readers_before: of each reader: after the work that has read from its memory so far.
        """
        source = values[0].device
        from_host = _devices.is_cpu(source)
        hops: list[_Hop] = []
        for reader, memory, before in zip(readers, memories, readers_before, strict=True):
            target = self._devices[reader]
            if not _devices.has_streams(target):
                for to, value in zip(memory, values, strict=True):
                    _devices.copy_into(to, value)
                continue
            hop = _Hop(reader, target, memory, copy_stream(target, from_host))
            for event in before:
                event.let_wait(hop.arrives_on)
            for to in memory:  # for the day when it is freed; a stream is noted once, however often this is called
                to.record_stream(hop.arrives_on)
                to.record_stream(self._computing[target])
            hops.append(hop)
        if from_host and hops:
            values = [torch.empty_like(value, pin_memory=True).copy_(value) for value in values]
            for hop in hops:
                with self._on_copy_streams(hop.reader, hop.device, from_host):
                    for to, value in zip(hop.memory, values, strict=True):
                        _devices.copy_into(to, value, wait=False)
        elif hops:
            self._read_from(source)
            self._made.append((torch.accelerator.current_stream(source), values))
            self._pass_along(values, hops)

    def _pass_along(self, values: Sequence[torch.Tensor], hops: Sequence["_Hop"]) -> None:
        """Copy values along a chain: each device sends on what has arrived there, while the next piece arrives."""
        piece_bytes = max(_PIECE_BYTES, sum([value.nbytes for value in values]) // _MOST_PIECES)
        senders = [copy_stream(values[0].device), *[_send_stream(hop.device) for hop in hops[:-1]]]
        chain = [*zip(hops, senders, [*senders[1:], None], strict=True)]
        for k, value in enumerate(values):
            size = value.numel() if len(hops) == 1 else max(1, piece_bytes // value.itemsize)
            pieces, arrived = torch.split(value, size), list[_devices.Event]()
            for hop, sender, next_sender in chain:
                copies, events = torch.split(hop.memory[k], size), list[_devices.Event]()
                stream = hop.arrives_on if sender.device == hop.device else sender
                with self._lock, _devices.using(hop.device, [hop.arrives_on, stream]):
                    for n, (piece, copy) in enumerate(zip(pieces, copies, strict=True)):
                        if arrived:
                            arrived[n].let_wait(stream)
                        _devices.copy_into(copy, piece, wait=False)
                        if next_sender is not None:
                            events.append(_devices.Event(hop.arrives_on))
                if next_sender is not None:
                    hop.memory[k].record_stream(next_sender)
                pieces, arrived = copies, events
        for hop, _, next_sender in chain:
            if next_sender is not None:
                # Forward may write into buffers, and the next step into all of it, which this device sends on first.
                _devices.wait_stream(hop.arrives_on, next_sender)
            with self._lock:
                self._last[hop.reader, False] = _devices.Event(hop.arrives_on)

    def computing_on(self, reader: int) -> torch.Stream | None:
        """Return the stream on which a reader computes; None where it has none."""
        return self._computing.get(self._devices[reader])

    def _read_from(self, source: torch.device) -> torch.Stream:
        """Let the stream that copies from a device wait for the work that the calling thread has queued there."""
        stream = copy_stream(source)
        _devices.wait_stream(stream, torch.accelerator.current_stream(source))  # (1)
        with self._lock:
            self._at_end[source] = stream
        return stream

    @contextmanager
    def _on_copy_streams(self, reader: int, other: torch.device, from_host: bool = False) -> Iterator[None]:
        """Within the block, queue work on copy streams: of the reader's device and of another."""
        target = self._devices[reader]
        streams = [copy_stream(d, from_host) for d in {target, other} if _devices.has_streams(d)]
        with self._lock, _devices.using(target, streams):
            yield
            if _devices.has_streams(target):
                self._last[reader, from_host] = _devices.Event(copy_stream(target, from_host))

    def on_copy_stream(self, reader: int) -> AbstractContextManager[None]:
        """Within the block, queue work on the reader's copy stream, after its copies; `wait_copies` waits for both."""
        return self._on_copy_streams(reader, self._devices[reader])

    @contextmanager
    def read(self, reader: int) -> Iterator[None]:
        """Within the block, queue work on the stream on which the reader's device computes, after its copies."""
        target = self._devices[reader]
        streams = [self._computing[target]] if _devices.has_streams(target) else []
        with _devices.using(target, streams):
            self.wait_copies(reader)
            yield

    def wait_copies(self, reader: int) -> None:
        """Let the calling thread's stream on the reader's device wait for the reader's copies."""
        if not self._computing:
            return
        with self._lock:
            events = [event for (other, _), event in self._last.items() if other == reader]
        for event in events:
            event.let_wait(torch.accelerator.current_stream(self._devices[reader]))  # (2)

    def join(self) -> None:
        """Let the calling thread's streams wait for all that has been copied, and for work on copy streams."""
        with self._lock:
            at_end = list(self._at_end.items())
        for device in {tensor.device for tensor in self._sent}:
            _devices.wait_stream(copy_stream(device), _send_stream(device))
        for device, stream in at_end:
            _devices.wait_stream(torch.accelerator.current_stream(device), stream)  # (3)

    def __enter__(self) -> "Copies":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not (self._computing or self._at_end or self._made):  # on the CPU
            return
        try:
            self.join()
            for made_on in {made_on for made_on, _ in self._made}:
                if made_on != torch.accelerator.current_stream(made_on.device):
                    _devices.wait_stream(made_on, copy_stream(made_on.device))
            for event in self._of_callers_memory:
                event.wait()
        except Exception as other:  # noqa: BLE001 - noted
            note_failure_after(error, other, "waiting for copies")
        finally:
            self._made.clear()
            self._sent.clear()

    def record_stream(self, tensor: torch.Tensor, reader: int) -> None:
        """Keep the memory of what was made on the reader's copy stream until its computation is done with it."""
        target = self._devices[reader]
        if _devices.has_streams(target):
            tensor.record_stream(self._computing[target])


class CopiesToHost:
    """Copies of tensors to the host, beside what their devices compute next.

    copies = CopiesToHost()
    copy = copies.begin(tensor)   # in pinned memory, perhaps still in flight
    copies.have_ended(wait=True)
    copy = copies.result(copy)    # in ordinary memory, of which there is more
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, tuple[torch.Tensor, _devices.IsDone]] = {}  # by id

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor; it may be freed, or written into on the calling thread's stream, at once."""
        device = tensor.device
        if not is_plain(tensor) or not _devices.has_streams(device):
            return _devices.copied_to(tensor, torch.device("cpu"))
        stream, computing = copy_stream(device), torch.accelerator.current_stream(device)
        _devices.wait_stream(stream, computing)
        tensor.record_stream(stream)
        with _devices.using(device, [stream]):
            copy, has_ended = _devices.begin_copy_to_host(tensor)
        self._in_flight[id(copy)] = copy, has_ended
        return copy

    def have_ended(self, *, wait: bool) -> bool:
        """Return whether all copies have ended; with `wait`, when they have."""
        return all([has_ended(wait) for _, has_ended in self._in_flight.values()])

    def result(self, copy: torch.Tensor) -> torch.Tensor:
        """Return what `begin` has returned, once it has ended, in ordinary memory; any other tensor as it is."""
        return copy.clone() if id(copy) in self._in_flight else copy


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the calling thread's stream on a device; None where it has none."""
    return torch.accelerator.current_stream(device) if _devices.has_streams(device) else None


def wait_for_maker(stream: torch.Stream, tensors: Iterable[torch.Tensor]) -> None:
    """Let the calling thread's stream wait for `stream`, on which what makes `tensors` has been queued.

    Their memory is kept until both are done with it. If both are one stream, nothing is done.
    """
    here = current_stream(stream.device)
    if here is None or here == stream:
        return
    _devices.wait_stream(here, stream)
    for tensor in _with_memory(tensors):
        tensor.record_stream(here)


def wait_for_makers(streams: Iterable[torch.Stream], tensors: Sequence[torch.Tensor | None]) -> None:
    """Let the calling thread's streams wait for those on which `tensors` have been made; as above."""
    for stream in streams:
        wait_for_maker(stream, (t for t in tensors if t is not None and t.device == stream.device))


def current_streams_of(tensors: Sequence[torch.Tensor | None]) -> list[torch.Stream]:
    """Return the calling thread's streams on the devices of tensors."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    return [stream for stream in map(current_stream, devices) if stream is not None]


@contextmanager
def on_streams(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Make streams current within the context: first they wait for the calling thread's, afterwards those for them.

    If they are current already, nothing is done.
    """
    here = _devices.current_streams([stream.device for stream in streams])
    if here == [*streams]:
        yield
        return
    for stream, other in zip(streams, here, strict=True):
        _devices.wait_stream(stream, other)
    with _devices.using(streams[0].device, streams):
        yield
    for stream, other in zip(streams, here, strict=True):
        _devices.wait_stream(other, stream)


def keep_for_reader(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the memory of tensors, whichever streams they were made on, until the calling thread's are done with it."""
    streams: dict[torch.device, torch.Stream | None] = {}
    for tensor in _with_memory(tensors):
        if tensor.device not in streams:
            streams[tensor.device] = current_stream(tensor.device)
        if (stream := streams[tensor.device]) is not None:
            tensor.record_stream(stream)


def _with_memory(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the plain tensors among some, and those inside sparse ones."""
    for tensor in tensors:
        if is_plain(tensor):
            yield tensor
        elif tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())


_NUM_IN_POOL = 32  # streams of a device, which are given out in turn
_streams: dict[tuple[torch.device, str], torch.Stream] = {}
_streams_lock = threading.Lock()


def copy_stream(device: torch.device, from_host: bool = False) -> torch.Stream:
    """Return the stream of an accelerator for copies from the host, or for all others."""
    return _stream(device, "from the host" if from_host else "copies")


def capture_stream(device: torch.device) -> torch.Stream:
    """Return the stream of an accelerator on which kernels are captured instead of running."""
    return _stream(device, "captures")


def _send_stream(device: torch.device) -> torch.Stream:
    """Return the stream of an accelerator that sends on what has arrived there."""
    return _stream(device, "sends")


def _stream(device: torch.device, does: str) -> torch.Stream:
    with _streams_lock:
        if (device, does) not in _streams:
            taken = [stream for (other, _), stream in _streams.items() if other == device]
            for _ in range(_NUM_IN_POOL):
                stream = _streams[device, does] = torch.Stream(device)
                if stream not in taken:
                    break
        return _streams[device, does]
