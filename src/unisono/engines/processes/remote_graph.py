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
from typing import Any, Self, TypeVar

import torch

from unisono.autograd.reducer import sums_of
from unisono.autograd.replica_graph import (
    BoundaryTensor,
    Gradients,
    ReplicaGraph,
    ReplicaGraphs,
    any_batched,
    gradients_of,
)
from unisono.distributed.gradient_sync import RankReduction
from unisono.engines.processes.messages import Backward, Reply, TensorRef, number_of_input
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

T = TypeVar("T")

_NO_SUMS: Mapping[int, torch.Tensor] = MappingProxyType({})
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

    Among the outputs, a worker's is a view of memory that its next reply overwrites. Workers own their leaves: among
    the inputs, and in `parameters`, a tensor of the same form marks that a worker has one.

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
    new_streams: Callable[[], SeededStreams] = field(kw_only=True)
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

    # ---- a forward, or a backward ----

    def values_of(
        self,
        outcomes: list[Outcome[Any]],
        streams: SeededStreams,
        end: Callable[[bool], object],
        value_of: Callable[[int, Reply], Any],
        of: str = "",
    ) -> list[Any]:
        """Wait for the workers' replies; return all replicas' values, in order, or raise what one has raised.

        Args:
            outcomes: that of the first replica; used up.
            streams: those of the pass.
            end: finishes this process's part in a collective; it is told whether the first replica has failed.
            value_of: returns the value of a worker, by its index and its reply.
            of: what has failed, in words before the replica's name.
        """
        names = [of + self.where[0]]
        try:
            end(outcomes[0].error is not None)
            replies = self.worker_group.replies()
            streams.ended([reply.random_digest for reply in replies.values()])
            for i, reply in replies.items():
                if reply.log_messages or reply.warnings:
                    repeat_messages(reply)
                if timeline.recording:
                    self.timings[i + 1].record(reply.spans)
                names.append(of + self.where[i + 1])
                if reply.error is not None:
                    outcomes.append(Outcome(error=reply.error.exception()))
                else:
                    outcomes.append(Outcome(value_of(i, reply)))
            return values_or_raise(outcomes, names)
        finally:
            outcomes.clear()  # a traceback refers to this frame: nothing in it may refer to an exception

    def output_of(self, index: int, reply: Reply) -> Any:
        """Return a worker's output of a forward, whose tensors are views of the worker's memory."""

        def received(sent: TensorRef, tensor: torch.Tensor) -> torch.Tensor:
            self._output_numbers[id(tensor)] = sent.output
            return tensor.requires_grad_() if sent.requires_grad else tensor

        return reply.output(self.worker_group.workers[index].received_segments, received)

    def joined_outputs(self) -> list[torch.Tensor]:
        joined = ReplicaGraphs.joined_outputs(self)
        return [tensor.clone() if id(tensor) in self._output_numbers else tensor for tensor in joined]

    # ---- backward ----

    def backward(
        self,
        output_grads: Sequence[torch.Tensor | None],
        keep: bool,
        reduction: RankReduction | None,
        needed: Sequence[bool] | None,
    ) -> Gradients:
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
    ) -> Gradients:
        graph, grads, callers = self.graph(0), self._parts_of(output_grads), self.outside.leaves

        def backward_own(reducer: WorkerReducer | None) -> tuple[Gradients, Gradients]:
            own = graph.gradients(grads[0], keep, into_grad=into_grad, needed=needed, callers=callers, reducer=reducer)
            if reducer is not None:
                self._hand_over_rest(reducer, *own)
            return own

        with self.step_lock as is_outermost:
            own, replies, sums = self._run_everywhere(is_outermost, grads, backward_own, keep, needed)
            return self.joined_with_replies(*own, replies, sums)

    def _hand_over_rest(self, reducer: WorkerReducer, of_inputs: Gradients, of_parameters: Gradients) -> None:
        """Give the reducer what hooks could not hand over, and take it out of the lists."""
        for number in reducer.numbers:
            of, place = (of_parameters, number) if number < len(of_parameters) else (of_inputs, self._place_of[number])
            if (grad := of[place]) is not None and reducer.add(number, grad):
                of[place] = None

    def _backward_batch(self, output_grads: Sequence[torch.Tensor | None]) -> Gradients:
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

        with self.step_lock as is_outermost:
            own, replies, _ = self._run_everywhere(is_outermost, grads, backward_own, True, needed, higher)
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
        is_outermost: bool,
        grads: Sequence[Sequence[torch.Tensor | None]],
        backward_own: Callable[[WorkerReducer | None], T],
        keep: bool,
        needed: Sequence[bool] | None,
        higher: Self | None = None,
    ) -> tuple[T, dict[int, Reply], Mapping[int, torch.Tensor]]:
        """Run every replica's backward: the first one's here, and the other ones in the workers; raise what one raised.

        Args:
            is_outermost: what the step lock gives.
            grads: each replica's gradients of its outputs.
            backward_own: the first replica's; it is given what reduces large gradients, None if nothing does.
            needed: as in `backward`; if not all are, none is reduced.
            higher: the graphs of the gradients, where these are to have any; then none is reduced.

        Returns:
            What `backward_own` returned, the workers' replies, and sums by the leaf's number.
        """
        self._check_workers(is_outermost)
        group, devices, reducer = self.worker_group, [timing.device for timing in self.timings], None

        def run() -> T:
            started = time.perf_counter()
            result = backward_own(reducer)
            self.timings[0].backward_s = time.perf_counter() - started
            return result

        def end(has_failed: bool) -> None:
            if reducer is not None:
                with group.collective():
                    (reducer.fail if has_failed else reducer.end)(group.poll)

        def of_worker(i: int, reply: Reply) -> tuple[int, Reply]:
            self.timings[i + 1].backward_s = reply.seconds
            return i, reply

        with divided_intra_op_threads(devices) as num_threads, group.step(self.where):
            streams = self.new_streams()
            has_work = self._ask(grads, streams, num_threads, keep, needed, higher)
            with streams as contexts, one_pass([*contexts, *self.passes.contexts]) as replica_context:
                if has_work:
                    with group.collective():  # workers that are connected already may come to a batch norm meanwhile
                        reducer = group.transport.reducer(group.poll)
                outcomes: list[Outcome[Any]] = [*run_together([run], devices[:1], replica_context)]
                own, *replies = self.values_of(outcomes, streams, end, of_worker, "the backward of ")
            if timeline.recording:
                timeline.mark(timeline.REDUCE)
            return own, dict(replies), group.transport.results() if has_work else _NO_SUMS

    def _check_workers(self, is_outermost: bool) -> None:
        """Check that the workers can run a backward of these graphs."""
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

    def _ask(
        self,
        grads: Sequence[Sequence[torch.Tensor | None]],
        streams: SeededStreams,
        num_threads: int,
        keep: bool,
        needed: Sequence[bool] | None,
        higher: Self | None,
    ) -> bool:
        """Send the workers their backwards, as `_run_everywhere` was told; return whether gradients are reduced."""
        group, thread, process = self.worker_group, ThreadState.capture(), ProcessState.capture()
        of_boundary = [] if higher is None else zip(higher.inputs, higher.keys, strict=True)
        leaf_of = {id(leaf): key for each, key in of_boundary for leaf in each.tensors if leaf is not None}
        asked = {i: sent for i, _ in enumerate(self.where[1:]) if (sent := self._put_grads(i, grads[i + 1], leaf_of))}
        keys = [*self.keys, *range(len(self.parameters.live))]
        in_workers = None if needed is None else frozenset(compress(keys, needed))
        has_work = False
        if asked and higher is None and needed is None:
            has_work = group.transport.begin_backward(self.remote_leaves, (0, *[i + 1 for i in asked]))
        for i, sent in asked.items():
            worker = group.workers[i]
            is_placed = higher is None and group.transport.shares_parameters
            placed = self._place_gradients(worker) if is_placed else None
            message = Backward(
                thread=thread,
                process=process,
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
            group.send(i, message, segments if placed is None else [*segments, worker.placed_in])
        return has_work

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

    def joined_with_replies(
        self,
        of_inputs: Gradients,
        of_parameters: Gradients,
        replies: Mapping[int, Reply],
        sums: Mapping[int, torch.Tensor] = _NO_SUMS,
    ) -> Gradients:
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
