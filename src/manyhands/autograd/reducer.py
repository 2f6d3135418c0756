"""Gradients reduced early: summed over the replicas while their backward still runs.

Each replica computes a gradient of its own for every parameter. Kept until the last replica is done, these gradients
would take the parameters' memory once more for each further replica, while most activations are still alive. So a large
gradient is added to the sum, and freed, as soon as those before it in replica order have arrived.

Guarantees
    - The order of additions does not depend on which replica is faster: first every replica's first contribution in
      replica order, then every second one, and so on. So runs repeat bit for bit. (A leaf receives several
      contributions where backward is called inside backward, as reentrant activation checkpointing does.)
    - A replica that contributes nothing delays the sum until backward ends, and no longer.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import TypeAlias

import torch

from manyhands.runtime import torch_private

Emit: TypeAlias = Callable[[int, torch.Tensor], None]
NOTHING_EARLY: tuple[Emit, Set[int]] = (lambda k, total: None, frozenset())

_LARGE_BYTES = 1 << 16  # a smaller gradient is not worth a call into Python during backward


@contextlib.contextmanager
def reduce_early(
    tensors: Sequence[Sequence[torch.Tensor | None]],
    emit: Emit = NOTHING_EARLY[0],
    reduced: Set[int] = NOTHING_EARLY[1],
) -> Iterator[None]:
    """Within the block, sum the gradients of large leaves: `tensors[k]` are the replicas' leaves for one tensor.

    When the block ends, the first leaf of each has the sum in `.grad`, and the others have None there. Leaves on
    several devices are left alone.

    Args:
        emit: called with k and the sum of one gradient from each replica, as soon as it is complete, for every k in
            `reduced`, small leaves included. When the block ends, `.grad` holds only what was not emitted.
    """
    sums: list[tuple[list[torch.Tensor], _RunningSum]] = []
    handles = []
    for k, of_tensor in enumerate(tensors):
        leaves = [leaf for leaf in of_tensor if leaf is not None]
        worth_it = k in reduced or (len(leaves) > 1 and leaves[0].nbytes >= _LARGE_BYTES)
        if leaves and worth_it and len({leaf.device for leaf in leaves}) == 1:
            running = _RunningSum(len(leaves), partial(emit, k) if k in reduced else None)
            sums.append((leaves, running))
            for i, leaf in enumerate(leaves):
                handles.append(leaf.register_post_accumulate_grad_hook(running.taking(i)))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for leaves, running in sums:
        leaves[0].grad = running.end()


def sum_in_place(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of gradients in the order given, in the memory of the first one if it owns its memory."""
    total, *others = gradients
    for gradient in others:
        # A leaf's gradient can be a view of what the caller gave to backward, or of another leaf's gradient:
        # (a.view(-1) + b.view(-1)).backward(g) leaves a.grad and b.grad in the memory of g.
        total = total.add_(gradient) if torch_private.owns_its_memory(total) else total + gradient
    return total


class _RunningSum:
    """The sum of the replicas' gradients for one tensor."""

    def __init__(self, num_replicas: int, emit: Callable[[torch.Tensor], None] | None) -> None:
        self._emit = emit
        self._lock = threading.Lock()
        self._waiting: list[deque[torch.Tensor]] = [deque() for _ in range(num_replicas)]
        self._turn = 0  # the replica whose gradient is added next
        self._total: torch.Tensor | None = None
        self._ending = False

    def taking(self, replica: int) -> Callable[[torch.Tensor], None]:
        """Return a hook that takes the gradient that the replica's leaf has just received, and adds what it can."""

        def take(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:  # a user's hook has taken it
                return
            with self._lock:
                self._waiting[replica].append(gradient)
                del gradient  # so that the sum may be made in its memory
                while self._waiting[self._turn]:
                    self._add_next()

        return take

    def end(self) -> torch.Tensor | None:
        """Add the gradients that still wait; return the sum, None if there was none."""
        self._ending = True
        while any(self._waiting):
            self._add_next()
        return self._total

    def _add_next(self) -> None:
        waiting = self._waiting[self._turn]
        self._turn = (self._turn + 1) % len(self._waiting)
        if waiting:
            gradient = waiting.popleft()
            self._total = gradient if self._total is None else sum_in_place([self._total, gradient])
            if self._emit is not None and not self._turn and not self._ending:  # one from each replica
                total, self._total = self._total, None
                self._emit(total)
