"""The replica graphs of one forward: what goes into them, what comes out, and the backward through all of them.

Each replica has a graph of its own, from leaves for its shard and its parameters to its outputs. The boundary
(boundary.py) is what the caller's graph sees of them.

Which thread runs the backward of a replica graph: on the CPU each worker thread runs its own, so that backward is
parallel (torch's engine would run a CPU graph in the thread that called it). On accelerators one call runs all of them:
torch's engine has one thread a device, the boundary's backward runs on such a thread, and a wait in it for another
backward on the same device would never end.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from manyhands.autograd.broadcast import reduce_coalesced
from manyhands.autograd.reducer import NOTHING_EARLY, reduce_early, sum_in_place
from manyhands.autograd.reduction import Reduction, SyncContext
from manyhands.primitives.parallel_apply import values_or_raise
from manyhands.primitives.placements import Placement, Replicate
from manyhands.runtime import devices as _devices
from manyhands.runtime import torch_private
from manyhands.runtime.streams import wait_for_streams
from manyhands.runtime.thread_pool import PassContext, ReplicaTiming, one_pass, run_together
from manyhands.runtime.thread_state import modes_that_stay

_BACKWARD_INSIDE = (
    "the module calls backward inside forward, and its gradients cannot be summed over the processes there. Return the "
    "loss and call backward outside, or keep the model to this process: DataParallel(..., process_group=False)."
)


# What is entered around a backward that runs all replica graphs in one call.
BackwardContext: TypeAlias = Callable[[], AbstractContextManager[Any]]


class BoundaryTensor(NamedTuple):
    """One input or output of the boundary: its placement, its device, and each replica's tensor.

    Of an input the tensors are leaves (None: it needs no gradient, or the replica has no part of it). Of an output they
    are results (None: the replica has none, or it does not count).
    """

    placement: Placement
    device: torch.device
    tensors: Sequence[torch.Tensor | None]

    def part(self, tensor: torch.Tensor, index: int, device: torch.device) -> torch.Tensor | None:
        part = self.placement.part(tensor, index)
        return None if part is None else _devices.copy_to(part, device)

    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return self.placement.join(self._here(parts))

    def join_gradients(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the gradient of an input from its leaves' gradients; None if no replica has one."""
        given = [part for part in parts if part is not None]
        if not given:
            return None
        if isinstance(self.placement, Replicate):
            return sum_in_place([_devices.copy_to(part, self.device) for part in given])
        return self.placement.join(self._here(self.with_every_part(parts)))

    def with_every_part(self, parts: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return the leaves' gradients with zeros for rows on which no output depends."""
        if not self.placement.needs_every_part:
            return parts
        pairs = zip(parts, self.tensors, strict=True)
        return [torch.zeros_like(leaf) if part is None and leaf is not None else part for part, leaf in pairs]

    def _here(self, parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [None if part is None else _devices.copy_to(part, self.device) for part in parts]


@dataclass
class ReplicaGraphs:
    """The replica graphs of one forward, and the boundary's inputs and outputs.

    Attributes:
        timings: one a replica; `timings[i].device` is its device.
        where: each replica's name in messages.
        inputs, outputs: the boundary's tensors.
        shared_leaves: whether the graphs share leaves that are the caller's own tensors.
        keep: whether graphs of a higher order share nodes with these, so that a backward must not free them.
        keep_alive: objects that must live as long as the graphs.
        pass_contexts: entered around a backward in which each replica graph has a thread of its own.
        backward_context: entered around a backward that runs all replica graphs in one call.
        live_inputs: the caller's tensors, one for each of `inputs`.
        sync_context: what these graphs count for when several processes sum the parameters' gradients; None: they do
            not.
        parameters: which of `inputs` are the module's parameters.
        remote_parameters: whether any replica's parameters are copies in memory of their own.
        separate_memory: as in `ThreadsEngine`.
    """

    timings: list[ReplicaTiming]
    where: list[str]
    inputs: list[BoundaryTensor]
    outputs: list[BoundaryTensor]
    shared_leaves: bool = False
    keep: bool = False
    keep_alive: Any = None
    pass_contexts: Sequence[PassContext] = ()
    backward_context: BackwardContext = nullcontext
    live_inputs: tuple[torch.Tensor, ...] = ()
    sync_context: SyncContext | None = None
    parameters: range = range(0)
    remote_parameters: bool = False
    separate_memory: bool = False
    released: bool = field(default=False, init=False)
    _grad_is_free: threading.Lock = field(default_factory=threading.Lock, init=False)

    def release(self) -> None:
        """Drop the replica graphs; this frees what only they referred to."""
        self.inputs, self.outputs, self.live_inputs = [], [], ()
        self.keep_alive, self.pass_contexts, self.backward_context, self.released = None, (), nullcontext, True

    def check_backward_inside_forward(self) -> None:
        """Raise RuntimeError if gradients are summed over processes: the module itself has called backward."""
        if self.sync_context is not None:
            raise RuntimeError(_BACKWARD_INSIDE)

    def begin_sum(self, boundary: Any) -> Reduction | None:
        """Begin to sum the parameters' gradients over processes; None if this backward reaches no parameter.

        Args:
            boundary: the node whose backward runs.
        """
        if self.sync_context is None:
            return None
        following = boundary.next_functions  # the nodes that receive the inputs' gradients
        nodes = [following[k][0] for k in self.parameters]
        if not any(map(torch_private.backward_reaches, nodes)):
            return None
        return self.sync_context.begin([self.live_inputs[k] for k in self.parameters], nodes)

    def backward(
        self, output_grads: Sequence[torch.Tensor | None], keep: bool, reduction: Reduction | None = None
    ) -> list[list[torch.Tensor | None]]:
        """Run backward in every replica graph; return the gradients of each input, one a replica.

        Gradients that `reduction` has taken meanwhile are missing.
        """
        together = any_batched(output_grads) or modes_that_stay()  # neither can follow into other threads
        if together or self.shared_leaves or not self._grad_is_free.acquire(blocking=False):
            # .grad cannot be used: it cannot hold a batch of gradients; that of a shared leaf is the caller's; another
            # backward of the same graphs may be writing it now. Graphs that share a leaf may share nodes, which the
            # first replica's backward must not free.
            keep = keep or (self._one_backward_each() and not together)
            return self._gradients(*self._ends(output_grads), together=together, keep=keep)
        try:
            return self._backward_into_grad(output_grads, keep, reduction)
        finally:
            self._grad_is_free.release()

    def _backward_into_grad(
        self, output_grads: Sequence[torch.Tensor | None], keep: bool, reduction: Reduction | None
    ) -> list[list[torch.Tensor | None]]:
        ends, grads = self._ends(output_grads)

        def backward_some(replicas: Sequence[int]) -> None:
            started = time.perf_counter()
            some_ends = [end for i in replicas for end in ends[i]]
            if some_ends:
                torch_private.run_backward(some_ends, [g for i in replicas for g in grads[i]], keep=keep)
            for i in replicas:
                self.timings[i].backward_s = time.perf_counter() - started

        totals: dict[int, torch.Tensor] = {}
        with self._reduced_early(reduction, totals):
            if self._one_backward_each():
                self._run_together(lambda index: backward_some([index]))
            else:
                with self.backward_context():
                    backward_some(range(len(self.timings)))
        found = self.take_leaf_gradients()
        for k, total in totals.items():
            found[self.parameters[k]] = [total]
        return found

    def _reduced_early(
        self, reduction: Reduction | None, totals: dict[int, torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Return a context that sums the leaves' gradients during backward: into `.grad` of the first, or `totals`."""
        leaves = [self.inputs[k].tensors for k in self.parameters]
        emit, reduced = (reduction.add, reduction.early) if reduction is not None else NOTHING_EARLY
        if self.remote_parameters:
            homes = [self.inputs[k].device for k in self.parameters]
            return reduce_coalesced(leaves, homes, totals, emit, reduced, separate_memory=self.separate_memory)
        if reduction is not None:
            return reduce_early(leaves, emit, reduced)
        if self._one_backward_each():
            return reduce_early([edge.tensors for edge in self.inputs if isinstance(edge.placement, Replicate)])
        return nullcontext()

    def let_outputs_stream_wait(self) -> None:
        """Make the stream of the boundary's first output, which autograd uses, wait for the inputs' gradients."""
        if not self._one_backward_each():
            wait_for_streams(self.outputs[0].device, [edge.device for edge in self.inputs])

    def take_leaf_gradients(self) -> list[list[torch.Tensor | None]]:
        """Return the leaves' `.grad`, by input and replica, and set it to None."""
        return [[take_grad(leaf) for leaf in edge.tensors] for edge in self.inputs]

    def differentiable_backward(
        self, output_grads: Sequence[torch.Tensor | None]
    ) -> tuple["ReplicaGraphs", list[list[torch.Tensor | None]]]:
        """Run backward with create_graph=True; return its graphs, without outputs yet, and what `backward` returns."""
        replicas = range(len(self.timings))
        incoming: list[BoundaryTensor] = []
        ends: list[list[torch.Tensor]] = [[] for _ in replicas]
        end_grads: list[list[torch.Tensor]] = [[] for _ in replicas]
        for edge, grad in zip(self.outputs, output_grads, strict=True):
            if grad is None:
                continue
            parts = [edge.part(grad.detach(), i, self.timings[i].device) for i in replicas]
            parts = [None if p is None else p.detach().requires_grad_(grad.requires_grad) for p in parts]
            incoming.append(
                BoundaryTensor(edge.placement, grad.device, parts if grad.requires_grad else [None] * len(parts))
            )
            for i, (end, part) in enumerate(zip(edge.tensors, parts, strict=True)):
                if end is not None and end.requires_grad and part is not None:
                    ends[i].append(end)
                    end_grads[i].append(part)
        together = any_batched(output_grads) or modes_that_stay()
        higher = replace(self, inputs=[*self.inputs, *incoming], outputs=[], live_inputs=(), keep=True)
        return higher, self._gradients(ends, end_grads, together=together, create_graph=True)

    def _ends(
        self, output_grads: Sequence[torch.Tensor | None]
    ) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """Return the tensors from which backward starts in each replica graph, and their gradients."""
        ends: list[list[torch.Tensor]] = [[] for _ in self.timings]
        grads: list[list[torch.Tensor]] = [[] for _ in self.timings]
        for edge, grad in zip(self.outputs, output_grads, strict=True):
            for i, end in enumerate(edge.tensors):
                if grad is None or end is None or not end.requires_grad:
                    continue
                part = edge.part(grad, i, end.device)
                if part is not None:
                    ends[i].append(end)
                    grads[i].append(part)
        return ends, grads

    def _gradients(
        self, ends: list[list[torch.Tensor]], grads: list[list[torch.Tensor]], *, together: bool, **options: bool
    ) -> list[list[torch.Tensor | None]]:
        """Return the gradients of each input without writing any `.grad`: one call a replica, or one for all."""
        replicas = range(len(self.timings))
        found: list[dict[int, torch.Tensor | None]] = [{}] * len(replicas)  # id of a leaf -> its gradient

        def gradients(some: Sequence[int]) -> dict[int, torch.Tensor | None]:
            some_leaves = [edge.tensors[i] for edge in self.inputs for i in some]
            leaves = {id(leaf): leaf for leaf in some_leaves if leaf is not None}
            some_ends = [end for i in some for end in ends[i]]
            if not some_ends or not leaves:
                return {}
            some_grads = [grad for i in some for grad in grads[i]]
            results = torch_private.gradients(some_ends, list(leaves.values()), some_grads, **options)
            return dict(zip(leaves, results, strict=True))

        def backward_one(index: int) -> None:
            found[index] = gradients([index])

        if together or not self._one_backward_each():
            with self.backward_context():
                found = [gradients(replicas)] * len(replicas)
        else:
            self._run_together(backward_one)
        # If one call has computed all gradients, they are in one dictionary, and a shared leaf's counts once.
        return [[found[i].pop(id(leaf), None) for i, leaf in enumerate(edge.tensors)] for edge in self.inputs]

    def _one_backward_each(self) -> bool:
        """Return whether each replica graph's backward has a thread of its own."""
        return all(_devices.computes_on_host(timing.device) for timing in self.timings)

    def _run_together(self, backward_one: Callable[[int], None]) -> None:
        """Run each replica graph's backward in a thread of its own."""
        tasks = [lambda i=i: backward_one(i) for i in range(len(self.timings))]
        devices = [timing.device for timing in self.timings]
        where = [f"the backward of {place}" for place in self.where]
        with one_pass(self.pass_contexts) as contexts:
            # No variable may hold the outcomes: an error's traceback refers to this frame.
            values_or_raise(run_together(tasks, devices, contexts), where)


def any_batched(grads: Sequence[torch.Tensor | None]) -> bool:
    return any(grad is not None and torch_private.is_batched(grad) for grad in grads)


def take_grad(leaf: torch.Tensor | None) -> torch.Tensor | None:
    """Return a leaf's `.grad`, and set it to None."""
    if leaf is None:
        return None
    grad, leaf.grad = leaf.grad, None
    return grad
