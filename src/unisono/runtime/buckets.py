"""Flat buckets: many tensors are sent as a few flat ones, each of one dtype.

Sending a tensor costs about the same whether it is small or large, up to some size; so gradients and parameters are
exchanged a bucket at a time. `buckets_of` divides tensors into buckets, and a `BucketPlan` says it for the parameters
of a module. Nothing here communicates.

Tensors are identified by numbers that the caller chooses. They have to be plain ones (`is_plain`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, chain, compress
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from unisono.runtime.torch_private import foreach

Gradients: TypeAlias = list[torch.Tensor | None]  # of some tensors; None: one has none
MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)

BUCKET_BYTES = 25 << 20  # that of torch's DistributedDataParallel
SHARED_BUCKET_BYTES = 1 << 18  # small: what is summed while backward runs, and then freed, is whole buckets


class Form(NamedTuple):
    """Dtype, size, strides and device of a tensor without gaps."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """Return the form of a copy of `tensor` without gaps."""
        return cls(tensor.dtype, tuple(tensor.size()), dense_stride(tensor), tensor.device)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype, on one device, that are sent together."""

    dtype: torch.dtype
    device: torch.device
    items: tuple[tuple[int, Form], ...]  # the tensors' numbers and forms
    aligned_bytes: int = 1  # each tensor begins at a multiple of this; 1 leaves no gaps

    @cached_property
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
        offsets = [*accumulate(lengths, initial=0)]
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
            foreach.copy_all_in_place([*self.views(flat)], sources)
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
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[tuple[int, Form]], int]] = {}
    for number, form in forms.items():
        items, num_bytes = filling.pop((form.dtype, form.device), ([], 0))
        items.append((number, form))
        num_bytes += form.num_bytes
        if num_bytes >= full_bytes:
            buckets.append(Bucket(form.dtype, form.device, tuple(items)))
        else:
            filling[form.dtype, form.device] = items, num_bytes
    return (*buckets, *(Bucket(*key, tuple(items)) for key, (items, _) in filling.items()))


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Which parameters share a bucket: in flat memory, behind one autograd node, in one message between ranks.

    Backward computes the last parameters' gradients first: so they come first.

    Attributes:
        numbers: of each bucket, the numbers of its parameters.
        forms: of each bucket, their forms; None for one parameter whose gradients are not flattened.
        source: of each bucket, the device of its parameters.
        num_parameters: how many there are.
    """

    numbers: Sequence[tuple[int, ...]]
    forms: Sequence[Bucket | None]
    source: Sequence[torch.device]
    num_parameters: int

    @classmethod
    def of(cls, parameters: Sequence[torch.Tensor], buckets: Sequence[Bucket]) -> "BucketPlan":
        """Return the plan of these buckets, and of one without a form for each parameter that is in none of them."""
        placed = {number for bucket in buckets for number in bucket.numbers}
        alone = [n for n, _ in enumerate(parameters) if n not in placed]
        return cls(
            [*(bucket.numbers for bucket in buckets), *((n,) for n in alone)],
            [*buckets, *[None for _ in alone]],
            [*(bucket.device for bucket in buckets), *(parameters[n].device for n in alone)],
            len(parameters),
        )

    @classmethod
    def of_replicas(cls, parameters: Sequence[torch.Tensor], full_bytes: int) -> "BucketPlan":
        """Return the plan where no other process takes part; a parameter that fills a bucket has one for itself."""
        plain = {n: Form.of(p.detach()) for n, p in reversed([*enumerate(parameters)]) if is_plain(p)}
        small = {n: form for n, form in plain.items() if form.num_bytes < full_bytes}
        large = [Bucket(form.dtype, form.device, ((n, form),)) for n, form in plain.items() if n not in small]
        return cls.of(parameters, [*buckets_of(small, full_bytes), *large])

    @cached_property
    def source_of(self) -> dict[int, torch.device]:
        """The device of each parameter."""
        return {n: source for source, numbers in zip(self.source, self.numbers, strict=True) for n in numbers}

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets with forms, which come first."""
        return tuple([bucket for bucket in self.forms if bucket is not None])

    @cached_property
    def places(self) -> Sequence[int]:
        """Of each parameter, its place among those of all buckets with forms; -1 if it has none."""
        place_of = {number: place for place, number in enumerate(chain.from_iterable(b.numbers for b in self.buckets))}
        return [place_of.get(n, -1) for n in range(self.num_parameters)]

    @cached_property
    def sources(self) -> list[torch.device]:
        """The devices of the parameters, each once."""
        return list(dict.fromkeys(self.source))

    @cached_property
    def _parts(self) -> dict[tuple[int, tuple[bool, ...]], Bucket]:
        return {}

    def part(self, b: int, given: Sequence[bool]) -> Bucket:
        """Return bucket `b` with those of its parameters that have a gradient."""
        bucket = self.forms[b]
        assert bucket is not None
        if all(given):
            return bucket
        key = b, tuple(given)
        if key not in self._parts:
            self._parts[key] = replace(bucket, items=tuple(compress(bucket.items, given)))
        return self._parts[key]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than its entries in memory: not sparse, quantized, nested or of a subclass."""
    no_subclass = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return no_subclass and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def added(one: torch.Tensor | None, other: MaybeTensor) -> MaybeTensor:
    """Return the sum of two gradients, each of which may be missing, and may be sparse."""
    if one is None or other is None:
        return other if one is None else one
    # torch adds a sparse tensor to a dense one, not a dense one to a sparse one.
    return torch.add(other, one) if one.is_sparse else torch.add(one, other)


def all_added(one: Gradients, other: Gradients) -> Gradients:
    """Return the sums of two lists of gradients."""
    return [*map(added, one, other)]


def total(lists: Sequence[Gradients], length: int) -> Gradients:
    """Return the sums of any number of lists of gradients, each of this length."""
    return reduce(all_added, lists) if lists else [None] * length


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy without gaps: the tensor's own where it has none, else in the same order of axes."""
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())
