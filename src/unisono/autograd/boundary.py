"""The autograd boundary: the caller's graph sees all replicas as one node.

caller's graph    live tensors ──► LiveNode ──► token ──► (2) Replicas ──► token ──► (1) Outputs ──► outputs ──► loss
                                     (bucket.py) │                                      ▲
                                                 ▼                                      │ joined
replica graphs           (3) BucketNodes ──► tensors of replica i ──► replica i ──► outputs of replica i

    forward     Each input is split into one tensor a replica by its placement: tensors with rows by `Shard`, parameters
                by `Replicate`. Each output is joined from the replicas' outputs by its placement.

    backward    is the adjoint.
(1) notes the gradients of the outputs.
(2) splits them as the outputs were joined, and runs the backward of every replica graph, each in a thread of its own.
(3) The replica graphs end at the buckets. Gradients are joined as the live tensors were split: rows are concatenated;
    gradients of replicated tensors are summed in replica order, so that runs repeat bit for bit.

(2) is a node of its own because the tokens are on the CPU: torch runs it in the thread that has called backward, and
not in the one thread that it has for an accelerator. So it can wait for the replicas, and the boundaries of several
forwards run one after the other, in an order that does not depend on time.

With create_graph=True the replicas' gradients are outputs of the replica graphs in turn, with the incoming gradients as
further inputs. Another boundary represents them in the caller's graph. So derivatives of any order come from the graphs
of the first forward: nothing is computed again, no buffer is written and no random number is drawn a second time.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from unisono.autograd.bucket import BOUNDARIES, FIRST, Gradients
from unisono.autograd.replica_graph import ReplicaGraphs
from unisono.runtime import devices as _devices
from unisono.runtime import timeline, torch_private
from unisono.runtime.errors import add_note, text_of
from unisono.runtime.interrupts import critical
from unisono.runtime.streams import current_streams_of, wait_for_makers
from unisono.runtime.tracebacks import without_own_frames

_KEEP_GRAPH = (
    "backward reaches both the module's output and a tensor that left forward another way (a hook or a list "
    "stored it), and the backward of one frees tensors that the other needs. Call backward(retain_graph=True), or "
    "return the tensor from forward."
)


_MODULE_HOOKS = (
    "backward reaches both the module's output and a tensor that left forward another way (a hook or a list "
    "stored it), and the module has backward hooks. On accelerators both would run at once and mix up the "
    "hooks' state. Return the tensor from forward, or call backward once for each, the first with "
    "retain_graph=True."
)


class _Incoming(NamedTuple):
    """The gradients of the outputs in one backward."""

    grads: Sequence[torch.Tensor | None]
    streams: Sequence[torch.Stream]  # on which they are computed
    device_thread: int | None  # the thread that torch has for the accelerator of the outputs, if they are on one

    def here(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients, for what the calling thread's streams do next."""
        wait_for_makers(self.streams, self.grads)
        return self.grads

    def is_in_device_thread(self) -> bool:
        """Return whether the calling thread is the one that torch has for an accelerator: it cannot wait for itself."""
        return self.device_thread == threading.get_ident()


class _Outputs(torch.autograd.Function):
    """(1) The node of the outputs: `_join_outputs(token, graphs, incoming)` returns them, joined.

    `incoming` are the gradients of each backward that runs, by its number.
    """

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, graphs: ReplicaGraphs, incoming: dict[int, _Incoming]
    ) -> tuple[torch.Tensor, ...]:
        ctx.incoming = incoming
        ctx.set_materialize_grads(False)
        joined = []
        constant = []
        for each in graphs.outputs:
            result = each.join(each.tensors)
            if [tensor for tensor in each.tensors if tensor is result]:
                result = result.clone()  # it would be a replica's own tensor, and the caller may write into it
            joined.append(result)
            if not each.requires_grad:
                constant.append(result)
        ctx.mark_non_differentiable(*constant)
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        on_host = _devices.all_on_host([grad.device for grad in grads if grad is not None])
        device_thread = None if on_host else threading.get_ident()
        ctx.incoming[torch_private.number_of_backward()] = _Incoming(grads, current_streams_of(grads), device_thread)
        # On accelerators (2) may be ready before or after that of another forward, as the two threads happen to run.
        torch_private.run_in_turn(ctx.next_functions[0][0], BOUNDARIES)
        return None, None, None


class _Replicas(torch.autograd.Function):
    """(2) The node of the replicas: `_link_replicas(graphs, incoming, *tokens, *leaves, *earlier)`, the outputs' token.

    `earlier` are the tokens of earlier forwards into whose graphs these go on.
    """

    @staticmethod
    def forward(ctx: Any, graphs: ReplicaGraphs, incoming: dict[int, _Incoming], *linked: torch.Tensor) -> torch.Tensor:
        ctx.graphs, ctx.incoming = graphs, incoming
        ctx.collectors = [group.collector for group in graphs.groups]
        ctx.num_others = len(linked) - len(ctx.collectors)
        ctx.set_materialize_grads(False)
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    @without_own_frames
    @critical
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        incoming: _Incoming = ctx.incoming.pop(torch_private.number_of_backward())
        step = ctx.graphs.step
        if step is None or not step.is_open:  # none where replicas were run again after the profile has ended
            return _backward(ctx, incoming)
        with step.recorded(timeline.BACKWARD, timeline.SCATTER):
            return _backward(ctx, incoming)


# `apply` without its search for torch.func's tensors: under a transform the plain composition runs.
_join_outputs: Any = super(torch.autograd.Function, _Outputs).apply
_link_replicas: Any = super(torch.autograd.Function, _Replicas).apply


def _backward(ctx: Any, incoming: _Incoming) -> tuple[torch.Tensor | None, ...]:
    """Run the backward of the replicas; give the live tensors' gradients to their collectors, and return the rest."""
    graphs: ReplicaGraphs = ctx.graphs
    grads = incoming.here()
    nothing: tuple[torch.Tensor | None, ...] = (None,) * (2 + len(ctx.collectors) + ctx.num_others)
    has_grads = bool([grad for grad in grads if grad is not None])
    if graphs.released:
        if not has_grads:  # a later forward has detached the only output that it used, a buffer
            return nothing
        raise RuntimeError(
            "Trying to backward through the replicas a second time: the first backward freed their saved "
            "tensors. Pass retain_graph=True to the first, or add the losses and call backward once."
        )
    reduction = graphs.begin_sum(ctx)
    if reduction is None and not has_grads:
        return nothing
    higher, needed = torch.is_grad_enabled(), graphs.needed_inputs(ctx)
    # Losses that left forward in another way go through the same graphs in this backward, later.
    others_follow = graphs.buckets_will_run()
    keep = graphs.are_needed_later or torch_private.backward_keeps_graph()
    on_backward, graphs.on_backward = graphs.on_backward, None
    if others_follow and not graphs.on_host and graphs.has_module_hooks():
        raise RuntimeError(_MODULE_HOOKS)
    try:
        if higher:
            found = _differentiable_backward(graphs, grads, needed)
        else:
            options = {"keep": keep or others_follow, "in_device_thread": incoming.is_in_device_thread()}
            early = None if others_follow else reduction  # all at the end: what follows would come late
            run = partial(graphs.backward, grads, early, needed, **options)
            found = run() if graphs.replay is None else graphs.replay.run(graphs, run)
        release = _nothing if keep or higher else partial(graphs.release, give_back=not others_follow)
        first = len(found) - len(graphs.parameters.live)
        of_parameters, all_reduce = found[first:], None
        if reduction is None:
            release()
        elif others_follow:
            all_reduce = partial(reduction.sum, when_sent=release)
        else:
            of_parameters = reduction.sum(of_parameters, when_sent=release)
    except BaseException as error:
        if others_follow and "backward through the graph a second time" in text_of(error):
            add_note(error, _KEEP_GRAPH)
        if not higher:
            graphs.release(failed=True)
        if reduction is not None:
            reduction.failed(error)
        raise
    if on_backward is not None and not torch_private.call_at_end_of_backward(on_backward):
        on_backward()
    start, num_earlier = 0, len(graphs.captured.earlier)
    for collector in ctx.collectors[:-1]:
        collector.add_of_boundary(found[start : start + len(collector.live)])
        start += len(collector.live)
    ctx.collectors[-1].add_of_boundary(of_parameters, all_reduce)
    return (*nothing[: 2 + len(ctx.collectors)], *found[start:first], *nothing[:num_earlier])


def _nothing() -> None:
    pass


def join(graphs: ReplicaGraphs) -> Sequence[torch.Tensor]:
    """Return the joined outputs, linked to the caller's tensors if any of them needs a gradient."""
    if not [each for each in graphs.outputs if each.requires_grad]:
        return [each.join(each.tensors) for each in graphs.outputs]
    incoming: dict[int, _Incoming] = {}
    tokens = [group.token for group in graphs.groups]
    earlier = [token for _, token in graphs.captured.earlier]
    token = _link_replicas(graphs, incoming, *tokens, *[leaf.live for leaf in graphs.leaves], *earlier)
    joined: tuple[torch.Tensor, ...] = _join_outputs(token, graphs, incoming)
    # Losses that left forward in another way lead to the replicas' graphs directly. A backward of both goes through the
    # boundary first, which then keeps these graphs.
    for node in {token.grad_fn, *[tensor.grad_fn for tensor in joined]} - {None}:
        torch_private.run_first(node, FIRST)
    return joined


def _differentiable_backward(
    graphs: ReplicaGraphs, grads: Sequence[torch.Tensor | None], needed: Sequence[bool] | None
) -> Gradients:
    """Return the gradients of the boundary's inputs as outputs of one more boundary."""
    run = partial(graphs.differentiable_backward, grads, needed)
    replay = graphs.replay
    higher, gradients = run() if replay is None else replay.run(graphs, run)
    if replay is not None:
        higher = replace(higher, replay=replay.of_gradients(graphs, lambda: run()[0]))
    if not higher.outputs:
        return [None] * len(gradients)
    results = iter(join(higher))
    return [next(results) if each is not None else None for each in gradients]
