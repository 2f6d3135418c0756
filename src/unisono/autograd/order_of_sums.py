"""The order in which gradients of several forwards are summed over the ranks in one backward."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from unisono.runtime.buckets import Gradients
from unisono.runtime.torch_private import engine, graph_nodes

AllReduce: TypeAlias = Callable[[Gradients], Gradients]

_SEVERAL_MODELS = (
    "this backward (torch.autograd.grad, backward(inputs=...) or create_graph=True) reaches several wrapped "
    "models, and a tensor of one left forward another way (a hook or a list stored it). Under a launcher "
    "their gradients are summed together. Return the tensor from forward; or call backward for one model at "
    "a time."
)

MOST_WAITING = 16  # backwards, each in a thread of its own; more are of backwards that have failed


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


class OneOrder:
    """Sums of several forwards over the ranks, of one model or of several, in one order on all of them.

    The order in which torch's engine comes to the LiveNodes of one backward depends on time, and on how a rank runs a
    forward; and sums that ranks begin in different orders never end. So the latest forward's gradients are summed
    first: those of another one wait until the LiveNodes of all later ones have run that this backward reaches. The
    LiveNode that has been waited for returns the gradients of its own live tensors; those of other live tensors go to
    them in a backward of their own.
    """

    def __init__(self) -> None:
        self._tokens: list[weakref.ref[torch.Tensor]] = []
        self._waiting: dict[int, list[_Unsummed]] = {}  # by the number of the backward
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
        self, number: int, collector: Summand, unsummed: Sequence[tuple[Gradients, AllReduce]]
    ) -> list[Gradients] | None:
        """Return the sums of backward `number` that can be had by now; None if a later LiveNode will have them."""
        if not unsummed and number not in self._waiting:
            return []
        for failed in sorted(self._waiting)[:-MOST_WAITING]:
            self._waiting.pop(failed, None)
        live, found = collector.live, list[Gradients]()
        self._waiting.setdefault(number, []).extend(_Unsummed(_forward_of(collector), live, *each) for each in unsummed)
        while (each := self._take_next(number, collector)) is not None:
            if each.live is not live and (torch.is_grad_enabled() or engine.backward_is_restricted()):
                raise RuntimeError(_SEVERAL_MODELS)
            gradients = each.all_reduce(each.gradients)
            if each.live is live:
                found.append(gradients)
            else:
                # Meanwhile torch may run other LiveNodes in this thread. For these this one is still to come: what they
                # have waits, and is taken next.
                _add_to(each.live, gradients)
            del each, gradients
        if self._waiting.get(number) and unsummed and not found:
            if not [other for other in self._to_come(number, collector) if other.live is live]:
                graph_nodes.skip_hooks_without_gradient(live)  # a backward of their own calls hooks
            return None
        return found

    def _take_next(self, number: int, collector: Summand) -> _Unsummed | None:
        """Take what waits and is summed next; None: nothing waits, or this backward will come to a later forward."""
        if not (waiting := self._waiting.get(number)):
            self._waiting.pop(number, None)  # all is summed
            return None
        place = max(range(len(waiting)), key=lambda place: waiting[place].forward)
        latest = max(map(_forward_of, self._to_come(number, collector)), default=0)
        return waiting.pop(place) if waiting[place].forward > latest else None

    def _to_come(self, number: int, collector: Summand) -> list[Summand]:
        """Return the collectors whose LiveNodes backward `number`, which runs, has still to come to, but for one."""
        others = [node.collector for node in self._live_nodes() if _will_run(node, number)]
        return [other for other in others if other is not collector]

    def _live_nodes(self) -> list[Any]:
        tokens = [ref() for ref in self._tokens]
        return [token.grad_fn for token in tokens if token is not None and token.grad_fn is not None]


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
