"""gather: join the replicas' outputs into one value, matched leaf by leaf: the inverse of scatter.py."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, TypeAlias

import torch

from unisono.primitives import batch_types, pytree
from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.dims import OutputRules, Padding, check_dim, spread
from unisono.primitives.output_rows import Leaf, is_own_mean, is_weighed, warn_of_other_rows
from unisono.primitives.placements import (
    PaddedShard,
    Placement,
    Shard,
    Single,
    Stack,
    WeightedSum,
    can_be_placed,
    cannot_be_placed,
)
from unisono.runtime import devices as _devices
from unisono.runtime.devices import DeviceLike
from unisono.runtime.errors import add_note
from unisono.runtime.model_warnings import of_process


@dataclass(frozen=True)
class Group:
    """Tensors of the replicas' outputs that belong together, and how they are joined.

    `tensors[i]` is replica i's; None if it has none, or if only another replica's counts. `path` is for messages.
    """

    tensors: tuple[torch.Tensor | None, ...]
    placement: Placement
    path: str


LiveTensors: TypeAlias = Sequence[Mapping[int, torch.Tensor]]
Maker: TypeAlias = Callable[[Sequence[Any], torch.device], Any]  # a leaf's gathered value, from the joined tensors

_STACKED = (
    "Each replica returned a scalar (a loss?), so you get a vector with one entry for each replica. For the "
    'exact mean over the batch write DataParallel(..., scalars="mean"), for a sum scalars="sum". Of the vector, '
    'backward() raises "grad can be implicitly created only for scalar outputs", and mean() is wrong if replicas have '
    "different numbers of rows (samples)."
)
_DIFFERENT_SIZES = (
    "cannot gather {path} along dimension {axis}: {each}. Only {may_differ} may differ. Is the batch on "
    "dimension {dim}? Pass out_dims={dim}{nested}. Does each replica pad to its own longest sequence? Pass "
    "out_dims=unisono.pad({dim}){nested}, or total_length= to pad_packed_sequence."
)


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Join the replicas' outputs along `dim`, in order, on `target_device`: the inverse of `scatter`.

        >>> unisono.gather([{"y": torch.zeros(3, 2)}, {"y": torch.ones(1, 2)}], "cpu")["y"].shape
        torch.Size([4, 2])

    Args:
        outputs: one output a replica, all of one structure: tensors, None, numbers and strings in tuples, lists,
            dicts and dataclasses, and in objects that their class makes again from what iterating over them yields.
        target_device: where the joined tensors are; an accelerator's index, a string or a `torch.device`.
        dim: the axis along which tensors are joined. 0-dim tensors become a vector, one entry a replica.

    Returns:
        A value of the same structure. None stays None, equal strings stay one, numbers become a list with one entry a
        replica. Differentiable.

    Raises:
        ValueError: outputs of different structure, rank, dtype or size (but along `dim`); names the path, and what
            each replica gave.
        TypeError: an output of a type that cannot be gathered.
    """
    check_dim(dim)
    if not isinstance(outputs, list | tuple):
        raise TypeError(f"outputs: expected a list with one output for each replica, got {type(outputs).__name__}")
    if not outputs:
        raise ValueError("no outputs to gather: expected one for each replica")
    if target_device is None:
        raise TypeError("target_device is None: expected an int, a string or a torch.device")
    device = _devices.resolve_output(target_device, (), "target_device")
    return gathered(outputs, device, OutputRules(dim, warnings=of_process))


class Outputs:
    """The replicas' outputs, matched leaf by leaf. One that is a parameter or buffer of the module is the live one.

    Args:
        outputs: one a replica.
        rules: how they are joined.
        sizes: the replicas' rows; None if unknown (then there is no "mean").
        live_of: for each replica, the live parameters and buffers by the ids of its own; empty if these are unknown.
        is_summed: whether gradients are summed over ranks. Those of what is not the boundary's output are not.

    Raises:
        ValueError: outputs that do not fit together; TypeError: outputs of a type that cannot be gathered.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        rules: OutputRules,
        sizes: tuple[int, ...] | None,
        live_of: LiveTensors = (),
        *,
        is_summed: bool = False,
    ) -> None:
        self.groups: list[Group] = []  # the tensors that are to be joined
        self._warnings = rules.warnings
        self._means_over = sizes if rules.amounts is None else rules.amounts
        self._live_of, self._is_summed = live_of, is_summed
        self._paths, self._given = ["output"], [tuple(outputs)]
        self._is_tensor = _TENSOR.issuperset(map(type, outputs)) and not (live_of and id(outputs[0]) in live_of[0])
        if self._is_tensor and isinstance(rules.scalars, str) and type(rules.out_dims) in _OF_ONE_AXIS:
            axis = rules.dim if rules.out_dims is ... else rules.out_dims  # the common case, without pytree's cost
            group = self._tensors("output", self._given[0], axis, None, rules.scalars)
            if rules.out_dims is not ... or getattr(group.placement, "sizes", sizes) == sizes or sizes is None:
                self.groups.append(group)
                return
        self._is_tensor = False
        self._numbers: dict[tuple[Any, ...], int] = {}  # of the groups, by their placements and tensors
        self._given, self._spec = pytree.flatten_together(outputs, "output")
        self._paths = [*self._spec.paths("output")]
        axes, paddings = rules.axes(self._spec)
        scalars = spread(rules.scalars, self._spec, "stack", "scalars")
        live = [*map(self._live_tensor, self._given)]
        if sizes is not None and rules.warnings is not None:
            entries = spread(rules.out_dims, self._spec, ..., "out_dims")
            joined_on = [axis if found is None else None for axis, found in zip(axes, live, strict=True)]
            own = [False] * len(axes)  # which leaves have an entry of their own in `scalars`
            if not isinstance(rules.scalars, str):
                own = [rule is not ... for rule in spread(rules.scalars, self._spec, ..., "scalars")]
            each = zip(self._paths, self._given, entries, joined_on, scalars, own, strict=True)
            warn_of_other_rows(self._spec, [*starmap(Leaf, each)], sizes, rules.warnings)
        # For each leaf a function that makes its gathered value from the joined tensors.
        self._makers = []
        try:
            for leaf in zip(self._paths, self._given, axes, paddings, scalars, live, strict=True):
                self._makers.append(self._match(*leaf))
        except (TypeError, ValueError) as error:
            if pytree.is_in_list(self._spec, len(self._makers)):
                add_note(error, pytree.ENTRIES_OF_ROWS)
            raise

    def put_together(self, joined: Sequence[torch.Tensor], device: torch.device) -> Any:
        """Return the gathered output on `device`, from one joined tensor a group.

        Where forward has called `retain_grad` of the replicas' tensors, the joined one retains its gradient, too.
        """
        for group, tensor in zip(self.groups, joined, strict=False):
            for own in group.tensors if tensor.requires_grad else ():
                if own is not None and own.retains_grad:
                    tensor.retain_grad()
        if self._is_tensor:
            return joined[0]
        return pytree.unflatten(self._spec, [make(joined, device) for make in self._makers])

    def _live_tensor(self, given: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the live parameter or buffer of which every replica has returned its own; None if it is not so."""
        found = [live.get(id(value)) for live, value in zip(self._live_of, given, strict=bool(self._live_of))]
        return found[0] if found and all(tensor is found[0] for tensor in found) else None

    def _match(
        self,
        path: str,
        given: tuple[Any, ...],
        axis: int | None,
        padding: Padding | None,
        rule: str,
        live: torch.Tensor | None,
    ) -> Maker:
        if live is not None and live.requires_grad and self._is_summed:
            return self._joined(Group((given[0], *[None] * (len(given) - 1)), Single(0), path))
        if live is not None:
            return lambda joined, device: _devices.moved_to(live, device)
        if any(isinstance(value, torch.Tensor) for value in given):
            return self._joined(self._tensors(path, given, axis, padding, rule))
        if batch_type_of(given[0]) is not None:
            return self._batches(path, given, num_counting=1 if axis is None else len(given))
        if axis is not None and is_own_mean(rule, given):
            value = given[0]
        elif axis is not None and rule != "stack" and all(map(is_weighed, given)):
            weights = self._weights(path, rule, len(given))
            value = sum(v if w == 1 else v * w for v, w in zip(given, weights, strict=True) if w)
        else:
            value = _common_value(path, given, whole=axis is None)
        return lambda joined, device: value

    def _joined(self, group: Group) -> Maker:
        # The replicas may have returned the same tensors twice.
        number = self._numbers.setdefault((group.placement, *map(id, group.tensors)), len(self.groups))
        if number == len(self.groups):
            self.groups.append(group)
        return lambda joined, device: joined[number]

    def _tensors(
        self, path: str, given: tuple[Any, ...], axis: int | None, padding: Padding | None, rule: str
    ) -> Group:
        _check_alike(path, given)
        first = given[0]
        if axis is None:
            others = [None] * (len(given) - 1)
            if others:
                _check_agree(path, given)
            return Group((first, *others), Single(0, is_common=bool(others)), path)
        if first.ndim == 0:
            if is_own_mean(rule, given):
                return Group((first, *[None] * (len(given) - 1)), Single(0), path)
            if rule != "stack":
                return Group(given, WeightedSum(self._weights(path, rule, len(given))), path)
            if self._warnings is not None:
                # Once without gradients and once with them: then it is also above the error of a backward.
                self._warnings.give(_STACKED, f"scalars, gradient {first.requires_grad}")
            return Group(given, Stack(), path)
        if not -first.ndim <= axis < first.ndim:
            raise ValueError(
                f"cannot gather {path} of shape {tuple(first.shape)} along dim={axis}: it has no such dimension"
            )
        axis %= first.ndim
        placement = Shard(axis, tuple([tensor.shape[axis] for tensor in given]))
        padded = () if padding is None else padded_axes(path, first, axis, padding)
        may_differ = {axis, *padded}
        if len({tensor.shape[:axis] + tensor.shape[axis + 1 :] for tensor in given}) == 1:
            return Group(given, placement, path)
        if padding is None or len({_without_axes(tensor.shape, may_differ) for tensor in given}) > 1:
            raise _different_sizes(path, axis, padded, given)
        lengths = tuple([tuple([tensor.shape[dim] for dim in padded]) for tensor in given])
        return Group(given, PaddedShard(placement, padded, lengths, padding.value), path)

    def _batches(self, path: str, given: tuple[Any, ...], num_counting: int) -> Maker:
        """Join batches of a registered class: their tensors are returned one by one, then the class's `gather` joins.

        Where the replicas agree on a batch (its axis is None), only the first one counts.
        """
        batch_types = [batch_type_of(value) for value in given]
        batch_type = batch_types[0]
        if batch_type is None or any(other is not batch_type for other in batch_types):
            raise pytree.disagreement(path, "types", [type(value).__name__ for value in given])
        makers = []
        for index, value in enumerate(given[:num_counting]):
            tensors, rebuild = batch_type.parts(value)
            alone = [tuple(t if i == index else None for i in range(len(given))) for t in tensors]
            makers.append((rebuild, [self._joined(Group(each, Single(index), path)) for each in alone]))

        def gathered(joined: Sequence[Any], device: torch.device) -> Any:
            batches = [rebuild([make(joined, device) for make in parts]) for rebuild, parts in makers]
            try:
                return batch_type.gather(batches)
            except Exception as error:
                add_note(error, f"while gathering {path}")
                raise

        return gathered

    def _weights(self, path: str, rule: str, num_replicas: int) -> tuple[float, ...]:
        """Return each replica's weight in a 0-dim output; for a mean they sum to 1.

        A mean over rows is weighted by rows; "mean:name" by the output of that name, where rows are not the unit.
        """
        kind, _, name = rule.partition(":")
        if kind == "sum":
            return (1,) * num_replicas
        if name:
            given = self._sibling(path, name)
            if any(isinstance(value, torch.Tensor) and value.requires_grad for value in given):
                raise ValueError(
                    f'scalars="mean:{name}" for {path}: {name!r} requires a gradient, but a weight must be a '
                    f'constant. Call {name}.detach() in forward; or return sums with scalars="sum", and '
                    "divide outside."
                )
            amounts = [float(value) for value in given]  # on an accelerator, waits for it
        elif self._means_over is not None:
            amounts = [float(amount) for amount in self._means_over]
        else:
            raise ValueError(
                'scalars="mean": the number of rows of each replica is unknown here; call gather inside forward'
            )
        total = sum(amounts)
        return tuple(amount / total for amount in amounts) if total else (1 / num_replicas,) * num_replicas

    def _sibling(self, path: str, name: str) -> tuple[Any, ...]:
        """Return the replicas' values of the output `name` that is nearest to the one at `path`."""
        for end in range(len(path), -1, -1):
            for step in (f"[{name!r}]", f".{name}", f"[{name}]"):
                if path[:end] + step in self._paths:
                    given = self._given[self._paths.index(path[:end] + step)]
                    if all(is_weighed(v) or (isinstance(v, torch.Tensor) and v.numel() == 1) for v in given):
                        return given
        raise ValueError(
            f'scalars="mean:{name}" for {path}: expected an output {name!r} beside it, a number or a 0-dim '
            f"tensor; the outputs are {', '.join(self._paths)}"
        )


def gathered(
    outputs: Sequence[Any],
    device: torch.device,
    rules: OutputRules,
    sizes: tuple[int, ...] | None = None,
    live_of: LiveTensors = (),
) -> Any:
    """Join the replicas' outputs on `device` by the caller's rules. Differentiable. Args: as `Outputs`."""
    matched = Outputs(outputs, rules, sizes, live_of)
    here = [[t if t is None else _devices.moved_to(t, device) for t in group.tensors] for group in matched.groups]
    joined = [group.placement.join(tensors) for group, tensors in zip(matched.groups, here, strict=True)]
    return matched.put_together(joined, device)


def padded_axes(path: str, tensor: torch.Tensor, rows: int, padding: Padding) -> tuple[int, ...]:
    """Return the axes that may be padded, from 0 up.

    Raises:
        ValueError: the output does not have them, or cannot be padded with this value.
    """
    shape = tuple(tensor.shape)
    for dim in padding.dims:
        if not -tensor.ndim <= dim < tensor.ndim or dim % tensor.ndim == rows:
            problem = "the batch dimension" if -tensor.ndim <= dim < tensor.ndim else "not one of its dimensions"
            raise ValueError(f"cannot gather {path} of shape {shape} by {padding!r}: {dim} is {problem}")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"cannot gather {path} by {padding!r}: a sparse tensor cannot be padded; return tensor.to_dense()"
        )
    if not _holds(tensor.dtype, padding.value):
        raise ValueError(f"cannot gather {path} by {padding!r}: dtype {tensor.dtype} cannot hold this value")
    return tuple(dict.fromkeys(dim % tensor.ndim for dim in padding.dims))


def _holds(dtype: torch.dtype, value: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return math.isfinite(value) == bool(torch.tensor(value, dtype=dtype, device="cpu").isfinite())
    return math.isfinite(value) and torch.tensor(value, device="cpu").to(dtype).item() == value


def _different_sizes(path: str, axis: int, padded: Sequence[int], given: Sequence[torch.Tensor]) -> ValueError:
    """Return the error for outputs whose sizes differ in a dimension that is neither joined nor padded."""
    shapes = [tuple(tensor.shape) for tensor in given]
    may_differ = f"dimension {axis}"
    if padded:
        may_differ = f"dimensions {axis} (joined), {', '.join(map(str, padded))} (padded)"
    return ValueError(
        _DIFFERENT_SIZES.format(
            path=path,
            axis=axis,
            each=", ".join(f"replica {i} returned {shape}" for i, shape in enumerate(shapes)),
            may_differ=may_differ,
            dim=next(
                dim
                for dim, sizes in enumerate(zip(*shapes, strict=True))
                if dim not in (axis, *padded) and len({*sizes}) > 1
            ),
            nested="" if path == "output" else f" for {path}",
        )
    )


def _without_axes(shape: torch.Size, axes: set[int]) -> tuple[int, ...]:
    return tuple([size for dim, size in enumerate(shape) if dim not in axes])


_VALUES = (numbers.Complex, str, bytes, torch.Size, torch.dtype, torch.device)
_TENSOR = frozenset({torch.Tensor})
_OF_ONE_AXIS = frozenset({int, type(None), type(...)})  # those of `out_dims` for a single output


def _check_alike(path: str, given: tuple[Any, ...]) -> None:
    if not {*map(type, given)} <= _TENSOR and not all(isinstance(value, torch.Tensor) for value in given):
        raise pytree.disagreement(path, "types", [type(value).__name__ for value in given])
    for tensor in given:
        if not can_be_placed(tensor):
            raise cannot_be_placed("gather", path, tensor)
        if tensor.is_nested:
            raise TypeError(
                f"cannot gather {path}, a nested tensor: it has no dimension along which replicas can be joined. "
                "Return it padded (torch.nested.to_padded_tensor) with its lengths, or as a PackedSequence."
            )
    if len(given) == 1:
        return
    if len({tensor.ndim for tensor in given}) > 1:
        raise pytree.disagreement(path, "numbers of dimensions", [tuple(tensor.shape) for tensor in given])
    if len({tensor.dtype for tensor in given}) > 1:
        raise pytree.disagreement(path, "dtypes", [tensor.dtype for tensor in given])


def _check_agree(path: str, given: tuple[torch.Tensor, ...]) -> None:
    """Check that a tensor with `out_dims` None is the same in every replica, within rounding."""
    first = given[0].detach()
    rounding = 1e-4 * first.abs().max().item() if first.is_floating_point() and first.numel() else 0.0
    for other in given[1:]:
        if other.shape != first.shape or not torch.allclose(
            _devices.moved_to(other.detach(), first.device), first, rtol=0, atol=rounding, equal_nan=True
        ):
            raise pytree.disagreement(
                path, "values, but out_dims=None says that all are equal", [_brief(t) for t in given]
            )


def _brief(tensor: torch.Tensor) -> str:
    return f"{tensor.item():g}" if tensor.numel() == 1 else f"shape {tuple(tensor.shape)}"


def _common_value(path: str, given: tuple[Any, ...], whole: bool) -> Any:
    """Return the gathered value of a leaf that is no tensor.

    Numbers become a list, unless the leaf is `whole` (`out_dims` None): then they have to be equal, as strings have.
    """
    first = given[0]
    if any(type(value) is not type(first) for value in given):
        raise pytree.disagreement(path, "types", [type(value).__name__ for value in given])
    if isinstance(first, numbers.Complex) and not whole:
        return list(given)
    if all(value is first for value in given):
        return first
    if isinstance(first, _VALUES):
        if any(value != first for value in given):
            raise pytree.disagreement(path, "values", [repr(value) for value in given])
        return first
    remedy = "tensors, numbers or strings, in tuples, lists, dicts or dataclasses"
    if isinstance(first, numbers.Number):  # a Decimal, say
        remedy = "float(value)"
    if hasattr(first, "__array__"):  # numpy's, say
        remedy = "the tensor itself, without .numpy() or by torch.as_tensor(array), and convert the gathered output"
    raise TypeError(
        f"cannot gather {path}: each replica returned an object of type {type(first).__name__}. Return {remedy}; or "
        "register how the class is joined: unisono.register_batch_type."
    )


def without_rows(output: Any, rules: OutputRules) -> Any:
    """Return an output with 0 rows: tensors narrowed along the axis that the rules name, differentiable.

    Raises:
        BaseException: what the class of a registered batch raises if that cannot have 0 rows.
    """

    def cut(leaf: Any, axis: int | None) -> Any:
        if axis is not None and batch_type_of(leaf) is not None:
            return batch_types.without_rows(leaf)
        if not isinstance(leaf, torch.Tensor) or axis is None or not -leaf.dim() <= axis < leaf.dim():
            return leaf
        return leaf.narrow(axis, 0, 0)

    leaves, spec = pytree.flatten(output, "output")
    return pytree.unflatten(spec, map(cut, leaves, rules.axes(spec)[0]))
