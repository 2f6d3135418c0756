"""The autograd boundary: the caller's graph sees all replicas as one node.

caller's graph:   inputs, parameters ──► Boundary.forward ──► outputs ──► loss
                                             │       ▲
                                         (1) part    │ join (2)
                                             ▼       │
replica graphs:   leaves of replica i ──► replica i ──► outputs of replica i      one graph for each replica

(1) Each input is split into one leaf a replica by its placement: tensors with rows by `Shard`, parameters by
    `Replicate`.
(2) Each output is joined from the replicas' outputs by its placement.
(3) Backward is the adjoint. Output gradients are split as (2) joined, every replica graph runs backward, and the
    leaves' gradients are joined as (1) split: rows are concatenated; gradients of replicated tensors are summed in
    replica order, so that runs repeat bit for bit.
(4) With create_graph=True the replicas' gradients are outputs of the replica graphs in turn, with the incoming
    gradients as further leaves. Another Boundary represents them in the caller's graph. So derivatives of any order
    come from the graphs of the first forward: nothing is computed again, no buffer is written and no random number
    is drawn a second time.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from unisono.autograd.replica_graph import ReplicaGraphs
from unisono.runtime import timeline, torch_private
from unisono.runtime.interrupts import critical
from unisono.runtime.tracebacks import without_own_frames


class Alias(torch.autograd.Function):
    """The same tensor with the same history, as another object.

    The boundary keeps its inputs for derivatives of higher order. If it kept the caller's own objects, `h += model(h)`
    would make a cycle of h and the boundary, and a later write into h would change what the boundary is linked to.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # None, where no replica used the tensor, stays None
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


class _Boundary(torch.autograd.Function):
    """The node of the caller's graph; `_apply(graphs, *live_inputs)` returns the joined outputs."""

    @staticmethod
    def forward(ctx: Any, graphs: ReplicaGraphs, *live_inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        graphs.live_inputs = live_inputs
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
    @without_own_frames
    @critical
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        step = ctx.graphs.step
        if step is None or not step.is_open:  # none where replicas were run again after the profile has ended
            return _backward(ctx, grads)
        with step.recorded(timeline.BACKWARD, timeline.SCATTER):
            return _backward(ctx, grads)


# `apply` without its search for torch.func's tensors, which is a call for each parameter: under a transform the plain
# composition runs.
_apply: Any = super(torch.autograd.Function, _Boundary).apply


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the boundary's inputs, behind one of `graphs`, which is None."""
    graphs: ReplicaGraphs = ctx.graphs
    has_grads = bool([grad for grad in grads if grad is not None])
    if graphs.released:
        if not has_grads:  # a later forward has detached the only output that it used, a buffer
            return (None,) * len(ctx.needs_input_grad)
        raise RuntimeError(
            "Trying to backward through the replicas a second time: the first backward freed the tensors that they "
            "had saved. Give the first one retain_graph=True, or add the losses up and call backward once."
        )
    reduction = None if graphs.sync_context is None else graphs.begin_sum(ctx)
    first, live_inputs = len(graphs.inputs), graphs.live_inputs
    if reduction is None and not has_grads:
        _skip_hooks_without_gradient(live_inputs, [None] * len(live_inputs))
        return (None,) * (1 + len(live_inputs))
    keep, higher = graphs.keep or torch_private.backward_keeps_graph(), torch.is_grad_enabled()
    needed = graphs.needed_inputs(ctx) if graphs.outside.with_reentrant_checkpoint else None
    let_stream_wait = None
    try:
        if higher:
            joined = _differentiable_backward(graphs, grads, needed)
            if reduction is not None:
                joined[first:] = reduction.differentiable(joined[first:])
        else:
            run = partial(graphs.backward, grads, keep, reduction, needed)
            joined = run() if graphs.replay is None else graphs.replay.run(graphs, run)
            wait = None if reduction is None else reduction.send(joined[first:])
            let_stream_wait = graphs.outputs_stream_wait()
            if not keep:
                graphs.release()  # takes time, so it is done while the other ranks are waited for
            if wait is not None:
                joined[first:] = wait()
    except BaseException as error:
        if not higher:
            graphs.release(failed=True)  # another backward must not count what the leaves hold now
        if reduction is not None:
            reduction.failed(error)
        raise
    _skip_hooks_without_gradient(live_inputs, joined)
    if let_stream_wait is not None:
        let_stream_wait()
    return (None, *joined)


def _skip_hooks_without_gradient(live_inputs: Sequence[torch.Tensor], joined: Sequence[torch.Tensor | None]) -> None:
    """Let hooks of leaves that no replica used not be called, as without a wrapper: no node would lead to the leaf."""
    if without := [n for n, gradient in enumerate(joined) if gradient is None]:
        torch_private.skip_hooks_without_gradient([live_inputs[n] for n in without])


def join(graphs: ReplicaGraphs, live_inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the joined outputs, linked to the caller's tensors if any of them needs a gradient.

    Args:
        live_inputs: the caller's tensors behind `graphs.inputs`.
    """
    if not [each for each in graphs.outputs if each.requires_grad]:
        return graphs.joined_outputs()
    live = [*live_inputs, *graphs.parameters.live]
    aliases = [tensor if tensor.is_leaf else Alias.apply(tensor) for tensor in live]  # type: ignore[no-untyped-call]
    joined: tuple[torch.Tensor, ...] = _apply(graphs, *aliases)
    return joined


def _differentiable_backward(
    graphs: ReplicaGraphs, grads: Sequence[torch.Tensor | None], needed: Sequence[bool] | None
) -> list[torch.Tensor | None]:
    """Return the inputs' gradients as outputs of one more Boundary (4)."""
    run = partial(graphs.differentiable_backward, grads, needed)
    replay = graphs.replay
    higher, gradients = run() if replay is None else replay.run(graphs, run)
    if replay is not None:
        higher.replay = replay.of_gradients(graphs, lambda: run()[0])
    if not higher.outputs:
        return [None] * len(gradients)
    first = len(graphs.inputs)
    incoming = [grad for grad in grads if grad is not None]
    live_inputs = (*graphs.live_inputs[:first], *incoming, *graphs.live_inputs[first:])
    results = iter(_apply(higher, *live_inputs))
    return [next(results) if each is not None else None for each in gradients]
