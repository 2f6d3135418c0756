"""Placements: how one tensor of the caller's is distributed over the replicas.

A placement has two methods, `part` (from the one tensor to the replicas') and `join` (back), each the other's adjoint:
the gradient of `part` is `join`, and the gradient of `join` is `part`. So one placement serves inputs and outputs,
forward and backward, and derivatives of any order.

    Shard          each replica has some rows of it
    Stack          each replica has one entry of a vector
    Replicate      each replica has all of it; joined, the replicas' tensors are summed
    Single         one replica has it, the others have nothing
    WeightedSum    each replica has all of it times a weight; joined, a weighted sum
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class Placement(abc.ABC):
    """How one tensor is distributed over the replicas.

    Attributes:
        needs_every_part: whether a missing part must be replaced by zeros before joining.
    """

    needs_every_part = False

    @abc.abstractmethod
    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor | None:
        """Return what replica `index` has of the joined tensor; None for nothing."""

    @abc.abstractmethod
    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the joined tensor; the parts must be on one device, and not all of them None."""


@dataclass(frozen=True)
class Shard(Placement):
    """A tensor of which replica i has `sizes[i]` rows along `dim`, in order."""

    dim: int
    sizes: tuple[int, ...]

    needs_every_part = True

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return replica `index`'s rows, as a view (a sparse tensor's as a copy)."""
        narrow = tensor.narrow_copy if tensor.is_sparse else tensor.narrow
        return narrow(self.dim, sum(self.sizes[:index]), self.sizes[index])

    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return torch.cat(_given(parts), self.dim)


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
    """A tensor that only replica `index` has, or that is taken from it because all replicas agree."""

    index: int

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
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _times(tensor: torch.Tensor, weight: float) -> torch.Tensor:
    return tensor if weight == 1 else tensor * weight
