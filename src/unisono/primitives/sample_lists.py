"""Lists with one entry a row: a batch type of unisono's own, and warnings where a plain list looks like one.

As in torch, a plain list is a container: tensors in it are split and joined one by one, and every replica gets all of a
list of strings. So pictures of several sizes are split along their channels, and a list of targets is not split at all.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import torch

from unisono.primitives.batch_types import batch_type_of, register_batch_type
from unisono.primitives.pytree import Spec, step
from unisono.runtime.errors import warn_once

T = TypeVar("T")


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

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return with_entries(self, found) if isinstance(index, slice) else found

    def __add__(self, other: Any) -> Any:
        return with_entries(self, super().__add__(other))

    def copy(self) -> Any:
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


def warn_of_whole_lists(inputs: Spec, name: str, leaves: Iterator[tuple[Any, int | None]], rows: int) -> None:
    """Warn of an input that is a list without tensors and has as many entries as the batch has rows: it is not split.

    A tuple of numbers counts as one value, such as a size.

    Args:
        inputs, name: the structure of the positional or the keyword inputs, and what messages call it.
        leaves: its leaves, each with the axis of its rows; None: every replica gets it on purpose.
        rows: of the batch.
    """
    wholes: list[tuple[Any, ...]] = []
    for key, spec in zip(inputs.keys or (), inputs.specs, strict=True):
        _find_wholes(spec, (key,), leaves, rows, wholes)
    for keys in wholes:
        in_dims: Any = None
        for key in reversed(keys):
            in_dims = {key: in_dims}
        warn_once(
            f"{_path(inputs, name, keys)} has as many entries as the batch has rows, and no tensors: every replica "
            "gets all of them. If each belongs to a row, give a unisono.SampleList; if every replica needs all: "
            f"in_dims={in_dims}."
        )


# These call themselves, so they are no closures: one that refers to itself is a cycle, which would keep the batch.


def _find_wholes(
    spec: Spec,
    keys: tuple[Any, ...],
    leaves: Iterator[tuple[Any, int | None]],
    rows: int,
    wholes: list[tuple[Any, ...]],
) -> bool:
    """Return whether something in an input is split, or whole on purpose; add the paths to lists to be warned of.

    Args:
        keys: the path to `spec`.
        leaves: takes those of `spec`.
        wholes: gets the paths.
    """
    if spec.keys is None:
        leaf, axis = next(leaves)
        return axis is None or isinstance(leaf, torch.Tensor) or batch_type_of(leaf) is not None
    pairs = zip(spec.keys, spec.specs, strict=True)
    stays = [_find_wholes(child, (*keys, key), leaves, rows, wholes) for key, child in pairs]
    if len(stays) == rows > 1 and not any(stays) and _may_be_samples(spec.value):
        wholes.append(keys)
    return any(stays)


def _may_be_samples(value: Any) -> bool:
    is_sequence = type(value) is list or (type(value) is tuple and not isinstance(value[0], int | float))
    return is_sequence and any(entry is not None for entry in value)


def warn_of_joined_entries(
    output: Spec, leaves: Iterator[tuple[tuple[Any, ...], int | None]], sizes: Sequence[int]
) -> None:
    """Warn of an output that is a list with as many entries as each replica has rows, and its tensors have other rows.

    Args:
        output: the structure of the output.
        leaves: its leaves, each replica's, each with the axis of its rows.
        sizes: the replicas' rows.
    """
    joined: list[tuple[Any, ...]] = []
    _find_joined(output, (), leaves, sizes, joined)
    for keys in joined:
        warn_once(
            f"{_path(output, 'output', keys)} is a list with as many entries as each replica has rows: the first "
            "entries of all replicas are joined, then the second ones, and so on. If each belongs to a row, return "
            "unisono.SampleList(entries)."
        )


def _find_joined(
    spec: Spec,
    keys: tuple[Any, ...],
    leaves: Iterator[tuple[tuple[Any, ...], int | None]],
    sizes: Sequence[int],
    joined: list[tuple[Any, ...]],
) -> bool:
    """Return whether a tensor in a part of the output has other rows; add the paths to lists to be warned of.

    The arguments are those of `_find_wholes`.
    """
    if spec.keys is None:
        given, axis = next(leaves)
        return any(_has_other_rows(each, axis, size) for each, size in zip(given, sizes, strict=True))
    pairs = zip(spec.keys, spec.specs, strict=True)
    differ = [_find_joined(child, (*keys, key), leaves, sizes, joined) for key, child in pairs]
    if type(spec.value) is list and {len(differ)} == {*sizes} != {1} and any(differ):
        joined.append(keys)
    return any(differ)


def _path(spec: Spec, path: str, keys: Sequence[Any]) -> str:
    """Return the path to the part of a structure to which keys lead; the structure itself is at `path`."""
    for key in keys:
        path += step(spec.value, key)
        spec = spec.specs[(spec.keys or ()).index(key)]
    return path


def _has_other_rows(value: Any, axis: int | None, rows: int) -> bool:
    if not isinstance(value, torch.Tensor) or axis is None or not -value.dim() <= axis < value.dim():
        return False
    return value.shape[axis] != rows
