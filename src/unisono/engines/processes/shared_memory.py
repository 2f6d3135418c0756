"""Memory that several processes map: segments, tensors moved into them, and buffers that pack tensors.

A `Segment` is memory without a name: a memfd on Linux, a deleted temporary file elsewhere. It reaches another process
as a file descriptor. It is freed with the last process that maps it, however that process ends. The size of /dev/shm
does not matter.

Guarantees
    - A tensor in a segment keeps the mapping alive: a memoryview between the two keeps the map's buffer open, and an
      open buffer cannot be unmapped.
    - `SendBuffer` writes into one segment again and again. It returns specs, not tensors: only the engine makes tensors
      of them, and it hands none out. So nothing in use is overwritten.

Assumes that the two processes alternate: while one reads from a send buffer, the other does not write to it.
"""

import itertools
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from unisono.engines.processes.limits import explained
from unisono.runtime import torch_private
from unisono.runtime.buckets import dense_stride, is_plain
from unisono.runtime.interrupts import at_deletion

_ALIGNMENT = 64  # bytes; what torch's own allocator gives
_PAGE = mmap.PAGESIZE
_CPU = torch.device("cpu")
_numbers = itertools.count()
_moved_into: "weakref.WeakSet[Segment]" = weakref.WeakSet()  # segments that `move_to_shared_memory` made


class TensorSpec(NamedTuple):
    """Where a tensor is in a segment, and its form; `offset` in bytes."""

    segment: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Segment:
    """Memory that processes share.

    Attributes:
        number: the segment's id, chosen by its creator.
        fd: its file descriptor, open as long as this object exists; the mapping lives as long as its tensors.
        num_bytes: its size.
        address: where it begins in this process.
    """

    def __init__(self, fd: int, num_bytes: int, number: int) -> None:
        self.fd, self.num_bytes, self.number = fd, num_bytes, number
        self._closed = at_deletion(map(os.close, [fd]))
        with explained(f"{num_bytes:,} bytes of memory that processes share"):
            self._map = mmap.mmap(fd, num_bytes)  # which duplicates the descriptor
        self._whole = self.storage(0, num_bytes)
        self.address = self._whole.data_ptr()

    @classmethod
    def create(cls, num_bytes: int) -> "Segment":
        """Return a new segment of at least `num_bytes`, filled with zeros."""
        num_bytes = max(_PAGE, -(-num_bytes // _PAGE) * _PAGE)
        return cls(unnamed_file("unisono", num_bytes), num_bytes, next(_numbers))

    def storage(self, offset: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a new storage over `num_bytes` (at least 1) from `offset`."""
        part = memoryview(self._map)[offset : offset + num_bytes]
        return torch.frombuffer(part, dtype=torch.uint8).untyped_storage()

    def view(self, spec: TensorSpec) -> torch.Tensor:
        """Return the tensor of a spec; its storage is that of the whole segment."""
        empty = torch.empty(0, dtype=spec.dtype, device=_CPU)
        return empty.set_(self._whole, spec.offset // spec.dtype.itemsize, spec.size, spec.stride)

    def numbers(self) -> memoryview:
        """Return the memory as 64-bit integers; each is read and written atomically."""
        return memoryview(self._map).cast("q")


def unnamed_file(label: str, num_bytes: int = 0) -> int:
    """Return the file descriptor of a new file in memory, without a name, of `num_bytes` zeros.

    Args:
        label: what /proc calls it.
    """
    with explained(f"{num_bytes:,} bytes of memory that processes share"):
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(label, os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            os.ftruncate(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
    return fd


def num_bytes(spec: TensorSpec) -> int:
    """Return how many bytes the tensor of a spec spans."""
    return (1 + sum((n - 1) * s for n, s in zip(spec.size, spec.stride, strict=True))) * spec.dtype.itemsize


def is_plain_strided(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is only dtype, size, strides and bytes, so that shared memory can hold a copy of it.

    The tensor may be on any device.
    """
    return is_plain(tensor) and not (tensor.is_meta or tensor.is_conj() or tensor.is_neg())


@dataclass
class BumpAllocator:
    """Allocates tensors one behind the other, in a segment that need not exist yet."""

    num_bytes: int = 0

    def allocate(self, tensor: torch.Tensor, segment: int = -1) -> TensorSpec:
        """Return a spec for a copy of `tensor`, behind all earlier ones."""
        return self.allocate_for(tensor.dtype, tuple(tensor.size()), dense_stride(tensor), segment)

    def allocate_for(
        self, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], segment: int = -1
    ) -> TensorSpec:
        """Return a spec for a dense tensor, behind all earlier ones."""
        offset = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = offset + math.prod(size) * dtype.itemsize
        return TensorSpec(segment, offset, dtype, size, stride)


class SendBuffer:
    """Writes the tensors of one message after another into a segment, which grows when it has to."""

    def __init__(self) -> None:
        self.segment = Segment.create(_PAGE)
        self._waiting: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Add a tensor that needs no gradient to the next `flush`; return its index in this message."""
        self._waiting.append(tensor)
        return len(self._waiting) - 1

    def flush(self) -> list[TensorSpec]:
        """Write the tensors that were added since the last time; return their specs, by index."""
        waiting, self._waiting = self._waiting, []
        allocator = BumpAllocator()
        specs = [allocator.allocate(tensor, self.segment.number) for tensor in waiting]
        if allocator.num_bytes > self.segment.num_bytes:
            self.segment = Segment.create(max(allocator.num_bytes, 2 * self.segment.num_bytes))
            specs = [spec._replace(segment=self.segment.number) for spec in specs]
        for spec, tensor in zip(specs, waiting, strict=True):
            self.segment.view(spec).copy_(tensor)
        return specs

    def clear(self) -> None:
        """Drop the tensors that were added, after a message that could not be written."""
        self._waiting = []


# ---- moving live tensors ----------------------------------------------------------------------------


def move_to_shared_memory(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[Segment, TensorSpec]]:
    """Move tensors' memory into a segment, unless it is in one already; ties, strides and identities stay.

    Returns:
        id -> where the tensor is. Tensors are left out whose memory cannot move without breaking a tie: another object
        refers to it, or other processes share it already.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if is_plain_strided(tensor.detach()) and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    found: dict[int, tuple[Segment, TensorSpec]] = {}
    to_move: list[tuple[list[torch.Tensor], int]] = []
    total_bytes = 0
    for address, group in by_storage.items():
        segment = next((s for s in _moved_into if s.address <= address < s.address + s.num_bytes), None)
        if segment is not None:
            found.update((id(tensor), (segment, _spec_in(segment, tensor))) for tensor in group)
        elif is_movable(group):
            to_move.append((group, total_bytes))
            total_bytes += -(-group[0].untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
    if not to_move:
        return found
    segment = Segment.create(total_bytes)
    _moved_into.add(segment)
    with torch.inference_mode(False), torch.no_grad():
        for group, offset in to_move:
            old = group[0].untyped_storage()
            new = segment.storage(offset, old.nbytes())
            new.copy_(old)
            for tensor in group:
                empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
                tensor.data = empty.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
                found[id(tensor)] = (segment, _spec_in(segment, tensor))
    return found


def is_movable(group: Sequence[torch.Tensor]) -> bool:
    """Return whether only these tensors refer to their memory."""
    storage = group[0].untyped_storage()
    return not storage.is_shared() and torch_private.num_references(storage) == len(group) + 1


def _spec_in(segment: Segment, tensor: torch.Tensor) -> TensorSpec:
    offset = tensor.data_ptr() - segment.address
    return TensorSpec(segment.number, offset, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()))
