"""scatter: split the rows of a batch among replicas.

`Arguments` are the inputs of one call, leaf by leaf; `DataParallel` splits them as the verb does. The gradient of a
scatter is a gather (gather.py).
"""

import copy
import io
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from operator import attrgetter
from typing import Any, Self, TypeAlias, TypeVar

import torch

from unisono.primitives import pytree
from unisono.primitives.batch_types import BatchType, batch_type_of
from unisono.primitives.checks import check_kwargs
from unisono.primitives.dims import check_dim, in_dims_of, spread_inputs
from unisono.primitives.placements import Placement, Replicate, Shard, Single, can_be_placed, cannot_be_placed
from unisono.primitives.references import MODES
from unisono.primitives.sample_lists import (
    SampleList,
    may_be_samples,
    split_lists,
    with_entries,
)
from unisono.primitives.split_sizes import split_rows
from unisono.primitives.tensor_attributes import carry_attributes
from unisono.runtime import devices as _devices
from unisono.runtime.devices import DeviceIds
from unisono.runtime.errors import add_note
from unisono.runtime.model_warnings import ModelWarnings, of_process

T = TypeVar("T")
# Makes each replica's part from a tensor and its placement.
Place = Callable[[torch.Tensor, Placement], Sequence[Any]]

_is_nested = attrgetter("is_nested")
_NAMED = 8  # inputs that a message names at most
_WHOLE = (
    "{path}: if each entry belongs to a row (a sample of the batch), give a tensor or a unisono.SampleList, or "
    "register how its class is split (unisono.register_batch_type). It has as many entries as the batch has rows, and "
    "every replica gets all of it. If every replica needs all: in_dims={in_dims}."
)
_ITERATOR = "{path} is an iterator, of which each replica would take some of the items. Give a list of them: [*{path}]."
_SPLIT = (
    "if an input has no batch dimension (class weights, a table, weights of layers), give every replica all of it, "
    "such as in_dims={in_dims}: the inputs were split by rows, {sizes}: {each}"
)
_SPLIT_ONLY = (
    "if its rows (samples) are on another dimension, write in_dims={in_dims}: the inputs were split by rows, {sizes}: "
    "{each}"
)
_ARRAYS = (
    "{each}, and only tensors are split: use torch.from_numpy({path}). No input has rows, so one replica got everything"
)
_SPLIT_ENTRIES = (
    "if a list has one entry for each row, make it a unisono.SampleList: the inputs were split by rows, {sizes}: {each}"
)

Flags: TypeAlias = tuple[tuple[Any, ...], tuple[str, ...]]  # of all leaves; and the names of the keyword inputs


def scatter(inputs: T, target_gpus: DeviceIds, dim: int = 0) -> list[T]:
    """Split the tensors in `inputs` along `dim` by torch's rule, ceil(rows / n) rows each; one result a device.

    Containers keep their types; objects that are not tensors are the same in every result. With fewer rows than
    devices there are fewer results: at least one, and as many as there are devices where no tensor has rows.

        >>> shards = unisono.scatter({"x": torch.zeros(10, 5), "flag": True}, ["cpu", "cpu", "cpu", "cpu"])
        >>> [shard["x"].shape[0] for shard in shards]
        [3, 3, 3, 1]

    Args:
        inputs: a tensor, or tuples, lists, dicts and dataclasses of tensors, with `rows` along `dim`.
        target_gpus: the devices: accelerator indices, strings or `torch.device`s.
        dim: the axis that holds the rows, of every tensor that is not 0-dim.

    Returns:
        A list of values like `inputs`, shard i a copy on device i. Differentiable.

    Raises:
        ValueError: tensors with different numbers of rows, or without the axis.
    """
    return [args[0] for args, _ in _scatter_call((inputs,), {}, target_gpus, dim)]


def scatter_kwargs(
    inputs: Any, kwargs: dict[str, Any] | None, target_gpus: DeviceIds, dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Scatter the positional and keyword inputs of one call; both results have one entry a shard.

        >>> inputs, kwargs = unisono.scatter_kwargs((torch.zeros(4, 5),), {"scale": 2.0}, ["cpu", "cpu"])
        >>> [x.shape[0] for (x,) in inputs], kwargs
        ([2, 2], ({'scale': 2.0}, {'scale': 2.0}))

    Args, Raises: as `scatter`. `inputs` is the tuple of positional arguments; anything else is the only one.
    """
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    shards = _scatter_call(inputs, check_kwargs(kwargs, "kwargs"), target_gpus, dim)
    return tuple(args for args, _ in shards), tuple(kw for _, kw in shards)


def _scatter_call(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], target_gpus: DeviceIds, dim: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    check_dim(dim)
    devices = _devices.resolve_each(target_gpus, "target_gpus")
    if not devices:
        raise ValueError("no devices to scatter to: expected at least one")
    arguments = Arguments(inputs, kwargs, dim).find_rows(dim)
    if arguments.rows is None:  # nothing to split: every device gets the same
        return scattered(arguments, devices, [0] * len(devices), of_process)
    # By torch's rule the last devices may get no rows.
    sizes = [size for size in split_rows(arguments.rows, len(devices)) if size] or [0]
    return scattered(arguments, devices[: len(sizes)], sizes, of_process)


class Arguments:
    """The inputs of one call, leaf by leaf; where each holds its rows, once they are found (`find_rows`), or known.

    Attributes:
        rows: how many rows the call has; None if nothing has rows (no tensors, 0-dim ones, or ones that are not split).
        axes: of each leaf, the axis that holds its rows; None: it has none.
        leaves: every leaf of the inputs, positional ones first.
        is_flat: whether each input is a leaf of a usual kind.
        flags: what can lead a forward another way: leaves that are bools, strings or None, and the others' types.
    """

    rows: int | None
    axes: Sequence[int | None]

    def __init__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> None:
        self._inputs, self._kwargs, self._dim = inputs, kwargs, dim
        self.is_flat = pytree.is_flat(inputs) and (not kwargs or pytree.is_flat(kwargs))
        self._specs: tuple[pytree.Spec, pytree.Spec] | None = None
        if self.is_flat:  # the common case, without pytree's cost
            self.leaves = [*inputs, *kwargs.values()]
            self._batch_types: list[BatchType | None] = [None] * len(self.leaves)
        else:
            self.leaves = self._flatten()
            self._batch_types = [*map(batch_type_of, self.leaves)]
        self.flags: Flags = tuple([each if type(each) in MODES else type(each) for each in self.leaves]), (*kwargs,)

    def kind(self, *, on_any_axis: bool) -> Hashable | None:
        """Return what is equal for calls of one structure, with the same flags and rows; None: it is not known.

        Args:
            on_any_axis: whether rows may be on another axis than `dim`.
        """
        if not self.is_flat and [each for each in self._batch_types if each is not None]:
            return None  # how many rows these have, their classes know
        sizes = slice(None) if on_any_axis else slice(self._dim, self._dim + 1 or None)
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        if True in map(_is_nested, tensors):
            return None
        forms = [(t.ndim, t.shape[sizes], t.requires_grad, t.layout, t.device) for t in tensors]
        tree = len(self._inputs) if self.is_flat else tuple([spec.kind() for spec in self._structure()])
        return tree, self.flags, (*forms,)

    def find_rows(
        self,
        in_dims: Any = ...,
        function: Callable[..., Any] | None = None,
        axes: Sequence[int | None] | None = None,
    ) -> Self:
        """Find the rows of each leaf; return these arguments.

        Args:
            in_dims: as the wrapper has it.
            function: what is called, for the names in `in_dims`.
            axes: of each leaf, where they are known.

        Raises:
            ValueError: tensors with different numbers of rows, or one without its axis; names each.
            TypeError: a tensor that torch cannot split: nested, CSR, mkldnn, or without data (meta).
        """
        if axes is not None:
            self.axes = axes
        elif in_dims is ... and self.is_flat:
            self.axes = [self._dim] * len(self.leaves)
        else:
            self.axes = spread_inputs(in_dims, *self._structure(), self._dim, function)
        counts: dict[int, int] = {}  # by number, the rows of each leaf that has some
        for number, (leaf, axis, batch_type) in enumerate(zip(self.leaves, self.axes, self._batch_types, strict=True)):
            if isinstance(leaf, torch.Tensor):
                if not can_be_placed(leaf):
                    raise cannot_be_placed("scatter", self.paths()[number], leaf)
                if axis is None:
                    continue
                if leaf.is_nested or (leaf.ndim and not -leaf.ndim <= axis < leaf.ndim):
                    raise self._cannot_be_split(number, leaf, axis)
                if leaf.ndim:
                    counts[number] = leaf.shape[axis]
            elif axis is not None and batch_type is not None:
                try:
                    rows = batch_type.rows(leaf)
                except Exception as error:
                    add_note(error, f"while scattering {self.paths()[number]}")
                    raise
                if rows is not None:
                    counts[number] = rows
        distinct = {*counts.values()}
        if len(distinct) > 1:
            raise self._different_rows(counts, self._dim)
        self.rows = distinct.pop() if distinct else None
        return self

    def check_whole(self, num_shards: int, warnings: ModelWarnings | None, *, in_parts: bool = False) -> None:
        """Look at what goes whole to each of several replicas, or to each part of a replica's rows.

        Args:
            warnings: the model's, which is told of what may have an entry a row; None: nothing is said.
            in_parts: whether a replica runs its rows in parts.

        Raises:
            TypeError: an iterator, of which each would take some items.
        """
        if self.is_flat:
            return
        for number, leaf in enumerate(self.leaves if num_shards > 1 else ()):
            if isinstance(leaf, Iterator) and not isinstance(leaf, io.IOBase):
                raise TypeError(_ITERATOR.format(path=self.paths()[number]))
        if warnings is not None and self.rows is not None and (num_shards > 1 or in_parts):
            for path, numbers in self.whole_with_rows():
                warnings.give(_WHOLE.format(path=path, in_dims=self.in_dims_with_whole(numbers)))

    def _flatten(self) -> list[Any]:
        """Take the structures of the inputs; return their leaves."""
        leaves, of_inputs = pytree.flatten(self._inputs, "inputs")
        more, of_kwargs = pytree.flatten(self._kwargs, "kwargs")
        self._specs = of_inputs, of_kwargs
        return leaves + more

    def _structure(self) -> tuple[pytree.Spec, pytree.Spec]:
        """Return the structures of the positional and the keyword inputs."""
        if self._specs is None:
            self._flatten()
        assert self._specs is not None
        return self._specs

    def paths(self) -> list[str]:
        """Return how messages name each leaf."""
        of_inputs, of_kwargs = self._structure()
        return [*of_inputs.paths("inputs"), *of_kwargs.paths("kwargs")]

    def _cannot_be_split(self, number: int, leaf: torch.Tensor, axis: int) -> TypeError | ValueError:
        path = self.paths()[number]
        if leaf.is_nested:
            return TypeError(
                f"cannot scatter {path}, a nested tensor: it has no dimension to split. Give it padded "
                "(torch.nested.to_padded_tensor) with its lengths, or as a PackedSequence."
            )
        shape = tuple(leaf.shape)
        return ValueError(f"cannot scatter {path} of shape {shape} along dim={axis}: it has no such dimension")

    def _different_rows(self, counts: dict[int, int], dim: int) -> ValueError:
        paths, first = self.paths(), next(iter(counts.values()))
        each = _named([f"{paths[number]} has {rows}" for number, rows in counts.items()])
        others = [number for number, rows in counts.items() if rows != first]
        elsewhere = {  # as in the state of an LSTM
            number: self.leaves[number].shape.index(first)
            for number in others
            if isinstance(self.leaves[number], torch.Tensor) and first in self.leaves[number].shape
        }

        def in_dims_with(axes: dict[int, int | None]) -> Any:
            now = [axis if axis is None or number in counts else dim for number, axis in enumerate(self.axes)]
            return in_dims_of(*self._structure(), [axes.get(number, axis) for number, axis in enumerate(now)], dim)

        remedies = []
        if elsewhere:
            there = _named([paths[number] for number in elsewhere])
            in_dims = in_dims_with(dict.fromkeys(others) | elsewhere)
            remedies.append(f"If the batch of {there} is on another dimension: DataParallel(..., in_dims={in_dims}).")
        lists = self._lists()
        if lists:
            named = _named([path for path, _ in lists])
            remedies.append(f"If each entry of {named} belongs to a row, give a unisono.SampleList.")
        # A list of two may be a pair.
        inside = tuple([f"{path}[" for path, spec in lists if len(spec.specs) > 2])
        are_all = all(paths[number].startswith(inside) for number in others)
        if not are_all:
            batches = [first]  # or what most have
            if len(elsewhere) < len(others):
                batches += [rows for rows, _ in Counter(counts.values()).most_common(1) if rows != first]
            for batch in batches:
                whole = dict.fromkeys(number for number, rows in counts.items() if rows != batch)
                named, in_dims = _named([paths[number] for number in whole]), in_dims_with(whole)
                remedies.append(f"If every replica needs all of {named}: DataParallel(..., in_dims={in_dims}).")
            remedies.append("Otherwise give every tensor one entry for each row (tensor.expand).")
        return ValueError(
            f"cannot scatter tensors with different numbers of rows (samples): {each}. {' '.join(remedies)}"
        )

    def _lists(self, fewest: int = 2) -> list[tuple[str, pytree.Spec]]:
        """Return the lists that have at least so many alike entries with tensors, each with its path."""
        of_inputs, of_kwargs = self._structure()
        return [*split_lists(of_inputs, "inputs", fewest), *split_lists(of_kwargs, "kwargs", fewest)]

    def split(self, sizes: Sequence[int], place: Place) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return each replica's positional and keyword inputs: `sizes[i]` rows for replica i; other values unchanged.

        Args:
            sizes: one a replica that has a share.
            place: makes each replica's part from a tensor and its placement.
        """
        sizes = tuple(sizes)
        split = [
            _parts(leaf, axis, batch_type, sizes, place)
            for leaf, axis, batch_type in zip(self.leaves, self.axes, self._batch_types, strict=True)
        ]
        if self.is_flat:
            num, names = len(self._inputs), list(self._kwargs)
            of_replicas = zip(*split, strict=True) if split else [()] * len(sizes)
            return [(parts[:num], dict(zip(names, parts[num:], strict=True))) for parts in of_replicas]
        return [self._with_leaves([parts[index] for parts in split]) for index in range(len(sizes))]

    def _split_numbers(self) -> list[int]:
        """Return the numbers of the tensors that are split."""
        return [
            number
            for number, (leaf, axis) in enumerate(zip(self.leaves, self.axes, strict=True))
            if axis is not None and isinstance(leaf, torch.Tensor) and leaf.dim()
        ]

    def in_dims_with_whole(self, numbers: Sequence[int]) -> dict[Any, Any]:
        """Return the `in_dims` with which every replica gets all of the leaves with these numbers, others as now."""
        axes = [None if number in numbers else axis for number, axis in enumerate(self.axes)]
        return in_dims_of(*self._structure(), axes, self._dim)

    def may_have_no_rows(self) -> list[list[int]]:
        """Return sets of tensors that may be split by mistake, the likeliest first: the numbers of their leaves.

        One tensor has the rows if several are split. It is likely to be the first; others with fewer dimensions are the
        first to be doubted, and of those the ones that are no integers, as targets are.
        """
        split = self._split_numbers()
        if len(split) < 2:
            return []
        tensors = self.leaves
        doubted = sorted(split[1:], key=lambda i: (tensors[i].dim(), not tensors[i].dtype.is_floating_point))
        return [*([number] for number in doubted), split[1:], split[:1]]

    def whole_with_rows(self) -> list[tuple[str, range]]:
        """Return what goes whole to every replica and may have an entry a row: its path, and the numbers of its leaves.

        Lists, arrays, and objects that hold a tensor or an array.
        """
        found: list[tuple[str, range]] = []
        rows, start = self.rows or 0, 0
        for structure, name in zip(self._structure(), ("inputs", "kwargs"), strict=True):
            for path, spec, inside in structure.parts(name, start):
                is_whole = all(map(self._is_whole, inside)) and spec is not structure
                is_named = any(inside.start in numbers for _, numbers in found)
                if is_whole and not is_named and rows > 1 and self._may_have_rows(spec, inside, rows):
                    found.append((path, inside))
            start += structure.num_leaves()
        return found

    def _is_whole(self, number: int) -> bool:
        """Return whether a leaf is not split, and nothing says that this is meant."""
        is_split = isinstance(self.leaves[number], torch.Tensor) or self._batch_types[number] is not None
        return not is_split and self.axes[number] is not None

    def _may_have_rows(self, spec: pytree.Spec, inside: range, rows: int) -> bool:
        if spec.keys is not None:
            return len(spec.keys) == rows and may_be_samples(spec.value)
        leaf, axis = self.leaves[inside.start], self.axes[inside.start]
        return axis is not None and (_num_entries(leaf, axis) == rows or _holds_rows(leaf, axis, rows))

    def described(self, numbers: Sequence[int], most: int = _NAMED) -> str:
        """Return the paths of tensors, with their shapes and the axes along which they are split."""
        paths = self.paths()
        each = [f"{paths[i]} of shape {tuple(self.leaves[i].shape)} along dim {self.axes[i]}" for i in numbers]
        return _named(each, most)

    def how_split(self, sizes: Sequence[int]) -> str | None:
        """Return how the inputs were split, in words, and what to write if that is not meant.

        None: there is nothing to doubt. The only tensor in a list may be one row.
        """
        if self.rows is None:
            return self._arrays()
        split = self._split_numbers()
        lists = self._lists(fewest=1 if len(split) == 1 else 2)
        # Beside another tensor a list is known to be a container, because its entries have the batch's rows.
        num_tensors = sum(isinstance(leaf, torch.Tensor) for leaf in self.leaves)
        are_entries = bool(lists) and num_tensors == sum(_num_tensors(spec) for _, spec in lists)
        if len(sizes) < 2 or not split or (len(split) == 1 and not are_entries and self.leaves[split[0]].dim() == 1):
            return None
        each = self.described(split)
        rows = f"{self.rows} = {' + '.join(map(str, sizes))}"
        if are_entries:
            return _SPLIT_ENTRIES.format(sizes=rows, each=self.described(split, most=2))
        if len(split) == 1:
            return _SPLIT_ONLY.format(sizes=rows, each=each, in_dims=self._in_dims_elsewhere(split[0]))
        in_dims = self.in_dims_with_whole(self.may_have_no_rows()[0])
        return _SPLIT.format(sizes=rows, each=each, in_dims=in_dims)

    def _in_dims_elsewhere(self, number: int) -> Any:
        """Return the `in_dims` with which the only tensor that is split is split along the first other axis."""
        axis = 1 if self.axes[number] in (0, -self.leaves[number].dim()) else 0
        if sum(isinstance(leaf, torch.Tensor) for leaf in self.leaves) == 1:
            return axis
        axes = [axis if each == number else own for each, own in enumerate(self.axes)]
        return in_dims_of(*self._structure(), axes, self._dim)

    def _arrays(self) -> str | None:
        """Return in words which inputs are numpy's arrays; None: none is."""
        each = zip(self.paths(), self.leaves, self.axes, strict=True)
        kinds = ((path, type(leaf)) for path, leaf, axis in each if _num_entries(leaf, axis or 0) is not None)
        arrays = [path for path, kind in kinds if kind.__module__ == "numpy"]
        if not arrays:
            return None
        return _ARRAYS.format(each=_named([f"{path} is a numpy.ndarray" for path in arrays]), path=arrays[0])

    def first_rows(self, rows: int) -> "Arguments | None":
        """Return arguments with the first `rows` rows, copied; if there are fewer, they are repeated.

        None if inputs of a registered class have fewer: their rows cannot be repeated here, but those of a SampleList.
        """

        def first(leaf: Any, axis: int | None, batch_type: BatchType | None) -> Any:
            if axis is not None and isinstance(leaf, SampleList):
                return pytree.map_tensors(_copied, with_entries(leaf, islice(cycle(leaf), rows)))
            if axis is not None and batch_type is not None:
                own_rows = batch_type.rows(leaf)
                some = next(iter(batch_type.scatter(leaf, [rows, (rows if own_rows is None else own_rows) - rows])))
                return pytree.map_tensors(_copied, some)
            if not isinstance(leaf, torch.Tensor) or axis is None or not leaf.dim():
                return leaf
            return leaf.detach().index_select(axis, torch.arange(rows, device=leaf.device) % leaf.size(axis))

        of_classes = [leaf for leaf, kind in zip(self.leaves, self._batch_types, strict=True) if kind is not None]
        if (self.rows or 0) < rows and not all(isinstance(leaf, SampleList) for leaf in of_classes):
            return None
        return self._mapped(first, rows)

    def copied(self) -> "Arguments":
        """Return arguments with copies of all containers and tensors, through which gradients go to the originals."""
        other = self._mapped(lambda leaf, *_: pytree.map_tensors(_cloned, leaf), self.rows)
        other._inputs, other._kwargs = self._with_leaves(other.leaves, rebuild_all=True)
        other._flatten()
        return other

    def with_rows(self, rows: int) -> "Arguments":
        """Return arguments like these with `rows` rows of zeros."""

        def like(leaf: Any, axis: int | None, _: BatchType | None) -> Any:
            if not isinstance(leaf, torch.Tensor) or axis is None or not leaf.dim():
                return leaf
            shape = list(leaf.shape)
            shape[axis] = rows
            return leaf.new_zeros(shape)

        return self._mapped(like, rows)

    def with_rows_of(self, other: "Arguments") -> "Arguments":
        """Return these arguments, which have no rows, with those of others, in the dtypes of these.

        They are linked to these, which get gradients without entries: what has made them takes part in backward.
        """
        values = iter(other.leaves)

        def replaced(leaf: Any, axis: int | None, batch_type: BatchType | None) -> Any:
            value = next(values)
            if not isinstance(leaf, torch.Tensor):
                return leaf if batch_type is None else pytree.map_tensors(_detached, value)
            if axis is None or not leaf.dim() or not isinstance(value, torch.Tensor):
                return leaf
            value = value.detach().to(leaf.dtype)
            return _StandIn.apply(value, leaf).requires_grad_() if leaf.requires_grad else value  # type: ignore[no-untyped-call]

        return self._mapped(replaced, other.rows)

    def _mapped(self, function: Callable[[Any, int | None, BatchType | None], Any], rows: int | None) -> "Arguments":
        """Return arguments whose leaves are `function(leaf, axis, batch_type)`, with `rows` rows."""
        other = copy.copy(self)
        other.leaves = [*map(function, self.leaves, self.axes, self._batch_types)]
        other.rows = rows
        return other

    def _with_leaves(
        self, leaves: Sequence[Any], *, rebuild_all: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword inputs like the caller's with other leaves.

        Args:
            rebuild_all: make new containers also where no leaf is another.
        """
        of_inputs, of_kwargs = self._structure()
        following = iter(leaves)
        inputs = pytree.unflatten(of_inputs, following, rebuild_all=rebuild_all)
        return inputs, pytree.unflatten(of_kwargs, following, rebuild_all=rebuild_all)


class _StandIn(torch.autograd.Function):
    """Rows in the place of those that a tensor does not have: `apply(rows, tensor)` returns them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.tensor = tensor.detach()
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, torch.zeros_like(ctx.tensor)


def _num_tensors(spec: pytree.Spec) -> int:
    if spec.keys is None:
        return int(isinstance(spec.value, torch.Tensor))
    return sum([_num_tensors(child) for child in spec.specs])


def _holds_rows(leaf: Any, axis: int, rows: int) -> bool:
    """Return whether an attribute of an object is a tensor or an array with as many entries as rows."""
    if type(leaf) in MODES or isinstance(leaf, torch.Tensor | torch.nn.Module | type | Callable):
        return False
    try:
        held = [each.shape for each in vars(leaf).values() if hasattr(each, "shape")]
        return any(len(shape) and -len(shape) <= axis < len(shape) and shape[axis] == rows for shape in held)
    except Exception:  # noqa: BLE001 - the code of a user's class
        return False


def _num_entries(leaf: Any, axis: int) -> int | None:
    """Return how many entries a leaf has along an axis, if it is an array or a sequence of another library's."""
    kind = type(leaf)
    if kind in MODES or isinstance(leaf, torch.Tensor | str | bytes | torch.Size | Mapping | torch.nn.Module):
        return None
    try:
        shape = getattr(leaf, "shape", None)
        if isinstance(shape, tuple) and shape:
            return shape[axis] if -len(shape) <= axis < len(shape) else None
        return len(leaf) if hasattr(kind, "__len__") and hasattr(kind, "__getitem__") else None
    except Exception:  # noqa: BLE001 - an array without axes, or the code of a user's class
        return None


def _named(each: Sequence[str], most: int = _NAMED) -> str:
    """Return a list for a message, cut if it is long."""
    return ", ".join(each[:most]) + (f", and {len(each) - most} more" if len(each) > most else "")


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, a leaf."""
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    carry_attributes(tensor, [copy])
    return copy


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, through which gradients go to the tensor."""
    copy = (tensor if tensor.requires_grad else tensor.detach()).clone()
    carry_attributes(tensor, [copy])
    return copy


def _parts(
    leaf: Any, axis: int | None, batch_type: BatchType | None, sizes: tuple[int, ...], place: Place
) -> Sequence[Any]:
    """Return what each replica gets for a leaf."""
    if isinstance(leaf, torch.Tensor):
        return place(leaf, Shard(axis, sizes) if axis is not None and leaf.dim() else Replicate())
    if batch_type is None:
        return [leaf] * len(sizes)
    shards = list(batch_type.scatter(leaf, list(sizes))) if axis is not None else [leaf] * len(sizes)
    if len(shards) != len(sizes):
        raise ValueError(
            f"the registered scatter of {type(leaf).__name__} returned {len(shards)} batches for the row "
            f"counts {list(sizes)}: expected one for each"
        )
    return [_placed(shard, index, place) for index, shard in enumerate(shards)]


def _placed(shard: Any, index: int, place: Place) -> Any:
    """Return what a registered scatter returned for replica `index`, with its tensors placed there only."""
    return pytree.map_tensors(lambda tensor: place(tensor, Single(index))[index], shard)


def scattered(
    arguments: Arguments,
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    warnings: ModelWarnings | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the (positional, keyword) inputs of each device: `sizes[i]` rows, copied there; differentiable.

    They are copies even where the device is the same, so that a module that writes into its input writes into its own.

    Args:
        warnings: as in `Arguments.check_whole`.
    """
    arguments.check_whole(len(sizes), warnings)

    def place(tensor: torch.Tensor, placement: Placement) -> list[Any]:
        parts = [placement.part(tensor, i) for i in range(len(devices))]
        placed = [p if p is None else _devices.copied_to(p, device) for p, device in zip(parts, devices, strict=True)]
        carry_attributes(tensor, placed)
        return placed

    return arguments.split(sizes, place)
