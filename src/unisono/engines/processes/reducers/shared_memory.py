"""Large gradients, summed during backward by the replicas' processes, in memory that all of them map.

Each large tensor has one piece of shared memory. The first replica copies its gradient into it, the next one adds its
own, and so on. After the last replica it holds the sum, and becomes the caller's gradient where it is. A replica adds a
gradient as soon as backward has made it, while it is still in the processor's cache.

Tensors are cut into chunks, so that several replicas work on one tensor at the same time. Each chunk has a number in
shared memory that says which replica's turn it is. Only that replica writes the number, so no lock is needed:

    1. a replica whose turn it is adds its part of the chunk, then passes the turn to the next replica
    2. a replica whose turn it is not postpones the chunk, goes on with backward, and tries again at its next gradient
    3. after its backward, a replica waits for the turns that are left

Guarantees
    - Chunks are summed in replica order, whichever replica is faster, so runs repeat bit for bit. (The first two
      replicas alternate in being first, chunk by chunk: a + b and b + a are the same number.)
    - Memory is reused only when nothing outside the engine refers to it. A gradient that the caller keeps stays as it
      is, and keeps only that tensor's memory.
    - A replica that fails sets a flag, and the others stop waiting. The caller must notice a worker that has died.

Assumes that further gradients of a leaf do not come here (backward inside backward leaves several in one pass).
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from unisono.engines.processes.reducers.base import OnWait, Transport, WorkerReducer, wait_on, wait_until
from unisono.engines.processes.shared_memory import BumpAllocator, Segment, TensorSpec, is_plain_strided, num_bytes
from unisono.runtime import torch_private
from unisono.runtime.buckets import LARGE_BYTES, dense_stride

_CHUNK_BYTES = 1 << 20  # small enough to be still in a cache when the next replica adds
_STEP = 2  # added to a chunk's turn by each replica; the turn is odd once the chunk holds anything
_IDLE_BACKWARDS = 16  # after this many, memory that accumulation once needed is freed

_Work: TypeAlias = tuple[int, torch.Tensor, torch.Tensor | None]  # number of the chunk, its memory, what to add
_lock = threading.Lock()


class SharedMemoryConfig(NamedTuple):
    """A worker's configuration for the sums of one backward.

    Attributes:
        specs: (number of the tensor, memory of its sum); None if they and `turns` are unchanged.
        turns: the segment that holds the turns.
        freed: segments that are no longer needed.
        replica: the receiver of this message.
        replicas: those that take part, in replica order.
    """

    specs: tuple[tuple[int, TensorSpec], ...] | None
    turns: int
    freed: tuple[int, ...]
    replica: int
    replicas: tuple[int, ...]


class ReduceBuffers:
    """The memory of the sums, as one process maps it.

    Attributes:
        chunks: by number of the tensor: (number of the chunk, its memory).
    """

    def __init__(
        self, specs: Iterable[tuple[int, TensorSpec]], segments: Mapping[int, Segment], turns: Segment
    ) -> None:
        self.turns = turns.numbers()
        self.specs = dict(specs)
        self.chunks: dict[int, list[tuple[int, torch.Tensor]]] = {}
        next_chunk = 1  # turn 0 is the flag of a failed replica
        for number, spec in self.specs.items():
            flat = segments[spec.segment].view(_flat(spec))
            parts = torch.split(flat, _chunk_items(spec.dtype))
            self.chunks[number] = list(enumerate(parts, next_chunk))
            next_chunk += len(parts)
        self._zeros = memoryview(bytes(8 * next_chunk)).cast("q")

    def begin(self) -> None:
        """Begin another backward: every chunk is the first replica's turn."""
        self.turns[: len(self._zeros)] = self._zeros

    def has_sum(self, number: int) -> bool:
        """Return whether any replica had a gradient for a tensor."""
        first_chunk, _ = self.chunks[number][0]
        return bool(self.turns[first_chunk] & 1)


class SharedMemoryReducer(WorkerReducer):
    """One replica's part in the sums of one backward."""

    def __init__(self, buffers: ReduceBuffers, replica: int, replicas: Sequence[int]) -> None:
        self._buffers = buffers
        self._turns = buffers.turns
        position = replicas.index(replica)
        # The first two replicas alternate in being first.
        exchanged = 1 - position if position < 2 <= len(replicas) else position
        self._my_turns = (position * _STEP, exchanged * _STEP)  # in even chunks, in odd ones
        self._added: set[int] = set()
        self._pending: list[deque[_Work]] = []  # each tensor's postponed chunks

    @property
    def numbers(self) -> Sequence[int]:
        return list(self._buffers.specs)

    def add(self, number: int, gradient: torch.Tensor) -> bool:
        spec = self._buffers.specs.get(number)
        if spec is None or number in self._added or not is_plain_strided(gradient):
            return False
        if gradient.dtype != spec.dtype or tuple(gradient.size()) != spec.size:
            return False
        self._added.add(number)
        if tuple(gradient.stride()) != spec.stride:
            gradient = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype).copy_(gradient)
        flat = gradient.detach().as_strided((gradient.numel(),), (1,), gradient.storage_offset())
        self._add_postponed()
        postponed: deque[_Work] = deque()
        parts = torch.split(flat, _chunk_items(spec.dtype))
        for (chunk, total), part in zip(self._buffers.chunks[number], parts, strict=True):
            if not self._add(chunk, total, part):
                postponed.append((chunk, total, part))
            self._add_from(postponed)  # the chunk that another replica has just written is still in the cache
        if postponed:
            self._pending.append(postponed)
        return True

    def end(self, on_wait: OnWait = wait_on) -> float:
        for number, chunks in self._buffers.chunks.items():
            if number not in self._added:
                self._added.add(number)
                self._pending.append(deque((chunk, total, None) for chunk, total in chunks))
        waited_s = 0.0
        while self._pending and not self._turns[0]:
            if not self._add_postponed():
                waited_s += self._wait(on_wait)
        self._pending.clear()
        return waited_s

    def fail(self, on_wait: OnWait = wait_on) -> None:
        self._turns[0] = 1
        self._pending.clear()

    def _add_postponed(self) -> bool:
        """Add the postponed chunks whose turn it is; return whether there were any."""
        done = [self._add_from(postponed) for postponed in self._pending]
        if any(done):
            self._pending = [postponed for postponed in self._pending if postponed]
        return any(done)

    def _wait(self, on_wait: OnWait) -> float:
        """Wait until a postponed chunk can be added, or a replica has failed; return for how many seconds."""
        started = time.perf_counter()
        wait_until(
            lambda: self._turns[0] != 0 or any(self._is_my_turn(chunks[0][0]) for chunks in self._pending), on_wait
        )
        return time.perf_counter() - started

    def _is_my_turn(self, chunk: int) -> bool:
        return self._turns[chunk] & ~1 == self._my_turns[chunk & 1]

    def _add_from(self, postponed: deque[_Work]) -> bool:
        """Add a tensor's postponed chunks up to the first whose turn it is not; return whether any was added."""
        before = len(postponed)
        while postponed and self._add(*postponed[0]):
            postponed.popleft()
        return len(postponed) < before

    def _add(self, chunk: int, total: torch.Tensor, part: torch.Tensor | None) -> bool:
        """Add this replica's part of a chunk and pass the turn on; return False if it is not its turn."""
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
    """Memory for one tensor's sum, which the caller gets as a tensor."""

    def __init__(self, segment: Segment, spec: TensorSpec) -> None:
        self.spec = spec._replace(segment=segment.number)
        self._segment = segment
        self._storage = segment.storage(spec.offset, num_bytes(spec))

    def is_free(self) -> bool:
        if self._storage.data_ptr() != self._segment.address + self.spec.offset:
            # `share_memory_()` moves a storage to other memory, and so does a queue of torch.multiprocessing that the
            # caller puts the gradient into. Then nothing refers to the old place.
            self._storage = self._segment.storage(self.spec.offset, num_bytes(self.spec))
        return torch_private.num_references(self._storage) == 1

    def tensor(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.spec.dtype, device="cpu")
        return empty.set_(self._storage, 0, self.spec.size, self.spec.stride)


class SharedMemoryTransport(Transport):
    """The caller's side: memory for the sums, reused once the caller has dropped the gradients in it.

    Attributes:
        is_possible: whether references to a piece of memory can be counted.
    """

    shares_parameters = True

    def __init__(self) -> None:
        self._turns = Segment.create(0)
        self.segments = [self._turns]
        self.is_possible = torch_private.num_references(self._turns.storage(0, 1)) is not None
        self._leaves: Mapping[int, torch.Tensor] | None = None  # for which `_wanted` holds
        self._wanted: dict[int, tuple[Any, ...]] = {}  # dtype, size and strides of the sums, by number
        self._slots: dict[tuple[Any, ...], list[_Slot]] = {}  # by dtype, size and stride
        self._idle: dict[int, int] = {}  # by segment: for how many backwards it has held no sum
        self._used: dict[int, _Slot] = {}  # by number of the tensor
        self._buffers: ReduceBuffers | None = None
        self._replicas: tuple[int, ...] = ()
        # By replica: the buffers and the segments that it has.
        self._configured: dict[int, tuple[ReduceBuffers, set[int]]] = {}

    def begin_backward(self, leaves: Mapping[int, torch.Tensor], replicas: tuple[int, ...]) -> bool:
        self._replicas = replicas
        if leaves is not self._leaves:
            large = [(n, t.detach()) for n, t in leaves.items() if t.nbytes >= LARGE_BYTES]
            self._wanted = {n: (t.dtype, tuple(t.size()), dense_stride(t)) for n, t in large if is_plain_strided(t)}
            self._leaves = leaves
        wanted = self._wanted
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
            used.update(self._allocate({number: wanted[number] for number in missing}))
            used = {number: used[number] for number in wanted}
        if used != self._used or self._buffers is None:
            self._used = used
            self._buffers = self._new_buffers()
        self._free_idle()
        self._buffers.begin()
        return True

    def reducer(self, on_wait: OnWait) -> WorkerReducer:
        assert self._buffers is not None
        return SharedMemoryReducer(self._buffers, 0, self._replicas)

    def config_for(self, replica: int) -> SharedMemoryConfig:
        assert self._buffers is not None
        buffers, has = self._configured.get(replica, (None, set()))
        if buffers is self._buffers:
            return SharedMemoryConfig(None, -1, (), replica, self._replicas)
        now = {segment.number for segment in self.segments}
        self._configured[replica] = self._buffers, now
        specs = tuple((number, slot.spec) for number, slot in self._used.items())
        return SharedMemoryConfig(specs, self._turns.number, tuple(has - now), replica, self._replicas)

    def results(self) -> dict[int, torch.Tensor]:
        assert self._buffers is not None
        return {number: slot.tensor() for number, slot in self._used.items() if self._buffers.has_sum(number)}

    def _allocate(self, wanted: dict[int, tuple[Any, ...]]) -> dict[int, _Slot]:
        allocator = BumpAllocator()
        specs = {number: allocator.allocate_for(*kind) for number, kind in wanted.items()}
        segment = Segment.create(allocator.num_bytes)
        self.segments.append(segment)
        slots = {number: _Slot(segment, spec) for number, spec in specs.items()}
        for number, slot in slots.items():
            self._slots.setdefault(wanted[number], []).append(slot)
        return slots

    def _new_buffers(self) -> "ReduceBuffers":
        num_chunks = sum(-(-math.prod(s.spec.size) // _chunk_items(s.spec.dtype)) for s in self._used.values())
        if (num_chunks + 1) * 8 > self._turns.num_bytes:
            self.segments.remove(self._turns)
            self._turns = Segment.create((num_chunks + 1) * 8)
            self.segments.append(self._turns)
        by_number = {segment.number: segment for segment in self.segments}
        return ReduceBuffers([(number, slot.spec) for number, slot in self._used.items()], by_number, self._turns)

    def _free_idle(self) -> None:
        """Free memory that was needed only while the caller kept gradients."""
        used = {slot.spec.segment for slot in self._used.values()}
        for segment in self.segments[:]:
            if segment is self._turns:
                continue
            number = segment.number
            self._idle[number] = 0 if number in used else self._idle.get(number, 0) + 1
            if self._idle[number] > _IDLE_BACKWARDS:
                del self._idle[number]
                self.segments.remove(segment)
                for slots in self._slots.values():
                    slots[:] = [slot for slot in slots if slot.spec.segment != number]


def _chunk_items(dtype: torch.dtype) -> int:
    return _CHUNK_BYTES // dtype.itemsize


def _flat(spec: TensorSpec) -> TensorSpec:
    return spec._replace(size=(math.prod(spec.size),), stride=(1,))


def _fence() -> None:
    """Order memory accesses: all before the call are visible to other processes before any after it.

    A processor may reorder accesses. It may not move one out of a locked block, nor exchange two such blocks; so none
    can cross both.
    """
    with _lock:
        pass
    with _lock:
        pass
