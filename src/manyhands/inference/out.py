"""Outputs written, row by row, into tensors or arrays that the caller gives."""

from collections.abc import Iterable
from typing import Any

import torch

from manyhands.primitives import pytree
from manyhands.primitives.dims import OutputRules, spread


class OutFiller:
    """Writes outputs into `out`, one behind the other along the axis of their rows.

    Args:
        out: a tensor, or an array of numpy's (a memory map too), or these in a form like the output's.
        rules: they say which axis of an output has the rows.

    Raises:
        TypeError: something else in `out`.
        ValueError: an array that cannot be written into.
    """

    def __init__(self, out: Any, rules: OutputRules) -> None:
        self._targets = {path: _tensor_over(leaf, f"out{path}") for path, leaf in pytree.leaves(out)}
        self._filled = dict.fromkeys(self._targets, 0)
        self._sizes: dict[str, int] = {}
        self._rules = rules

    def fill(self, outputs: Iterable[Any]) -> None:
        """Write all outputs.

        Raises:
            ValueError: an output that does not fit; says which, and both shapes. What came before it is written.
        """
        for number, output in enumerate(outputs):
            self._add(number, output)

    def check_full(self) -> None:
        """Raise ValueError if rows of `out` are left."""
        for path, filled in self._filled.items():
            if filled < self._sizes.get(path, -1):
                raise ValueError(
                    f"out{path} of shape {tuple(self._targets[path].shape)} has room for {self._sizes[path]} rows, and "
                    f"the outputs have {filled} together: give one of exactly as many"
                )

    def _add(self, number: int, output: Any) -> None:
        leaves = dict(pytree.leaves(output))
        if leaves.keys() != self._targets.keys():
            raise ValueError(
                f"out has {_places(self._targets)}, and the output of batch {number} has {_places(leaves)}: give out a "
                "form like the output's"
            )
        axes = spread(self._rules.out_dims, output, self._rules.dim, "out_dims")
        for (path, leaf), axis in zip(leaves.items(), axes, strict=True):
            self._write(number, path, leaf, axis)

    def _write(self, number: int, path: str, leaf: Any, axis: int | None) -> None:
        what = f"output{path} of batch {number}"
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or axis is None:
            kind = "a 0-dim tensor" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise ValueError(
                f"{what} has no rows (it is {kind}), and out{path} takes rows: iterate over the map instead"
            )
        target, start = self._targets[path], self._filled[path]
        shape, rows = list(target.shape), leaf.size(axis)
        has_axis = -len(shape) <= axis < len(shape)
        room = shape[axis] - start if has_axis else 0
        if has_axis:
            shape[axis] = rows
        if not has_axis or shape != list(leaf.shape) or rows > room:
            raise ValueError(
                f"out{path} has the shape {tuple(target.shape)}, of which {start} rows are filled, and {what} has the "
                f"shape {tuple(leaf.shape)}: they have to be equal but for the rows (axis {axis}), and there has to be "
                "room for all rows of all batches"
            )
        if not torch.can_cast(leaf.dtype, target.dtype):
            raise ValueError(f"out{path} is of {target.dtype}, which cannot hold the {leaf.dtype} of {what}")
        target.narrow(axis, start, rows).copy_(leaf)
        self._filled[path], self._sizes[path] = start + rows, target.size(axis)


def _tensor_over(out: Any, name: str) -> torch.Tensor:
    """Return a tensor over the memory of `out`."""
    if isinstance(out, torch.Tensor):
        return out.detach()
    interface = getattr(out, "__array_interface__", None)
    if interface is None:
        raise TypeError(f"{name}: expected a tensor or an array of numpy's, got {type(out).__name__}")
    if interface["data"][1]:
        raise ValueError(f"{name}: the array is read-only; open a memory map with mode='r+' or 'w+'")
    tensor = torch.as_tensor(out)
    if tensor.numel() and tensor.data_ptr() != interface["data"][0]:
        raise TypeError(f"{name}: torch cannot write into this {type(out).__name__}; give an array of numpy's")
    return tensor


def _places(leaves: dict[str, Any]) -> str:
    return f"{len(leaves)} values" if "" not in leaves else "one value"
