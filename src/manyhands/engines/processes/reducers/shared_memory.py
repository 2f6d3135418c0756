"""Large gradients, summed by the replicas' processes themselves, in memory that all of them map, during backward.

For each large tensor there is one piece of shared memory. The first replica copies its gradient into it, the next one
adds its own, and so on; what the last one leaves there is the sum, and becomes the caller's gradient where it lies. A
replica does its part as soon as its backward has made the gradient, which is then still in the processor's cache.

Tensors are cut into chunks, so that the replicas work on one tensor at the same time. Each chunk has a number in shared
memory that says whose turn it is, and only the replica whose turn it is writes that number: no lock is needed. Who
finds that it is not his turn goes on with backward and looks again later, and at the end waits.

Guarantees
    - Chunks are summed in replica order, whoever is faster, so runs repeat bit for bit. (The first two take turns in
      being first, chunk by chunk: a + b and b + a are the same number.)
    - Memory is used again only when nothing outside the engine refers to it. A gradient that the caller keeps stays as
      it is, and keeps that one tensor's memory.
    - A replica that fails tells the others, who then wait for nobody. Whether one has died the caller has to see.

Assumes that a leaf's further gradients (backward inside backward leaves several in one pass) go another way.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from manyhands.engines.processes.reducers.base import OnWait, Reducer, Transport, wait_until
from manyhands.engines.processes.shared_memory import BumpAllocator, Segment, TensorSpec, can_lie_in_memory, num_bytes
from manyhands.runtime import torch_private
from manyhands.runtime.buckets import LARGE_BYTES, dense_stride

_CHUNK_BYTES = 1 << 20  # small enough for what one replica has written to be in a cache when the next one adds
_STEP = 2  # what a chunk's number grows by with each replica; odd once there is anything in the chunk
_IDLE_BACKWARDS = 16  # after so many, memory that was needed for accumulation once is given back

_Work: TypeAlias = tuple[int, torch.Tensor, torch.Tensor | None]  # number of the chunk, its memory, what to add
_lock = threading.Lock()


class SharedMemoryConfig(NamedTuple):
    """What a worker is told about the sums of one backward.

    Attributes:
        places: (number of the tensor, where its sum is made); None if they and `turns` are what they were.
        turns: the segment that says whose turn it is.
        gone: segments that are not needed any more.
        replica: which one it is.
        replicas: who takes part, in replica order.
    """

    places: tuple[tuple[int, TensorSpec], ...] | None
    turns: int
    gone: tuple[int, ...]
    replica: int
    replicas: tuple[int, ...]


class ReduceBuffers:
    """The memory in which one process's part in the sums is done.

    Attributes:
        chunks: by number of the tensor: (number of the chunk, its memory).
    """

    def __init__(
        self, places: Iterable[tuple[int, TensorSpec]], segments: Mapping[int, Segment], turns: Segment
    ) -> None:
        self.turns = turns.numbers()
        self.places = dict(places)
        self.chunks: dict[int, list[tuple[int, torch.Tensor]]] = {}
        next_chunk = 1  # 0 is where failures are told
        for number, place in self.places.items():
            flat = segments[place.segment].view(_flat(place))
            parts = torch.split(flat, _chunk_items(place.dtype))
            self.chunks[number] = list(enumerate(parts, next_chunk))
            next_chunk += len(parts)
        self._zeros = memoryview(bytes(8 * next_chunk)).cast("q")

    def begin(self) -> None:
        """Begin another backward: it is the first replica's turn everywhere."""
        self.turns[: len(self._zeros)] = self._zeros

    def has_sum(self, number: int) -> bool:
        """Return whether any replica had a gradient for a tensor."""
        first_chunk, _ = self.chunks[number][0]
        return bool(self.turns[first_chunk] & 1)


class SharedMemoryReducer(Reducer):
    """One replica's part in the sums of one backward."""

    def __init__(self, ground: ReduceBuffers, replica: int, replicas: Sequence[int]) -> None:
        self._ground = ground
        self._turns = ground.turns
        position = replicas.index(replica)
        # The first two take turns in being first.
        exchanged = 1 - position if position < 2 <= len(replicas) else position
        self._mine = (position * _STEP, exchanged * _STEP)  # in even chunks, in odd ones
        self._given: set[int] = set()
        self._pending: list[deque[_Work]] = []  # for each tensor, what was put off

    @property
    def numbers(self) -> Sequence[int]:
        return list(self._ground.places)

    def add(self, number: int, gradient: torch.Tensor) -> bool:
        place = self._ground.places.get(number)
        if place is None or number in self._given or not can_lie_in_memory(gradient):
            return False
        if gradient.dtype != place.dtype or tuple(gradient.size()) != place.size:
            return False
        self._given.add(number)
        if tuple(gradient.stride()) != place.stride:
            gradient = torch.empty_strided(place.size, place.stride, dtype=place.dtype).copy_(gradient)
        flat = gradient.detach().as_strided((gradient.numel(),), (1,), gradient.storage_offset())
        self._go_on()
        late: deque[_Work] = deque()
        parts = torch.split(flat, _chunk_items(place.dtype))
        for (chunk, total), part in zip(self._ground.chunks[number], parts, strict=True):
            if not self._add(chunk, total, part):
                late.append((chunk, total, part))
            self._add_first_of(late)  # what another replica has just written is still in the cache
        if late:
            self._pending.append(late)
        return True

    def end(self, watch: OnWait = lambda: None) -> float:
        for number, chunks in self._ground.chunks.items():
            if number not in self._given:
                self._given.add(number)
                self._pending.append(deque((chunk, total, None) for chunk, total in chunks))
        waited_s = 0.0
        while self._pending and not self._turns[0]:
            if not self._go_on():
                waited_s += self._wait(watch)
        self._pending.clear()
        return waited_s

    def fail(self, watch: OnWait = lambda: None) -> None:
        self._turns[0] = 1
        self._pending.clear()

    def _go_on(self) -> bool:
        """Do what can be done of what was put off; return whether that was anything."""
        done = [self._add_first_of(late) for late in self._pending]
        if any(done):
            self._pending = [late for late in self._pending if late]
        return any(done)

    def _wait(self, watch: OnWait) -> float:
        """Wait until there is something to do; return for how many seconds."""
        started = time.perf_counter()
        wait_until(lambda: self._turns[0] != 0 or any(self._is_my_turn(late[0][0]) for late in self._pending), watch)
        return time.perf_counter() - started

    def _is_my_turn(self, chunk: int) -> bool:
        return self._turns[chunk] & ~1 == self._mine[chunk & 1]

    def _add_first_of(self, late: deque[_Work]) -> bool:
        """Do the first of what was put off for a tensor, as far as it goes; return whether that was anything."""
        before = len(late)
        while late and self._add(*late[0]):
            late.popleft()
        return len(late) < before

    def _add(self, chunk: int, total: torch.Tensor, part: torch.Tensor | None) -> bool:
        """Do this replica's part of a chunk, if it is its turn."""
        if not self._is_my_turn(chunk):
            return False
        turn = self._turns[chunk]
        if part is not None:
            _fence()
            with torch.no_grad():
                if turn & 1:
                    total.add_(part)
                else:
                    total.copy_(part)
            turn |= 1
            _fence()
        self._turns[chunk] = turn + _STEP
        return True


class _Slot:
    """Memory for one tensor's sum, which is handed out as a tensor of the caller's."""

    def __init__(self, segment: Segment, place: TensorSpec) -> None:
        self.place = place._replace(segment=segment.number)
        self._storage = segment.storage(place.offset, num_bytes(place))

    def is_free(self) -> bool:
        return torch_private.num_references(self._storage) == 1

    def tensor(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.place.dtype, device="cpu")
        return empty.set_(self._storage, 0, self.place.size, self.place.stride)


class SharedMemoryTransport(Transport):
    """The caller's side: memory for the sums, used again once the caller has let go of what he got.

    Attributes:
        is_possible: whether it can be told that nobody refers to a piece of memory.
    """

    shares_parameters = True

    def __init__(self) -> None:
        self._turns = Segment.create(0)
        self.segments = [self._turns]
        self.is_possible = torch_private.num_references(self._turns.storage(0, 1)) is not None
        self._slots: dict[tuple[Any, ...], list[_Slot]] = {}  # by what a tensor is like
        self._idle: dict[int, int] = {}  # for how many backwards no sum has been made in a segment
        self._used: dict[int, _Slot] = {}  # by number of the tensor
        self._ground: ReduceBuffers | None = None
        self._replicas: tuple[int, ...] = ()
        self._told: dict[
            int, tuple[ReduceBuffers, set[int]]
        ] = {}  # what each replica was told last, and the segments it has

    def begin_backward(self, leaves: Mapping[int, torch.Tensor], replicas: tuple[int, ...]) -> bool:
        self._replicas = replicas
        large = [(n, t.detach()) for n, t in leaves.items() if t.nbytes >= LARGE_BYTES]
        wanted = {n: (t.dtype, tuple(t.size()), dense_stride(t)) for n, t in large if can_lie_in_memory(t)}
        if not wanted or not self.is_possible:
            return False
        free = {kind: [slot for slot in self._slots.get(kind, ()) if slot.is_free()] for kind in wanted.values()}
        used: dict[int, _Slot] = {}
        missing: list[int] = []
        for number, kind in wanted.items():
            if free[kind]:
                used[number] = free[kind].pop(0)
            else:
                missing.append(number)
        if missing:
            used.update(self._more({number: wanted[number] for number in missing}))
            used = {number: used[number] for number in wanted}
        if used != self._used or self._ground is None:
            self._used = used
            self._ground = self._new_buffers()
        self._drop_idle()
        self._ground.begin()
        return True

    def part(self, watch: OnWait) -> Reducer:
        assert self._ground is not None
        return SharedMemoryReducer(self._ground, 0, self._replicas)

    def config_for(self, replica: int) -> SharedMemoryConfig:
        assert self._ground is not None
        ground, has = self._told.get(replica, (None, set()))
        if ground is self._ground:
            return SharedMemoryConfig(None, -1, (), replica, self._replicas)
        now = {segment.number for segment in self.segments}
        self._told[replica] = self._ground, now
        places = tuple((number, slot.place) for number, slot in self._used.items())
        return SharedMemoryConfig(places, self._turns.number, tuple(has - now), replica, self._replicas)

    def results(self) -> dict[int, torch.Tensor]:
        assert self._ground is not None
        return {number: slot.tensor() for number, slot in self._used.items() if self._ground.has_sum(number)}

    def rendezvous(self, replica: int) -> None:
        return None

    def begin_sending(self, flats: Sequence[torch.Tensor], replicas: tuple[int, ...], watch: OnWait) -> None:
        pass  # the workers have them

    def end_sending(self, watch: OnWait) -> None:
        pass

    def end(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def _more(self, wanted: dict[int, tuple[Any, ...]]) -> dict[int, _Slot]:
        allocator = BumpAllocator()
        places = {number: allocator.place_for(*kind) for number, kind in wanted.items()}
        segment = Segment.create(allocator.num_bytes)
        self.segments.append(segment)
        slots = {number: _Slot(segment, place) for number, place in places.items()}
        for number, slot in slots.items():
            self._slots.setdefault(wanted[number], []).append(slot)
        return slots

    def _new_buffers(self) -> "ReduceBuffers":
        num_chunks = sum(-(-math.prod(s.place.size) // _chunk_items(s.place.dtype)) for s in self._used.values())
        if (num_chunks + 1) * 8 > self._turns.num_bytes:
            self.segments.remove(self._turns)
            self._turns = Segment.create((num_chunks + 1) * 8)
            self.segments.append(self._turns)
        by_number = {segment.number: segment for segment in self.segments}
        return ReduceBuffers([(number, slot.place) for number, slot in self._used.items()], by_number, self._turns)

    def _drop_idle(self) -> None:
        """Let go of memory that was needed while the caller kept gradients, and no longer is."""
        used = {slot.place.segment for slot in self._used.values()}
        for segment in self.segments[:]:
            if segment is self._turns:
                continue
            number = segment.number
            self._idle[number] = 0 if number in used else self._idle.get(number, 0) + 1
            if self._idle[number] > _IDLE_BACKWARDS:
                del self._idle[number]
                self.segments.remove(segment)
                for slots in self._slots.values():
                    slots[:] = [slot for slot in slots if slot.place.segment != number]


def _chunk_items(dtype: torch.dtype) -> int:
    return _CHUNK_BYTES // dtype.itemsize


def _flat(place: TensorSpec) -> TensorSpec:
    return place._replace(size=(math.prod(place.size),), stride=(1,))


def _fence() -> None:
    """Have everything written before be seen before what is written from now on, and the same for reading.

    A processor may reorder what another one sees. It may not move anything out of a locked block, nor exchange two of
    them; so nothing can pass both.
    """
    with _lock:
        pass
    with _lock:
        pass
