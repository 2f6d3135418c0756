"""Flat buckets: many tensors that travel as few, one behind the other in one tensor of their dtype.

Sending a tensor costs about the same whether it is small or large, up to some size; so gradients and parameters are
exchanged a bucket at a time. A plan (`buckets_of`) says which tensors share a bucket, and is plain data that another
process can be sent; `BucketFiller` fills its buckets in one backward, where nothing is scaled on the way; `fingerprint`
tells whether what a bucket holds has changed. Nothing here communicates.

Tensors are called by numbers, whatever these mean to the caller. They have to be plain ones (`is_plain`).
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from manyhands.runtime import torch_private

BUCKET_BYTES = 25 << 20  # that of torch's DistributedDataParallel
LARGE_BYTES = 1 << 16  # smaller gradients are not worth a call into Python in the middle of backward
_CHUNK = 1 << 20  # entries that a fingerprint takes at once


class Form(NamedTuple):
    """What a tensor without gaps is like.

    Attributes:
        device: where its bucket is to be; None: that is each process's own affair.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, device: torch.device | None = None) -> "Form":
        """Return what a copy of `tensor` without gaps is like."""
        return cls(tensor.dtype, tuple(tensor.size()), dense_stride(tensor), device)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


class Bucket(NamedTuple):
    """Tensors of one dtype, on one device, that travel together.

    Attributes:
        device: as in `Form`.
        items: the tensors' numbers, and what they are like.
        aligned_bytes: tensors begin at multiples of this, or one behind the other.
    """

    dtype: torch.dtype
    device: torch.device | None
    items: tuple[tuple[int, Form], ...]
    aligned_bytes: int = 1

    @property
    def num_entries(self) -> int:
        return sum(self._num_entries_of(form) for _, form in self.items)

    def pieces(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the tensors as views of `flat`, by number."""
        pieces, offset = {}, 0
        for number, form in self.items:
            pieces[number] = flat.as_strided(form.size, form.stride, flat.storage_offset() + offset)
            offset += self._num_entries_of(form)
        return pieces

    def _num_entries_of(self, form: Form) -> int:
        """Return how many entries there are from the beginning of a tensor to that of the next."""
        unit = max(1, self.aligned_bytes // self.dtype.itemsize)
        return -(-math.prod(form.size) // unit) * unit

    def flat(self, tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return copies of its tensors, taken out of `tensors` by number, each at its place."""
        flat = torch.empty(self.num_entries, dtype=self.dtype, device=tensors[self.items[0][0]].device)
        with torch.no_grad():
            pieces = self.pieces(flat)
            torch_private.copy_all_in_place([*pieces.values()], [tensors[number].detach() for number in pieces])
        return flat


def buckets_of(forms: Mapping[int, Form], full_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Divide tensors into buckets of one dtype and device each, in the order given.

    >>> forms = {number: Form.of(torch.empty(100)) for number in range(5)}
    >>> [[number for number, _ in bucket.items] for bucket in buckets_of(forms, full_bytes=800)]
    [[0, 1], [2, 3], [4]]

    Args:
        forms: what the tensors are like, by number; as they become ready, because buckets are exchanged in this order.
        full_bytes: a bucket is full as soon as it holds this much; as no tensor is split, it can hold more.

    Returns:
        The buckets in the order in which they become full; those that do not, last, by their last tensors.
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
    """Buckets that are filled tensor by tensor, and handed out in their order, each as soon as it is full.

    Behind the tensors a bucket holds, for each of them, 1 if it was given and 0 if not. So whoever sums buckets of
    several processes learns in how many of them there was one.

    Attributes:
        order: the numbers of the tensors that were given, in the order in which they came.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device | None = None) -> None:
        """Prepare to fill `buckets`, which are on `device` unless they say otherwise."""
        self._buckets, self._device = buckets, device
        self._form_of = {number: form for bucket in buckets for number, form in bucket.items}
        self._bucket_of = {number: b for b, bucket in enumerate(buckets) for number, _ in bucket.items}
        self._begun: dict[int, _Begun] = {}
        self._next = 0  # the first bucket that has not been handed out
        self.order: list[int] = []

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the tensors that the buckets are for."""
        return list(self._bucket_of)

    def add(self, number: int, tensor: torch.Tensor) -> bool:
        """Copy a tensor to its place; return whether it has one: the first of its number, and of the planned form."""
        form = self._form_of.get(number)
        if form is None or (tensor.dtype, tuple(tensor.size())) != (form.dtype, form.size):
            return False
        b = self._bucket_of[number]
        if b < self._next or not self._bucket(b).take(number, tensor):
            return False
        self.order.append(number)
        return True

    def fill_up(self) -> None:
        """Put zeros wherever nothing has been given: every bucket that is left is full."""
        for b in range(self._next, len(self._buckets)):
            self._bucket(b).fill_up()

    def full(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Hand out the next buckets, while they are full: each once, and none before those in front of it."""
        while self._next in self._begun and not self._begun[self._next].missing:
            begun = self._begun.pop(self._next)
            self._next += 1
            yield begun.bucket, begun.flat

    def _bucket(self, b: int) -> "_Begun":
        if b not in self._begun:
            self._begun[b] = _Begun(self._buckets[b], self._buckets[b].device or self._device)
        return self._begun[b]


class _Begun:
    """One bucket that is being filled."""

    def __init__(self, bucket: Bucket, device: torch.device | None) -> None:
        self.bucket = bucket
        self.missing = {number: place for place, (number, _) in enumerate(bucket.items, bucket.num_entries)}
        self.flat = torch.empty(bucket.num_entries + len(bucket.items), dtype=bucket.dtype, device=device)
        self.flat[bucket.num_entries :] = 1  # at once, as nearly always all are given
        self._pieces = bucket.pieces(self.flat)

    def take(self, number: int, tensor: torch.Tensor) -> bool:
        if self.missing.pop(number, None) is None:
            return False
        with torch.no_grad():
            self._pieces[number].copy_(tensor.detach())
        return True

    def fill_up(self) -> None:
        if len(self.missing) == len(self.bucket.items):
            self.flat.zero_()
        else:
            for number, place in self.missing.items():
                self._pieces[number].zero_()
                self.flat[place] = 0
        self.missing.clear()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's entries, as they lie in memory, are all there is to it.

    That is: it is not sparse, quantized or nested, and has no class of its own.
    """
    of_no_class = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return of_no_class and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy: the tensor's own where it has no gaps, else in the same order of axes."""
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())


def fingerprint(flat: torch.Tensor) -> torch.Tensor:
    """Return a number that is another when one entry of `flat` is, and, but for an unlikely chance, when several are.

    The bits are taken, 32 at a time, as whole numbers. Each is multiplied by an odd weight of its place, and the
    products are summed, modulo 2^64; so a change of one of them always shows. The result is on the device of `flat`.
    """
    octets = flat.detach().view(torch.uint8)
    end = len(octets) // 4 * 4
    parts = [*torch.split(octets[:end].view(torch.int32), _CHUNK), octets[end:].to(torch.int32)]
    weights = _weights(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in parts:
        total = total * 0x5851F42D4C957F2D + (part * weights[: len(part)]).sum()
    return total


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern: linear ones would not tell one permutation matrix from another."""
    weights = torch.arange(1, _CHUNK + 1, device=device) * 0x1E3779B97F4A7C15
    weights = (weights ^ (weights >> 29)) * 0x3F58476D1CE4E5B9
    return (weights ^ (weights >> 32)) | 1
