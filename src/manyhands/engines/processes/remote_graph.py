"""Replica graphs of which the first is in this process, and each other in a worker process.

The boundary (autograd/boundary.py) asks for the same as of graphs that are all in this process: a backward, and a
backward that is itself differentiable. One backward, step by step:

    1. send each worker its part of the output gradients, in one message
    2. run the first replica's backward in this thread, meanwhile; large gradients are reduced meanwhile, too
    3. finish this process's part of the reduction, then wait for the workers' replies
    4. add the small gradients that came in the replies

Derivatives of higher order need nothing special: a worker keeps the graph of its gradients as it keeps that of a
forward. So there is one kind of graph, whatever the order.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self, TypeAlias, TypeVar

import torch

from manyhands.autograd.reducer import sums_of
from manyhands.autograd.reduction import Reduction
from manyhands.autograd.replica_graph import (
    BoundaryTensor,
    ReplicaGraph,
    ReplicaGraphs,
    any_batched,
    gradients_of,
    pass_on,
)
from manyhands.engines.processes.messages import Backward, Reply, TensorRef
from manyhands.engines.processes.module_sync import ModuleSync
from manyhands.engines.processes.pickling import loads
from manyhands.engines.processes.reducers.base import ModuleLeaves, PlacedGradients, WorkerReducer
from manyhands.engines.processes.reducers.collectives import CollectiveConfig
from manyhands.engines.processes.reducers.shared_memory import SharedMemoryConfig
from manyhands.engines.processes.shared_memory import BumpAllocator, Segment, is_plain_strided
from manyhands.engines.processes.worker_group import StepLock, WorkerGroup
from manyhands.primitives.parallel_apply import values_or_raise
from manyhands.primitives.placements import Replicate
from manyhands.runtime import devices as _devices
from manyhands.runtime import torch_private
from manyhands.runtime.buckets import LARGE_BYTES
from manyhands.runtime.errors import log_once
from manyhands.runtime.rng import SeededStreams
from manyhands.runtime.thread_pool import Outcome, divided_intra_op_threads, one_pass, run_together
from manyhands.runtime.thread_state import ProcessState, ThreadState, modes_that_stay

T = TypeVar("T")
Gradients: TypeAlias = list[torch.Tensor | None]

_registry: dict[Any, Any] = {}  # of the workers' warnings that were given; the warnings module fills it


def repeat_messages(reply: Reply) -> None:
    """Give the warnings and log messages of a worker in this process."""
    for text in reply.log_messages:
        log_once(text)
    for text, category, filename, line in reply.warnings:
        warnings.warn_explicit(text, category, filename, line, registry=_registry)


@dataclass
class RemoteGraphs(ReplicaGraphs):
    """See the module's docstring.

    In an output edge, a worker's output is a view of memory that its next reply overwrites. In an input edge, a
    worker's leaf is any tensor of its size.

    Attributes:
        worker_group, step_lock, module_sync: the engine's.
        number: the workers' number of this graph.
        keys: the number in the workers of the leaf of each of `inputs`; None where they have none.
        module_leaves: the numbers of the parameters' leaves.
        remote_leaves: a tensor of the size of each of the module's tensors that workers have leaves for, by number.
    """

    worker_group: WorkerGroup = field(kw_only=True)
    step_lock: StepLock = field(kw_only=True)
    module_sync: ModuleSync = field(kw_only=True)
    number: int = field(kw_only=True)
    keys: list[int | None] = field(default_factory=list, kw_only=True)
    module_leaves: ModuleLeaves = field(default_factory=lambda: ModuleLeaves(()), kw_only=True)
    remote_leaves: Mapping[int, torch.Tensor] = field(default_factory=dict, kw_only=True)
    _output_numbers: dict[int, int] = field(default_factory=dict, init=False)  # by id of an output edge's tensor

    def __del__(self) -> None:
        if not self.released:
            self.release(failed=True)

    def release(self, failed: bool = False) -> None:
        if not self.released:
            self.worker_group.release_graph(self.number)
        self.remote_leaves = {}
        ReplicaGraphs.release(self, failed)

    @property
    def all_inputs(self) -> list[BoundaryTensor]:
        num_replicas = len(self.where)
        pairs = zip(self.live_parameters, self.leaves[0] if self.leaves else (), strict=True)
        replicate = Replicate()
        return [*self.inputs, *(BoundaryTensor(replicate, live.device, [leaf] * num_replicas) for live, leaf in pairs)]

    @property
    def all_keys(self) -> list[int | None]:
        """The number of the leaf of each of `all_inputs` in the workers."""
        return [*self.keys, *self.module_leaves.numbers] if self.leaves else self.keys

    def graphs(self) -> list[ReplicaGraph]:
        return [self.graph(0)]

    def take_replies(self, streams: SeededStreams) -> dict[int, Reply]:
        """Wait for the workers' replies; repeat their warnings and log messages; note if they drew random numbers."""
        replies = self.worker_group.replies(self.where)
        streams.others_drew = any(reply.drew for reply in replies.values())
        for _, reply in sorted(replies.items()):
            repeat_messages(reply)
        return replies

    # ---- after a forward ----

    def outcomes(self, replies: dict[int, Reply]) -> list[Outcome[Any]]:
        """Return how the workers' forwards ended, in order; outputs are views of the workers' memory."""
        return [self._outcome(i, reply) for i, reply in sorted(replies.items())]

    def joined_outputs(self) -> list[torch.Tensor]:
        joined = ReplicaGraphs.joined_outputs(self)
        return [tensor.clone() if id(tensor) in self._output_numbers else tensor for tensor in joined]

    def pass_on_gradients_of_forward(self, live: Sequence[torch.Tensor], replies: dict[int, Reply]) -> None:
        """Pass on the gradients that a backward inside the module's forward has left in the replicas' leaves."""
        of_caller = set(map(id, live))
        own = [edge.tensors[0] for edge in self.inputs if id(edge.tensors[0]) not in of_caller]
        gradients = [leaf for leaf in (*own, *self.leaves[0]) if leaf is not None and leaf.grad is not None]
        if not gradients and not any([reply.gradients or reply.all_placed for reply in replies.values()]):
            return
        self.check_backward_inside_forward()
        of_inputs, of_parameters = self.graph(0).take_gradients()
        pass_on(live, self._with_replies(of_inputs, of_parameters, replies))

    def _outcome(self, index: int, reply: Reply) -> Outcome[Any]:
        if reply.error is not None:
            return Outcome(error=reply.error.exception())
        views: dict[int, torch.Tensor] = {}

        def tensor_of(sent: TensorRef) -> torch.Tensor:
            if sent.output not in views:
                tensor = self._received(index, sent, reply)
                if sent.requires_grad:
                    tensor.requires_grad_()
                views[sent.output] = tensor
                self._output_numbers[id(tensor)] = sent.output
            return views[sent.output]

        assert reply.value is not None
        return Outcome(value=loads(reply.value, tensor_of))

    # ---- backward ----

    def backward(
        self, output_grads: Sequence[torch.Tensor | None], keep: bool, reduction: Reduction | None = None
    ) -> list[torch.Tensor | None]:
        # No gradient goes to the sum over processes early: this process's sums are known only at the end.
        if any_batched(output_grads):
            return self._backward_batch(output_grads)
        return self._backward(output_grads, keep, into_grad=not self.shared_leaves and not modes_that_stay())

    def _backward(
        self, output_grads: Sequence[torch.Tensor | None], keep: bool, into_grad: bool
    ) -> list[torch.Tensor | None]:
        with self._step() as num_threads:
            state = ThreadState.capture(), ProcessState.capture()
            streams = SeededStreams(len(self.where))
            sent_grads: list[tuple[torch.Tensor | None, int | None]] = [(grad, None) for grad in output_grads]
            asked = {i: parts for i in range(len(self.where) - 1) if (parts := self._grads_for(i, sent_grads))}
            transport, replicas = self.worker_group.transport, (0, *(i + 1 for i in asked))
            has_work = bool(asked) and transport.begin_backward(self.remote_leaves, replicas)
            for i, parts in asked.items():
                config = transport.config_for(i + 1) if has_work else None
                self._send_backward(i, parts, keep, None, num_threads, state, streams.seeds[i + 1], config)
            with self.worker_group.collective():
                reducer = transport.reducer(self._poll_workers) if has_work else None
            graph, own_grads = self.graph(0), self._part_of(0, output_grads)

            def backward_own() -> tuple[Gradients, Gradients]:
                started = time.perf_counter()
                gradients = self._backward_own(graph, own_grads, keep, into_grad, reducer)
                self.timings[0].backward_s = time.perf_counter() - started
                return gradients

            (of_inputs, of_parameters), replies = self._run_backward(backward_own, streams, reducer)
            for i, reply in replies.items():
                self.timings[i + 1].backward_s = reply.seconds
            return self._with_replies(of_inputs, of_parameters, replies, transport.results() if has_work else {})

    def differentiable_backward(
        self, output_grads: Sequence[torch.Tensor | None]
    ) -> tuple[Self, list[list[torch.Tensor | None]]]:
        incoming: list[BoundaryTensor] = []
        keys: list[int | None] = []
        own_grads: list[torch.Tensor | None] = []
        sent_grads: list[tuple[torch.Tensor | None, int | None]] = []
        for edge, grad in zip(self.outputs, output_grads, strict=True):
            if grad is None:
                own_grads.append(None)
                sent_grads.append((None, None))
                continue
            key = ~(len(self.keys) + len(incoming)) if grad.requires_grad else None
            parts: list[torch.Tensor | None] = [None] * len(self.where)
            own = edge.part(grad.detach(), 0, self.timings[0].device)
            if grad.requires_grad:
                own = None if own is None else own.detach().requires_grad_()
                parts = [own, *(edge.placement.part(grad.detach(), i) for i in range(1, len(self.where)))]
            incoming.append(BoundaryTensor(edge.placement, grad.device, parts))
            keys.append(key)
            own_grads.append(own)
            sent_grads.append((grad.detach(), key))
        higher = self._higher(incoming, number=next(self.worker_group.graph_numbers), keys=[*self.keys, *keys])
        graph = self.graph(0)

        def backward_own() -> Gradients:
            (gradients,) = gradients_of([graph], [own_grads], create_graph=True)
            return gradients

        with self._step() as num_threads:
            state = ThreadState.capture(), ProcessState.capture()
            streams = SeededStreams(len(self.where))
            for i in range(len(self.where) - 1):
                if own_parts := self._grads_for(i, sent_grads):
                    seed = streams.seeds[i + 1]
                    self._send_backward(i, own_parts, True, higher.number, num_threads, state, seed, None)
            own_results, replies = self._run_backward(backward_own, streams)
            parts_by_edge = [[grad, *[None] * (len(self.where) - 1)] for grad in own_results]
            edge_of = {key: e for e, key in enumerate(self.all_keys) if key is not None}
            for i, reply in replies.items():
                for key, tensor_ref in reply.gradients:
                    tensor = self._received(i, tensor_ref, reply).clone()
                    higher._output_numbers[id(tensor)] = tensor_ref.output
                    parts_by_edge[edge_of[key]][i + 1] = tensor.requires_grad_(tensor_ref.requires_grad)
        return higher, parts_by_edge

    def _grads_for(
        self, index: int, grads: Sequence[tuple[torch.Tensor | None, int | None]]
    ) -> list[tuple[int, TensorRef]]:
        """Put a worker's part of the output gradients into its send buffer, each with the number of its own leaf.

        Returns:
            (the worker's number of the output, the reference of its gradient).
        """
        parts: list[tuple[int, TensorRef]] = []
        for edge, (grad, leaf) in zip(self.outputs, grads, strict=True):
            end = edge.tensors[index + 1]
            if grad is None or end is None or not end.requires_grad:
                continue
            part = edge.placement.part(grad, index + 1)
            if part is not None:
                send_buffer = self.worker_group.workers[index].send_buffer
                parts.append((self._output_numbers[id(end)], TensorRef.put(send_buffer, part)._replace(leaf=leaf)))
        return parts

    def _send_backward(
        self,
        index: int,
        parts: list[tuple[int, TensorRef]],
        keep: bool,
        create_graph_as: int | None,
        num_threads: int,
        state: tuple[ThreadState, ProcessState],
        seed: int,
        reducer_config: SharedMemoryConfig | CollectiveConfig | None,
    ) -> None:
        """Have a worker run its graph's backward."""
        thread, process = state
        worker = self.worker_group.workers[index]
        segments = [*self.worker_group.transport.segments] if reducer_config is not None else []
        specs = None
        if worker.placed is None and self.worker_group.transport.shares_parameters:
            allocator = BumpAllocator()
            tensors = {n: t.detach() for n, t in self.module_sync.with_gradients().items() if t.nbytes < LARGE_BYTES}
            offsets = {n: allocator.allocate(t) for n, t in tensors.items() if is_plain_strided(t)}
            segment = Segment.create(allocator.num_bytes)
            specs = {n: spec._replace(segment=segment.number) for n, spec in offsets.items()}
            worker.placed = PlacedGradients({n: segment.view(spec) for n, spec in specs.items()})
            segments.append(segment)
        message = Backward(
            specs=worker.send_buffer.flush(),
            thread=thread,
            seed=seed,
            graph=self.number,
            keep=keep,
            grads=parts,
            create_graph_as=create_graph_as,
            placed=specs,
            num_threads=num_threads,
            reducer_config=reducer_config,
        )
        self.worker_group.send(index, message, segments, process, self.where[index + 1])

    def _run_backward(
        self, backward_own: Callable[[], T], streams: SeededStreams, reducer: WorkerReducer | None = None
    ) -> tuple[T, dict[int, Reply]]:
        """Run the first replica's backward, and wait for the workers; raise what one of them raised."""
        with streams, one_pass(self.pass_contexts) as replica_context:
            outcomes: list[Outcome[Any]] = [*run_together([backward_own], [self.timings[0].device], replica_context)]
            try:
                if reducer is not None:
                    with self.worker_group.collective():
                        (reducer.end if outcomes[0].error is None else reducer.fail)(self._poll_workers)
                replies = self.take_replies(streams)
                outcomes += [Outcome() for _ in self.where[1:]]
                for i, reply in replies.items():
                    if reply.error is not None:
                        outcomes[i + 1] = Outcome(error=reply.error.exception())
                own, *_ = values_or_raise(outcomes, [f"the backward of {replica}" for replica in self.where])
                return own, replies
            finally:
                outcomes.clear()  # a traceback refers to this frame: nothing in it may refer to an exception

    def _backward_own(
        self,
        graph: ReplicaGraph,
        grads: Sequence[torch.Tensor | None],
        keep: bool,
        into_grad: bool,
        reducer: WorkerReducer | None,
    ) -> tuple[Gradients, Gradients]:
        """Run the first replica's backward; return the gradients of its leaves, except those that `reducer` took.

        Args:
            into_grad: whether gradients go through the leaves' `.grad`, as a module may expect; not where the leaves
                are the caller's own, nor under a mode.
        """
        part = self.module_leaves.part(reducer)
        if into_grad:
            graph.backward(grads, keep, part)
            of_inputs, of_parameters = graph.take_gradients()
        else:
            (gradients,) = gradients_of([graph], [grads], keep=keep)
            of_inputs, of_parameters = gradients[: len(self.inputs)], gradients[len(self.inputs) :]
        if reducer is not None and part is not None:  # what the hooks could not hand over
            for k in part.numbers:
                if (grad := of_parameters[k]) is not None and part.add(k, grad):
                    of_parameters[k] = None
            for e, key in enumerate(self.keys):
                if key is not None and (grad := of_inputs[e]) is not None and reducer.add(key, grad):
                    of_inputs[e] = None
        return of_inputs, of_parameters

    def _backward_batch(self, output_grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run one backward for each entry of the axis that vmap hides; hide it again in the results."""
        plain = [None if grad is None else torch_private.without_batch(grad) for grad in output_grads]
        num_passes = next(len(grad) for grad in plain if grad is not None)
        passes = [
            self._backward([None if grad is None else grad[b] for grad in plain], keep=True, into_grad=False)
            for b in range(num_passes)
        ]
        return [
            None if parts[0] is None else torch_private.with_batch(torch.stack(parts))
            for parts in zip(*passes, strict=True)
        ]

    def _with_replies(
        self,
        of_inputs: Gradients,
        of_parameters: Gradients,
        replies: dict[int, Reply],
        sums: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> list[torch.Tensor | None]:
        """Return the gradient of each of the boundary's inputs.

        Args:
            of_inputs, of_parameters: the first replica's; these lists are used up.
            sums: those that the reducers have summed, by the leaf's number.
        """
        num_parameters = len(of_parameters)
        parts: list[Gradients] = [[grad, *[None] * (len(self.where) - 1)] for grad in of_inputs]
        edge_of = {key: e for e, key in enumerate(self.keys) if key is not None}
        position_of = self.module_leaves.position_of
        of_replicas: list[Gradients] = [of_parameters]
        for i, reply in sorted(replies.items()):
            of_worker: Gradients = [None] * num_parameters
            if reply.all_placed:
                placed = self.worker_group.workers[i].placed
                assert placed is not None
                places, views = placed.of(self.module_leaves)
                for k, view in zip(places, views, strict=True):
                    of_worker[k] = view
            for key, tensor_ref in reply.gradients:
                # What is received is in memory that the next message overwrites.
                grad = self._received(i, tensor_ref, reply)
                if key in edge_of:
                    parts[edge_of[key]][i + 1] = grad.clone()
                elif (k := position_of.get(key, -1)) >= 0:
                    of_worker[k] = _devices.copy_to(grad, self.live_parameters[k].device)
            for k in [k for k, grad in enumerate(of_worker) if grad is not None and of_parameters[k] is None]:
                of_worker[k] = of_worker[k].clone()  # type: ignore[union-attr]
            of_replicas.append(of_worker)
        with torch.no_grad():
            totals = sums_of(of_replicas)
            joined = [edge.join_gradients(of) for edge, of in zip(self.inputs, parts, strict=True)]
            for key, summed in sums.items():
                gradients, place = (joined, edge_of[key]) if key in edge_of else (totals, position_of[key])
                before = gradients[place]
                gradients[place] = summed if before is None else summed.add_(before)
        return joined + totals

    def _poll_workers(self) -> None:
        self.worker_group.poll(self.where)

    def _received(self, index: int, sent: TensorRef, reply: Reply) -> torch.Tensor:
        if sent.inline is not None:
            tensor: torch.Tensor = loads(sent.inline, lambda reference: reference)
            return tensor
        spec = reply.specs[sent.spec_index]
        return self.worker_group.workers[index].received_segments[spec.segment].view(spec)

    @contextlib.contextmanager
    def _step(self) -> Iterator[int]:
        """Acquire the engine's step lock for a backward; yield the number of intra-op threads of each replica."""
        with self.step_lock.acquire() as is_outermost:
            if not is_outermost:
                raise RuntimeError(
                    'backward through a model with engine="processes" was called from inside a step of the same model '
                    '(a hook, say), whose workers are busy: use engine="threads".'
                )
            if self.worker_group.ended:
                raise RuntimeError(
                    "the worker processes that ran this forward have ended, and what they had saved for its backward "
                    "is gone: call the model again."
                )
            devices = [timing.device for timing in self.timings]
            with divided_intra_op_threads(devices) as num_threads, self.worker_group.ended_on_failure():
                yield num_threads
