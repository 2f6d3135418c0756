"""Warnings about outputs whose entries may not be the replicas' rows.

Whether an entry belongs to a row cannot be known: in one batch lengths may agree, or differ, by accident. So they
decide what is said, once a model, and never how an output is joined.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from unisono.primitives import pytree
from unisono.primitives.dims import out_dims_of
from unisono.runtime.model_warnings import ModelWarnings

# Kinds of warnings.
ROWS = "rows of outputs"
_LISTS = "lists in outputs"

_LIST = (
    "{path} is a {kind} with as many entries as each replica has rows: the first entries of all replicas are joined, "
    "then the second ones, and so on. If each belongs to a row, return unisono.SampleList(entries); if not, "
    "DataParallel(..., out_dims={as_now}) says so."
)
_OTHER_ROWS = (
    "{path} of shape {shape} comes from {rows} rows, and has {size} entries on axis {axis}, along which it is joined. "
    "Write DataParallel(..., out_dims={out_dims}) if {condition}; out_dims={as_now} if its entries follow the rows in "
    "order, as they are joined now. If neither is so, return one entry a row; or, for a sum or mean over the rows, a "
    "0-dim tensor, with scalars=."
)


class Leaf(NamedTuple):
    """A leaf of the replicas' outputs."""

    path: str
    given: tuple[Any, ...]  # each replica's
    entry: Any  # of `out_dims`: `...` where nothing is said
    axis: int | None  # along which tensors are joined; None: they are not
    scalars: str  # the rule for 0-dim tensors and numbers


def warn_of_other_rows(
    output: pytree.Spec, leaves: Sequence[Leaf], sizes: Sequence[int], warnings: ModelWarnings
) -> None:
    """Warn of lists whose entries may belong to rows, and of tensors with another size than their replica's rows.

    Args:
        output: the structure of the output.
        leaves: its leaves.
        sizes: the replicas' rows. One replica's tensors are returned as they are, but its numbers become vectors.
        warnings: of the model.
    """
    unsaid = [number for number, leaf in enumerate(leaves) if leaf.entry is ... and leaf.axis is not None]
    tensors = {number for number in unsaid if len(sizes) > 1 and _has_other_size(leaves[number], sizes)}
    others = {number for number in unsaid if _is_one_a_replica(leaves[number], len(sizes))}
    if not tensors and not others:
        return
    for path, spec, numbers in _containers(output, "output", 0):
        inside = (tensors | others).intersection(numbers)
        if not inside or not _may_have_entries_of_rows(spec, sizes):
            continue
        tensors -= inside
        others -= inside
        if not warnings.has_given(_LISTS):
            as_now = _out_dims(output, leaves, {number: leaves[number].axis for number in numbers})
            warnings.give(_LIST.format(path=path, kind=type(spec.value).__name__, as_now=as_now), _LISTS)
    if tensors and not warnings.has_given(ROWS):
        warnings.give(_about_tensors(output, leaves, sorted(tensors), sizes), ROWS)


def _has_other_size(leaf: Leaf, sizes: Sequence[int]) -> bool:
    """Return whether each replica has a tensor, and its size along the axis is not that of its rows.

    Not where tensors do not fit together, or have no such axis: that is an error.
    """
    if not all(isinstance(value, torch.Tensor) and not value.is_nested for value in leaf.given):
        return False
    dims = {tensor.dim() for tensor in leaf.given}
    if leaf.axis is None or len(dims) > 1 or not -min(dims) <= leaf.axis < min(dims):
        return False
    return [tensor.shape[leaf.axis] for tensor in leaf.given] != [*sizes]


def _is_one_a_replica(leaf: Leaf, num_replicas: int) -> bool:
    """Return whether each replica has one value, which does not become one value."""
    first = leaf.given[0]
    if isinstance(first, torch.Tensor):
        return not first.dim() and leaf.scalars == "stack"
    if isinstance(first, str | bytes):
        return num_replicas > 1
    return isinstance(first, int | float | complex) and leaf.scalars == "stack"


def _containers(spec: pytree.Spec, path: str, start: int) -> Iterator[tuple[str, pytree.Spec, range]]:
    """Yield the path and the structure of each container, and the numbers of the leaves in it; outer ones first."""
    if spec.keys is None:
        return
    yield path, spec, range(start, start + spec.num_leaves())
    for key, child in zip(spec.keys, spec.specs, strict=True):
        yield from _containers(child, path + pytree.step(spec.value, key), start)
        start += child.num_leaves()


def _may_have_entries_of_rows(spec: pytree.Spec, sizes: Sequence[int]) -> bool:
    """Return whether a container is a list (or a tuple of strings) of as many like entries as each replica has rows.

    A list of one entry, where each replica has one row, is no sign. A tuple is one value, such as a loss and a size.
    """
    entries = [child for child in spec.specs if child.value is not None]
    if {len(spec.specs)} != {*sizes} or len(spec.specs) < 2 or len({*map(_form, entries)}) != 1:
        return False
    return isinstance(spec.value, list) or (type(spec.value) is tuple and isinstance(entries[0].value, str))


def _form(entry: pytree.Spec) -> Any:
    value = entry.value
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dim()
    return float if isinstance(value, int | float) else type(value)


def _about_tensors(output: pytree.Spec, leaves: Sequence[Leaf], numbers: Sequence[int], sizes: Sequence[int]) -> str:
    rows_on = {number: _axis_of_rows(leaves[number], sizes) for number in numbers}
    path, given, _, axis, _ = leaves[numbers[0]]
    assert axis is not None
    index = next(i for i, (tensor, rows) in enumerate(zip(given, sizes, strict=True)) if tensor.shape[axis] != rows)
    found = rows_on[numbers[0]]
    condition = "every replica returns the same" if found is None else f"its rows are on axis {found}"
    return _OTHER_ROWS.format(
        path=path,
        shape=tuple(given[index].shape),
        rows=sizes[index],
        size=given[index].shape[axis],
        axis=axis,
        out_dims=_out_dims(output, leaves, rows_on),
        condition=condition,
        as_now=_out_dims(output, leaves, {number: leaves[number].axis for number in numbers}),
    )


def _axis_of_rows(leaf: Leaf, sizes: Sequence[int]) -> int | None:
    """Return the first axis on which each replica's tensor has its rows; None if there is none."""
    axes = range(min(tensor.dim() for tensor in leaf.given))
    return next((a for a in axes if [tensor.shape[a] for tensor in leaf.given] == [*sizes]), None)


def _out_dims(output: pytree.Spec, leaves: Sequence[Leaf], entries: Mapping[int, int | None]) -> Any:
    """Return the `out_dims` with other entries for the leaves with these numbers, for a message."""
    return out_dims_of(output, [entries.get(number, leaf.entry) for number, leaf in enumerate(leaves)])
