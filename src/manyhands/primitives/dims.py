"""Rules for a call's tensors: which axis holds the rows (`in_dims`, `out_dims`), and how 0-dim outputs are joined
(`scalars`).

All three are nested like the value that they describe, as far down as needed: one entry applies to everything below
it, as in `torch.func.vmap`. `spread` turns such a rule into one entry a leaf.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.primitives import pytree

_SCALAR_RULES = ("stack", "mean", "sum")


@dataclass(frozen=True)
class OutputRules:
    """How outputs are joined.

    Attributes:
        dim: the axis of the rows where `out_dims` has no entry.
        out_dims: `...` (left out), or axes nested like the output.
        scalars: "stack", "mean", "sum" or "mean:name", or these nested like the output.
    """

    dim: int
    out_dims: Any = ...
    scalars: Any = "stack"


def check_dim(dim: object) -> None:
    """Raise TypeError if `dim` cannot be the axis of the rows."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim={dim!r}: expected an int, the axis that holds the rows")


def check_dims(dims: object, argument: str) -> None:
    """Raise TypeError if `dims` is no axis, no None, and no nested tuple or dict of these. `...` means left out."""
    if dims is ...:
        return
    for path, entry in pytree.leaves(dims, argument):
        if entry is not None and (not isinstance(entry, int) or isinstance(entry, bool)):
            raise TypeError(
                f"{path}={entry!r}: expected an int (the axis that holds the rows), None (no rows: whole), or tuples "
                "and dicts of these, nested like what they describe"
            )


def check_scalars(scalars: object) -> None:
    """Raise TypeError or ValueError if `scalars` is no rule for 0-dim outputs."""
    expected = 'expected "stack", "mean", "sum" or "mean:name", or these in tuples and dicts nested like the output'
    for path, entry in pytree.leaves(scalars, "scalars"):
        if not isinstance(entry, str):
            raise TypeError(f"{path}={entry!r}: {expected}")
        rule, colon, name = entry.partition(":")
        if rule not in _SCALAR_RULES or (colon and (rule != "mean" or not name)):
            raise ValueError(f"{path}={entry!r}: {expected}")


def spread_inputs(
    in_dims: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], dim: int, function: Callable[..., Any] | None = None
) -> list[int | None]:
    """Return the axis of the rows for every leaf of a call's inputs, positional ones first.

    Args:
        in_dims: `...` for `dim` everywhere; an int or None for all inputs; a tuple with one entry a positional input
            (keyword inputs then have `dim`); or a dict with inputs' names as keys, or the positions of positional
            ones (all others have `dim`).
        function: the function that is called; its signature gives the names of positional inputs.

    Raises:
        ValueError: an entry that matches no input, or is not nested like it; names it.
    """
    if not isinstance(in_dims, tuple | list | Mapping):
        axis = dim if in_dims is ... else in_dims
        return [axis for _ in pytree.leaves((inputs, kwargs))]
    if isinstance(in_dims, Mapping):
        entries = _by_position(in_dims, len(inputs), kwargs, function)
    elif len(in_dims) == len(inputs):
        entries = dict(enumerate(in_dims))
    else:
        raise ValueError(
            f"in_dims={in_dims!r} has {len(in_dims)} entries for {len(inputs)} positional inputs: give one each, or a "
            "dict of names"
        )
    axes: list[int | None] = []
    for key, value in (*enumerate(inputs), *kwargs.items()):
        axes += spread(entries.get(key, ...), value, dim, f"in_dims[{key!r}]")
    return axes


def _by_position(
    in_dims: Mapping[Any, Any], num_inputs: int, kwargs: dict[str, Any], function: Callable[..., Any] | None
) -> dict[Any, Any]:
    """Return `in_dims` with the names of inputs that were given by position replaced by these positions."""
    try:
        parameters = list(inspect.signature(function).parameters.values()) if function is not None else []
    except (TypeError, ValueError):  # a function without a signature
        parameters = []
    kinds = inspect.Parameter
    positions = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY]
    all_others = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None)
    takes_any = not parameters or any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    entries: dict[Any, Any] = {}
    for key, entry in in_dims.items():
        if key in kwargs or (isinstance(key, int) and not isinstance(key, bool) and key >= 0):
            entries[key] = entry
        elif not isinstance(key, str):
            raise ValueError(f"in_dims has the key {key!r}: expected names of inputs, or positions from 0")
        elif key in positions:
            entries[positions.index(key)] = entry
        elif key == all_others:
            entries.update(dict.fromkeys(range(len(positions), num_inputs), entry))
        elif key not in by_name and not takes_any:
            raise ValueError(
                f"in_dims names {key!r}, which is no input: there are {', '.join(p.name for p in parameters)}"
            )
    return entries


def spread(rule: Any, value: Any, default: Any, argument: str) -> list[Any]:
    """Return one entry for every leaf of `value`, in order, from a rule that is nested like it or stops earlier.

    >>> spread({"x": 1, "state": (0, None)}, {"x": "leaf", "state": ("leaf", ["leaf", "leaf"]), "y": "leaf"}, 7, "rule")
    [1, 0, None, None, 7]

    Raises:
        ValueError: a rule that names an entry that the value lacks, or is nested further than the value.
    """
    return list(_spread(rule, value, default, argument))


def _spread(rule: Any, value: Any, default: Any, argument: str) -> Iterator[Any]:
    entries = pytree.children(rule)
    inside = pytree.children(value)
    if entries is None:
        for _ in pytree.leaves(value):
            yield default if rule is ... else rule
        return
    if inside is None:
        raise ValueError(f"{argument}={rule!r} is nested further than what it describes, a {type(value).__name__}")
    if isinstance(rule, Sequence):
        if len(entries) != len(inside):
            raise ValueError(
                f"{argument}={rule!r} has {len(entries)} entries for a {type(value).__name__} of {len(inside)}"
            )
        entries = dict(zip(inside, entries.values(), strict=True))
    unknown = [key for key in entries if key not in inside]
    if unknown:
        raise ValueError(
            f"{argument} names {unknown[0]!r}, which is not there: a {type(value).__name__} of {list(inside)}"
        )
    for key, child in inside.items():
        yield from _spread(entries.get(key, ...), child, default, f"{argument}[{key!r}]")
