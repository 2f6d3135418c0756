"""Memory that several processes map: segments, tensors in them, and tensors packed one behind the other.

A `Segment` is memory without a name: a memfd on Linux, a deleted temporary file elsewhere. It reaches another process
as a file descriptor and is gone with the last process that maps it, however that one ends; the size of /dev/shm does
not matter.

Guarantees
    - A tensor in a segment keeps the mapping alive: a ctypes array between the two holds the map's buffer open, and an
      open buffer cannot be unmapped.
    - `Outbox` writes into one segment again and again. What it hands out are places, not tensors: nobody outside the
      engine may keep a tensor in there, so that nothing that is still in use is ever written over.

Assumes that the two sides take turns: while one reads what an outbox holds, the other does not write.
"""

import ctypes
import itertools
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from manyhands.buckets import dense_stride

_ALIGNMENT = 64  # bytes; what torch's own allocator gives
_PAGE = mmap.PAGESIZE
_CPU = torch.device("cpu")
_numbers = itertools.count()


class Place(NamedTuple):
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

    def view(self, place: Place) -> torch.Tensor:
        """Return the tensor at a place; its storage is that of the whole segment."""
        empty = torch.empty(0, dtype=place.dtype, device=_CPU)
        return empty.set_(self._whole, place.offset // place.dtype.itemsize, place.size, place.stride)

    def alone(self, place: Place) -> torch.Tensor:
        """Return the tensor at a place, with a storage of its own that ends where the tensor does."""
        storage = self.storage(place.offset, num_bytes(place))
        return torch.empty(0, dtype=place.dtype, device=_CPU).set_(storage, 0, place.size, place.stride)

    def numbers(self) -> memoryview:
        """Return the memory as 64-bit integers, each of which is read and written at once."""
        return memoryview(self._map).cast("q")

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def num_bytes(place: Place) -> int:
    """Return how many bytes a tensor at a place reaches over."""
    return (1 + sum((n - 1) * s for n, s in zip(place.size, place.stride, strict=True))) * place.dtype.itemsize


def can_lie_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is described by dtype, size and strides alone, so that its bytes are all there is.

    Where it is does not matter: what lies in memory of the host is then a copy of it.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_nested
    )


@dataclass
class Packing:
    """Places for tensors one behind the other, in a segment that need not exist yet."""

    num_bytes: int = 0

    def place(self, tensor: torch.Tensor, segment: int = -1) -> Place:
        """Return where a copy of `tensor` is to lie, behind all others."""
        return self.place_for(tensor.dtype, tuple(tensor.size()), dense_stride(tensor), segment)

    def place_for(self, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], segment: int = -1) -> Place:
        """Return where a tensor without gaps is to lie, behind all others."""
        offset = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = offset + math.prod(size) * dtype.itemsize
        return Place(segment, offset, dtype, size, stride)


class Outbox:
    """Writes the tensors of one message after the other into a segment, which grows when it has to."""

    def __init__(self) -> None:
        self.segment = Segment.create(_PAGE)
        self._packing = Packing()
        self._waiting: list[tuple[Place, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Take a tensor for the next `flush`; return its number in this message."""
        self._waiting.append((self._packing.place(tensor), tensor))
        return len(self._waiting) - 1

    def flush(self) -> list[Place]:
        """Write all tensors that were added since the last time; return their places, by number."""
        waiting, packing = self._waiting, self._packing
        self._waiting, self._packing = [], Packing()
        if packing.num_bytes > self.segment.num_bytes:
            self.segment = Segment.create(max(packing.num_bytes, 2 * self.segment.num_bytes))
        places = [place._replace(segment=self.segment.number) for place, _ in waiting]
        copy_all([self.segment.view(place) for place in places], [tensor for _, tensor in waiting])
        return places

    def forget(self) -> None:
        """Drop what was added, after a message that could not be written."""
        self._waiting, self._packing = [], Packing()


def copy_all(targets: Sequence[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy each source into its target."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
