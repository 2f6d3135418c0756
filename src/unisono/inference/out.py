"""Outputs written, row by row, into tensors or arrays that the caller gives."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from unisono.primitives import pytree
from unisono.primitives.dims import OutputRules, Padding
from unisono.primitives.gather import padded_axes
from unisono.runtime import devices as _devices
from unisono.runtime.errors import add_note


@dataclass
class _Target:
    """A tensor that is filled."""

    tensor: torch.Tensor
    axis: int | None  # of the rows; None: it has none
    padding: Padding | None  # how outputs that are shorter on other axes are padded; None: they have to be of one size
    num_filled: int = 0  # how many rows have been written

    @property
    def num_rows(self) -> int | None:
        """How many rows there are; None if it has no such axis."""
        if self.axis is None or not -self.tensor.ndim <= self.axis < self.tensor.ndim:
            return None
        return self.tensor.shape[self.axis]


class OutFiller:
    """Writes outputs into `out`, one behind the other along the axis of their rows.

    Args:
        out: a tensor, or an array of numpy's (a memory map too), or these in a form like the output's.
        rules: they say which axis of an output has the rows, and how outputs of different lengths are padded.

    Raises:
        TypeError: something else in `out`.
        ValueError: an array that cannot be written into; an `out` that the wrapper's `out_dims` do not describe.
    """

    def __init__(self, out: Any, rules: OutputRules) -> None:
        try:
            leaves, spec = pytree.flatten(out)
            axes, paddings = rules.axes(spec)
        except ValueError as error:
            add_note(error, "out must have the shape of the output: a tuple for a tuple, a dict for a dict")
            raise
        self._targets = {
            path: _Target(_tensor_over(leaf, f"out{path}"), axis, padding)
            for path, leaf, axis, padding in zip(spec.paths(), leaves, axes, paddings, strict=True)
        }

    def fill(self, outputs: Iterable[Any]) -> None:
        """Write all outputs.

        Raises:
            ValueError: an output that does not fit; says which, and both shapes. What came before it is written.
        """
        for number, output in enumerate(outputs):
            leaves = dict(pytree.leaves(output))
            if leaves.keys() != self._targets.keys():
                raise ValueError(
                    f"out has {_places(self._targets)}, but the output of batch {number} has "
                    f"{_places(leaves)}: out must have the shape of the output"
                )
            for path, leaf in leaves.items():
                _write(leaf, self._targets[path], f"out{path}", f"output{path} of batch {number}")

    def check_full(self) -> None:
        """Raise ValueError if rows of `out` are left."""
        for path, target in self._targets.items():
            if target.num_rows is not None and target.num_filled < target.num_rows:
                raise ValueError(
                    f"out{path} of shape {tuple(target.tensor.shape)} has {target.num_rows} rows, but all "
                    f"outputs together have {target.num_filled}: expected the same number"
                )


def _write(leaf: Any, target: _Target, name: str, what: str) -> None:
    """Write an output behind those before it.

    Args:
        name: the target's, for errors.
        what: which output it is, for errors.
    """
    if not isinstance(leaf, torch.Tensor) or not leaf.dim() or target.axis is None:
        kind = "a 0-dim tensor" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        raise ValueError(
            f"{what} has no batch dimension (it is {kind}), but {name} stores rows: iterate over the map instead"
        )
    tensor, start, axis = target.tensor, target.num_filled, target.axis
    padded = () if target.padding is None else padded_axes(what, leaf, axis % leaf.ndim, target.padding)
    if leaf.ndim != tensor.ndim or target.num_rows is None or not _fits(leaf, target, padded):
        off = "".join(f", or shorter on dimension {dim}, which is padded" for dim in padded)
        raise ValueError(
            f"{name} has the shape {tuple(tensor.shape)}, with {start} rows filled, but {what} has the shape "
            f"{tuple(leaf.shape)}: expected equal sizes except in dimension {axis}{off}, and enough room for the "
            "rows of all batches"
        )
    if not torch.can_cast(leaf.dtype, tensor.dtype):
        raise ValueError(f"{name} is {tensor.dtype}, which cannot hold the {leaf.dtype} of {what}")
    place = tensor.narrow(axis, start, leaf.size(axis))
    if place.shape != leaf.shape and target.padding is not None:
        place.fill_(target.padding.value)
        for dim in padded:
            place = place.narrow(dim, 0, leaf.size(dim))
    _devices.copy_into(place, leaf)
    target.num_filled += leaf.size(axis)


def _fits(leaf: torch.Tensor, target: _Target, padded: tuple[int, ...]) -> bool:
    assert target.axis is not None
    room = list(target.tensor.shape)
    room[target.axis] -= target.num_filled
    may_be_less = {target.axis % leaf.ndim, *padded}
    return all(
        own <= size if dim in may_be_less else own == size
        for dim, (own, size) in enumerate(zip(leaf.shape, room, strict=True))
    )


def _tensor_over(out: Any, name: str) -> torch.Tensor:
    """Return a tensor over the memory of `out`."""
    if isinstance(out, torch.Tensor):
        if out.layout != torch.strided or any(
            size > 1 and not stride for size, stride in zip(out.shape, out.stride(), strict=True)
        ):
            raise ValueError(f"{name}: expected a dense tensor in which no elements share memory (no expand)")
        return out.detach()
    interface = getattr(out, "__array_interface__", None)
    if interface is None:
        raise TypeError(f"{name}: expected a tensor or a numpy array, got {type(out).__name__}")
    if interface["data"][1]:
        raise ValueError(f"{name}: the array is read-only; open a memory map with mode='r+' or 'w+'")
    try:
        tensor = torch.as_tensor(out, device="cpu")  # whatever the default device is: there its memory is
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: torch cannot write into an array of {out.dtype} with the strides {out.strides}: "
            "expected this machine's byte order and positive strides"
        ) from None
    if tensor.numel() and tensor.data_ptr() != interface["data"][0]:
        raise TypeError(f"{name}: torch cannot write into this {type(out).__name__}; give a numpy array")
    return tensor


def _places(leaves: dict[str, Any]) -> str:
    return "one value, not in a dict or tuple" if "" in leaves else f"values at {', '.join(leaves) or 'no place'}"
