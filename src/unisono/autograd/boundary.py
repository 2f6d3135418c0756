"""The autograd boundary: what the caller's graph sees of all replicas, in place of their graphs.

caller's graph    live tensors ──► LiveNode ──► token ──► (2) Replicas ──► token ──► (1) Output ──► output ──► loss
                             (live_gradients.py) │                                      ▲
                                                 ▼                                      │ joined
replica graphs           (3) BucketNodes ──► tensors of replica i ──► replica i ──► outputs of replica i

    forward     Each input is split into one tensor a replica by its placement: tensors with rows by `Shard`, parameters
                by `Replicate`. Each output is joined from the replicas' outputs by its placement.

    backward    is the adjoint.
(1) notes the gradient of its output. Each output has a node of its own: hooks of one without a gradient are not called.
(2) splits them as the outputs were joined, and runs the backward of every replica graph, each in a thread of its own.
(3) The replica graphs end at the buckets. Gradients are joined as the live tensors were split: rows are concatenated;
    gradients of replicated tensors are summed in replica order, so that runs repeat bit for bit. (2) puts them into the
    live tensors' collectors and returns None for the tokens; the LiveNodes, which run next, return them.

(2) is a node of its own because the tokens are on the CPU: torch runs it in the thread that has called backward, and
not in the one thread that it has for an accelerator. So it can wait for the replicas, and the boundaries of several
forwards run one after the other: those of the last forward first, as on one device, because torch's engine runs the
latest of the nodes that are ready, and (1) to (4) keep the place in which they were made.

An output may lie on the way to others, as `hidden` does in `return head(hidden), hidden`. It has a lower level than
they, and the caller's graph has the way:

    (2) Replicas ──► token ──┬──► (1) hidden ──► (4) Level ──► token ──► (1) head(hidden) ──► loss
                             └─────────────────────┘

(4) computes the gradient of `hidden` by what has come to the levels above, if something in the caller's graph sees it:
    a hook, `retain_grad`, or `torch.autograd.grad`. (2) runs the whole backward, as without (4), but with the gradient
    that has come to (1) of `hidden` in the place of what reaches it inside the replicas.

With create_graph=True the replicas' gradients are outputs of the replica graphs in turn, with the incoming gradients as
further inputs. Another boundary represents them in the caller's graph. So derivatives of any order come from the graphs
of the first forward: nothing is computed again, no buffer is written and no random number is drawn a second time.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, repeat
from typing import Any, TypeAlias

import torch

from unisono.autograd.order_of_sums import order_of_sums
from unisono.autograd.replica_graph import Joined, ReplicaGraphs
from unisono.distributed.gradient_sync import RankReduction
from unisono.runtime import devices as _devices
from unisono.runtime import timeline
from unisono.runtime.buckets import Gradients
from unisono.runtime.errors import add_note, text_of
from unisono.runtime.interrupts import critical
from unisono.runtime.streams import current_streams_of, wait_for_makers
from unisono.runtime.torch_private import engine
from unisono.runtime.tracebacks import without_own_frames

_KEEP_GRAPH = (
    "backward reaches both the module's output and a tensor that left forward another way (a hook or a list "
    "stored it), and the backward of one frees tensors that the other needs. Call backward(retain_graph=True), or "
    "return the tensor from forward."
)
_FREED = (
    "Trying to backward through the replicas a second time: the first backward freed their saved "
    "tensors. Pass retain_graph=True to the first, or add the losses and call backward once."
)
_WAY_RUNS_TWICE = (
    "the gradient of one output by another that lies on its way was asked for (by torch.autograd.grad, retain_grad or "
    "a hook), so backward goes that way twice: set torch._functorch.config.donated_buffer = False before you compile."
)
_MODULE_HOOKS = (
    "backward reaches both the module's output and a tensor that left forward another way (a hook or a list "
    "stored it), and the module has backward hooks. On accelerators both would run at once and mix up the "
    "hooks' state. Return the tensor from forward, or call backward once for each, the first with "
    "retain_graph=True."
)


@dataclass
class _Incoming:
    """The gradients of the outputs in one backward.

    Attributes:
        grads: of each output; None: none has come.
        streams: on which they are computed.
        device_threads: those that torch has for the accelerators of the outputs.
        totals: the outputs whose gradients have in them what comes from the levels above.
    """

    grads: Gradients
    streams: list[torch.Stream] = field(default_factory=list)
    device_threads: set[int] = field(default_factory=set)
    totals: set[int] = field(default_factory=set)

    def here(self) -> Gradients:
        """Return the gradients, for what the calling thread's streams do next."""
        wait_for_makers(self.streams, self.grads)
        return self.grads

    def end(self) -> None:
        """Free the gradients: the backward has ended."""
        self.grads = []

    def is_in_device_thread(self) -> bool:
        """Return whether the calling thread is one that torch has for an accelerator: it cannot wait for itself."""
        return threading.get_ident() in self.device_threads


_OfBackwards: TypeAlias = dict[int, Callable[[], Any]]  # returns an _Incoming


class _OutputNode(torch.autograd.Function):
    """(1) The node of one output: `_join_output(token, graphs, incoming, number)` returns it, joined.

    `incoming` has the gradients of each backward that runs, by its number. torch's engine keeps them alive, until the
    backward has ended, or failed.
    """

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, graphs: ReplicaGraphs, incoming: _OfBackwards, number: int
    ) -> torch.Tensor:
        ctx.incoming, ctx.number, ctx.num_outputs = incoming, number, len(graphs.outputs)
        ctx.set_materialize_grads(False)
        each = graphs.outputs[number]
        result = each.join(each.tensors)
        if [tensor for tensor in each.tensors if tensor is result]:
            result = result.clone()  # it would be a replica's own tensor, and the caller may write into it
        if not each.requires_grad:
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, ...]:
        number = engine.number_of_backward()
        if number not in ctx.incoming:
            new = _Incoming([None] * ctx.num_outputs)
            ref = weakref.ref(new)
            is_first = ctx.incoming.setdefault(number, ref) is ref  # outputs on other devices come from other threads
            if is_first:
                engine.call_at_end_of_backward(new.end)
        incoming = ctx.incoming[number]()
        if grad is not None:
            incoming.grads[ctx.number] = grad
            incoming.streams += current_streams_of([grad])
            if not _devices.computes_on_host(grad.device):
                incoming.device_threads.add(threading.get_ident())
        return None, None, None, None


class _LevelNode(torch.autograd.Function):
    """(4) The node between two levels: `_link_level(graphs, incoming, lower, token, *joined)`, the upper level's token.

    `lower` are the numbers of the lower level's outputs that lie on the way to others, `joined` the outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, graphs: ReplicaGraphs, incoming: _OfBackwards, lower: Sequence[int], *linked: torch.Tensor
    ) -> torch.Tensor:
        ctx.graphs, ctx.incoming, ctx.lower = graphs, incoming, lower
        ctx.set_materialize_grads(False)
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    @without_own_frames
    @critical
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        next_token, *nodes = [node for node, _ in ctx.next_functions]
        number = engine.number_of_backward()
        goes_on = engine.backward_runs(next_token)
        incoming = ctx.incoming[number]() if goes_on else ctx.incoming.pop(number)()
        found = _gradients_of_lower(ctx.graphs, incoming, dict(zip(ctx.lower, nodes, strict=True)), goes_on=goes_on)
        return None, None, None, None, *[found.get(number) for number in ctx.lower]


class _ReplicasNode(torch.autograd.Function):
    """(2) The node of the replicas: `_link_replicas(graphs, incoming, *tokens, *leaves)`, the outputs' token."""

    @staticmethod
    def forward(ctx: Any, graphs: ReplicaGraphs, incoming: _OfBackwards, *linked: torch.Tensor) -> torch.Tensor:
        ctx.graphs, ctx.incoming = graphs, incoming
        ctx.collectors = [group.collector for group in graphs.groups]
        ctx.num_others = len(linked) - len(ctx.collectors)
        ctx.set_materialize_grads(False)
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    @without_own_frames
    @critical
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        incoming: _Incoming = ctx.incoming.pop(engine.number_of_backward())()
        recording = ctx.graphs.recording
        try:
            # None is open where replicas were run again after the profile has ended.
            if recording is None or not recording.is_open:
                return _backward(ctx, incoming)
            with recording.recorded(timeline.BACKWARD, timeline.SCATTER):
                return _backward(ctx, incoming)
        finally:
            incoming.grads = []


# `apply` without its search for torch.func's tensors: under a transform the plain composition runs.
_join_output: Any = super(torch.autograd.Function, _OutputNode).apply
_link_level: Any = super(torch.autograd.Function, _LevelNode).apply
_link_replicas: Any = super(torch.autograd.Function, _ReplicasNode).apply


def _backward(ctx: Any, incoming: _Incoming) -> tuple[torch.Tensor | None, ...]:
    """Run the backward of the replicas; give the live tensors' gradients to their collectors, and return the rest."""
    graphs: ReplicaGraphs = ctx.graphs
    grads = incoming.here()
    no_gradients: tuple[torch.Tensor | None, ...] = (None,) * (2 + len(ctx.collectors) + ctx.num_others)
    has_grads = bool([grad for grad in grads if grad is not None])
    if graphs.released:
        if not has_grads:  # a later forward has detached the only output that it used, a buffer
            return no_gradients
        raise RuntimeError(_FREED)
    live_node = graphs.live_node_to_sum(ctx)
    if live_node is None and not has_grads:
        return no_gradients
    reduction, sum_later = (None, None) if live_node is None else _sums_over_ranks(graphs, live_node)
    higher, needed = torch.is_grad_enabled(), graphs.needed_inputs(ctx)
    # Losses that left forward in another way go through the same graphs in this backward, later.
    others_follow = graphs.buckets_will_run()
    keep = graphs.keep or engine.backward_keeps_graph()
    on_backward, graphs.on_backward = graphs.on_backward, None
    if others_follow and not graphs.on_host and graphs.has_module_hooks():
        raise RuntimeError(_MODULE_HOOKS)
    try:
        if higher:
            every = range(len(graphs.all_inputs))
            wanted = [*compress(every, repeat(True) if needed is None else needed)]
            gradients = dict(zip(wanted, _differentiable_backward(graphs, incoming, wanted, wanted), strict=True))
            found = [gradients.get(number) for number in every]
        else:
            options: Any = {"keep": keep or others_follow, "in_device_thread": incoming.is_in_device_thread()}
            options["totals"] = incoming.totals
            early = None if others_follow else reduction  # all at the end: what follows would come late
            run = partial(graphs.backward, grads, early, needed, **options)
            found = run() if graphs.replay is None else graphs.replay.run(graphs, run)
        release = _do_nothing if keep or higher else partial(graphs.release, give_back=not others_follow)
        first = len(found) - len(graphs.parameters.live)
        summed, all_reduce = found[first:], sum_later
        if reduction is None:
            release()
        elif others_follow:
            all_reduce = partial(reduction.sum, when_sent=release)
        else:
            summed = reduction.sum(summed, when_sent=release)
    except BaseException as error:
        if others_follow and "backward through the graph a second time" in text_of(error):
            add_note(error, _KEEP_GRAPH)
        if not higher:
            graphs.release(failed=True)
        if reduction is not None:
            reduction.failed(error)
        raise
    if on_backward is not None:
        engine.call_at_end_of_backward(on_backward)
    start = 0
    for collector in ctx.collectors[:-1]:
        collector.add_of_boundary(found[start : start + len(collector.live)])
        start += len(collector.live)
    ctx.collectors[-1].add_of_boundary(summed, all_reduce)
    return (*no_gradients[: 2 + len(ctx.collectors)], *found[start:first])


def _sums_over_ranks(
    graphs: ReplicaGraphs, live_node: Any
) -> tuple[RankReduction | None, Callable[[Gradients], Gradients] | None]:
    """Return what sums full buckets over the ranks at once; or, where others are summed before, what sums all later."""
    parameters, sync_context = graphs.parameters, graphs.sync_context
    assert sync_context is not None  # else there is no node whose gradients are to be summed
    if order_of_sums.is_next(parameters.collector):
        return sync_context.begin(parameters.live, live_node, parameters.plan), None
    return None, partial(sync_context.sum, parameters.live, live_node)


def _do_nothing() -> None:
    pass


def _gradients_of_lower(
    graphs: ReplicaGraphs, incoming: _Incoming, nodes: Mapping[int, Any], *, goes_on: bool
) -> dict[int, torch.Tensor | None]:
    """Return the gradients of the lower level's outputs by what has come to the levels above: of those that are seen.

    Args:
        nodes: those of the outputs, by their numbers.
        goes_on: whether the backward goes on to the lower level's token.
    """
    grads, is_restricted = incoming.here(), engine.backward_is_restricted()
    # `torch.autograd.grad` may ask for them, or for what is behind them: that is the same from here.
    is_sure = not (is_restricted and goes_on)
    lower_level = max(graphs.levels[k] for k in nodes)
    ends = [k for k, grad in enumerate(grads) if grad is not None and graphs.levels[k] > lower_level]
    wanted = [k for k, node in nodes.items() if graphs.on_way[k].is_seen(node)]  # type: ignore[union-attr]
    if not ends or not wanted:
        return {}
    if graphs.released:
        raise RuntimeError(_FREED)
    if is_sure:
        graphs.check_have_gradients(wanted, grads)
    wanted = [k for k in wanted if graphs.why_no_gradient(k) is None]
    if torch.is_grad_enabled():
        gradients = _differentiable_backward(graphs, incoming, wanted, None, of_outputs=True)
    else:
        options: Any = {
            "outputs": wanted,
            "totals": incoming.totals,
            "keep": goes_on or graphs.keep or engine.backward_keeps_graph(),
            "in_device_thread": incoming.is_in_device_thread(),
        }
        run = partial(graphs.backward, grads, None, None, **options)
        try:
            gradients = run() if graphs.replay is None else graphs.replay.run(graphs, run)
        except RuntimeError as error:
            if "donated buffers" in text_of(error) and not engine.backward_keeps_graph():
                add_note(error, _WAY_RUNS_TWICE)
            raise
    found = dict(zip(wanted, gradients, strict=True))
    for number, gradient in found.items():
        if gradient is None:
            graphs.on_way[number].skip_hooks()  # type: ignore[union-attr]
        else:
            incoming.totals.add(number)
    return found


def join(graphs: ReplicaGraphs) -> Sequence[torch.Tensor]:
    """Return the joined outputs, linked to the caller's tensors if any of them needs a gradient."""
    if not [each for each in graphs.outputs if each.requires_grad]:
        return [each.join(each.tensors) for each in graphs.outputs]
    incoming: _OfBackwards = {}
    tokens = [group.token for group in graphs.groups]
    token = _link_replicas(graphs, incoming, *tokens, *[leaf.live for leaf in graphs.leaves])
    # Losses that left forward in another way lead to the replicas' graphs directly. A backward of both goes through the
    # boundary first, which then keeps these graphs: its nodes are made after theirs, in whatever thread those were.
    if graphs.on_way:
        return _joined_by_level(graphs, incoming, token)
    return [_join_output(token, graphs, incoming, number) for number, _ in enumerate(graphs.outputs)]


def _joined_by_level(graphs: ReplicaGraphs, incoming: _OfBackwards, token: torch.Tensor) -> list[torch.Tensor]:
    """Return the joined outputs, of which some lie on the way to others."""
    # Those of the forward, where these are graphs of gradients. What the caller has dropped is not seen.
    joined = {k: each.ref() for k, each in graphs.on_way.items() if each is not None}
    for level in range(max(graphs.levels) + 1):
        below = {k: joined[k] for k, each in graphs.on_way.items() if each and graphs.levels[k] == level - 1}
        if lower := {k: tensor for k, tensor in below.items() if tensor is not None}:
            token = _link_level(graphs, incoming, [*lower], token, *lower.values())
        for number in [k for k, of_output in enumerate(graphs.levels) if of_output == level and k not in joined]:
            tensor = joined[number] = _join_output(token, graphs, incoming, number)
            if number in graphs.on_way and tensor.requires_grad:
                graphs.on_way[number] = Joined.of(tensor, graphs.outputs[number].tensors)
    return [joined[k] for k, _ in enumerate(graphs.outputs)]  # type: ignore[misc]


def _differentiable_backward(
    graphs: ReplicaGraphs,
    incoming: _Incoming,
    wanted: Sequence[int],
    refused: Collection[int] | None,
    *,
    of_outputs: bool = False,
) -> Gradients:
    """Return the gradients of some inputs, or outputs, as outputs of one more boundary."""
    args = incoming.grads, incoming.totals, wanted, refused
    run = partial(graphs.differentiable_backward, *args, of_outputs=of_outputs)
    higher, gradients = run() if graphs.replay is None else graphs.replay.run(graphs, run)
    if not [each for each in gradients if each is not None]:
        return [None] * len(gradients)
    results = iter(join(higher))
    return [next(results) if each is not None else None for each in gradients]
