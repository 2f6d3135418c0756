"""Rules for a call's tensors: which axis holds the rows (`in_dims`, `out_dims`), and how 0-dim outputs are joined
(`scalars`).

All three are nested like the value that they describe, as far down as needed: one entry applies to everything below
it, as in `torch.func.vmap`. `spread` turns such a rule into one entry a leaf.
"""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

from unisono.primitives import pytree
from unisono.runtime.errors import shown, warn
from unisono.runtime.model_warnings import ModelWarnings

ScalarRule: TypeAlias = Literal["stack", "mean", "sum"]
# In a form like the output also "mean:name", which `check_scalars` looks at: a type cannot say it.
Scalars: TypeAlias = ScalarRule | tuple[object, ...] | list[Any] | Mapping[Any, object]
_DIM_1 = (
    "{name}(batch_first=False) has its batch on dimension 1 in input, output and hidden state; DataParallel "
    "splits and joins dimension 0. Write DataParallel(module, ..., dim=1)."
)
_OUT_DIMS = (
    "{name}(batch_first=True) has the batch of its hidden state on dimension 1; DataParallel joins it along "
    "dimension 0. Write DataParallel(module, ..., out_dims=(0, 1))."
)


class Padding:
    """What `pad` returns, an entry of `out_dims`.

    Attributes:
        dims (tuple[int, ...]): the axes on which sizes may differ.
        value (float): what is filled in.
        rows (int | None): the axis of the rows; None: the wrapper's `dim`.
    """

    # Not a dataclass, which would count as a container of its fields.
    def __init__(self, dims: tuple[int, ...], value: float, rows: int | None) -> None:
        self.dims, self.value, self.rows = dims, value, rows

    def __repr__(self) -> str:
        dims = self.dims[0] if len(self.dims) == 1 else self.dims
        return f"pad({dims}, value={self.value}{'' if self.rows is None else f', rows={self.rows}'})"


def pad(dim: int | Sequence[int], value: float = 0, *, rows: int | None = None) -> Padding:
    """Have outputs padded to the longest before they are joined: an entry of `out_dims`.

        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(1))
        >>> model = unisono.DataParallel(model, ["cpu", "cpu"], out_dims=unisono.pad(1, value=-1.0))
        >>> model(torch.zeros(6, 5, dtype=torch.int64)).shape  # replicas may return another size on axis 1
        torch.Size([6, 20])

    Each replica's rows end with its own longest sequence: `generate`, and `pad_packed_sequence` without
    `total_length`. A tensor of (3, 7) and one of (2, 9) become one of (5, 9), with `value` behind the first three rows.
    What is filled in has no gradient.

    Args:
        dim: the axis on which sizes may differ, of the output as the module returns it, rows included; several for
            several. From the end if negative.
        value: what is filled in; a number that the output's dtype can hold.
        rows: the axis of the rows; None: the wrapper's `dim`.

    Raises:
        TypeError: arguments of other types.
    """
    dims = tuple(dim) if isinstance(dim, Sequence) and not isinstance(dim, str) else (dim,)
    for axis in (*dims, *([] if rows is None else [rows])):
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise TypeError(f"pad: {shown(axis)} is not a dimension: expected an int, or a tuple of ints")
    if not dims:
        raise TypeError("pad: dim is empty: expected the dimension whose size may differ between replicas")
    if not isinstance(value, int | float):
        raise TypeError(f"pad: value={shown(value)}: expected a number")
    return Padding(dims, value, rows)


@dataclass(frozen=True)
class OutputRules:
    """How outputs are joined."""

    dim: int  # the axis of the rows where `out_dims` has no entry
    out_dims: Any = ...  # `...` (left out), or axes, None and `Padding`s, nested like the output
    scalars: Any = "stack"  # "stack", "mean", "sum" or "mean:name", or these nested like the output
    amounts: Sequence[float] | None = None  # over how much each replica's "mean" is; None: over its rows
    warnings: ModelWarnings | None = field(default=None, compare=False)  # the model's; None: nothing is said

    def axes(self, output: pytree.Spec) -> tuple[list[int | None], list[Padding | None]]:
        """Return for every leaf of an output the axis of its rows, None for a whole one, and how it is padded."""
        entries = spread(self.out_dims, output, self.dim, "out_dims")
        paddings = [entry if isinstance(entry, Padding) else None for entry in entries]
        rows = [self.dim if padding is None or padding.rows is None else padding.rows for padding in paddings]
        axes = [entry if padding is None else row for entry, padding, row in zip(entries, paddings, rows, strict=True)]
        return axes, paddings


def warn_if_rows_elsewhere(module: nn.Module, dim: int, out_dims: Any) -> bool:
    """Warn if `module` is a recurrent layer, and nothing says where its rows are. For a wrapper's constructor.

    Return whether it has warned.

    `torch.nn.RNN`, `LSTM` and `GRU` return two values with rows on different axes:

        batch_first   input and output          hidden state
        False         (steps, rows, features)   (layers, rows, features)
        True          (rows, steps, features)   (layers, rows, features)

    A wrapper that is told nothing splits and joins all of them on axis 0, as torch's does: without an error, and with
    other numbers than those of one device. Only a layer that is wrapped itself is known to be used like this: a model
    around it may transpose its rows.
    """
    if isinstance(module, nn.RNNBase) and dim == 0 and out_dims is ...:
        said = _OUT_DIMS if module.batch_first else _DIM_1
        warn(said.format(name=type(module).__name__))
        return True
    return False


def check_dim(dim: object) -> int:
    """Return `dim`; raise TypeError if it cannot be the axis of the rows."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim={shown(dim)}: expected an int, the batch dimension")
    return dim


def check_dims(dims: object, argument: str) -> Any:
    """Return `dims`; raise TypeError if it is no axis, no None, and no nested tuple or dict of these.

    `...` means left out. Of outputs an entry may also be a `Padding`.
    """
    if dims is ...:
        return dims
    for path, entry in pytree.leaves(dims, argument):
        if isinstance(entry, Padding) and argument == "in_dims":
            raise TypeError(f"{path}={entry!r}: inputs cannot be padded; use pad() in out_dims")
        if isinstance(entry, Padding):
            continue
        if entry is not None and (not isinstance(entry, int) or isinstance(entry, bool)):
            raise TypeError(
                f"{path}={shown(entry)}: expected an int (the batch dimension) or None (the same for every "
                "replica), or tuples and dicts of these in the shape of the value"
            )
    return dims


def check_scalars(scalars: object, argument: str = "scalars") -> Any:
    """Return `scalars`; raise TypeError or ValueError if it is no rule for 0-dim outputs."""
    expected = 'expected "stack", "mean", "sum" or "mean:name", or tuples and dicts of these in the shape of the output'
    for path, entry in pytree.leaves(scalars, argument):
        if not isinstance(entry, str):
            raise TypeError(f"{path}={shown(entry)}: {expected}")
        rule, colon, name = entry.partition(":")
        if rule not in get_args(ScalarRule) or (colon and (rule != "mean" or not name)):
            raise ValueError(f"{path}={entry!r}: {expected}")
    return scalars


def spread_inputs(
    in_dims: Any, inputs: pytree.Spec, kwargs: pytree.Spec, dim: int, function: Callable[..., Any] | None = None
) -> list[int | None]:
    """Return the axis of the rows for every leaf of a call's inputs, positional ones first.

    Args:
        inputs, kwargs: the structures of the positional and the keyword inputs.
        in_dims: `...` for `dim` everywhere; an int or None for all inputs; a tuple with one entry a positional input
            (keyword inputs then have `dim`); or a dict with inputs' names as keys, or the positions of positional
            ones (all others have `dim`).
        function: the function that is called; its signature gives the names of positional inputs.

    Raises:
        ValueError: an entry that matches no input, or is not nested like it; names it.
    """
    if not isinstance(in_dims, tuple | list | Mapping):
        axis = dim if in_dims is ... else in_dims
        return [axis] * (inputs.num_leaves() + kwargs.num_leaves())
    num_inputs = len(inputs.specs)
    if isinstance(in_dims, Mapping):
        entries = _by_position(in_dims, num_inputs, kwargs.keys or (), function)
    elif len(in_dims) == num_inputs:
        entries = dict(enumerate(in_dims))
    else:
        raise ValueError(
            f"in_dims={in_dims!r} has {len(in_dims)} entries for {num_inputs} positional inputs: give one for "
            "each, or a dict of names"
        )
    axes: list[int | None] = []
    for key, spec in zip((*range(num_inputs), *(kwargs.keys or ())), (*inputs.specs, *kwargs.specs), strict=True):
        axes += spread(entries.get(key, ...), spec, dim, f"in_dims[{key!r}]")
    return axes


def in_dims_of(inputs: pytree.Spec, kwargs: pytree.Spec, axes: Sequence[int | None], dim: int) -> dict[Any, Any]:
    """Return the `in_dims` that give the leaves of a call's inputs these axes; what has `dim` is left out.

    >>> (_, inputs), (_, kwargs) = pytree.flatten(("x", ["mask", "y"])), pytree.flatten({"table": "table"})
    >>> in_dims_of(inputs, kwargs, [0, 1, 0, None], 0)
    {1: {0: 1}, 'table': None}

    Args:
        inputs, kwargs: the structures of the positional and the keyword inputs.
        axes: of every leaf of the inputs, positional ones first.
    """
    entries = iter([... if axis == dim else axis for axis in axes])
    each = {
        key: _nested(spec, entries)
        for inside in (inputs, kwargs)
        for key, spec in zip(inside.keys or (), inside.specs, strict=True)
    }
    return {key: rule for key, rule in each.items() if rule is not ...}


def out_dims_of(output: pytree.Spec, entries: Sequence[Any]) -> Any:
    """Return the `out_dims` with these entries for the leaves of an output; `...` is left out.

    >>> _, output = pytree.flatten(("y", ["h", "c"]))
    >>> out_dims_of(output, [..., 1, None]), out_dims_of(output, [..., 1, 1])
    ({1: {0: 1, 1: None}}, {1: 1})
    """
    return _nested(output, iter(entries))


def _nested(spec: pytree.Spec, entries: Iterator[Any]) -> Any:
    if spec.keys is None:
        return next(entries)
    rules = {key: _nested(child, entries) for key, child in zip(spec.keys, spec.specs, strict=True)}
    first = next(iter(rules.values()), ...)
    if not isinstance(first, dict) and all(rule == first for rule in rules.values()):
        return first
    return {key: rule for key, rule in rules.items() if rule is not ...}


def _by_position(
    in_dims: Mapping[Any, Any], num_inputs: int, kwargs: Collection[Any], function: Callable[..., Any] | None
) -> dict[Any, Any]:
    """Return `in_dims` with the names of inputs that were given by position replaced by these positions."""
    parameters: Mapping[str, inspect.Parameter] = {}
    given: Mapping[str, Any] = {}  # by parameter, the position of its input; or those of all that it takes
    with contextlib.suppress(TypeError, ValueError):  # no function, one without a signature, or not for these inputs
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
        given = inspect.signature(function).bind_partial(*range(num_inputs)).arguments  # type: ignore[arg-type]
    takes_any = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    entries: dict[Any, Any] = {}
    for key, entry in in_dims.items():
        if key in kwargs or (isinstance(key, int) and not isinstance(key, bool) and key >= 0):
            entries[key] = entry
        elif not isinstance(key, str):
            raise ValueError(f"in_dims has the key {key!r}: expected names of inputs, or positions (0, 1, ...)")
        elif key in given:
            positions = given[key] if isinstance(given[key], tuple) else [given[key]]
            entries.update(dict.fromkeys(positions, entry))
        elif key not in parameters and not takes_any:
            raise ValueError(f"in_dims names {key!r}, but the inputs are: {', '.join(parameters)}")
    return entries


def spread(rule: Any, spec: pytree.Spec, default: Any, argument: str) -> list[Any]:
    """Return one entry for every leaf of a structure, in order, from a rule that is nested like it or stops earlier.

    >>> _, spec = pytree.flatten({"x": "leaf", "state": ("leaf", ["leaf", "leaf"]), "y": "leaf"})
    >>> spread({"x": 1, "state": (0, None)}, spec, 7, "rule")
    [1, 0, None, None, 7]

    Raises:
        ValueError: a rule that names an entry that the structure lacks, or is nested further.
    """
    return list(_spread(rule, spec, default, argument))


def _spread(rule: Any, spec: pytree.Spec, default: Any, argument: str) -> Iterator[Any]:
    entries = pytree.children(rule)
    if entries is None:
        yield from [default if rule is ... else rule] * spec.num_leaves()
        return
    kind = type(spec.value).__name__
    if spec.keys is None:
        raise ValueError(f"{argument}={rule!r} is nested deeper than the value, a {kind}")
    if isinstance(rule, Sequence):
        if len(entries) != len(spec.keys):
            raise ValueError(f"{argument}={rule!r} has {len(entries)} entries for a {kind} of {len(spec.keys)}")
        entries = dict(zip(spec.keys, entries.values(), strict=True))
    if unknown := [key for key in entries if key not in spec.keys]:
        raise ValueError(f"{argument} names {unknown[0]!r}, but the {kind} has only {[*spec.keys]}")
    for key, child in zip(spec.keys, spec.specs, strict=True):
        yield from _spread(entries.get(key, ...), child, default, f"{argument}[{key!r}]")
