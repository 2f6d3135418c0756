"""Inputs: the arguments of one call, leaf by leaf, and each replica's part of them."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any, TypeAlias

import torch

from unisono.primitives import pytree
from unisono.primitives.batch_types import BatchType, batch_type_of
from unisono.primitives.dims import in_dims_of, spread_inputs
from unisono.primitives.placements import Placement, Replicate, Shard, Single, can_be_placed, cannot_be_placed
from unisono.primitives.references import MODES
from unisono.primitives.sample_lists import SampleList, warn_of_whole_lists, with_entries
from unisono.runtime import devices as _devices

# Makes each replica's part from a tensor and its placement.
Place = Callable[[torch.Tensor, Placement], Sequence[Any]]

_NAMED = 8  # inputs that a message names at most

Flags: TypeAlias = tuple[tuple[Any, ...], tuple[str, ...]]  # of all leaves; and the names of the keyword inputs


class Arguments:
    """The inputs of one call, leaf by leaf, and where each holds its rows.

    Attributes:
        rows: how many rows the call has; None if nothing has rows (no tensors, 0-dim ones, or ones that are not split).
        axes: of each leaf, the axis that holds its rows; None: it has none.
        leaves: every leaf of the inputs, positional ones first.
        flags: what can lead a forward another way: leaves that are bools, strings or None, and the others' types.

    Raises:
        ValueError: tensors with different numbers of rows, or one without its axis; names each.
        TypeError: a tensor that torch cannot split: nested, CSR, mkldnn, or without data (meta).
    """

    def __init__(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        dim: int,
        in_dims: Any = ...,
        function: Callable[..., Any] | None = None,
        axes: Sequence[int | None] | None = None,
    ) -> None:
        self._inputs, self._kwargs = inputs, kwargs
        self._is_flat = pytree.is_flat(inputs) and (not kwargs or pytree.is_flat(kwargs))
        self._specs: tuple[pytree.Spec, pytree.Spec] | None = None
        if self._is_flat:  # the common case, without pytree's cost
            self.leaves = [*inputs, *kwargs.values()]
            self._batch_types: list[BatchType | None] = [None] * len(self.leaves)
        else:
            self.leaves = self._flatten()
            self._batch_types = [*map(batch_type_of, self.leaves)]
        self.flags: Flags = tuple([each if type(each) in MODES else type(each) for each in self.leaves]), (*kwargs,)
        if axes is not None:
            self.axes = [*axes]
        elif in_dims is ... and self._is_flat:
            self.axes = [dim] * len(self.leaves)
        else:
            self.axes = spread_inputs(in_dims, *self._structure(), dim, function)
        counts: dict[int, int] = {}  # by number, the rows of each leaf that has some
        for number, (leaf, axis, batch_type) in enumerate(zip(self.leaves, self.axes, self._batch_types, strict=True)):
            if isinstance(leaf, torch.Tensor):
                if not can_be_placed(leaf):
                    raise cannot_be_placed("scatter", self._paths()[number], leaf)
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
                    error.add_note(f"while {self._paths()[number]} was scattered")
                    raise
                if rows is not None:
                    counts[number] = rows
        distinct = {*counts.values()}
        if len(distinct) > 1:
            raise self._different_rows(counts, dim)
        self.rows = distinct.pop() if distinct else None

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

    def _paths(self) -> list[str]:
        """Return how messages name each leaf."""
        of_inputs, of_kwargs = self._structure()
        return [*of_inputs.paths("inputs"), *of_kwargs.paths("kwargs")]

    def _cannot_be_split(self, number: int, leaf: torch.Tensor, axis: int) -> TypeError | ValueError:
        path = self._paths()[number]
        if leaf.is_nested:
            return TypeError(
                f"cannot scatter {path}, a nested tensor: it has no axis along which it could be split. Give it padded "
                "(torch.nested.to_padded_tensor) with its lengths, or as a PackedSequence."
            )
        shape = tuple(leaf.shape)
        return ValueError(f"cannot scatter {path} of shape {shape} along dim={axis}: it has no such axis")

    def _different_rows(self, counts: dict[int, int], dim: int) -> ValueError:
        paths = self._paths()
        each = _named([f"{paths[number]} has {rows}" for number, rows in counts.items()])
        [(of_most, _)] = Counter(counts.values()).most_common(1)  # if as many have others, of the first
        others = [number for number, rows in counts.items() if rows != of_most]
        axes = [axis if counts.get(number) == of_most or axis is None else dim for number, axis in enumerate(self.axes)]
        for number in others:
            axes[number] = None
        whole = _named([paths[number] for number in others])
        return ValueError(
            f"cannot scatter tensors with different numbers of rows: {each}. Give every tensor the rows of the batch "
            f"(tensor.expand). Or, if every replica needs all of {whole}: "
            f"DataParallel(..., in_dims={in_dims_of(*self._structure(), axes, dim)}). A list with one entry a row is a "
            "unisono.SampleList."
        )

    def split(self, sizes: Sequence[int], place: Place) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return each replica's positional and keyword inputs: `sizes[i]` rows for replica i; other values unchanged.

        Args:
            sizes: one a replica that has a share.
            place: makes each replica's part from a tensor and its placement.
        """
        sizes = tuple(sizes)
        if not self._is_flat and self.rows is not None and len(sizes) > 1:
            following = zip(self.leaves, self.axes, strict=True)
            for spec, name in zip(self._structure(), ("inputs", "kwargs"), strict=True):
                warn_of_whole_lists(spec, name, following, self.rows)
        split = [
            _parts(leaf, axis, batch_type, sizes, place)
            for leaf, axis, batch_type in zip(self.leaves, self.axes, self._batch_types, strict=True)
        ]
        if self._is_flat:
            num, names = len(self._inputs), list(self._kwargs)
            of_replicas = zip(*split, strict=True) if split else [()] * len(sizes)
            return [(parts[:num], dict(zip(names, parts[num:], strict=True))) for parts in of_replicas]
        return [self._with_leaves([parts[index] for parts in split]) for index in range(len(sizes))]

    def first_rows(self, rows: int) -> "Arguments | None":
        """Return arguments with the first `rows` rows, copied; if there are fewer, they are repeated.

        None if inputs of a registered class have fewer: their rows cannot be repeated here, but those of a SampleList.
        """

        def first(leaf: Any, axis: int | None, batch_type: BatchType | None) -> Any:
            if axis is not None and isinstance(leaf, SampleList):
                return pytree.map_all_tensors(_copied, with_entries(leaf, islice(cycle(leaf), rows)))
            if axis is not None and batch_type is not None:
                own_rows = batch_type.rows(leaf)
                some = next(iter(batch_type.scatter(leaf, [rows, (rows if own_rows is None else own_rows) - rows])))
                return pytree.map_all_tensors(_copied, some)
            if not isinstance(leaf, torch.Tensor) or axis is None or not leaf.dim():
                return leaf
            return leaf.detach().index_select(axis, torch.arange(rows, device=leaf.device) % leaf.size(axis))

        of_classes = [leaf for leaf, kind in zip(self.leaves, self._batch_types, strict=True) if kind is not None]
        if (self.rows or 0) < rows and not all(isinstance(leaf, SampleList) for leaf in of_classes):
            return None
        return self._mapped(first, rows)

    def copied(self) -> "Arguments":
        """Return arguments with copies of all containers and tensors; these need gradients where the originals do."""
        other = self._mapped(lambda leaf, *_: pytree.map_all_tensors(_copied, leaf), self.rows)
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
        """Return these arguments with the rows of others, in the dtypes of these, and needing gradients as these do."""
        values = iter(other.leaves)

        def replaced(leaf: Any, axis: int | None, batch_type: BatchType | None) -> Any:
            value = next(values)
            if not isinstance(leaf, torch.Tensor):
                return leaf if batch_type is None else pytree.map_all_tensors(_detached, value)
            if axis is None or not leaf.dim() or not isinstance(value, torch.Tensor):
                return leaf
            return value.detach().to(leaf.dtype).requires_grad_(leaf.requires_grad)

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


def _named(each: Sequence[str]) -> str:
    """Return a list for a message, cut if it is long."""
    return ", ".join(each[:_NAMED]) + (f", and {len(each) - _NAMED} more" if len(each) > _NAMED else "")


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


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
            f"the registered scatter of {type(leaf).__name__} returned {len(shards)} batches for the row counts "
            f"{list(sizes)}: expected one each"
        )
    return [_placed(shard, index, place) for index, shard in enumerate(shards)]


def _placed(shard: Any, index: int, place: Place) -> Any:
    """Return what a registered scatter returned for replica `index`, with its tensors placed there only."""
    return pytree.map_all_tensors(lambda tensor: place(tensor, Single(index))[index], shard)


def scattered(
    arguments: Arguments, devices: Sequence[torch.device], sizes: Sequence[int]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the (positional, keyword) inputs of each device: `sizes[i]` rows, copied there; differentiable.

    They are copies even where the device is the same, so that a module that writes into its input writes into its own.
    """

    def place(tensor: torch.Tensor, placement: Placement) -> list[Any]:
        parts = [placement.part(tensor, i) for i in range(len(devices))]
        return [p if p is None else _devices.copied_to(p, device) for p, device in zip(parts, devices, strict=True)]

    return arguments.split(sizes, place)
