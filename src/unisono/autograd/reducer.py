"""Gradients that are reduced while backward still runs: what takes them off the leaves, and their sum in this process.

Each replica computes a gradient of its own for every parameter. Kept until the last replica is done, these gradients
would take the parameters' memory once more for each further replica, while most activations are still alive. So a large
gradient is handed to the replica's `Reducer` as soon as it is computed. Reducers differ in what is behind them: a sum
in this process (`RunningSums`), buckets on another device (broadcast.py), the ranks under a launcher (distributed/).
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch

from unisono.runtime import devices as _devices
from unisono.runtime import timeline, torch_private
from unisono.runtime.buckets import dense_first
from unisono.runtime.interrupts import uninterruptible
from unisono.runtime.streams import current_stream, queued_on

Add: TypeAlias = Callable[[int, torch.Tensor], bool]
Emit: TypeAlias = Callable[[int, torch.Tensor], None]


class Reducer(Protocol):
    """One replica's part in reducing the gradients of one backward."""

    @property
    def numbers(self) -> Collection[int]:
        """The numbers of the leaves whose gradients are reduced."""

    def add(self, number: int, gradient: torch.Tensor, /) -> bool:
        """Add a leaf's gradient; return False, and do nothing, if it cannot be reduced, such as a second one."""


class PartialSums(NamedTuple):
    """The `Reducer` of a replica whose gradients are summed in this process."""

    numbers: Collection[int]
    add: Add


class LeafHooks:
    """Hands the gradients of one replica's leaves to a reducer, each as soon as backward has computed it.

    On an accelerator a module's branches may compute on streams of their own, and backward computes a gradient on the
    stream of its branch. Reducers need not know: their work is queued on the stream that was current when the reducer
    was given, which first waits for the gradient's.

    Args:
        leaves: by the numbers that reducers have for them. A leaf gets its hook when it first needs one, and keeps it.

    Attributes:
        installed: the numbers of the leaves that have one.
    """

    def __init__(self, leaves: Mapping[int, torch.Tensor]) -> None:
        self._leaves = leaves
        self.installed: set[int] = set()
        self._with_streams: list[torch.device] | None = None  # the leaves' devices that have streams, once known
        # What adds a gradient to the sum, and its streams. The hooks refer to this list only: no cycle leads to leaves.
        self._active: list[tuple[Add, dict[torch.device, torch.Stream | None]]] = []

    @contextlib.contextmanager
    def handing_to(self, reducer: Reducer) -> Iterator[None]:
        """Within the context, hand the gradients to `reducer`; a gradient that it takes is not left in `.grad`."""
        for number in reducer.numbers:
            leaf = None if number in self.installed else self._leaves.get(number)
            if leaf is not None and leaf.is_leaf and leaf.requires_grad:
                self.installed.add(number)
                leaf.register_post_accumulate_grad_hook(partial(_hand_over, self._active, number))  # type: ignore[no-untyped-call]
        if self._with_streams is None:
            self._with_streams = [d for d in {leaf.device for leaf in self._leaves.values()} if _devices.has_streams(d)]
        add = timeline.during(timeline.REDUCE)(reducer.add) if timeline.recording else reducer.add
        self._active.append((add, {device: current_stream(device) for device in self._with_streams}))
        try:
            yield
        finally:
            self._active.clear()


@uninterruptible
def _hand_over(
    active: list[tuple[Add, dict[torch.device, torch.Stream | None]]], number: int, leaf: torch.Tensor
) -> None:
    if not active or leaf.grad is None:
        return
    add, streams = active[0]
    if not streams:
        if add(number, leaf.grad):
            leaf.grad = None
        return
    with queued_on(streams.get(leaf.grad.device), leaf.grad):
        if add(number, leaf.grad):
            leaf.grad = None


class RunningSums:
    """The sums of the replicas' gradients, in this process. Each replica adds from a thread of its own.

    Guarantees
        - The order of additions does not depend on which replica is faster: first every replica's first contribution
          in replica order, then every second one, and so on. So runs repeat bit for bit. (A leaf receives several
          contributions where backward is called inside backward, as reentrant activation checkpointing does.)
        - A replica that contributes nothing delays the sum until backward ends, and no longer.

    Args:
        numbers: the tensors' numbers.
        emit: called with a number and the sum of one gradient from each replica, as soon as it is complete, for every
            number in `emitted`; `end` then returns only what was not emitted.
    """

    def __init__(
        self,
        num_replicas: int,
        numbers: Collection[int],
        emit: Emit | None = None,
        emitted: Collection[int] = (),
    ) -> None:
        self._sums = {
            number: _RunningSum(num_replicas, partial(emit, number) if emit and number in emitted else None)
            for number in numbers
        }

    def of(self, replica: int) -> Reducer:
        """Return a replica's part."""
        return PartialSums(self._sums.keys(), partial(self._add, replica))

    def _add(self, replica: int, number: int, gradient: torch.Tensor) -> bool:
        if number in self._sums:
            self._sums[number].add(replica, gradient)
        return number in self._sums

    def end(self) -> dict[int, torch.Tensor]:
        """Add the gradients that still wait; return the sums, by number."""
        sums = {number: running.end() for number, running in self._sums.items()}
        return {number: total for number, total in sums.items() if total is not None}


def sum_in_place(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of gradients in the order given, in the memory of the first one if it owns its memory."""
    total, *others = gradients
    for gradient in others:
        total, gradient = dense_first(total, gradient)
        # A leaf's gradient can be a view of what the caller gave to backward, or of another leaf's gradient:
        # (a.view(-1) + b.view(-1)).backward(g) leaves a.grad and b.grad in the memory of g.
        total = total.add_(gradient) if torch_private.owns_its_memory(total) else total + gradient
    return total


def sums_of(gradients: Sequence[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    """Return the sum of each parameter's gradients in replica order; None where no replica has one. Frees them.

    Args:
        gradients: `gradients[i][k]` is replica i's gradient of parameter k.
    """
    totals, *others = gradients
    num_parameters = len(totals)
    is_own = False  # whether the sums are in memory of their own
    for of_replica in others:
        both = [
            k
            for k, (total, grad) in enumerate(zip(totals, of_replica, strict=True))
            if total is not None and grad is not None and not total.is_sparse and not grad.is_sparse
        ]
        of_all = len(both) == num_parameters
        if of_all and is_own:
            torch_private.add_all_in_place(totals, of_replica)  # type: ignore[arg-type]
        elif both:
            sums = torch_private.add_all([totals[k] for k in both], [of_replica[k] for k in both])  # type: ignore[misc]
            for k, both_added in zip(both, sums, strict=True):
                totals[k], of_replica[k] = both_added, None
            is_own = of_all
        if not of_all:
            for k, grad in enumerate(of_replica):
                total = totals[k]
                if grad is not None:
                    totals[k] = grad if total is None else torch.add(*dense_first(total, grad))
        of_replica.clear()
    return totals


class _RunningSum:
    """The sum of the replicas' gradients for one tensor."""

    def __init__(self, num_replicas: int, emit: Callable[[torch.Tensor], None] | None) -> None:
        self._emit = emit
        self._lock = threading.Lock()
        self._waiting: list[deque[torch.Tensor]] = [deque() for _ in range(num_replicas)]
        self._turn = 0  # the replica whose gradient is added next
        self._total: torch.Tensor | None = None
        self._ending = False

    def add(self, replica: int, gradient: torch.Tensor) -> None:
        """Take a gradient that a replica's leaf has just received, and add what can be added."""
        with self._lock, torch.set_grad_enabled(False):
            self._waiting[replica].append(gradient)
            del gradient  # so that the sum may be made in its memory
            while self._waiting[self._turn]:
                self._add_next()

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
