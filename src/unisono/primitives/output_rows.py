"""Warnings about outputs that are joined in another way than the rows of the batch: numbers, lists, other sizes.

Whether an entry belongs to a row cannot be known: in one batch lengths may agree, or differ, by accident. So they
decide what is said, once a model, and never how an output is joined.

What is said of each kind of output that no option describes:

    numbers    they become a list with one entry a replica: that is always said
    lists      entry i of all replicas is joined: said where there are as many entries as each replica has rows, and
               they have no rows themselves
    tensors    they are joined along an axis: said where entries there may be lost or doubled. Not where each replica
               has as many times its rows (tokens), or its own number (rows that it chose)
"""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from unisono.primitives import pytree
from unisono.primitives.dims import out_dims_of
from unisono.runtime.model_warnings import ModelWarnings

# Kinds of warnings.
ROWS = "rows of outputs"
_LISTS = "lists in outputs"
_NUMBERS = "numbers in outputs"

_MOST_NAMED = 4
_LIST = (
    "{path} is a {kind} with as many entries as each replica has rows (samples): the first entries of all "
    "replicas are joined, then the second ones, and so on, as in torch. If each entry belongs to a row, "
    "return unisono.SampleList(entries). To keep this without the warning: DataParallel(..., "
    "out_dims={as_now}); if every replica returns the same: out_dims={whole}."
)
_OTHER_ROWS = (
    "{path} of shape {shape} comes from {rows} rows (samples), but has {size} entries on dimension {axis}, "
    "along which it is joined. Write DataParallel(..., out_dims={out_dims}) if {condition}; out_dims={as_now} if the "
    "entries follow the rows in order, as joined now. Otherwise return one entry for each row; "
    "or, for a sum or mean over rows, a 0-dim tensor with scalars=."
)
_ONE_NUMBER = (
    "{names} in each replica, computed from its own rows (samples): you get a list with one entry for each "
    'replica. Write DataParallel(..., scalars="mean"), or "sum", for one number; out_dims={whole} if every '
    "replica returns the same; out_dims={as_now} if you want the list. If the numbers belong to rows, return a "
    "tensor or unisono.SampleList(entries)."
)


class Leaf(NamedTuple):
    """A leaf of the replicas' outputs."""

    path: str
    given: tuple[Any, ...]  # each replica's
    entry: Any  # of `out_dims`: `...` where nothing is said
    axis: int | None  # along which tensors are joined; None: they are not
    scalars: str  # the rule for 0-dim tensors and numbers
    is_scalar: bool  # whether `scalars` has an entry for it

    @property
    def is_unsaid(self) -> bool:
        """Whether no option says how it is joined."""
        return self.entry is ... and self.axis is not None


def warn_of_other_rows(
    output: pytree.Spec, leaves: Sequence[Leaf], sizes: Sequence[int], warnings: ModelWarnings
) -> None:
    """Warn of what is joined in another way than entries that belong to rows, as the module's docstring says.

    Args:
        output: the structure of the output.
        leaves: its leaves.
        sizes: the replicas' rows. One replica's tensors are returned as they are, but its numbers become vectors.
        warnings: of the model.
    """
    unsaid = [number for number, leaf in enumerate(leaves) if leaf.is_unsaid]
    if not unsaid:
        return
    others = {number for number in unsaid if len(sizes) > 1 and _has_other_size(leaves[number], sizes)}
    numbers = {number for number in unsaid if _become_a_list(leaves[number])}
    for path, spec, inside in output.parts("output") if len(sizes) > 1 else ():
        of_list = {number for number in inside if leaves[number].is_unsaid}
        if (
            of_list
            and _may_have_entries_of_rows(spec, sizes)
            and any(i in others or _is_one(leaves[i]) for i in of_list)
        ):
            if not warnings.has_given(_LISTS):
                as_now = _out_dims(output, leaves, {number: leaves[number].axis for number in inside})
                whole = _out_dims(output, leaves, dict.fromkeys(inside))
                kind = type(spec.value).__name__
                warnings.give(_LIST.format(path=path, kind=kind, as_now=as_now, whole=whole), _LISTS)
            others -= of_list
            numbers -= of_list
    if others and not warnings.has_given(ROWS):
        warnings.give(_about_tensors(output, leaves, sorted(others), sizes), ROWS)
    if numbers and not warnings.has_given(_NUMBERS):
        warnings.give(_about_numbers(output, leaves, sorted(numbers)), _NUMBERS)


def _has_other_size(leaf: Leaf, sizes: Sequence[int]) -> bool:
    """Return whether each replica has a tensor whose entries along the axis can be others than those of its rows.

    That is where the rows are on another axis, or where all have one size, which is no multiple of their rows: a table,
    a sum over rows. Not where tensors do not fit together, or have no such axis: that is an error.
    """
    if not all(isinstance(value, torch.Tensor) and not value.is_nested for value in leaf.given):
        return False
    dims = {tensor.dim() for tensor in leaf.given}
    if leaf.axis is None or len(dims) > 1 or not -min(dims) <= leaf.axis < min(dims):
        return False
    found = [tensor.shape[leaf.axis] for tensor in leaf.given]
    if found == [*sizes]:
        return False
    each = [divmod(size, rows) for size, rows in zip(found, sizes, strict=True) if rows]
    are_multiples = len({*each}) == 1 and each[0][0] > 0 and each[0][1] == 0 and max(sizes) > 1  # as of tokens
    return _axis_of_rows(leaf, sizes) is not None or (len({*found}) == 1 and not are_multiples)


def _become_a_list(leaf: Leaf) -> bool:
    """Return whether the replicas' numbers become a list: by `scalars` bools and complex numbers do, too."""
    value = leaf.given[0]
    if isinstance(value, torch.Tensor) or not isinstance(value, numbers.Complex):  # the former costs no call
        return False
    if leaf.is_scalar or is_own_mean(leaf.scalars, leaf.given):
        return False
    return leaf.scalars == "stack" or not is_weighed(value)


def is_weighed(value: object) -> bool:
    """Return whether `scalars` makes a mean or sum of a number: one of Python's, numpy's, or a fraction."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_own_mean(rule: str, given: Sequence[Any]) -> bool:
    """Return whether the rule asks for a mean of what is the same in all replicas, and so stays as it is.

    Numbers and bools, also in 0-dim tensors, of which the mean of integers would be a float. What may have a gradient
    is not looked at. On an accelerator this waits for tensors of integers.
    """
    if not rule.startswith("mean"):
        return False
    first = given[0]
    if isinstance(first, torch.Tensor):
        is_exact = not (first.is_floating_point() or first.is_complex())
        return is_exact and len({tensor.item() for tensor in given}) == 1
    return isinstance(first, numbers.Complex) and all(type(v) is type(first) and v == first for v in given)


def _may_have_entries_of_rows(spec: pytree.Spec, sizes: Sequence[int]) -> bool:
    """Return whether a list has as many like entries as each replica rows."""
    if spec.keys is None or {len(spec.specs)} != {*sizes} or not spec.specs:
        return False
    return isinstance(spec.value, list) and len({_form(child) for child in spec.specs if child.value is not None}) <= 1


def _form(entry: pytree.Spec) -> Any:
    value = entry.value
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dim()
    return float if isinstance(value, numbers.Real) else type(value)


def _is_one(leaf: Leaf) -> bool:
    """Return whether a leaf has no axis, and `scalars` has no entry for it."""
    return not leaf.is_scalar and not (isinstance(leaf.given[0], torch.Tensor) and leaf.given[0].dim())


def _about_tensors(output: pytree.Spec, leaves: Sequence[Leaf], numbers: Sequence[int], sizes: Sequence[int]) -> str:
    rows_on = {number: _axis_of_rows(leaves[number], sizes) for number in numbers}
    leaf, found = leaves[numbers[0]], rows_on[numbers[0]]
    axis = leaf.axis
    assert axis is not None
    index = next(
        i for i, (tensor, rows) in enumerate(zip(leaf.given, sizes, strict=True)) if tensor.shape[axis] != rows
    )
    return _OTHER_ROWS.format(
        path=leaf.path,
        shape=tuple(leaf.given[index].shape),
        rows=sizes[index],
        size=leaf.given[index].shape[axis],
        axis=axis,
        out_dims=_out_dims(output, leaves, rows_on),
        condition="every replica returns the same" if found is None else f"its batch is on dimension {found}",
        as_now=_out_dims(output, leaves, {number: leaves[number].axis for number in numbers}),
    )


def _axis_of_rows(leaf: Leaf, sizes: Sequence[int]) -> int | None:
    """Return the first axis on which each replica's tensor has its rows; None if there is none."""
    axes = range(min(tensor.dim() for tensor in leaf.given))
    return next((a for a in axes if [tensor.shape[a] for tensor in leaf.given] == [*sizes]), None)


def _about_numbers(output: pytree.Spec, leaves: Sequence[Leaf], numbers: Sequence[int]) -> str:
    paths = [leaves[number].path for number in numbers]
    names = ", ".join(paths[:_MOST_NAMED]) + (
        f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    )
    return _ONE_NUMBER.format(
        names=f"{names} {'is a number' if len(paths) == 1 else 'are numbers'}",
        whole=_out_dims(output, leaves, dict.fromkeys(numbers)),
        as_now=_out_dims(output, leaves, {number: leaves[number].axis for number in numbers}),
    )


def _out_dims(output: pytree.Spec, leaves: Sequence[Leaf], entries: Mapping[int, int | None]) -> Any:
    """Return the `out_dims` with other entries for the leaves with these numbers, for a message."""
    return out_dims_of(output, [entries.get(number, leaf.entry) for number, leaf in enumerate(leaves)])
