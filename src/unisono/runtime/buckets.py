"""Flat buckets: many tensors are sent as a few flat ones, each of one dtype.

Sending a tensor costs about the same whether it is small or large, up to some size; so gradients and parameters are
exchanged a bucket at a time. A plan (`buckets_of`) says which tensors share a bucket, and is plain data that can be
sent to another process; `BucketFiller` fills the buckets during one backward, without scaling; `fingerprint` shows
whether the contents of a bucket have changed. Nothing here communicates.

Tensors are identified by numbers that the caller chooses. They have to be plain ones (`is_plain`).
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from unisono.runtime import torch_private

BUCKET_BYTES = 25 << 20  # that of torch's DistributedDataParallel
LARGE_BYTES = 1 << 16  # smaller gradients are not worth a call into Python in the middle of backward
_CHUNK = 1 << 20  # entries that a fingerprint takes at once


class Form(NamedTuple):
    """Dtype, size and strides of a tensor without gaps.

    Attributes:
        device: the device of its bucket; None: each process chooses its own.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, device: torch.device | None = None) -> "Form":
        """Return the form of a copy of `tensor` without gaps."""
        return cls(tensor.dtype, tuple(tensor.size()), dense_stride(tensor), device)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype, on one device, that are sent together.

    Attributes:
        device: as in `Form`.
        items: the tensors' numbers and forms.
        aligned_bytes: each tensor begins at a multiple of this; 1 leaves no gaps.
    """

    dtype: torch.dtype
    device: torch.device | None
    items: tuple[tuple[int, Form], ...]
    aligned_bytes: int = 1

    @property
    def num_entries(self) -> int:
        return self._layout[2][-1]

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the tensors, in their order."""
        return tuple([number for number, _ in self.items])

    @cached_property
    def is_plain(self) -> bool:
        """Whether a bucket is its tensors flattened one after the other: no gaps, no strides in another order."""
        in_order = (form.stride == tuple(torch.empty(form.size, device="meta").stride()) for _, form in self.items)
        return self.aligned_bytes == 1 and all(in_order)

    @cached_property
    def _layout(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int]]:
        """Sizes, strides and offsets of the tensors; the last offset is the end of the bucket."""
        unit = max(1, self.aligned_bytes // self.dtype.itemsize)
        lengths = [-(-math.prod(form.size) // unit) * unit for _, form in self.items]
        offsets = [*itertools.accumulate(lengths, initial=0)]
        return [form.size for _, form in self.items], [form.stride for _, form in self.items], offsets

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the tensors as views of `flat`, in their order; without Python code for each."""
        as_strided: Any = flat.as_strided
        sizes, strides, offsets = self._layout
        return map(as_strided, sizes, strides, map(flat.storage_offset().__add__, offsets))

    def pieces(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the tensors as views of `flat`, by number."""
        return dict(zip(self.numbers, self.views(flat), strict=True))

    def flat(self, tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return one flat tensor with copies of its tensors, which are looked up in `tensors` by number."""
        sources = [tensors[number] for number in self.numbers]
        flat = torch.empty(self.num_entries, dtype=self.dtype, device=sources[0].device)
        with torch.no_grad():
            torch_private.copy_all_in_place([*self.views(flat)], sources)
        return flat


def buckets_of(forms: Mapping[int, Form], full_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Divide tensors into buckets of one dtype and device each, in the order given.

    >>> forms = {number: Form.of(torch.empty(100)) for number in range(5)}
    >>> [[number for number, _ in bucket.items] for bucket in buckets_of(forms, full_bytes=800)]
    [[0, 1], [2, 3], [4]]

    Args:
        forms: the tensors' forms by number, in the order in which they become ready: buckets are sent in this order.
        full_bytes: a bucket is full as soon as it holds this much; as no tensor is split, it can hold more.

    Returns:
        The buckets in the order in which they become full; then those that do not, ordered by their last tensors.
    """
    buckets: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device | None], tuple[list[tuple[int, Form]], int]] = {}
    for number, form in forms.items():
        items, num_bytes = filling.pop((form.dtype, form.device), ([], 0))
        items.append((number, form))
        num_bytes += form.num_bytes
        if num_bytes >= full_bytes:
            buckets.append(Bucket(form.dtype, form.device, tuple(items)))
        else:
            filling[form.dtype, form.device] = items, num_bytes
    return (*buckets, *(Bucket(*key, tuple(items)) for key, (items, _) in filling.items()))


class BucketFiller:
    """Takes tensors in any order, and hands out their buckets in order, each as soon as it has all of its tensors.

    After its tensors, a bucket has one flag a tensor: 1 if it was added, 0 if not. So the sum of the buckets of several
    processes also says how many processes had each tensor.

    Attributes:
        order: the numbers of the tensors that were added, in the order of the calls.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device | None = None) -> None:
        """Prepare to fill `buckets`, which are on `device` unless they name one."""
        self._buckets, self._device = buckets, device
        self._form_of = {number: form for bucket in buckets for number, form in bucket.items}
        self._bucket_of = {number: b for b, bucket in enumerate(buckets) for number, _ in bucket.items}
        self._given: list[dict[int, torch.Tensor]] = [{} for _ in buckets]
        self._next = 0  # the first bucket that has not been handed out
        self._ending = False
        self.order: list[int] = []

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the tensors that the buckets are for."""
        return list(self._bucket_of)

    def add(self, number: int, tensor: torch.Tensor) -> bool:
        """Take a tensor; return False if it has no place: a second one, or not of the planned form.

        It is copied when its bucket is handed out, and must not change before.
        """
        form = self._form_of.get(number)
        if form is None or (tensor.dtype, tuple(tensor.size())) != (form.dtype, form.size):
            return False
        b = self._bucket_of[number]
        if b < self._next or number in self._given[b]:
            return False
        self._given[b][number] = tensor.detach()
        self.order.append(number)
        return True

    def fill_up(self) -> None:
        """Fill the places of missing tensors with zeros: every remaining bucket is then full."""
        self._ending = True

    def full(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield the next buckets while they are full: each once, in the order of the plan."""
        for bucket, given in zip(self._buckets[self._next :], self._given[self._next :], strict=True):
            is_complete = len(given) == len(bucket.items)
            if not (is_complete or self._ending):
                return
            self._next += 1
            length, device = bucket.num_entries + len(bucket.items), bucket.device or self._device
            flat = (torch.empty if is_complete else torch.zeros)(length, dtype=bucket.dtype, device=device)
            pieces = bucket.pieces(flat)
            with torch.no_grad():
                torch_private.copy_all_in_place([pieces[number] for number in given], [*given.values()])
            flat[bucket.num_entries :] = 1 if is_complete else torch.tensor([n in given for n in bucket.numbers])
            given.clear()
            yield bucket, flat


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than its entries in memory: not sparse, quantized, nested or of a subclass."""
    no_subclass = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return no_subclass and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def dense_first(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two gradients in an order in which torch can add them: it adds a sparse one to a dense one only."""
    return (other, one) if one.is_sparse else (one, other)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy without gaps: the tensor's own where it has none, else in the same order of axes."""
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of a plain tensor's bits: a change of one entry always changes it, of several almost surely.

    The bits are read as 32-bit integers, in the order of the axes, whatever the strides. Each is multiplied by an odd
    weight that depends on its position, and the products are summed modulo 2^64; so a change of one of them always
    shows. The result is on the tensor's device.
    """
    entries = tensor.detach().resolve_conj().resolve_neg().contiguous()
    octets = entries.as_strided((entries.numel(),), (1,)).view(torch.uint8)  # a view(-1) of one entry keeps its stride
    end = len(octets) // 4 * 4
    parts = [*torch.split(octets[:end].view(torch.int32), _CHUNK), octets[end:].to(torch.int32)]
    weights = _weights(octets.device)
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    for part in parts:
        total = total * 0x5851F42D4C957F2D + (part * weights[: len(part)]).sum()
    return total


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern: with linear ones, all permutation matrices would have one fingerprint."""
    weights = torch.arange(1, _CHUNK + 1, device=device) * 0x1E3779B97F4A7C15
    weights = (weights ^ (weights >> 29)) * 0x3F58476D1CE4E5B9
    return (weights ^ (weights >> 32)) | 1
