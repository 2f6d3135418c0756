"""The order in which gradients of several forwards are summed over the ranks in one backward."""

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from unisono.runtime.buckets import Gradients, total
from unisono.runtime.torch_private import engine, graph_nodes

AllReduce: TypeAlias = Callable[[Gradients], Gradients]

_SEVERAL_MODELS = (
    "this backward (torch.autograd.grad, backward(inputs=...) or create_graph=True) reaches several wrapped "
    "models, and a tensor of one left forward another way (a hook or a list stored it). Under a launcher "
    "their gradients are summed together. Return the tensor from forward; or call backward for one model at "
    "a time."
)


class OverRanks(NamedTuple):
    """How the gradients of losses that left one forward otherwise are summed over the ranks."""

    sum: Callable[[Any, Gradients], Gradients]  # called with the LiveNode whose backward runs
    forward: int  # the number of the forward, from 1


class Summand(Protocol):
    """The live tensors of one forward, as a `Collector` has them."""

    live: Sequence[torch.Tensor]
    over_ranks: OverRanks | None
    latest: int


class _Unsummed(NamedTuple):
    """Gradients of one forward that are still to be summed over the ranks."""

    forward: int
    live: Sequence[torch.Tensor]
    gradients: Gradients
    all_reduce: AllReduce


class _Sum(NamedTuple):
    """Gradients of one forward, summed over the ranks."""

    forward: int
    live: Sequence[torch.Tensor]
    gradients: Gradients


class _Brought:
    """What one backward has brought so far, of all forwards."""

    def __init__(self) -> None:
        self.waiting: list[_Unsummed] = []
        self.summed: list[_Sum] = []

    def take(self, live: Sequence[torch.Tensor]) -> Gradients:
        """Take the sums for some live tensors, and add them: the latest forward's first."""
        found = sorted([each for each in self.summed if _are_same(each.live, live)], key=lambda each: -each.forward)
        self.summed = [each for each in self.summed if not _are_same(each.live, live)]
        return total([each.gradients for each in found], len(live))

    def end(self) -> None:
        """Note that the backward has ended. Until then, or until it has failed, torch's engine keeps this."""


class OneOrder:
    """Sums of several forwards over the ranks, of one model or of several, in one order on all of them.

    The order in which torch's engine comes to the LiveNodes of one backward depends on time, and on how a rank runs a
    forward; and sums that ranks begin in different orders never end. So the latest forward's gradients are summed
    first: those of another one wait until the LiveNodes of all later ones have run that this backward reaches. The last
    LiveNode of some live tensors returns the sums of all their forwards. If one still waits then, they go to the live
    tensors in a backward of their own, all at once. So hooks of a parameter see one gradient, as on one device, if the
    forwards have the same live tensors; not if one has frozen some, or two models share some.
    """

    def __init__(self) -> None:
        self._tokens: list[weakref.ref[torch.Tensor]] = []
        # By the number of the backward.
        self._brought: weakref.WeakValueDictionary[int, _Brought] = weakref.WeakValueDictionary()
        self._num_forwards = 0
        self._lock = threading.Lock()

    def next_forward(self, token: torch.Tensor) -> int:
        """Return the number of a forward whose live parameters are behind `token`."""
        with self._lock:
            if not self._tokens or self._tokens[-1]() is not token:  # as it is where one model is trained
                others = [ref for ref in self._tokens if ref() is not None and ref() is not token]
                self._tokens = [*others, weakref.ref(token)]
            self._num_forwards += 1
            return self._num_forwards

    def is_next(self, collector: Summand) -> bool:
        """Return whether the running backward reaches no later forward whose gradients are still to be summed."""
        if _forward_of(collector) == self._num_forwards:
            return True
        number = engine.number_of_backward()
        return not [each for each in self._to_come(number, collector) if _forward_of(each) > _forward_of(collector)]

    def sums(
        self,
        number: int,
        collector: Summand,
        summed: Sequence[Gradients],
        unsummed: Sequence[tuple[Gradients, AllReduce]],
    ) -> Gradients | None:
        """Return the sums for the live tensors whose LiveNode runs, in backward `number`; None if they get them later.

        Args:
            summed: over the ranks, of this forward.
            unsummed: what is still to be summed, and how.
        """
        live, forward, brought = collector.live, _forward_of(collector), self._brought.get(number)
        if brought is None:
            if not unsummed and (len(self._tokens) == 1 or not self._comes_again(number, collector, live)):
                return total(summed, len(live))
            brought = self._brought[number] = _Brought()
            engine.call_at_end_of_backward(brought.end)
        brought.waiting += [_Unsummed(forward, live, *each) for each in unsummed]
        brought.summed += [_Sum(forward, live, gradients) for gradients in summed]
        while (each := self._take_next(brought, number, collector)) is not None:
            is_own = _are_same(each.live, live)
            if not is_own and (torch.is_grad_enabled() or engine.backward_is_restricted()):
                raise RuntimeError(_SEVERAL_MODELS)
            brought.summed.append(_Sum(each.forward, each.live, each.all_reduce(each.gradients)))
            if not is_own and self._has_all(brought, number, collector, each.live):
                # Meanwhile torch may run other LiveNodes in this thread. For these this one is still to come: what they
                # have waits, and is taken next.
                _add_to(each.live, brought.take(each.live))
            del each
        if self._has_all(brought, number, collector, live):
            return brought.take(live)
        if not self._comes_again(number, collector, live):
            graph_nodes.skip_hooks_without_gradient(live)  # a backward of their own calls hooks
        return None

    def _has_all(self, brought: _Brought, number: int, collector: Summand, live: Sequence[torch.Tensor]) -> bool:
        """Return whether all gradients of some live tensors are summed that this backward brings."""
        waits = any(_are_same(each.live, live) for each in brought.waiting)
        return not waits and not self._comes_again(number, collector, live)

    def _comes_again(self, number: int, collector: Summand, live: Sequence[torch.Tensor]) -> bool:
        """Return whether another LiveNode of some live tensors is still to run in this backward."""
        others = self._to_come(number, collector)
        return any(other.over_ranks is not None and _are_same(other.live, live) for other in others)

    def _take_next(self, brought: _Brought, number: int, collector: Summand) -> _Unsummed | None:
        """Take what waits and is summed next; None: nothing waits, or this backward will come to a later forward."""
        if not (waiting := brought.waiting):
            return None
        place = max(range(len(waiting)), key=lambda place: waiting[place].forward)
        latest = max(map(_forward_of, self._to_come(number, collector)), default=0)
        return waiting.pop(place) if waiting[place].forward > latest else None

    def _to_come(self, number: int, collector: Summand) -> list[Summand]:
        """Return the collectors whose LiveNodes backward `number`, which runs, has still to come to, but for one."""
        others = [node for node in self._live_nodes() if node.collector is not collector]
        return [node.collector for node in others if _will_run(node, number)]

    def _live_nodes(self) -> list[Any]:
        tokens = [ref() for ref in self._tokens]
        return [token.grad_fn for token in tokens if token is not None and token.grad_fn is not None]


def _are_same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Return whether two forwards have the same live tensors; the lists are two if the module has changed between."""
    return one is other or (len(one) == len(other) and all(map(operator.is_, one, other)))


def _add_to(live: Sequence[torch.Tensor], gradients: Gradients) -> None:
    """Add gradients to those of live tensors, in a backward of its own."""
    given = [(tensor, gradient) for tensor, gradient in zip(live, gradients, strict=True) if gradient is not None]
    engine.run_backward([tensor for tensor, _ in given], [gradient for _, gradient in given], keep=False)


def _forward_of(collector: Summand) -> int:
    """Return the number of a forward whose gradients are summed over ranks."""
    return 0 if collector.over_ranks is None else collector.over_ranks.forward


def _will_run(live_node: Any, number: int) -> bool:
    """Return whether the running backward, of this number, has still to come to a LiveNode."""
    return live_node.collector.latest != number and engine.backward_runs(live_node)


order_of_sums = OneOrder()
