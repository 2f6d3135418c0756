"""Lists with one entry a row: a batch type of unisono's own, and a warning where a plain input looks like one.

As in torch, a plain list is a container: tensors in it are split and joined one by one, and every replica gets all of a
list of strings. So pictures of several sizes are split along their channels, and a list of targets is not split at all.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import torch

from unisono.primitives.batch_types import batch_type_of, register_batch_type
from unisono.primitives.pytree import Spec, step
from unisono.runtime.model_warnings import ModelWarnings

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


def warn_of_whole_lists(
    inputs: Spec, name: str, leaves: Iterator[tuple[Any, int | None]], rows: int, warnings: ModelWarnings
) -> None:
    """Warn of an input that is a list without tensors and has as many entries as the batch has rows: it is not split.

    Args:
        inputs, name: the structure of the positional or the keyword inputs, and what messages call it.
        leaves: its leaves, each with the axis of its rows; None: every replica gets it on purpose.
        rows: of the batch.
        warnings: of the model.
    """

    def stays(leaf: Any, axis: int | None) -> bool:  # it is split, or whole on purpose
        return axis is None or isinstance(leaf, torch.Tensor) or batch_type_of(leaf) is not None

    def is_whole(value: Any, inside: list[bool]) -> bool:
        return len(inside) == rows > 1 and not any(inside) and _may_be_samples(value)

    wholes: list[tuple[Any, ...]] = []
    for key, spec in zip(inputs.keys or (), inputs.specs, strict=True):
        _find_lists(spec, (key,), leaves, stays, is_whole, wholes)
    for keys in wholes:
        in_dims: Any = None
        for key in reversed(keys):
            in_dims = {key: in_dims}
        warnings.give(
            f"{_path(inputs, name, keys)} has as many entries as the batch has rows (samples), but its "
            "entries are not tensors, so every replica gets all of them. If each entry belongs to a row, "
            f"give a unisono.SampleList. If every replica needs all: in_dims={in_dims}."
        )


def split_lists(inputs: Spec, name: str, fewest: int = 2) -> list[tuple[str, Spec]]:
    """Return the lists and tuples of `fewest` entries or more that are alike and have tensors, each with its path.

    Entries are alike if they have one structure, and tensors of one number of axes and one dtype: pictures; or dicts
    with a picture. What is inside such a list is not searched.
    """
    pairs = zip(inputs.keys or (), inputs.specs, strict=True)
    return [found for key, child in pairs for found in _split_lists(child, name + step(inputs.value, key), fewest)]


def _split_lists(spec: Spec, path: str, fewest: int) -> Iterator[tuple[str, Spec]]:
    are_alike = type(spec.value) in (list, tuple, deque) and len({*map(_form, spec.specs)}) == 1
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


def _find_lists(
    spec: Spec,
    keys: tuple[Any, ...],
    leaves: Iterator[tuple[Any, int | None]],
    is_counted: Callable[[Any, int | None], bool],
    is_found: Callable[[Any, list[bool]], bool],
    found: list[tuple[Any, ...]],
) -> bool:
    """Return whether a leaf of a structure is counted; add the paths of the containers that are found.

    It calls itself, so it is no closure: one that refers to itself is a cycle, which would keep the batch.

    Args:
        keys: the path to `spec`.
        leaves: takes those of `spec`, each with the axis of its rows.
        is_counted: says it of a leaf.
        is_found: says it of a container, by what is inside: whether a leaf in each child is counted.
        found: gets the paths.
    """
    if spec.keys is None:
        return is_counted(*next(leaves))
    pairs = zip(spec.keys, spec.specs, strict=True)
    inside = [_find_lists(child, (*keys, key), leaves, is_counted, is_found, found) for key, child in pairs]
    if is_found(spec.value, inside):
        found.append(keys)
    return any(inside)


def _may_be_samples(value: Any) -> bool:
    """Return whether the entries of a list may belong to rows: integers are a size, layers, or a table of labels."""
    no_rows: tuple[type, ...] = (int,)
    entries = [*value] if type(value) in (list, tuple, deque) else []
    if isinstance(value, dict) and [*value] == [*range(len(value))]:
        entries, no_rows = [*value.values()], (int, float, str)
    return any(entry is not None for entry in entries) and not any(isinstance(entry, no_rows) for entry in entries)


def _path(spec: Spec, path: str, keys: Sequence[Any]) -> str:
    """Return the path to the part of a structure to which keys lead; the structure itself is at `path`."""
    for key in keys:
        path += step(spec.value, key)
        spec = spec.specs[(spec.keys or ()).index(key)]
    return path
