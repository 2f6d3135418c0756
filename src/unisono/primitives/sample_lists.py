"""Lists with one entry a row: a batch type of unisono's own, and what tells that a plain input may be one.

As in torch, a plain list is a container: tensors in it are split and joined one by one, and every replica gets all of a
list of strings. So pictures of several sizes are split along their channels, and a list of targets is not split at all.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Self, SupportsIndex, TypeVar, overload

import torch

from unisono.primitives.batch_types import register_batch_type
from unisono.primitives.pytree import Spec, step

T = TypeVar("T")
U = TypeVar("U")


class SampleList(list[T]):
    """A list with one entry a row: pictures of several sizes, the boxes in each, strings.

        >>> pictures = unisono.SampleList(torch.zeros(3, size, size) for size in (20, 30, 40))
        >>> [[tuple(picture.shape) for picture in shard] for shard in unisono.scatter(pictures, ["cpu", "cpu"])]
        [[(3, 20, 20), (3, 30, 30)], [(3, 40, 40)]]

    It is split and joined by entry, where a plain list is a container, whose tensors are split and joined one by one.
    Use it for each input that has one entry a row, and for an output that has: each replica returns its own, and the
    gathered one has all entries, in the order of the rows. An entry is any value that `pickle` can serialise.

    Slices and copies of it, and what is added to it, are SampleLists.
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return with_entries(self, found) if isinstance(index, slice) else found

    @overload
    def __add__(self, other: list[T]) -> Self: ...
    @overload
    def __add__(self, other: list[U]) -> "SampleList[T | U]": ...
    def __add__(self, other: Any) -> Any:
        return with_entries(self, super().__add__(other))

    def copy(self) -> Self:
        """Return a SampleList with the same entries."""
        return copy.copy(self)


def with_entries(samples: SampleList[Any], entries: Iterable[Any]) -> SampleList[Any]:
    """Return a list like `samples`, of the same class and with the same attributes, with other entries."""
    made = copy.copy(samples)
    made[:] = entries
    return made


def _split(samples: SampleList[Any], sizes: Sequence[int]) -> list[SampleList[Any]]:
    entries = iter(samples)
    return [with_entries(samples, islice(entries, size)) for size in sizes]


def _join(parts: Sequence[SampleList[Any]]) -> SampleList[Any]:
    return with_entries(parts[0], chain.from_iterable(parts))


register_batch_type(SampleList, scatter=_split, gather=_join)


def split_lists(inputs: Spec, name: str, fewest: int = 2) -> list[tuple[str, Spec]]:
    """Return the lists and tuples of `fewest` entries or more that are alike and have tensors, each with its path.

    Entries are alike if they have one structure, and tensors of one number of axes and one dtype: pictures; or dicts
    with a picture. What is inside such a list is not searched.
    """
    pairs = zip(inputs.keys or (), inputs.specs, strict=True)
    return [found for key, child in pairs for found in _split_lists(child, name + step(inputs.value, key), fewest)]


def _split_lists(spec: Spec, path: str, fewest: int) -> Iterator[tuple[str, Spec]]:
    are_alike = type(spec.value) in (list, tuple) and len({*map(_form, spec.specs)}) == 1
    if (
        are_alike
        and len(spec.specs) >= fewest
        and any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in _leaves(spec.specs[0]))
    ):
        yield path, spec
        return
    for key, child in zip(spec.keys or (), spec.specs, strict=True):
        yield from _split_lists(child, path + step(spec.value, key), fewest)


def _form(spec: Spec) -> Any:
    if spec.keys is not None:
        return type(spec.value), spec.keys, tuple([_form(child) for child in spec.specs])
    value = spec.value
    return (value.dim(), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _leaves(spec: Spec) -> Iterator[Any]:
    if spec.keys is None:
        yield spec.value
    for child in spec.specs:
        yield from _leaves(child)


def may_be_samples(value: Any) -> bool:
    """Return whether the entries of a list may belong to rows: integers are a size, or layers."""
    entries = value if type(value) in (list, tuple) else ()
    return any(entry is not None for entry in entries) and not any(isinstance(entry, int) for entry in entries)
