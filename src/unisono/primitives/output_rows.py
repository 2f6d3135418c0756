"""Warnings about outputs that are joined in another way than the rows of the batch: numbers, lists, other sizes.

Whether an entry belongs to a row cannot be known: in one batch lengths may agree, or differ, by accident. So they
decide what is said, once a model, and never how an output is joined.

What is said of each kind of output that no option describes:

    numbers, 0-dim tensors   they become a list, or a vector, with one entry a replica: that is always said
    lists                    entry i of all replicas is joined: said where there are as many entries as the replica has
                             rows, and entries that belong to rows would be another value
    tensors                  they are joined along an axis: said where entries there may be lost or doubled. Not where
                             each replica has as many times its rows (tokens), or its own number (rows that it chose)
    sizes (torch.Size)       they are that of a replica's output: said where they have a replica's number of rows
"""

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from unisono.primitives import pytree
from unisono.primitives.dims import out_dims_of
from unisono.runtime.model_warnings import ModelWarnings

# Kinds of warnings.
ROWS = "rows of outputs"
_LISTS = "lists in outputs"
_NUMBERS = "numbers in outputs"
_SIZES = "sizes in outputs"

_MOST_NAMED = 4
_NUMBERS_OF_PYTHON = (bool, int, float, complex)
_LIST = (
    "{path} is a {kind} with as many entries as each replica has rows (samples): the first entries of all "
    "replicas are joined, then the second ones, and so on, as in torch. If each entry belongs to a row, "
    "return unisono.SampleList(entries). To keep this without the warning: DataParallel(..., "
    "out_dims={as_now}){or_whole}."
)
_OR_WHOLE = "; if every replica returns the same: out_dims={whole}"
_OTHER_ROWS = (
    "{path} of shape {shape} comes from {rows} rows (samples), but has {size} entries on dimension {axis}, "
    "along which it is joined. Write DataParallel(..., {remedies}. Otherwise return one entry for each row; "
    "or, for a sum or mean over rows, a 0-dim tensor with scalars=."
)
_ELSEWHERE = (
    "out_dims={out_dims}) if {condition}; out_dims={as_now} if the entries follow the rows in order, as joined now"
)
_FILTERED = "out_dims={as_now}) if the entries follow the rows in order, as when forward filters rows"
_ONE_NUMBER = (
    "{names} in each replica, computed from its own rows (samples): you get a list with one entry for each "
    'replica. Write DataParallel(..., scalars="mean"), or "sum", for one number; out_dims={whole} if every '
    "replica returns the same; out_dims={as_now} if you want the list. If the numbers belong to rows, return a "
    "tensor or unisono.SampleList(entries)."
)
_SIZE = (
    "{path} is {value} in each replica, which has {rows} of the {total} rows of the batch, and is returned "
    "unchanged. Take the size of the gathered tensor, outside the model. If the number is not a batch size, "
    "write DataParallel(..., out_dims={whole})."
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
    for path, spec, inside in output.parts("output"):
        of_list = {number for number in inside if leaves[number].is_unsaid}
        if not of_list or not _may_have_entries_of_rows(spec, sizes):
            continue
        if not of_list & (others | numbers) and not _would_be_another(spec, [leaves[i] for i in inside], sizes):
            continue
        if not warnings.has_given(_LISTS):
            warnings.give(_about_list(path, spec, output, leaves, inside, of_list & others), _LISTS)
        others -= of_list
        numbers -= of_list
    if others and not warnings.has_given(ROWS):
        warnings.give(_about_tensors(output, leaves, sorted(others), sizes), ROWS)
    if numbers and not warnings.has_given(_NUMBERS):
        warnings.give(_about_numbers(output, leaves, sorted(numbers)), _NUMBERS)
    if not warnings.has_given(_SIZES):
        of_rows = next((number for number in unsaid if _is_size_of_rows(leaves[number].given, sizes)), None)
        if of_rows is not None:
            path, value = leaves[of_rows].path, leaves[of_rows].given[0]
            whole = _out_dims(output, leaves, {of_rows: None})
            text = _SIZE.format(path=path, value=value, rows=sizes[0], total=sum(sizes), whole=whole)
            warnings.give(text, _SIZES)


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
    if not isinstance(value, int | float | complex) or leaf.is_scalar or is_own_mean(leaf.scalars, leaf.given):
        return False
    return leaf.scalars == "stack" or isinstance(value, bool | complex)


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
    return isinstance(first, _NUMBERS_OF_PYTHON) and all(type(v) is type(first) and v == first for v in given)


def _is_size_of_rows(given: Sequence[Any], sizes: Sequence[int]) -> bool:
    if len(sizes) == 1 or not all(isinstance(value, torch.Size) for value in given):
        return False
    return len({*sizes}) == 1 and sizes[0] in given[0] and sizes[0] > 0


def _may_have_entries_of_rows(spec: pytree.Spec, sizes: Sequence[int]) -> bool:
    """Return whether a container has as many like entries as each replica has rows, and may be a list of rows.

    Lists are, and dicts whose keys number the rows. A tuple may be one value, such as a loss and its terms, unless it
    holds numbers and strings only.
    """
    if spec.keys is None or {len(spec.specs)} != {*sizes} or not spec.specs:
        return False
    value = spec.value
    if isinstance(value, MutableMapping):
        if [*(spec.keys or ())] != [*range(len(spec.specs))]:
            return False
    elif not isinstance(value, list | deque) and not (type(value) is tuple and _has_no_tensors(spec)):
        return False
    return len({_form(child) for child in spec.specs if child.value is not None}) <= 1


def _has_no_tensors(spec: pytree.Spec) -> bool:
    values = [leaf.value for leaf in _leaves(spec) if leaf.value is not None]
    return bool(values) and all(isinstance(value, str | bytes | int | float | complex) for value in values)


def _leaves(spec: pytree.Spec) -> Iterator[pytree.Spec]:
    if spec.keys is None:
        yield spec
    for child in spec.specs:
        yield from _leaves(child)


def _form(entry: pytree.Spec) -> Any:
    value = entry.value
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dim()
    return float if isinstance(value, int | float) else type(value)


def _would_be_another(spec: pytree.Spec, leaves: Sequence[Leaf], sizes: Sequence[int]) -> bool:
    """Return whether a list of entries without other sizes looks like one of rows, and would then be another value.

    Numbers and 0-dim tensors of which `scalars` makes one; strings; and the rows of one tensor whose size is that of
    the replica's rows by accident.
    """
    values = [leaf.given[0] for leaf in leaves if leaf.given[0] is not None]
    if all(isinstance(value, torch.Tensor) and value.dim() for value in values) and values:
        if len({value.shape for value in values}) > 1 or len(sizes) == 1:
            return False
        return _are_rows_of_one(values)
    if len(sizes) > 1 and all(isinstance(value, str | bytes) for value in values):
        return True
    return any(
        not leaf.is_scalar and (isinstance(leaf.given[0], int | float) or _is_0_dim(leaf.given[0])) for leaf in leaves
    )


def _is_0_dim(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()


def _are_rows_of_one(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors of one shape lie one after the other in one memory, as the rows of a tensor do.

    One alone does not say: a list of one tensor is a usual form of an output.
    """
    if len(tensors) < 2:
        return False
    first = tensors[0]
    try:
        start, length = first.data_ptr(), first.numel() * first.element_size()
        return all(t.is_contiguous() and t.data_ptr() == start + i * length for i, t in enumerate(tensors))
    except RuntimeError:  # a tensor without memory, as in a transform of torch.func
        return False


def _about_list(
    path: str, spec: pytree.Spec, output: pytree.Spec, leaves: Sequence[Leaf], inside: range, others: set[int]
) -> str:
    """Return the warning of a list; `others` are the numbers of its tensors of other sizes."""
    as_now = _out_dims(output, leaves, {number: leaves[number].axis for number in inside})
    or_whole = ""
    if others == {*inside} and all(_have_one_shape(leaves[number]) for number in others):
        or_whole = _OR_WHOLE.format(whole=_out_dims(output, leaves, dict.fromkeys(inside)))
    return _LIST.format(path=path, kind=type(spec.value).__name__, as_now=as_now, or_whole=or_whole)


def _have_one_shape(leaf: Leaf) -> bool:
    return len({tensor.shape for tensor in leaf.given}) == 1


def _about_tensors(output: pytree.Spec, leaves: Sequence[Leaf], numbers: Sequence[int], sizes: Sequence[int]) -> str:
    rows_on = {number: _axis_of_rows(leaves[number], sizes) for number in numbers}
    leaf, found = leaves[numbers[0]], rows_on[numbers[0]]
    axis = leaf.axis
    assert axis is not None
    index = next(
        i for i, (tensor, rows) in enumerate(zip(leaf.given, sizes, strict=True)) if tensor.shape[axis] != rows
    )
    as_now = _out_dims(output, leaves, {number: leaves[number].axis for number in numbers})
    remedies = _FILTERED.format(as_now=as_now)
    if found is not None or _have_one_shape(leaf):
        condition = "every replica returns the same" if found is None else f"its batch is on dimension {found}"
        out_dims = _out_dims(output, leaves, rows_on)
        remedies = _ELSEWHERE.format(out_dims=out_dims, condition=condition, as_now=as_now)
    return _OTHER_ROWS.format(
        path=leaf.path,
        shape=tuple(leaf.given[index].shape),
        rows=sizes[index],
        size=leaf.given[index].shape[axis],
        axis=axis,
        remedies=remedies,
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
