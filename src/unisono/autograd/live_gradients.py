"""The autograd nodes behind a replica's parameters, and the way of a gradient from there to the live parameter.

caller's graph          live tensors ──► (1) LiveNode ──► token
graph of replica i      token ──► (2) BucketNode, one a bucket ──► the replica's own tensors ──► its forward ──► outputs
                        mark ───►

(1) One node stands for the live tensors: for the module's parameters, and for the inputs of a call that need
    gradients. Its output, the token, is a 0-dim tensor on the CPU without a meaning of its own.
(2) A replica's tensors are outputs of nodes, so torch's engine says when the gradients of a bucket are complete:
    Python is called once a bucket and replica, not once a parameter. Behind them is a mark as well, a leaf without a
    meaning: unlike the token, only the graphs of the forward's own replicas lead to it, and what goes on from them. On
    an accelerator parameters have a leaf there, too: who calls backward inside forward waits for its stream, as for
    those of a plain module's parameters.

Both are made with the replicas, and used again in later steps: a steady step links nothing.

A `Collector` is behind both nodes: autograd carries no gradient from (2) to (1), as (2) returns None for the token. A
gradient goes this way in a step of several replicas:

    replica i's backward ──► BucketNode.backward ──► Collector.receive ──► BucketSums.add, over the replicas
    caller's backward, next ──► Collector.add_of_boundary ──► LiveNode.backward returns it ──► grad of the live tensor

Who runs the backward says where the gradients of a bucket go:

    the boundary (boundary.py)       to the sum of the backward that runs (gradient_sums.py). It stops at the marks.
    the module, inside forward       they are kept until forward ends; then they are passed on to the live tensors
    the caller, where the replica's  to the other ranks, or to the LiveNode
    graph is a part of its own
    (callers_graph.py)
    the caller, for a tensor that    to the LiveNode, which runs when all of them have come. So the caller's graph sees
    left forward in another way      one gradient for each live tensor, that of the boundary included
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import torch

from unisono.autograd.gradient_sums import Contribution
from unisono.autograd.order_of_sums import AllReduce, OverRanks, order_of_sums
from unisono.runtime import devices as _devices
from unisono.runtime import timeline
from unisono.runtime.buckets import BucketPlan, Gradients, added, all_added, total
from unisono.runtime.interrupts import uninterruptible
from unisono.runtime.torch_private import engine, graph_nodes, tensor_objects
from unisono.runtime.tracebacks import without_own_frames

# Called with a bucket's number, a replica's, and the gradients of the bucket's tensors.
Receiver: TypeAlias = Callable[[int, int, Sequence[torch.Tensor | None]], None]

_PICKLED = (
    "a replica's parameters cannot be pickled inside forward, nor its modules: save its state_dict() there, or pickle "
    "the module outside of forward."
)

# Added to the sequence numbers of nodes that torch's engine runs as soon as they are ready. A LiveNode comes before the
# next forward's boundary, whose gradients would need memory beside its own.
_FIRST = 1 << 62


_MOST_WAITING = 16  # backwards, each in a thread of its own; more are of backwards that have failed

# What gets the gradients of a backward of the boundary, by collector.
Receivers: TypeAlias = "dict[Collector, Receiver]"


class InsideForward:
    """What backwards inside forward have brought, while forward runs.

    Args:
        own: the parameters of replica i, in the order of the live ones.
        numbers: of each bucket, the numbers of its parameters.
    """

    def __init__(self, own: Sequence[Sequence[torch.Tensor]], numbers: Sequence[Sequence[int]]) -> None:
        self._own, self._numbers = own, numbers
        self._grads: dict[tuple[int, int], torch.Tensor] = {}  # by replica and parameter
        self.contributions: list[Contribution] = []

    def add(self, contribution: Contribution) -> None:
        """Add gradients, and let the replica see them as its parameters' `.grad`."""
        self.contributions.append(contribution)
        if not self._own:
            return
        replica = contribution.replica
        for n, gradient in zip(self._numbers[contribution.bucket], contribution.gradients, strict=True):
            if gradient is not None:
                total = added(self._grads.get((replica, n)), gradient.detach())
                self._grads[replica, n] = self._own[replica][n].grad = total

    def end(self) -> list[Contribution]:
        """Return all that has come."""
        for replica, n in self._grads:
            self._own[replica][n].grad = None
        return self.contributions


class RunningBackward:
    """A backward that has come to the outputs of a forward whose graph is the caller's (callers_graph.py).

    torch's engine keeps it, until the backward has ended, or has failed.

    Attributes:
        reduction: sums the gradients over the ranks, bucket by bucket; None: all are summed when they have come.
    """

    reduction: Any = None

    def __del__(self) -> None:
        if self.reduction is not None:  # other ranks wait for its sums
            self.reduction.left()


class Collector:
    """Collects the gradients of the live tensors behind one token.

    Args:
        live: the live tensors.
        join: returns the gradient of each live tensor from contributions, which are in replica order.

    Attributes:
        mark: the leaf behind its bucket nodes.
        inside: has those of a backward inside forward while forward runs, else None.
        over_ranks: what sums gradients over ranks that no boundary has summed; None: there are no other ranks.
        latest: the number of the latest backward in which the LiveNode has run.
        backwards: those that have come to the outputs of a forward in the caller's graph, by number.
        frozen: the parameters of replicas that forward has frozen: bucket, replica, place in the bucket. What came
            through them before that is dropped, as torch drops it at a leaf that needs no gradient any more.
    """

    def __init__(self, live: Sequence[torch.Tensor], join: Callable[[Sequence[Contribution]], Gradients]) -> None:
        self.live, self._join = live, join
        self.mark = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        self.inside: InsideForward | None = None
        self.over_ranks: OverRanks | None = None
        self.latest = -1
        self.frozen: set[tuple[int, int, int]] = set()
        self.backwards: dict[int, weakref.ref[RunningBackward]] = {}
        # By the number of the caller's backward: those of boundaries, each with what sums it over the ranks if that is
        # still to be done; and those that have come beside them.
        self._of_boundaries: dict[int, list[tuple[Gradients, AllReduce | None]]] = {}
        self._contributions: dict[int, list[Contribution]] = {}

    def receive(self, bucket: int, replica: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Receive the gradients of a bucket of a replica. Called by torch's engine, in any of its threads."""
        receivers: Receivers = engine.backward_context()
        if self.frozen:
            gradients = [None if (bucket, replica, n) in self.frozen else each for n, each in enumerate(gradients)]
        has_gradients = bool([gradient for gradient in gradients if gradient is not None])
        if self in receivers:
            if has_gradients:
                receivers[self](bucket, replica, gradients)
        elif self.inside is not None:
            if has_gradients:
                self.inside.add(Contribution.of(bucket, replica, gradients))
        else:
            number = engine.number_of_backward()
            reduction = backward.reduction if (backward := self.running(number)) is not None else None
            if reduction is not None and reduction.takes_buckets:
                if has_gradients:  # a single one is a view, perhaps; without its base it may have its memory to itself
                    reduction.add(bucket, [*gradients] if len(gradients) > 1 else [gradients[0].detach()])  # type: ignore[union-attr]
                return
            contributions = self._contributions.setdefault(number, [])
            if has_gradients:  # if not, other ranks may have some
                contributions.append(Contribution.of(bucket, replica, gradients))

    def running(self, number: int) -> RunningBackward | None:
        """Return a backward that has come to the outputs of the forward, and has not ended or failed."""
        ref = self.backwards.get(number)
        return None if ref is None else ref()

    def add_of_boundary(self, gradients: Gradients, all_reduce: AllReduce | None = None) -> None:
        """Add the gradient of each live tensor, from a boundary's backward, for the LiveNode.

        Args:
            all_reduce: sums these, and what has come beside them, over the ranks; None: there is nothing to be done.
        """
        self._of_boundaries.setdefault(engine.number_of_backward(), []).append((gradients, all_reduce))

    def drop(self) -> None:
        """Forget what backwards that have failed have left. One of another thread may still be on its way here."""
        for left in (self._of_boundaries, self._contributions, self.backwards):
            for failed in [*left][:-_MOST_WAITING]:  # the oldest ones
                left.pop(failed, None)

    def joined(self, contributions: Iterable[Contribution]) -> Gradients:
        """Return the gradient of each live tensor, for the calling thread's streams."""
        return self._join([each.here() for each in sorted(contributions, key=attrgetter("replica"))])

    def end_forward(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the live tensors that have got gradients inside forward, each with its gradient."""
        inside, self.inside = self.inside, None
        if inside is None or not inside.contributions:
            return []
        joined = zip(self.live, self.joined(inside.end()), strict=True)
        return [(live, gradient) for live, gradient in joined if gradient is not None]

    def all_gradients(self, live_node: Any) -> Gradients | None:
        """Return the gradient of each live tensor, from the boundary and from losses that left forward otherwise.

        None for each in a backward that only passes here because it cannot stop at the token. None if another LiveNode
        of this backward returns them, or they get them in a backward of their own.

        Args:
            live_node: the node whose backward runs.
        """
        number = engine.number_of_backward()
        try:
            return self._all_gradients(number, live_node)
        finally:
            self.latest = number

    def _all_gradients(self, number: int, live_node: Any) -> Gradients | None:
        if (backward := self.running(number)) is not None and backward.reduction is not None:
            reduction, backward.reduction = backward.reduction, None
            beside = self._contributions.pop(number, [])
            with timeline.during(timeline.REDUCE) if timeline.recording else _NOTHING:
                found: Gradients = reduction.sum(self.joined(beside) if beside else [None] * len(self.live))
            return order_of_sums.sums(number, self, [found], [])
        of_boundaries = self._of_boundaries.pop(number, [])
        every = [gradients for gradients, all_reduce in of_boundaries if all_reduce is None]
        unsummed = [(gradients, all_reduce) for gradients, all_reduce in of_boundaries if all_reduce is not None]
        if (contributions := self._contributions.pop(number, None)) is not None:
            joined = self.joined(contributions)
            if unsummed:
                (gradients, all_reduce), *others = unsummed
                unsummed = [(all_added(gradients, joined), all_reduce), *others]
            elif self.over_ranks is not None:
                unsummed = [(joined, partial(self.over_ranks.sum, live_node))]
            else:
                every.append(joined)
        if self.over_ranks is not None:
            return order_of_sums.sums(number, self, every, unsummed)
        return total(every, len(self.live))


collectors_with_nodes: "weakref.WeakValueDictionary[int, Collector]" = weakref.WeakValueDictionary()


def token_of(collector: Collector) -> torch.Tensor:
    """Return a token for the live tensors of a collector."""
    token: torch.Tensor = LiveNode.apply(collector, *collector.live)  # type: ignore[no-untyped-call]
    if token.grad_fn is not None:
        graph_nodes.run_first(token.grad_fn, _FIRST)
    return token


class LiveNode(torch.autograd.Function):
    """(1) The node of the caller's graph for live tensors."""

    @staticmethod
    def forward(ctx: Any, collector: Collector, *live: torch.Tensor) -> torch.Tensor:
        ctx.collector = collector
        ctx.set_materialize_grads(False)
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    @without_own_frames
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        collector: Collector = ctx.collector
        gradients = collector.all_gradients(ctx)
        if gradients is None:
            return (None,) * (1 + len(collector.live))
        if without := [live for live, gradient in zip(collector.live, gradients, strict=True) if gradient is None]:
            graph_nodes.skip_hooks_without_gradient(without)  # as without a wrapper: no node would lead to them
        return (None, *gradients)


class BucketReceiver(Protocol):
    """What gets the gradients of bucket nodes: a `Collector`, or one of a replica that is captured (graphed.py)."""

    mark: torch.Tensor

    def receive(self, bucket: int, replica: int, gradients: Sequence[torch.Tensor | None], /) -> None: ...


class BucketNode(torch.autograd.Function):
    """(2) The node of one bucket of one replica.

    `apply(token, mark, leaf, collector, bucket, replica, make)` returns the tensors that `make` makes, as its outputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        _: torch.Tensor,
        __: torch.Tensor | None,
        collector: BucketReceiver,
        bucket: int,
        replica: int,
        make: Callable[[], tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, ...]:
        ctx.token = token  # keeps it, for `OneOrder`
        ctx.collector, ctx.bucket, ctx.replica = collector, bucket, replica
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    @uninterruptible
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        ctx.collector.receive(ctx.bucket, ctx.replica, grads)
        return (None,) * 7


def with_bucket_node(
    token: torch.Tensor,
    receiver: BucketReceiver,
    bucket: int,
    replica: int,
    given: Sequence[torch.Tensor],
    leaf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return tensors that need no gradient yet as outputs of a bucket node, which runs as soon as it can."""
    of_node = token, receiver.mark, leaf, receiver, bucket, replica
    tensors: tuple[torch.Tensor, ...] = BucketNode.apply(*of_node, lambda: tuple(given))  # type: ignore[no-untyped-call]
    graph_nodes.run_first(tensors[0].grad_fn, _FIRST)
    return tensors


def own_tensors(
    token: torch.Tensor,
    collector: Collector,
    bucket: int,
    replica: int,
    given: Sequence[torch.Tensor],
    leaf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the tensors of one bucket as a replica has them: those given, which need no gradient yet, with a node.

    Args:
        leaf: that of parameters; see `leaf_on`.
    """
    tensors = with_bucket_node(token, collector, bucket, replica, given, leaf)
    collectors_with_nodes[id(collector)] = collector
    for place, tensor in enumerate(tensors):
        tensor.__dict__["requires_grad_"] = Link(
            weakref.ref(tensor), token, collector, bucket, replica, place, len(tensors)
        )
    return tensors


def leaf_on(device: torch.device) -> torch.Tensor | None:
    """Return the leaf behind a replica's parameters, for the stream that is current; None where there are no streams.

    A backward inside forward runs it last, and then lets the thread that has called it wait for that stream.
    """
    if not _devices.has_streams(device):
        return None
    return torch.empty((), dtype=torch.float32, device=device, requires_grad=True)


class Link(NamedTuple):
    """The place of a replica's parameter in its bucket; and the parameter's `requires_grad_`.

    torch refuses that for a tensor that is no leaf. A parameter that forward freezes is cut off from its bucket; where
    it is to be trained again, it gets a node of its own.
    """

    parameter: "weakref.ref[torch.Tensor]"
    token: torch.Tensor
    collector: Collector
    bucket: int
    replica: int
    place: int  # in the bucket
    size: int  # of the bucket

    def __call__(self, requires_grad: bool = True) -> torch.Tensor:
        parameter = self.parameter()
        assert parameter is not None
        # Not in place: what the graph has saved of the parameter stays as it was, and nothing counts as a write, which
        # replicas in the same memory would see.
        if parameter.requires_grad and not requires_grad:
            self.collector.frozen.add((self.bucket, self.replica, self.place))
            tensor_objects.exchange(parameter, parameter.detach())
        elif requires_grad and not parameter.requires_grad:
            self.collector.frozen.discard((self.bucket, self.replica, self.place))
            with torch.enable_grad():
                behind = self.token, self.collector.mark, leaf_on(parameter.device)
                linked = _Relink.apply(*behind, self, parameter)  # type: ignore[no-untyped-call]
            tensor_objects.exchange(parameter, linked)
        return parameter

    def __reduce__(self) -> NoReturn:
        raise TypeError(_PICKLED)


class _Relink(torch.autograd.Function):
    """The node of a single parameter of a bucket."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        _: torch.Tensor,
        __: torch.Tensor | None,
        link: Link,
        parameter: torch.Tensor,
    ) -> torch.Tensor:
        ctx.link, ctx.collector, ctx.replica = link, link.collector, link.replica
        return parameter.detach()

    @staticmethod
    @uninterruptible
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        link: Link = ctx.link
        gradients: Gradients = [None] * link.size
        gradients[link.place] = grad
        link.collector.receive(link.bucket, link.replica, gradients)
        return (None,) * 5


def is_bucket_node(node: Any) -> bool:
    """Return whether a node of a graph is the end of a replica's part of it."""
    return getattr(node, "_forward_cls", None) in (BucketNode, _Relink)


def joined_gradients(
    live: Sequence[torch.Tensor], plan: BucketPlan, contributions: Sequence[Contribution]
) -> Gradients:
    """Return the gradient of each live parameter from contributions, in their order."""
    found: Gradients = [None] * len(live)
    for each in contributions:
        for n, gradient in zip(plan.numbers[each.bucket], each.gradients, strict=True):
            if gradient is not None:
                found[n] = added(found[n], _devices.moved_to(gradient, live[n].device))
    return found


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
