"""What the boundary asks of a sum over several processes; distributed/gradient_sync.py makes it."""

from collections.abc import Sequence, Set
from typing import Any, Protocol

import torch


class Reduction(Protocol):
    """The parameters' gradients of one backward, summed over several processes.

    Attributes:
        early: the parameters whose gradients `add` is to be given while backward runs.
    """

    @property
    def early(self) -> Set[int]: ...

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Add to the gradient of parameter `number`; callable from several threads, with gradients off."""

    def finish(self, rest: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Add `rest`, for each parameter a gradient or None; wait for the other processes; return the sums likewise."""

    def differentiable(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the sums of gradients that have a history."""

    def failed(self, error: BaseException) -> None:
        """Tell the other processes that this one cannot finish."""


class SyncContext(Protocol):
    """What one forward counts for when several processes sum the gradients of its parameters."""

    def begin(self, tensors: Sequence[torch.Tensor], nodes: Sequence[Any]) -> Reduction:
        """Begin the sum for a backward; `nodes` are the autograd nodes that receive the gradients of `tensors`.

        The list of an earlier call, itself, says that the module has not changed since then.
        """
