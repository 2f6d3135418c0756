"""The autograd boundary: the caller's graph sees all replicas as one node.

    caller's graph:   inputs, parameters ──► Boundary.forward ──► outputs ──► loss
                                                 │       ▲
                                             (1) part    │ join (2)
                                                 ▼       │
    replica graphs:   leaves of replica i ──► replica i ──► outputs of replica i      one graph for each replica

    (1) Each input is parted into one leaf a replica by its placement: tensors with rows by `Shard`, parameters by
        `Replicate`.
    (2) Each output is joined from the replicas' outputs, by its placement.
    (3) Backward goes the other way with the roles exchanged: output gradients are parted as (2) joined, every replica
        graph is walked, and the leaves' gradients are joined as (1) parted: rows concatenated, whole tensors summed in
        replica order, so that runs repeat bit for bit.
    (4) With create_graph=True the replicas' gradients are themselves outputs of the replica graphs, which get leaves
        for the incoming gradients beside the first ones; one more Boundary of the same kind stands for them in the
        caller's graph. So derivatives of any order come from the graphs of the first pass: nothing is computed again,
        no buffer is written and no random number drawn a second time.

Who walks the replica graphs. On the host each worker walks its own, so backward runs in parallel (torch walks a CPU
graph in the thread that asked). On accelerators one call walks all: torch's engine has one thread a device, this code
runs on such a thread, and waiting in it for another thread's backward on the same device would wait for ever.
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
from manyhands.distributed.gradient_sync import Reduction, SyncContext
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


# What surrounds a walk of all replica graphs by one call.
BackwardContext: TypeAlias = Callable[[], AbstractContextManager[Any]]


class BoundaryTensor(NamedTuple):
    """One input or output of the boundary: its placement, its device, and what each replica has of it.

    For an input the replicas have leaves (None where it needs no gradient, or the replica has nothing of it), for an
    output they have results (None where a replica has none, or it does not count).
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
        """Return the leaves' gradients with zeros for rows that nothing depends on."""
        if not self.placement.needs_every_part:
            return parts
        pairs = zip(parts, self.tensors, strict=True)
        return [torch.zeros_like(leaf) if part is None and leaf is not None else part for part, leaf in pairs]

    def _here(self, parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [None if part is None else _devices.copy_to(part, self.device) for part in parts]


@dataclass
class ReplicaGraphs:
    """The replica graphs of one forward: what goes in, what comes out, and where each stands.

    Attributes:
        timings: one a replica; `timings[i].device` is its device.
        where: how a message calls each replica.
        inputs, outputs: the boundary's edges.
        shared_leaves: whether the graphs share leaves that are the caller's own tensors.
        keep: whether graphs of a higher order share nodes with these, so that a backward must not free them.
        keep_alive: what must not go before the graphs.
        begin_walk: what surrounds the replicas during a walk, where each is walked by a worker of its own.
        backward_context: what surrounds a walk of all by one call.
        live_inputs: the caller's tensors, one an input edge.
        sync_context: what these graphs count for when the gradients of the module's parameters are summed over
            processes; None: they are not.
        parameters: which input edges are those parameters.
        parameters_apart: whether any of their leaves is not where the parameter is.
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
    parameters_apart: bool = False
    released: bool = field(default=False, init=False)
    _grad_is_free: threading.Lock = field(default_factory=threading.Lock, init=False)

    def release(self) -> None:
        """Let the replica graphs go; what only they held is freed here."""
        self.inputs, self.outputs, self.live_inputs = [], [], ()
        self.keep_alive, self.pass_contexts, self.backward_context, self.released = None, (), nullcontext, True

    def check_backward_inside_forward(self) -> None:
        """Raise RuntimeError if a backward that the module has called itself has left gradients that cannot count."""
        if self.sync_context is not None:
            raise RuntimeError(_BACKWARD_INSIDE)

    def begin_sum(self, boundary: Any) -> Reduction | None:
        """Begin to sum the parameters' gradients over processes; None if that is not wanted.

        Args:
            boundary: the node whose backward runs.
        """
        if self.sync_context is None:
            return None
        following = boundary.next_functions  # where the gradient of each input is taken
        nodes = [following[k][0] for k in self.parameters]
        if not any(map(torch_private.backward_reaches, nodes)):
            return None
        return self.sync_context.begin([self.live_inputs[k] for k in self.parameters], nodes)

    def backward(
        self, output_grads: Sequence[torch.Tensor | None], keep: bool, over_processes: Reduction | None = None
    ) -> list[list[torch.Tensor | None]]:
        """Run backward in every replica graph; return each input edge's gradients, one a replica.

        Those of parameters are missing where they could be given to the sum over processes in the meantime.
        """
        together = _any_batched(output_grads) or modes_that_stay()  # neither can follow into other threads
        if together or self.shared_leaves or not self._grad_is_free.acquire(blocking=False):
            # A leaf's .grad cannot hold a batch of gradients, that of a shared one is the caller's, and another walk of
            # the same graphs may be filling it now. Graphs that share a leaf may share nodes too, which must not be
            # freed by the first who has walked them.
            keep = keep or (self._one_backward_each() and not together)
            return self._gradients(*self._ends(output_grads), together=together, retain_graph=keep)
        try:
            return self._backward_into_grad(output_grads, keep, over_processes)
        finally:
            self._grad_is_free.release()

    def _backward_into_grad(
        self, output_grads: Sequence[torch.Tensor | None], keep: bool, over_processes: Reduction | None
    ) -> list[list[torch.Tensor | None]]:
        ends, grads = self._ends(output_grads)

        def backward_some(replicas: Sequence[int]) -> None:
            started = time.perf_counter()
            some_ends = [end for i in replicas for end in ends[i]]
            if some_ends:
                torch.autograd.backward(some_ends, [g for i in replicas for g in grads[i]], retain_graph=keep)
            for i in replicas:
                self.timings[i].backward_s = time.perf_counter() - started

        totals: dict[int, torch.Tensor] = {}
        with self._summed_early(over_processes, totals):
            if self._one_backward_each():
                self._run_together(lambda index: backward_some([index]))
            else:
                with self.backward_context():
                    backward_some(range(len(self.timings)))
        found = self.take_leaf_gradients()
        for k, total in totals.items():
            found[self.parameters[k]] = [total]
        return found

    def _summed_early(
        self, over_processes: Reduction | None, totals: dict[int, torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Return what sums the leaves' gradients while a walk runs: into `.grad` of the first, or into `totals`."""
        leaves = [self.inputs[k].tensors for k in self.parameters]
        emit, reduced = (over_processes.add, over_processes.early) if over_processes is not None else NOTHING_EARLY
        if self.parameters_apart:
            return reduce_coalesced(leaves, [self.inputs[k].device for k in self.parameters], totals, emit, reduced)
        if over_processes is not None:
            return reduce_early(leaves, emit, reduced)
        if self._one_backward_each():
            return reduce_early([edge.tensors for edge in self.inputs if isinstance(edge.placement, Replicate)])
        return nullcontext()

    def let_outputs_stream_wait(self) -> None:
        """Have the inputs' gradients ready where autograd looks: on the stream of the boundary's first output."""
        if not self._one_backward_each():
            wait_for_streams(self.outputs[0].device, [edge.device for edge in self.inputs])

    def take_leaf_gradients(self) -> list[list[torch.Tensor | None]]:
        """Return what the leaves hold in `.grad`, by edge and replica, and take it away from them."""
        return [[take_grad(leaf) for leaf in edge.tensors] for edge in self.inputs]

    def differentiable_backward(
        self, output_grads: Sequence[torch.Tensor | None]
    ) -> tuple["ReplicaGraphs", list[list[torch.Tensor | None]]]:
        """Run backward with a graph of its own; return it, without outputs yet, and what `backward` returns."""
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
        together = _any_batched(output_grads) or modes_that_stay()
        higher = replace(self, inputs=[*self.inputs, *incoming], outputs=[], live_inputs=(), keep=True)
        return higher, self._gradients(ends, end_grads, together=together, create_graph=True)

    def _ends(
        self, output_grads: Sequence[torch.Tensor | None]
    ) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """Return where backward begins in each replica graph, and the gradients with which it does."""
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
        """Return each input edge's gradients without writing any `.grad`: one call a replica, or one for all."""
        replicas = range(len(self.timings))
        found: list[dict[int, torch.Tensor | None]] = [{}] * len(replicas)  # id of a leaf -> its gradient

        def gradients(some: Sequence[int]) -> dict[int, torch.Tensor | None]:
            some_leaves = [edge.tensors[i] for edge in self.inputs for i in some]
            leaves = {id(leaf): leaf for leaf in some_leaves if leaf is not None}
            some_ends = [end for i in some for end in ends[i]]
            if not some_ends or not leaves:
                return {}
            some_grads = [grad for i in some for grad in grads[i]]
            results = torch.autograd.grad(some_ends, list(leaves.values()), some_grads, allow_unused=True, **options)
            return dict(zip(leaves, results, strict=True))

        def backward_one(index: int) -> None:
            found[index] = gradients([index])

        if together or not self._one_backward_each():
            with self.backward_context():
                found = [gradients(replicas)] * len(replicas)
        else:
            self._run_together(backward_one)
        # What all replicas share is in one dictionary if one call has found it, and counts once.
        return [[found[i].pop(id(leaf), None) for i, leaf in enumerate(edge.tensors)] for edge in self.inputs]

    def _one_backward_each(self) -> bool:
        """Return whether a thread of its own walks each replica's graph."""
        return all(_devices.computes_on_host(timing.device) for timing in self.timings)

    def _run_together(self, backward_one: Callable[[int], None]) -> None:
        """Walk each replica's graph in a thread of its own."""
        torch_private.import_what_backward_imports()
        tasks = [lambda i=i: backward_one(i) for i in range(len(self.timings))]
        devices = [timing.device for timing in self.timings]
        where = [f"the backward of {place}" for place in self.where]
        with one_pass(self.pass_contexts) as surroundings:
            # The outcomes have no name here: an error's traceback refers to this frame.
            values_or_raise(run_together(tasks, devices, surroundings), where)


class Alias(torch.autograd.Function):
    """The same tensor with the same history, as another object.

    The boundary keeps its inputs for derivatives of higher order. If it kept the caller's own objects, `h += model(h)`
    would make a cycle of h and the boundary, and a later write into h would change what the boundary is linked to.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Boundary(torch.autograd.Function):
    """The node of the caller's graph; `Boundary.apply(graphs, *live_inputs)` returns the joined outputs."""

    @staticmethod
    def forward(ctx: Any, graphs: ReplicaGraphs, *live_inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        graphs.live_inputs = live_inputs
        joined = []
        constant = []
        for edge in graphs.outputs:
            result = edge.join(edge.tensors)
            if any(result is tensor for tensor in edge.tensors):
                result = result.clone()  # a tensor of the caller's own, which he may write into
            joined.append(result)
            if not any(tensor is not None and tensor.requires_grad for tensor in edge.tensors):
                constant.append(result)
        ctx.mark_non_differentiable(*constant)
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        graphs: ReplicaGraphs = ctx.graphs
        if graphs.released:
            raise RuntimeError(
                "Trying to backward through the replicas a second time: what they had saved was freed by the first "
                "backward. Give the first one retain_graph=True, or add the losses up and call backward once."
            )
        over_processes = graphs.begin_sum(ctx)
        if over_processes is None and all(grad is None for grad in grads):
            return (None, *(None for _ in graphs.inputs))
        keep = graphs.keep or torch_private.backward_keeps_graph()
        of_parameters = slice(graphs.parameters.start, graphs.parameters.stop)
        try:
            if torch.is_grad_enabled():
                joined = _differentiable_backward(graphs, grads)
                if over_processes is not None:
                    joined[of_parameters] = over_processes.differentiable(joined[of_parameters])
                return (None, *joined)
            parts = graphs.backward(grads, keep, over_processes)
            joined = []
            for edge, of_edge in zip(graphs.inputs, parts, strict=True):
                joined.append(edge.join_gradients(of_edge))
                of_edge.clear()  # the replicas' gradients go as soon as their sum is there
            if over_processes is not None:
                rest = {k: grad for k, grad in enumerate(joined[of_parameters]) if grad is not None}
                joined[of_parameters] = over_processes.finish(rest)
        except BaseException as error:
            if not torch.is_grad_enabled():
                graphs.release()  # partly walked: what the leaves hold now must not be counted in another backward
            if over_processes is not None:
                over_processes.failed(error)
            raise
        graphs.let_outputs_stream_wait()
        if not keep:
            graphs.release()
        return (None, *joined)


def _differentiable_backward(graphs: ReplicaGraphs, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return the inputs' gradients as outputs of one more Boundary (4)."""
    graphs.keep = True
    higher, parts = graphs.differentiable_backward(grads)
    gradients = [
        BoundaryTensor(edge.placement, edge.device, edge.with_every_part(of_edge))
        if any(p is not None for p in of_edge)
        else None
        for edge, of_edge in zip(graphs.inputs, parts, strict=True)
    ]
    higher.outputs = [edge for edge in gradients if edge is not None]
    if not higher.outputs:
        return [None] * len(gradients)
    live_inputs = (*graphs.live_inputs, *(grad for grad in grads if grad is not None))
    results = iter(Boundary.apply(higher, *live_inputs))  # type: ignore[no-untyped-call]
    return [next(results) if edge is not None else None for edge in gradients]


def _any_batched(grads: Sequence[torch.Tensor | None]) -> bool:
    return any(grad is not None and torch_private.is_batched(grad) for grad in grads)


def take_grad(leaf: torch.Tensor | None) -> torch.Tensor | None:
    """Return what a leaf holds in `.grad`, and take it away from it."""
    if leaf is None:
        return None
    grad, leaf.grad = leaf.grad, None
    return grad
