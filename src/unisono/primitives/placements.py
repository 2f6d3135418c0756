"""Placements: how one tensor of the caller's is distributed over the replicas.

A placement has two methods, `part` (from the one tensor to the replicas') and `join` (back), each the other's adjoint:
the gradient of `part` is `join`, and the gradient of `join` is `part`. So one placement serves inputs and outputs,
forward and backward, and derivatives of any order.

    Shard          each replica has some rows of it
    PaddedShard    the same, and its rows end earlier on other axes; joined, they are padded
    Stack          each replica has one entry of a vector
    Replicate      each replica has all of it; joined, the replicas' tensors are summed
    Single         one replica has it, the others have nothing
    WeightedSum    each replica has all of it times a weight; joined, a weighted sum
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from unisono.primitives import pytree
from unisono.runtime.buckets import added

# Strided, sparse COO; and the layout of jagged nested tensors, for which other errors give a remedy of their own.
_LAYOUTS = frozenset({torch.strided, torch.sparse_coo, torch.jagged})


def can_be_placed(tensor: torch.Tensor) -> bool:
    """Return whether torch can copy the tensor, split it and join it."""
    return tensor.layout in _LAYOUTS and not tensor.is_meta


def cannot_be_placed(verb: str, path: str, tensor: torch.Tensor) -> TypeError:
    """Return the error for a tensor that torch cannot copy, split or join, with the remedy."""
    if tensor.is_meta:
        return TypeError(
            f"cannot {verb} {path}, a tensor on the meta device: it has a shape but no data. Make it on a "
            "real device: torch.empty_like(tensor, device=...)."
        )
    remedy = ".to_dense()" if tensor.layout == torch._mkldnn else ".to_sparse_coo() or .to_dense()"  # type: ignore[attr-defined]
    return TypeError(
        f"cannot {verb} {path}, a tensor with the layout {tensor.layout}: torch cannot split or join its "
        f"rows. Convert it: {remedy}."
    )


def check_have_data(verb: str, value: Any, path: str) -> None:
    """Check that every tensor in a value can be copied.

    Raises:
        TypeError: one has no data (meta); names it. ValueError: as `pytree.leaves`.
    """
    for where, tensor in pytree.tensors(value, path):
        if tensor.is_meta:
            raise cannot_be_placed(verb, where, tensor)


class Placement(abc.ABC):
    """How one tensor is distributed over the replicas."""

    needs_every_part = False  # whether a missing part must be replaced by zeros before joining

    @abc.abstractmethod
    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor | None:
        """Return what replica `index` has of the joined tensor; None for nothing."""

    @abc.abstractmethod
    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the joined tensor; the parts must be on one device, and not all of them None."""

    def of_gradients(self) -> "Placement":
        """Return the placement by which gradients of the parts are joined: this one, if `join` adds no constant."""
        return self


@dataclass(frozen=True)
class Shard(Placement):
    """A tensor of which replica i has `sizes[i]` rows along `dim`, in order."""

    dim: int
    sizes: tuple[int, ...]

    needs_every_part = True

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return replica `index`'s rows, as a view (a sparse tensor's as a copy); the only one has all of it."""
        if len(self.sizes) == 1:
            return tensor
        narrow = tensor.narrow_copy if tensor.is_sparse else tensor.narrow
        return narrow(self.dim, sum(self.sizes[:index]), self.sizes[index])

    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return torch.cat(_given(parts), self.dim)


@dataclass(frozen=True)
class PaddedShard(Placement):
    """A tensor of which replica i has rows, cut to `lengths[i][k]` on axis `padded[k]`; beyond them there is `value`.

    What is beyond belongs to no replica: its gradient is dropped.
    """

    rows: Shard
    padded: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    value: float

    needs_every_part = True

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        part = self.rows.part(tensor, index)
        for dim, length in zip(self.padded, self.lengths[index], strict=True):
            part = part.narrow(dim, 0, length)
        return part

    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        longest = [max(lengths) for lengths in zip(*self.lengths, strict=True)]
        return self.rows.join([self._filled(part, longest) for part in _given(parts)])

    def of_gradients(self) -> Placement:
        return replace(self, value=0.0)

    def _filled(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        for dim, size in zip(self.padded, sizes, strict=True):
            if part.shape[dim] < size:
                missing = (*part.shape[:dim], size - part.shape[dim], *part.shape[dim + 1 :])
                part = torch.cat([part, part.new_full(missing, self.value)], dim)
        return part


@dataclass(frozen=True)
class Stack(Placement):
    """A vector with one entry a replica, made of 0-dim tensors."""

    needs_every_part = True

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        return tensor[index]

    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return torch.stack(_given(parts))


class Replicate(Placement):
    """A tensor that every replica has; its gradient is the sum of the replicas' gradients."""

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        return tensor

    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return _sum(_given(parts))


@dataclass(frozen=True)
class Single(Placement):
    """A tensor that only replica `index` has, or that is taken from it because all replicas agree (`is_common`)."""

    index: int
    is_common: bool = False

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor | None:
        return tensor if index == self.index else None

    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        part = parts[self.index]
        assert part is not None
        return part


@dataclass(frozen=True)
class WeightedSum(Placement):
    """A weighted sum over the replicas.

    A replica with weight 0 is left out, forward and backward: its mean over no rows is NaN.
    """

    weights: tuple[float, ...]

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor | None:
        return _times(tensor, self.weights[index]) if self.weights[index] else None

    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        pairs = zip(parts, self.weights, strict=True)
        return _sum([_times(part, weight) for part, weight in pairs if part is not None and weight])


def _given(parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [part for part in parts if part is not None]


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in replica order, so that runs repeat bit for bit."""
    return reduce(added, parts)


def _times(tensor: torch.Tensor, weight: float) -> torch.Tensor:
    return tensor if weight == 1 else tensor * weight
