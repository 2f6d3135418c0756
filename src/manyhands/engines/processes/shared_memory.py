"""Memory that several processes map: segments, tensors in them or moved into them, and tensors packed into one.

A `Segment` is memory without a name: a memfd on Linux, a deleted temporary file elsewhere. It reaches another process
as a file descriptor and is gone with the last process that maps it, however that one ends; the size of /dev/shm does
not matter.

Guarantees
    - A tensor in a segment keeps the mapping alive: a ctypes array between the two holds the map's buffer open, and an
      open buffer cannot be unmapped.
    - `SendBuffer` writes into one segment again and again. What it hands out are places, not tensors: nobody outside
    the
      engine may keep a tensor in there, so that nothing that is still in use is ever written over.

Assumes that the two sides take turns: while one reads what an outbox holds, the other does not write.
"""

import ctypes
import itertools
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from manyhands.runtime import torch_private
from manyhands.runtime.buckets import dense_stride, is_plain

_ALIGNMENT = 64  # bytes; what torch's own allocator gives
_PAGE = mmap.PAGESIZE
_CPU = torch.device("cpu")
_numbers = itertools.count()
_moved_into: "weakref.WeakSet[Segment]" = weakref.WeakSet()  # segments that tensors have been moved into


class TensorSpec(NamedTuple):
    """Where a tensor lies in a segment; `offset` in bytes."""

    segment: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Segment:
    """Memory that processes share.

    Attributes:
        number: what this process calls it; a process that attaches it says how.
        fd: its file descriptor, open for as long as this object is there; the mapping lives as long as its tensors.
        num_bytes: its size.
        address: where it begins in this process.
    """

    def __init__(self, fd: int, num_bytes: int, number: int) -> None:
        self.fd, self.num_bytes, self.number = fd, num_bytes, number
        self._map = mmap.mmap(fd, num_bytes)
        self._whole = self.storage(0, num_bytes)
        self.address = self._whole.data_ptr()

    @classmethod
    def create(cls, num_bytes: int) -> "Segment":
        """Return a new segment of at least `num_bytes`, filled with zeros."""
        num_bytes = max(_PAGE, -(-num_bytes // _PAGE) * _PAGE)
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("manyhands", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, num_bytes)
        return cls(fd, num_bytes, next(_numbers))

    def storage(self, offset: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage of its own over `num_bytes` (at least 1) from `offset`."""
        array = (ctypes.c_char * num_bytes).from_buffer(self._map, offset)
        return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()

    def view(self, place: TensorSpec) -> torch.Tensor:
        """Return the tensor at a place; its storage is that of the whole segment."""
        empty = torch.empty(0, dtype=place.dtype, device=_CPU)
        return empty.set_(self._whole, place.offset // place.dtype.itemsize, place.size, place.stride)

    def alone(self, place: TensorSpec) -> torch.Tensor:
        """Return the tensor at a place, with a storage of its own that ends where the tensor does."""
        storage = self.storage(place.offset, num_bytes(place))
        return torch.empty(0, dtype=place.dtype, device=_CPU).set_(storage, 0, place.size, place.stride)

    def numbers(self) -> memoryview:
        """Return the memory as 64-bit integers, each of which is read and written at once."""
        return memoryview(self._map).cast("q")

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def num_bytes(place: TensorSpec) -> int:
    """Return how many bytes a tensor at a place reaches over."""
    return (1 + sum((n - 1) * s for n, s in zip(place.size, place.stride, strict=True))) * place.dtype.itemsize


def can_lie_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is described by dtype, size and strides alone, so that its bytes are all there is.

    Where it is does not matter: what lies in memory of the host is then a copy of it.
    """
    return is_plain(tensor) and not (tensor.is_meta or tensor.is_conj() or tensor.is_neg())


@dataclass
class BumpAllocator:
    """Places for tensors one behind the other, in a segment that need not exist yet."""

    num_bytes: int = 0

    def place(self, tensor: torch.Tensor, segment: int = -1) -> TensorSpec:
        """Return where a copy of `tensor` is to lie, behind all others."""
        return self.place_for(tensor.dtype, tuple(tensor.size()), dense_stride(tensor), segment)

    def place_for(
        self, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], segment: int = -1
    ) -> TensorSpec:
        """Return where a tensor without gaps is to lie, behind all others."""
        offset = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = offset + math.prod(size) * dtype.itemsize
        return TensorSpec(segment, offset, dtype, size, stride)


class SendBuffer:
    """Writes the tensors of one message after the other into a segment, which grows when it has to."""

    def __init__(self) -> None:
        self.segment = Segment.create(_PAGE)
        self._packing = BumpAllocator()
        self._waiting: list[tuple[TensorSpec, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Take a tensor for the next `flush`; return its number in this message."""
        self._waiting.append((self._packing.place(tensor), tensor))
        return len(self._waiting) - 1

    def flush(self) -> list[TensorSpec]:
        """Write all tensors that were added since the last time; return their places, by number."""
        waiting, allocator = self._waiting, self._packing
        self._waiting, self._packing = [], BumpAllocator()
        if allocator.num_bytes > self.segment.num_bytes:
            self.segment = Segment.create(max(allocator.num_bytes, 2 * self.segment.num_bytes))
        places = [place._replace(segment=self.segment.number) for place, _ in waiting]
        copy_all([self.segment.view(place) for place in places], [tensor for _, tensor in waiting])
        return places

    def forget(self) -> None:
        """Drop what was added, after a message that could not be written."""
        self._waiting, self._packing = [], BumpAllocator()


def copy_all(targets: Sequence[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy each source into its target."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


# ---- tensors that stay what they are ---------------------------------------------------------------


def move_to_shared_memory(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[Segment, TensorSpec]]:
    """Move tensors' memory into a segment, unless it is in one already; ties, strides and identities stay.

    Returns:
        id -> where it is. Tensors are missing whose memory cannot be moved without breaking a tie: others refer to it,
        or it is shared with other processes already.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if can_lie_in_memory(tensor.detach()) and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    found: dict[int, tuple[Segment, TensorSpec]] = {}
    to_move: list[tuple[list[torch.Tensor], int]] = []
    total_bytes = 0
    for address, group in by_storage.items():
        segment = next((s for s in _moved_into if s.address <= address < s.address + s.num_bytes), None)
        if segment is not None:
            found.update((id(tensor), (segment, _place_in(segment, tensor))) for tensor in group)
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
                found[id(tensor)] = (segment, _place_in(segment, tensor))
    return found


def is_movable(group: Sequence[torch.Tensor]) -> bool:
    """Return whether nothing but these tensors refers to their memory."""
    storage = group[0].untyped_storage()
    return not storage.is_shared() and torch_private.num_references(storage) == len(group) + 1


def _place_in(segment: Segment, tensor: torch.Tensor) -> TensorSpec:
    offset = tensor.data_ptr() - segment.address
    return TensorSpec(segment.number, offset, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()))
