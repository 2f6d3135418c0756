"""The graph of a rank with one device: that of its replica is a part of the caller's.

live parameters ──► LiveNode ──► token ──► BucketNodes ──► the replica's parameters ──► its forward ──► (1) ──► outputs
                        ▲                       │
                        └──(3) sums ◄── ranks ◄─┴─(2) full buckets

There is nothing to split, to join or to run in another thread. So all that the caller does with the outputs is torch's
own: the order of hooks, `retain_graph`, `torch.autograd.grad`, `create_graph`, gradients between outputs, and what left
forward in another way.

(1) The node of an output keeps the replica while the graph lives. The first one that a backward comes to begins it.
(2) Where no later forward's gradients are still to be summed in this backward, buckets are sent to the other ranks as
    soon as they are full.
(3) The LiveNode waits for their sums. Otherwise it gets all gradients first, and sums them then.

A forward with a reentrant activation checkpoint has a boundary: that runs a backward inside the caller's, and there is
one sum for both.

A failed backward has nothing of ours around it. torch's engine drops the `RunningBackward` then, which tells the other
ranks if they wait for its sums.
"""

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from unisono.autograd.linked import LinkedParameters
from unisono.autograd.live_gradients import RunningBackward
from unisono.autograd.order_of_sums import order_of_sums
from unisono.distributed.gradient_sync import SyncContext
from unisono.leftovers.buffers_in_backward import BuffersInBackward
from unisono.runtime import timeline
from unisono.runtime.timeline import ReplicaTiming, StepRecording
from unisono.runtime.torch_private import engine
from unisono.runtime.tracebacks import without_own_frames


class CallersGraph:
    """What the output nodes of one forward have in common.

    Args:
        parameters: the live ones, and the replica's.
        sync_context: how their gradients are summed.
        timing: of the replica.
        buffers: gives the replica the live buffers, for activation checkpoints; None: it has none.
        on_release: called when a backward has freed the graph; keeps the replica alive.
        recording: of the step that this graph is part of, if it is recorded; the replica computes on the host then.
    """

    def __init__(
        self,
        parameters: LinkedParameters,
        sync_context: SyncContext,
        timing: ReplicaTiming,
        buffers: BuffersInBackward | None,
        on_release: Callable[[], object],
        recording: StepRecording | None,
    ) -> None:
        self._parameters, self._sync_context, self._timing = parameters, sync_context, timing
        self._buffers, self._on_release, self._recording = buffers, on_release, recording
        self._lock = threading.Lock()  # outputs on several devices have several threads

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output of the replica as the caller's, whose backward begins that of the forward."""
        output: torch.Tensor = _output(tensor, self) if tensor.requires_grad else tensor
        return output

    def begin_backward(self) -> None:
        """Begin the running backward, unless another output has."""
        collector, number = self._parameters.collector, engine.number_of_backward()
        with self._lock:
            if collector.running(number) is not None:
                return
            began, keeps = time.perf_counter(), engine.backward_keeps_graph()
            recorded = None
            if self._recording is not None and self._recording.is_open:
                recorded = timeline.RecordedBackward(self._recording)

            def end(_: RunningBackward) -> None:
                collector.backwards.pop(number, None)
                if recorded is not None:
                    recorded.end()
                self._timing.backward_s = time.perf_counter() - began
                if not keeps:
                    self._on_release()

            backward = RunningBackward()
            engine.call_at_end_of_backward(partial(end, backward))
            collector.backwards[number] = weakref.ref(backward)
            backward.reduction = self._begin_reduction()
        if self._buffers is not None:
            self._buffers.renew()

    def _begin_reduction(self) -> Any:
        """Return what sums full buckets at once; None where others are summed before, or sums are not for all."""
        token, collector = self._parameters.token, self._parameters.collector
        if (
            torch.is_grad_enabled()
            or token.grad_fn is None
            or engine.backward_is_restricted()
            or not engine.backward_runs(token.grad_fn)
            or not order_of_sums.is_next(collector)
        ):
            return None
        return self._sync_context.begin(collector.live, token.grad_fn, self._parameters.plan)


class _OutputNode(torch.autograd.Function):
    """(1) The node of an output."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, graph: CallersGraph) -> torch.Tensor:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    @without_own_frames
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        ctx.graph.begin_backward()
        return grad, None


_output: Any = super(torch.autograd.Function, _OutputNode).apply  # as in boundary.py
