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

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from types import MappingProxyType
from typing import Any, Self, TypeAlias, TypeVar

import torch

from unisono.autograd.reducer import number_of_input, sums_of
from unisono.autograd.replica_graph import (
    BoundaryTensor,
    ReplicaGraph,
    ReplicaGraphs,
    any_batched,
    gradients_aside,
    gradients_of,
    pass_on,
)
from unisono.distributed.gradient_sync import RankReduction
from unisono.engines.processes.messages import Backward, Reply, TensorRef
from unisono.engines.processes.pickling import loads
from unisono.engines.processes.reducers.base import WorkerReducer
from unisono.engines.processes.shared_memory import BumpAllocator, Segment, TensorSpec, is_plain_strided
from unisono.engines.processes.worker_group import StepLock, WorkerGroup, WorkerHandle
from unisono.primitives.parallel_apply import values_or_raise
from unisono.runtime import devices as _devices
from unisono.runtime import timeline, torch_private
from unisono.runtime.buckets import LARGE_BYTES
from unisono.runtime.errors import ReplicaDied, log_once
from unisono.runtime.interrupts import at_deletion
from unisono.runtime.rng import SeededStreams
from unisono.runtime.thread_pool import Outcome, divided_intra_op_threads, one_pass, run_together
from unisono.runtime.thread_state import ProcessState, ThreadState, modes_that_stay
from unisono.runtime.whole_batch_draws import SharedStream

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

    Among the outputs, a worker's is a view of memory that its next reply overwrites. Among the inputs, and in
    `parameters`, a worker's leaf is any tensor of its size.

    Attributes:
        worker_group, step_lock: the engine's.
        new_streams: makes the replicas' random streams for one pass.
        number: the workers' number of this graph.
        kept: keeps it in the workers.
        keys: the number in the workers of the leaf of each of `inputs`; None where they have none.
        remote_leaves: a tensor of the form of each of the workers' numbered leaves: those of the live parameters, then
            tensors from outside the module. The same object as long as the forms are the same.
    """

    worker_group: WorkerGroup = field(kw_only=True)
    step_lock: StepLock = field(kw_only=True)
    new_streams: Callable[[], SeededStreams | SharedStream] = field(kw_only=True)
    number: int = field(kw_only=True)
    kept: at_deletion | None = field(kw_only=True)
    keys: list[int | None] = field(default_factory=list, kw_only=True)
    remote_leaves: Mapping[int, torch.Tensor] = field(default_factory=dict, kw_only=True)
    _output_numbers: dict[int, int] = field(default_factory=dict, init=False)  # by id of an output

    def drop(self) -> None:
        self.kept = None
        self.remote_leaves = {}
        ReplicaGraphs.drop(self)

    @property
    def _place_of(self) -> dict[int, int]:
        """The place in `inputs` of each leaf in the workers that is no parameter's, by its number."""
        return {key: e for e, key in enumerate(self.keys) if key is not None}

    def graphs(self) -> list[ReplicaGraph]:
        return [self.graph(0)]

    def take_replies(self, streams: SeededStreams | SharedStream) -> dict[int, Reply]:
        """Wait for the workers' replies; return them by index, in order.

        Their warnings and log messages are repeated here; that they drew random numbers is noted.
        """
        replies = self.worker_group.replies(self.where)
        streams.ended([reply.random_digest for reply in replies.values()])
        for reply in replies.values():
            if reply.log_messages or reply.warnings:
                repeat_messages(reply)
        return replies

    # ---- after a forward ----

    def outcomes(self, replies: dict[int, Reply]) -> list[Outcome[Any]]:
        """Return how the workers' forwards ended, in order; outputs are views of the workers' memory."""
        return [self._outcome(i, reply) for i, reply in replies.items()]

    def joined_outputs(self) -> list[torch.Tensor]:
        joined = ReplicaGraphs.joined_outputs(self)
        return [tensor.clone() if id(tensor) in self._output_numbers else tensor for tensor in joined]

    def pass_on_gradients_of_forward(self, live: Sequence[torch.Tensor], replies: dict[int, Reply]) -> None:
        """Pass on the gradients that a backward inside the module's forward has left in the replicas' leaves."""
        of_caller = set(map(id, live))
        own = [each.tensors[0] for each in self.inputs if id(each.tensors[0]) not in of_caller]
        gradients = [leaf for leaf in (*own, *self.parameters.leaves[0]) if leaf is not None and leaf.grad is not None]
        if not gradients and not any([reply.gradients for reply in replies.values()]):
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
        self,
        output_grads: Sequence[torch.Tensor | None],
        keep: bool,
        reduction: RankReduction | None = None,
        needed: Sequence[bool] | None = None,
    ) -> list[torch.Tensor | None]:
        # No gradient goes to the sum over processes early: this process's sums are known only at the end.
        if any_batched(output_grads):
            return self._backward_batch(output_grads)
        into_grad = self.outside.through_grad and needed is None and not modes_that_stay()
        return self._backward(output_grads, keep, into_grad, needed)

    def _backward(
        self,
        output_grads: Sequence[torch.Tensor | None],
        keep: bool,
        into_grad: bool,
        needed: Sequence[bool] | None = None,
    ) -> list[torch.Tensor | None]:
        graph, grads = self.graph(0), self._parts_of(output_grads)

        def backward_own(reducer: WorkerReducer | None) -> tuple[Gradients, Gradients]:
            return self._backward_own(graph, grads[0], keep, into_grad, needed, reducer)

        with self.step_lock as is_outermost, self._divided_threads(is_outermost) as num_threads, self.worker_group:
            (of_inputs, of_parameters), replies, sums = self._run_everywhere(
                grads, backward_own, num_threads, keep, needed
            )
            return self._with_replies(of_inputs, of_parameters, replies, sums)

    def _higher(self, incoming: Sequence[BoundaryTensor], **changes: Any) -> Self:
        keys = [*self.keys, *[number_of_input(len(self.keys) + k) for k, _ in enumerate(incoming)]]
        number = next(self.worker_group.graph_numbers)
        kept = self.worker_group.keep_graph(number)
        return super()._higher(incoming, number=number, kept=kept, keys=keys, **changes)

    def _differentiate(
        self, grads: Sequence[Sequence[torch.Tensor | None]], higher: Self, needed: Sequence[bool] | None
    ) -> list[Gradients]:
        graph = self.graph(0)

        def backward_own(_: WorkerReducer | None) -> Gradients:
            (gradients,) = gradients_of([graph], [grads[0]], needed, create_graph=True)
            return gradients

        with self.step_lock as is_outermost, self._divided_threads(is_outermost) as num_threads, self.worker_group:
            own, replies, _ = self._run_everywhere(grads, backward_own, num_threads, True, needed, higher)
            parts: list[Gradients] = [[grad, *[None] * (len(self.where) - 1)] for grad in own]
            place_of, first = self._place_of, len(self.inputs)
            for i, reply in replies.items():
                for key, tensor_ref in reply.gradients:
                    tensor = self._received(i, tensor_ref, reply).clone()
                    higher._output_numbers[id(tensor)] = tensor_ref.output
                    place = place_of[key] if key in place_of else first + key
                    parts[place][i + 1] = tensor.requires_grad_(tensor_ref.requires_grad)
        return parts

    def _run_everywhere(
        self,
        grads: Sequence[Sequence[torch.Tensor | None]],
        backward_own: Callable[[WorkerReducer | None], T],
        num_threads: int,
        keep: bool,
        needed: Sequence[bool] | None,
        higher: Self | None = None,
    ) -> tuple[T, dict[int, Reply], dict[int, torch.Tensor]]:
        """Run every replica's backward: the first one's here, and the other ones in the workers; raise what one raised.

        Args:
            grads: each replica's gradients of its outputs.
            backward_own: the first replica's; it is given what reduces large gradients, None if nothing does.
            needed: as in `backward`; if not all are, none is reduced.
            higher: the graphs of the gradients, where these are to have any; then none is reduced.

        Returns:
            What `backward_own` returned, the workers' replies, and sums by the leaf's number.
        """
        group, thread, process = self.worker_group, ThreadState.capture(), ProcessState.capture()
        streams = self.new_streams()
        of_boundary = [] if higher is None else zip(higher.inputs, higher.keys, strict=True)
        leaf_of = {id(leaf): key for each, key in of_boundary for leaf in each.tensors if leaf is not None}
        asked = {i: sent for i, _ in enumerate(self.where[1:]) if (sent := self._put_grads(i, grads[i + 1], leaf_of))}
        replicas = (0, *[i + 1 for i in asked])
        in_workers = None
        if needed is not None:
            keys = [*self.keys, *range(len(self.parameters.live))]
            in_workers = frozenset([key for key in compress(keys, needed) if key is not None])
        of_all = higher is None and needed is None
        has_work = of_all and bool(asked) and group.transport.begin_backward(self.remote_leaves, replicas)
        for i, sent in asked.items():
            worker = group.workers[i]
            placed = self._place_gradients(worker) if group.transport.shares_parameters else None
            message = Backward(
                specs=worker.send_buffer.flush(),
                thread=thread,
                seed=streams.seeds[i + 1],
                graph=self.number,
                keep=keep,
                grads=sent,
                create_graph_as=None if higher is None else higher.number,
                placed=placed,
                num_threads=num_threads,
                reducer_config=group.transport.config_for(i + 1) if has_work else None,
                needed=in_workers,
                is_recorded=timeline.current_step() is not None,
            )
            segments = [*group.transport.segments] if has_work else []
            if placed is not None:
                segments.append(worker.placed_in)
            group.send(i, message, segments, process, self.where)

        def poll_workers(waited_s: float) -> None:
            group.poll(self.where, waited_s)

        def run() -> T:
            started = time.perf_counter()
            result = backward_own(reducer)
            self.timings[0].backward_s = time.perf_counter() - started
            return result

        with streams as contexts, one_pass([*contexts, *self.passes.contexts]) as replica_context:
            reducer = None
            if has_work:
                with group.collective:  # workers that are connected already may come to a batch norm meanwhile
                    reducer = group.transport.reducer(poll_workers)
            outcomes: list[Outcome[Any]] = [*run_together([run], [self.timings[0].device], replica_context)]
            try:
                if reducer is not None:
                    with group.collective:
                        (reducer.end if outcomes[0].error is None else reducer.fail)(poll_workers)
                replies = self.take_replies(streams)
                outcomes += [Outcome() for _ in self.where[1:]]
                for i, reply in replies.items():
                    self.timings[i + 1].backward_s = reply.seconds
                    if timeline.recording:
                        self.timings[i + 1].record(reply.spans)
                    if reply.error is not None:
                        outcomes[i + 1] = Outcome(error=reply.error.exception())
                if timeline.recording:
                    timeline.mark(timeline.REDUCE)
                own, *_ = values_or_raise(outcomes, [f"the backward of {replica}" for replica in self.where])
            finally:
                outcomes.clear()  # a traceback refers to this frame: nothing in it may refer to an exception
        return own, replies, group.transport.results() if has_work else {}

    def _put_grads(
        self, index: int, grads: Sequence[torch.Tensor | None], leaf_of: Mapping[int, int | None]
    ) -> list[tuple[int, TensorRef]]:
        """Put gradients of a worker's outputs into its send buffer; return them by the worker's number of the output.

        Args:
            leaf_of: the number of the leaf of each gradient that needs one itself, by its id.
        """
        send_buffer = self.worker_group.workers[index].send_buffer
        ends = [each.tensors[index + 1] for each in self.outputs]
        return [
            (self._output_numbers[id(end)], TensorRef.put(send_buffer, grad, leaf=leaf_of.get(id(grad))))
            for end, grad in zip(ends, grads, strict=True)
            if end is not None and grad is not None and end.requires_grad
        ]

    def _place_gradients(self, worker: WorkerHandle) -> dict[int, TensorSpec] | None:
        """Give each small gradient of a worker a place; return the places by leaf, None if they are as before."""
        if worker.placed_for is self.remote_leaves:
            return None
        allocator = BumpAllocator()
        leaves = [live.detach() for live in self.parameters.live]
        small = [leaf.nbytes < LARGE_BYTES and is_plain_strided(leaf) for leaf in leaves]
        specs = {k: allocator.allocate(leaves[k]) for k, is_small in enumerate(small) if is_small}
        if allocator.num_bytes > worker.placed_in.num_bytes:
            worker.placed_in = Segment.create(allocator.num_bytes)
        specs = {k: spec._replace(segment=worker.placed_in.number) for k, spec in specs.items()}
        worker.placed_for = self.remote_leaves
        worker.placed = {k: worker.placed_in.view(spec) for k, spec in specs.items()}
        return specs

    def _backward_own(
        self,
        graph: ReplicaGraph,
        grads: Sequence[torch.Tensor | None],
        keep: bool,
        into_grad: bool,
        needed: Sequence[bool] | None,
        reducer: WorkerReducer | None,
    ) -> tuple[Gradients, Gradients]:
        """Run the first replica's backward; return the gradients of its leaves, except those that `reducer` took.

        Args:
            into_grad: whether gradients go through the leaves' `.grad`, as a module may expect; not where the leaves
                are the caller's own, nor under a mode.
        """
        if into_grad and not self.outside.leaves:
            graph.backward(grads, keep, reducer)
            of_inputs, of_parameters = graph.take_gradients()
        elif into_grad:
            with gradients_aside(self.outside.leaves):
                graph.backward(grads, keep, reducer)
                of_inputs, of_parameters = graph.take_gradients()
        else:
            (gradients,) = gradients_of([graph], [grads], needed, keep=keep)
            of_inputs, of_parameters = gradients[: len(self.inputs)], gradients[len(self.inputs) :]
        for number in reducer.numbers if reducer is not None else ():  # what the hooks could not hand over
            of, place = (of_parameters, number) if number < len(of_parameters) else (of_inputs, self._place_of[number])
            if (grad := of[place]) is not None and reducer is not None and reducer.add(number, grad):
                of[place] = None
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
        place_of = self._place_of
        of_replicas: list[Gradients] = [of_parameters]
        for i, reply in replies.items():
            of_worker: Gradients = [None] * num_parameters
            if reply.all_placed:
                for k, view in self.worker_group.workers[i].placed.items():
                    of_worker[k] = view
            for key, tensor_ref in reply.gradients:
                # What is received is in memory that the next message overwrites.
                grad = self._received(i, tensor_ref, reply)
                if 0 <= key < num_parameters:
                    of_worker[key] = _devices.copy_to(grad, self.parameters.live[key].device)
                else:
                    parts[place_of[key]][i + 1] = grad.clone()
            for k in [k for k, grad in enumerate(of_worker) if grad is not None and of_parameters[k] is None]:
                of_worker[k] = of_worker[k].clone()  # type: ignore[union-attr]
            of_replicas.append(of_worker)
        with torch.set_grad_enabled(False):
            totals = sums_of(of_replicas)
            joined = [each.join_gradients(of) for each, of in zip(self.inputs, parts, strict=True)]
            for key, summed in sums.items():
                gradients, place = (totals, key) if key < num_parameters else (joined, place_of[key])
                before = gradients[place]
                gradients[place] = summed if before is None else summed.add_(before)
        return joined + totals

    def _received(self, index: int, sent: TensorRef, reply: Reply) -> torch.Tensor:
        return sent.tensor(reply.specs, self.worker_group.workers[index].received_segments)

    def _divided_threads(self, is_outermost: bool) -> divided_intra_op_threads:
        """Check that workers can run a backward of these graphs; return the context that divides intra-op threads.

        Args:
            is_outermost: what the step lock gives.
        """
        if not is_outermost:
            raise RuntimeError(
                'backward through a model with engine="processes" was called from inside a step of the same model '
                '(a hook, say), whose workers are busy: use engine="threads".'
            )
        if self.worker_group.ended:
            raise ReplicaDied(
                "the worker processes that ran this forward have ended, and what they had saved for its backward "
                "is gone: call the model again.",
                cause="The worker processes that ran this forward have ended.",
            )
        return divided_intra_op_threads([timing.device for timing in self.timings])
