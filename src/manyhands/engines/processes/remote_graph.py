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
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from manyhands.autograd.reduction import Reduction
from manyhands.autograd.replica_graph import BoundaryTensor, ReplicaGraphs, take_grad
from manyhands.engines.processes.messages import Backward, Reply, TensorRef
from manyhands.engines.processes.module_sync import ModuleSync
from manyhands.engines.processes.pickling import loads
from manyhands.engines.processes.reducers.base import Reducer
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

_registry: dict[Any, Any] = {}  # of the workers' warnings that were given; the warnings module fills it


@dataclass
class RemoteGraphs(ReplicaGraphs):
    """See the module's docstring.

    In an output edge, a worker's output is a view of memory that its next reply overwrites. In an input edge, a
    worker's leaf is any tensor of its size.

    Attributes:
        worker_group, step_lock, module_sync: the engine's.
        number: the workers' number of this graph.
        keys: the number of each input edge's leaf in the workers; None where they have none.
        remote_leaves: a tensor of the size of each of the module's tensors that workers have leaves for, by number.
    """

    worker_group: WorkerGroup = field(kw_only=True)
    step_lock: StepLock = field(kw_only=True)
    module_sync: ModuleSync = field(kw_only=True)
    number: int = field(kw_only=True)
    keys: list[int | None] = field(default_factory=list, kw_only=True)
    remote_leaves: Mapping[int, torch.Tensor] = field(default_factory=dict, kw_only=True)
    _output_numbers: dict[int, int] = field(default_factory=dict, init=False)  # by id of an output edge's tensor

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        if not self.released:
            self.worker_group.release_graph(self.number)
        self.remote_leaves = {}
        ReplicaGraphs.release(self)

    def take_replies(self, streams: SeededStreams) -> dict[int, Reply]:
        """Wait for the workers' replies; repeat their warnings and log messages; note if they drew random numbers."""
        replies = self.worker_group.replies(self.where)
        streams.others_drew = any(reply.drew for reply in replies.values())
        for _, reply in sorted(replies.items()):
            for text in reply.log_messages:
                log_once(text)
            for text, category, filename, line in reply.warnings:
                warnings.warn_explicit(text, category, filename, line, registry=_registry)
        return replies

    # ---- after a forward ----

    def outcomes(self, replies: dict[int, Reply]) -> list[Outcome[Any]]:
        """Return how the workers' forwards ended, in order; outputs are views of the workers' memory."""
        return [self._outcome(i, reply) for i, reply in sorted(replies.items())]

    def joined_outputs(self) -> list[torch.Tensor]:
        """Return the joined outputs where no backward will follow."""
        joined = [edge.join(edge.tensors) for edge in self.outputs]
        return [tensor.clone() if id(tensor) in self._output_numbers else tensor for tensor in joined]

    def pass_on_gradients_of_forward(self, live: Sequence[torch.Tensor], replies: dict[int, Reply]) -> None:
        """Pass on the gradients that a backward inside the module's forward has left in the replicas' leaves."""
        own = [
            take_grad(edge.tensors[0]) if edge.tensors[0] is not t else None
            for edge, t in zip(self.inputs, live, strict=True)
        ]
        if all(grad is None for grad in own) and not any(reply.gradients for reply in replies.values()):
            return
        self.check_backward_inside_forward()
        parts = zip(self.inputs, self._with_replies(own, replies), strict=True)
        gradients = [edge.join_gradients(of_edge) for edge, of_edge in parts]
        reached = [(tensor, grad) for tensor, grad in zip(live, gradients, strict=True) if grad is not None]
        torch_private.run_backward([tensor for tensor, _ in reached], [grad for _, grad in reached], keep=False)

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
    ) -> list[list[torch.Tensor | None]]:
        # No gradient goes to the sum over processes early: this process's sums are known only at the end.
        if any(grad is not None and torch_private.is_batched(grad) for grad in output_grads):
            return self._backward_batch(output_grads)
        return self._backward(output_grads, keep, into_grad=not self.shared_leaves and not modes_that_stay())

    def _backward(
        self, output_grads: Sequence[torch.Tensor | None], keep: bool, into_grad: bool
    ) -> list[list[torch.Tensor | None]]:
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

            def backward_own() -> list[torch.Tensor | None]:
                started = time.perf_counter()
                grads = self._backward_own(output_grads, keep, into_grad, reducer)
                if not keep:
                    self.keep_alive = None  # now, while the workers' backward still runs
                self.timings[0].backward_s = time.perf_counter() - started
                return grads

            own, replies = self._run_backward(backward_own, streams, reducer)
            for i, reply in replies.items():
                self.timings[i + 1].backward_s = reply.seconds
            return self._with_replies(own, replies, transport.results() if has_work else {})

    def differentiable_backward(
        self, output_grads: Sequence[torch.Tensor | None]
    ) -> tuple[ReplicaGraphs, list[list[torch.Tensor | None]]]:
        incoming: list[BoundaryTensor] = []
        keys: list[int | None] = []
        own_grads: list[torch.Tensor | None] = []
        sent_grads: list[tuple[torch.Tensor | None, int | None]] = []
        for edge, grad in zip(self.outputs, output_grads, strict=True):
            if grad is None:
                own_grads.append(None)
                sent_grads.append((None, None))
                continue
            key = ~(len(self.inputs) + len(incoming)) if grad.requires_grad else None
            parts: list[torch.Tensor | None] = [None] * len(self.where)
            own = edge.part(grad.detach(), 0, self.timings[0].device)
            if grad.requires_grad:
                own = None if own is None else own.detach().requires_grad_()
                parts = [own, *(edge.placement.part(grad.detach(), i) for i in range(1, len(self.where)))]
            incoming.append(BoundaryTensor(edge.placement, grad.device, parts))
            keys.append(key)
            own_grads.append(own)
            sent_grads.append((grad.detach(), key))
        higher = replace(
            self,
            inputs=[*self.inputs, *incoming],
            outputs=[],
            live_inputs=(),
            keep=True,
            number=next(self.worker_group.graph_numbers),
            keys=[*self.keys, *keys],
        )

        def backward_own() -> list[torch.Tensor | None]:
            pairs = [
                (edge.tensors[0], grad)
                for edge, grad in zip(self.outputs, own_grads, strict=True)
                if grad is not None and edge.tensors[0] is not None and edge.tensors[0].requires_grad
            ]
            leaves = [edge.tensors[0] for edge in self.inputs]
            if not pairs:
                return [None] * len(leaves)
            wanted = [leaf for leaf in leaves if leaf is not None]
            ends, grads = zip(*pairs, strict=True)
            results = iter(torch_private.gradients(ends, wanted, grads, create_graph=True))
            return [None if leaf is None else next(results) for leaf in leaves]

        with self._step() as num_threads:
            state = ThreadState.capture(), ProcessState.capture()
            streams = SeededStreams(len(self.where))
            for i in range(len(self.where) - 1):
                if own_parts := self._grads_for(i, sent_grads):
                    seed = streams.seeds[i + 1]
                    self._send_backward(i, own_parts, True, higher.number, num_threads, state, seed, None)
            own_results, replies = self._run_backward(backward_own, streams)
            parts_by_edge = [[grad, *[None] * (len(self.where) - 1)] for grad in own_results]
            edge_of = {key: e for e, key in enumerate(self.keys) if key is not None}
            for i, reply in replies.items():
                for key, tensor_ref in reply.gradients:
                    assert tensor_ref is not None
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
        if worker.gradients is None and self.worker_group.transport.shares_parameters:
            allocator = BumpAllocator()
            tensors = {n: t.detach() for n, t in self.module_sync.with_gradients().items() if t.nbytes < LARGE_BYTES}
            offsets = {n: allocator.allocate(t) for n, t in tensors.items() if is_plain_strided(t)}
            segment = Segment.create(allocator.num_bytes)
            specs = {n: spec._replace(segment=segment.number) for n, spec in offsets.items()}
            worker.gradients = {n: segment.view(spec) for n, spec in specs.items()}
            segments.append(segment)
        message = Backward(
            specs=worker.send_buffer.flush(),
            thread=thread,
            seed=seed,
            graph=self.number,
            keep=keep,
            grads=parts,
            create_graph_as=create_graph_as,
            gradients=specs,
            num_threads=num_threads,
            reducer_config=reducer_config,
        )
        self.worker_group.send(index, message, segments, process, self.where[index + 1])

    def _run_backward(
        self,
        backward_own: Callable[[], list[torch.Tensor | None]],
        streams: SeededStreams,
        reducer: Reducer | None = None,
    ) -> tuple[list[torch.Tensor | None], dict[int, Reply]]:
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
                grads, *_ = values_or_raise(outcomes, [f"the backward of {replica}" for replica in self.where])
                return grads, replies
            finally:
                outcomes.clear()  # a traceback refers to this frame: nothing in it may refer to an exception

    def _backward_own(
        self, output_grads: Sequence[torch.Tensor | None], keep: bool, into_grad: bool, reducer: Reducer | None
    ) -> list[torch.Tensor | None]:
        """Run the first replica's backward; return its gradient of each input edge, except those that `reducer` took.

        Args:
            into_grad: whether gradients go through the leaves' `.grad`, as a module may expect; not where the leaves
                are the caller's own, nor under a mode.
        """
        ends, grads = [], []
        for edge, grad in zip(self.outputs, output_grads, strict=True):
            end = edge.tensors[0]
            own = None if grad is None or end is None or not end.requires_grad else edge.part(grad, 0, end.device)
            if end is not None and own is not None:
                ends.append(end)
                grads.append(own)
        leaves = [edge.tensors[0] for edge in self.inputs]
        if not ends:
            return [None] * len(leaves)
        if not into_grad:
            wanted = [leaf for leaf in leaves if leaf is not None]
            results = iter(torch_private.gradients(ends, wanted, grads, keep=keep))
            return self._without_reduced([None if leaf is None else next(results) for leaf in leaves], reducer)
        keyed = {key: leaf for key, leaf in zip(self.keys, leaves, strict=True) if key is not None and leaf is not None}
        with reducer.hooked(keyed) if reducer is not None else contextlib.nullcontext():
            torch_private.run_backward(ends, grads, keep=keep)
        return self._without_reduced([take_grad(leaf) for leaf in leaves], reducer)

    def _without_reduced(self, grads: list[torch.Tensor | None], reducer: Reducer | None) -> list[torch.Tensor | None]:
        """Return the gradients of the input edges, except those that `reducer` took."""
        if reducer is None:
            return grads
        return [
            None if grad is not None and key is not None and reducer.add(key, grad) else grad
            for key, grad in zip(self.keys, grads, strict=True)
        ]

    def _backward_batch(self, output_grads: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor | None]]:
        """Run one backward for each entry of the axis that vmap hides; hide it again in the results."""
        plain = [None if grad is None else torch_private.without_batch(grad) for grad in output_grads]
        num_passes = next(len(grad) for grad in plain if grad is not None)
        passes = [
            self._backward([None if grad is None else grad[b] for grad in plain], keep=True, into_grad=False)
            for b in range(num_passes)
        ]
        return [
            [
                None if parts[0] is None else torch_private.with_batch(torch.stack(parts))
                for parts in zip(*of_edge, strict=True)
            ]
            for of_edge in zip(*passes, strict=True)
        ]

    def _with_replies(
        self,
        own: Sequence[torch.Tensor | None],
        replies: dict[int, Reply],
        sums: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> list[list[torch.Tensor | None]]:
        """Return each input edge's gradients, one a replica; those of replicated tensors summed in replica order.

        Args:
            sums: those that the reducers have summed, by the leaf's number.
        """
        parts: list[list[torch.Tensor | None]] = [[grad, *[None] * (len(self.where) - 1)] for grad in own]
        edge_of = {key: e for e, key in enumerate(self.keys) if key is not None}
        for key, summed in sums.items():
            of_edge = parts[edge_of[key]]
            of_edge[0] = summed if of_edge[0] is None else summed.add_(of_edge[0])
        for i, reply in sorted(replies.items()):
            views = self.worker_group.workers[i].gradients
            totals, others = [], []
            for key, tensor_ref in reply.gradients:
                number = edge_of.get(key)
                if number is None:
                    continue
                if tensor_ref is None:
                    assert views is not None
                    grad = views[key]
                else:
                    grad = self._received(i, tensor_ref, reply)
                of_edge = parts[number]
                if not isinstance(self.inputs[number].placement, Replicate):
                    of_edge[i + 1] = grad.clone()
                    continue
                total = of_edge[0]
                grad = grad if total is None else _devices.copy_to(grad, total.device)
                if total is None:
                    of_edge[0] = grad.clone()
                elif not grad.is_sparse and torch_private.owns_its_memory(total):
                    totals.append(total)
                    others.append(grad)
                else:
                    of_edge[0] = total + grad
            with torch.no_grad():
                torch_private.add_all_in_place(totals, others)
        return parts

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
