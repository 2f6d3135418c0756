"""The replica graphs of one forward: what goes into them, what comes out, and the backward through all of them.

Each replica has a graph of its own, from leaves for its shard and its parameters to its outputs (`ReplicaGraph`). The
boundary (boundary.py) is what the caller's graph sees of them (`ReplicaGraphs`).

Which thread runs the backward of a replica graph: on the CPU each worker thread runs its own, so that backward is
parallel (torch's engine would run a CPU graph in the thread that called it). On accelerators one call runs all of them:
torch's engine has one thread a device, the boundary's backward runs on such a thread, and a wait in it for another
backward on the same device would never end.

The parameters are many, and go through in bulk: as one list a replica, without an object or a call for each.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, compress, repeat
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch

from unisono.autograd.broadcast import CoalescedReduce, ReduceBuckets
from unisono.autograd.reducer import (
    LeafHooks,
    Reducer,
    RunningSums,
    sum_in_place,
    sums_of,
)
from unisono.distributed.gradient_sync import RankReduction, SyncContext
from unisono.primitives.parallel_apply import values_or_raise
from unisono.primitives.placements import Placement, Replicate
from unisono.runtime import devices as _devices
from unisono.runtime import timeline, torch_private
from unisono.runtime.errors import ReplicaNames
from unisono.runtime.streams import keep_for_reader, wait_for_streams
from unisono.runtime.thread_pool import PassContext, one_pass, run_together
from unisono.runtime.thread_state import modes_that_stay
from unisono.runtime.timeline import ReplicaTiming, StepRecording

T = TypeVar("T")
Gradients: TypeAlias = list[torch.Tensor | None]

_BACKWARD_INSIDE = (
    "the module calls backward inside forward, and its gradients cannot be summed over the processes there. Return the "
    "loss and call backward outside, or keep the model to this process: DataParallel(..., process_group=False)."
)


class Repeater(Protocol):
    """Runs a backward of `graphs`, again after a failure from which it recovers; engines/rescue.py has it."""

    def run(self, graphs: "ReplicaGraphs", backward: Callable[[], T]) -> T: ...

    def of_gradients(self, graphs: "ReplicaGraphs", make: Callable[[], "ReplicaGraphs"]) -> "Repeater":
        """Return that of the graphs of the gradients of `graphs`, which `make` makes."""


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

    @property
    def requires_grad(self) -> bool:
        return bool([tensor for tensor in self.tensors if tensor is not None and tensor.requires_grad])

    def part(self, tensor: torch.Tensor, index: int, device: torch.device) -> torch.Tensor | None:
        part = self.placement.part(tensor, index)
        return part if part is None or part.device == device else _devices.copy_to(part, device)

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

    def _here(self, parts: Sequence[torch.Tensor | None]) -> Gradients:
        here = self.device
        return [part if part is None or part.device == here else _devices.copy_to(part, here) for part in parts]


@dataclass(slots=True)
class ReplicaGraph:
    """One replica's graph."""

    # Its leaves for the inputs of the call, and for tensors from outside the module; None where it has none.
    inputs: Sequence[torch.Tensor | None]
    parameters: Sequence[torch.Tensor]  # its leaves for the module's parameters
    outputs: Sequence[torch.Tensor | None]  # its outputs; None where it has none
    hooks: LeafHooks | None = None  # on the leaves of the parameters; None: they have none

    @property
    def leaves(self) -> Gradients:
        return [*self.inputs, *self.parameters]

    def ends(self, grads: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the outputs from which a backward starts, each with its gradient."""
        pairs = zip(self.outputs, grads, strict=True)
        return [(end, grad) for end, grad in pairs if end is not None and grad is not None and end.requires_grad]

    def take_gradients(self) -> tuple[Gradients, Gradients]:
        """Return the `.grad` of the leaves of inputs, and of parameters, and set it to None."""
        gradients = (
            [None if leaf is None else leaf.grad for leaf in self.inputs],
            [leaf.grad for leaf in self.parameters],
        )
        for leaf in self.inputs:
            if leaf is not None:
                leaf.grad = None
        for leaf in self.parameters:
            leaf.grad = None
        return gradients


def backward_of(
    graphs: Sequence[ReplicaGraph],
    grads: Sequence[Sequence[torch.Tensor | None]],
    keep: bool,
    reducers: Sequence[Reducer | None],
) -> None:
    """Run the backward of several graphs in one call; `grads[i]` are the gradients of the outputs of graph i."""
    ends = [end for graph, of_graph in zip(graphs, grads, strict=True) for end in graph.ends(of_graph)]
    if not ends:
        return
    run = partial(torch_private.run_backward, [end for end, _ in ends], [grad for _, grad in ends], keep=keep)
    pairs = zip(graphs, reducers, strict=True)
    reduced = [(graph.hooks, reducer) for graph, reducer in pairs if graph.hooks is not None and reducer is not None]
    if not reduced:
        run()
        return
    with contextlib.ExitStack() as stack:
        for hooks, reducer in reduced:
            stack.enter_context(hooks.handing_to(reducer))
        run()


def gradients_of(
    graphs: Sequence[ReplicaGraph],
    grads: Sequence[Sequence[torch.Tensor | None]],
    needed: Sequence[bool] | None = None,
    **options: bool,
) -> list[Gradients]:
    """Return the gradients of each graph's `leaves`, from one call, without writing any `.grad`.

    A leaf that several graphs share has its gradient in the first.

    Args:
        needed: for each leaf of a graph, whether its gradient is needed; None: all are.
    """
    ends = [end for graph, of_graph in zip(graphs, grads, strict=True) for end in graph.ends(of_graph)]
    wanted = [compress(graph.leaves, repeat(True) if needed is None else needed) for graph in graphs]
    leaves = {id(leaf): leaf for of_graph in wanted for leaf in of_graph if leaf is not None}
    found: dict[int, torch.Tensor | None] = {}
    if ends and leaves:
        results = torch_private.gradients(
            [end for end, _ in ends], list(leaves.values()), [grad for _, grad in ends], **options
        )
        found = dict(zip(leaves, results, strict=True))
    return [[found.pop(id(leaf), None) for leaf in graph.leaves] for graph in graphs]


class ParameterLeaves(NamedTuple):
    """The leaves that replicas have for the parameters."""

    live: Sequence[torch.Tensor] = ()  # the live parameters that need a gradient
    leaves: Sequence[Sequence[torch.Tensor]] = ()  # `leaves[i]` are replica i's, one for each of `live`
    hooks: Sequence[LeafHooks] = ()  # on these leaves, one object a replica
    large: Collection[int] = ()  # the numbers of the parameters whose gradients are summed while backward runs
    # Those in which gradients are reduced; None where no replica's parameters are in memory of their own.
    buckets: ReduceBuckets | None = None


class OutsideLeaves(NamedTuple):
    """The leaves in replicas' graphs that are neither the module's nor a replica's: globals, or made by forward."""

    leaves: Sequence[torch.Tensor] = ()  # they are the caller's own tensors, or forward has made them
    with_reentrant_checkpoint: bool = False  # whether the graphs have a checkpoint that runs a backward inside backward
    are_shared: bool = False  # whether one is in the graphs of several replicas

    @property
    def through_grad(self) -> bool:
        """Whether a backward uses the leaves' `.grad`.

        That of an outside leaf is the caller's, who may use it in another thread. But a reentrant checkpoint can be
        differentiated in no other way. It is done if no leaf is shared: gradients would be added in any order.
        """
        return not self.leaves or (self.with_reentrant_checkpoint and not self.are_shared)


class Passes(NamedTuple):
    """How backwards of the graphs run."""

    # Entered around a backward in which each replica graph has a thread of its own.
    contexts: Sequence[PassContext] = ()
    one_call: BackwardContext = nullcontext  # entered around a backward that runs all replica graphs in one call
    timeout_s: float | None = None  # for how long the caller waits for a replica without progress; None: for ever


_NO_PARAMETERS, _NO_LEAVES, _PLAIN_PASSES = ParameterLeaves(), OutsideLeaves(), Passes()


@dataclass
class ReplicaGraphs:
    """The replica graphs of one forward, and the boundary's inputs and outputs.

    The boundary's inputs are `inputs` and, behind them, the live parameters.
    """

    timings: list[ReplicaTiming]  # one a replica; `timings[i].device` is its device
    where: ReplicaNames  # each replica's name in messages
    # The boundary's tensors, without the parameters.
    inputs: list[BoundaryTensor] = field(default_factory=list)
    outputs: list[BoundaryTensor] = field(default_factory=list)
    parameters: ParameterLeaves = _NO_PARAMETERS  # the replicas' leaves for the live parameters
    outside: OutsideLeaves = _NO_LEAVES  # the other leaves
    keep: bool = False  # whether graphs of a higher order share nodes with these, so that a backward must not free them
    # Called when a backward has freed the graphs; keeps alive what they need.
    on_release: Callable[[], object] = lambda: None
    passes: Passes = _PLAIN_PASSES  # how backwards run
    live_inputs: tuple[torch.Tensor, ...] = ()  # the caller's tensors, one for each of the boundary's inputs
    # What these graphs count for when several processes sum the parameters' gradients; None: they do not.
    sync_context: SyncContext | None = None
    replay: "Repeater | None" = None  # runs a backward of these graphs, again after a failure; None: a failure is final
    step: StepRecording | None = None  # the one that these graphs are part of, if it is recorded
    released: bool = field(default=False, init=False)
    _grad_is_free: threading.Lock = field(default_factory=threading.Lock, init=False)

    def release(self, failed: bool = False) -> None:
        """Drop the replica graphs. If a backward has `failed`, half done, their replicas are not used again."""
        on_release = self.on_release
        self.drop()
        self.live_inputs, self.replay, self.released = (), None, True
        if not (failed or self.keep):
            on_release()

    def drop(self) -> None:
        """Drop what refers to the replica graphs."""
        self.on_release = lambda: None
        self.inputs, self.outputs, self.parameters, self.passes = [], [], _NO_PARAMETERS, _PLAIN_PASSES

    def take_from(self, other: Self) -> None:
        """Take the replica graphs of another object, which has none after it: the same forward's, run again."""
        kept = self.live_inputs, self.replay
        self.__dict__.update(other.__dict__)
        self.live_inputs, self.replay = kept
        other.released, other.replay = True, None
        other.drop()

    @property
    def all_inputs(self) -> list[BoundaryTensor]:
        """The boundary's inputs, with one object for each parameter too: for what is not done in bulk."""
        pairs = zip(self.parameters.live, zip(*self.parameters.leaves, strict=True), strict=True)
        return [*self.inputs, *(BoundaryTensor(Replicate(), live.device, of_live) for live, of_live in pairs)]

    def graphs(self) -> list[ReplicaGraph]:
        """Return the graphs of all replicas."""
        graphs = []
        for index, _ in enumerate(self.timings):
            inputs, outputs = [[each.tensors[index] for each in of] for of in (self.inputs, self.outputs)]
            graphs.append(ReplicaGraph(inputs, self.parameters.leaves[index], outputs, self.parameters.hooks[index]))
        return graphs

    def begin_sum(self, boundary: Any) -> RankReduction | None:
        """Begin to sum the parameters' gradients over processes, in the backward of the node `boundary`.

        None if that reaches no parameter.
        """
        if self.sync_context is None:
            return None
        # The nodes that receive the gradients of the parameters.
        nodes = [node for node, _ in boundary.next_functions[len(self.inputs) :]]
        if not any(map(torch_private.backward_reaches, nodes)):
            return None
        return self.sync_context.begin(self.parameters.live, nodes)

    def joined_outputs(self) -> list[torch.Tensor]:
        """Return the joined outputs where no backward will follow."""
        return [each.join(each.tensors) for each in self.outputs]

    def pass_on(self, live: Sequence[torch.Tensor], gradients: Gradients) -> None:
        """Pass gradients of the module's own call of backward, inside forward, on to the boundary's inputs.

        Args:
            live: the caller's tensors behind `inputs`.

        Raises:
            RuntimeError: gradients are to be summed over processes.
        """
        if self.sync_context is not None:
            raise RuntimeError(_BACKWARD_INSIDE)
        pairs = zip([*live, *self.parameters.live], gradients, strict=True)
        reached = [(tensor, grad) for tensor, grad in pairs if grad is not None]
        torch_private.run_backward([tensor for tensor, _ in reached], [grad for _, grad in reached], keep=False)

    def needed_inputs(self, boundary: Any) -> list[bool] | None:
        """Return which of its inputs the running backward of the node `boundary` needs gradients of; None: all.

        It matters where there are reentrant checkpoints. A backward for given inputs (`torch.autograd.grad`) cannot run
        one; so the replicas' must not reach one where the plain module's does not.
        """
        if not torch_private.backward_is_restricted():
            return None
        return [node is not None and torch_private.backward_reaches(node) for node, _ in boundary.next_functions]

    def backward(
        self,
        output_grads: Sequence[torch.Tensor | None],
        keep: bool,
        reduction: RankReduction | None,
        needed: Sequence[bool] | None,
    ) -> Gradients:
        """Run backward in every replica graph; return the gradient of each of the boundary's inputs.

        Gradients that `reduction` has taken meanwhile are missing.

        Args:
            needed: for each input, whether its gradient is needed; None: all are.
        """
        together = any_batched(output_grads) or modes_that_stay()  # neither can follow into other threads
        grads = self._parts_of(output_grads)
        into_grad = self.outside.through_grad and needed is None and not together
        if not into_grad or not self._grad_is_free.acquire(blocking=False):
            # .grad cannot be used: it cannot hold a batch of gradients; that of a shared leaf is the caller's; another
            # backward of the same graphs may be writing it now; and a backward into it computes all gradients. Graphs
            # that share a leaf may share nodes, which the first replica's backward must not free.
            keep = keep or (self._one_backward_each and not together)
            parts = self._gradients(grads, needed, together=together, keep=keep)
            return [each.join_gradients(of) for each, of in zip(self.all_inputs, parts, strict=True)]
        try:
            if not self.outside.leaves:
                return self._backward_into_grad(grads, keep, reduction)
            with gradients_aside(self.outside.leaves):
                return self._backward_into_grad(grads, keep, reduction)
        finally:
            self._grad_is_free.release()

    def _backward_into_grad(self, grads: Sequence[Gradients], keep: bool, reduction: RankReduction | None) -> Gradients:
        graphs = self.graphs()

        def backward_some(replicas: Sequence[int]) -> None:
            started = time.perf_counter()
            some = [graphs[i] for i in replicas]
            backward_of(some, [grads[i] for i in replicas], keep, [parts[i] for i in replicas])
            for i in replicas:
                self.timings[i].backward_s = time.perf_counter() - started

        with self._sums(reduction) as sums:
            parts = [None if sums is None else sums.of(i) for i in range(len(graphs))]
            if self._one_backward_each:
                self._run_together(lambda index: backward_some([index]))
            else:
                with self.passes.one_call(), timeline.one_backward_of(self.timings):
                    backward_some(range(len(graphs)))
            if timeline.recording:
                timeline.mark(timeline.REDUCE)
            totals = {} if sums is None else sums.end()
        joined = self.joined([graph.take_gradients() for graph in graphs])
        for number, total in totals.items():
            joined[len(self.inputs) + number] = total
        return joined

    def joined(self, gradients: Sequence[tuple[Gradients, Gradients]]) -> Gradients:
        """Return the gradient of each of the boundary's inputs, from those of each replica's leaves."""
        if not self._one_backward_each:  # a branch's gradients may be from its own stream
            given = chain.from_iterable(chain(*of_replica) for of_replica in gradients)
            keep_for_reader([gradient for gradient in given if gradient is not None])
        of_inputs = zip(*(of_inputs for of_inputs, _ in gradients), strict=True)
        joined = [each.join_gradients(of) for each, of in zip(self.inputs, of_inputs, strict=True)]
        return joined + sums_of([of_parameters for _, of_parameters in gradients])

    def _sums(self, reduction: RankReduction | None) -> AbstractContextManager[RunningSums | CoalescedReduce | None]:
        """Return the context in which gradients of parameters are summed while backward runs."""
        emit, emitted = (reduction.add, reduction.early) if reduction is not None else (None, ())
        if self.parameters.buckets is not None:
            devices = [timing.device for timing in self.timings]
            return CoalescedReduce(self.parameters.buckets, devices, emit, emitted)
        numbers = set(emitted)
        if self._one_backward_each and len(self.timings) > 1:
            numbers.update(self.parameters.large)
        return nullcontext(RunningSums(len(self.timings), numbers, emit, emitted) if numbers else None)

    def outputs_stream_wait(self) -> Callable[[], object] | None:
        """Return what makes the stream of the first output, which autograd uses, wait for the inputs' gradients."""
        if self._one_backward_each:
            return None
        sources = [each.device for each in self.inputs] + [live.device for live in self.parameters.live]
        return partial(wait_for_streams, self.outputs[0].device, sources)

    def differentiable_backward(
        self, output_grads: Sequence[torch.Tensor | None], needed: Sequence[bool] | None
    ) -> tuple[Self, list[BoundaryTensor | None]]:
        """Run backward with create_graph=True; return its graphs, and the gradient of each input, None without one."""
        self.keep = True
        incoming: list[BoundaryTensor] = []
        end_grads: list[Gradients] = [[] for _ in self.timings]
        for each, grad in zip(self.outputs, output_grads, strict=True):
            parts: list[torch.Tensor | None] = [None for _ in self.timings]
            if grad is not None:
                devices = [
                    timing.device if end is None else end.device
                    for end, timing in zip(each.tensors, self.timings, strict=True)
                ]
                parts = [each.part(grad.detach(), i, device) for i, device in enumerate(devices)]
                parts = [None if p is None else p.detach().requires_grad_(grad.requires_grad) for p in parts]
                tensors = parts if grad.requires_grad else [None] * len(parts)
                incoming.append(BoundaryTensor(each.placement.of_gradients(), grad.device, tensors))
            for i, part in enumerate(parts):
                end_grads[i].append(part)
        together = any_batched(chain.from_iterable(end_grads)) or modes_that_stay()
        of_inputs = self._gradients(end_grads, needed, together=together, create_graph=True)
        gradients = [
            BoundaryTensor(each.placement, each.device, each.with_every_part(of_input))
            if any(part is not None for part in of_input)
            else None
            for each, of_input in zip(self.all_inputs, of_inputs, strict=True)
        ]
        outputs = [each for each in gradients if each is not None]
        inputs = [*self.inputs, *incoming]
        higher = replace(self, inputs=inputs, outputs=outputs, live_inputs=(), keep=True, replay=None)
        return higher, gradients

    def _parts_of(self, output_grads: Sequence[torch.Tensor | None]) -> list[Gradients]:
        """Return each replica's part of the output gradients; None for an output that needs none."""
        pairs = [*zip(self.outputs, output_grads, strict=True)]
        return [
            [
                each.part(grad, i, end.device) if grad is not None and end is not None and end.requires_grad else None
                for each, grad in pairs
                for end in (each.tensors[i],)
            ]
            for i, _ in enumerate(self.timings)
        ]

    def _gradients(
        self,
        grads: Sequence[Sequence[torch.Tensor | None]],
        needed: Sequence[bool] | None,
        *,
        together: bool,
        **options: bool,
    ) -> list[Gradients]:
        """Return the gradients of each input without writing any `.grad`: one call a replica, or one for all."""
        graphs = self.graphs()
        found: list[Gradients] = [[] for _ in graphs]

        def backward_one(index: int) -> None:
            (found[index],) = gradients_of([graphs[index]], [grads[index]], needed, **options)

        if together or not self._one_backward_each:
            with self.passes.one_call():
                found = gradients_of(graphs, grads, needed, **options)
        else:
            self._run_together(backward_one)
        return [list(of_input) for of_input in zip(*found, strict=True)]

    @cached_property
    def _one_backward_each(self) -> bool:
        """Whether each replica graph's backward has a thread of its own."""
        return _devices.all_on_host([timing.device for timing in self.timings])

    def _run_together(self, backward_one: Callable[[int], None]) -> None:
        """Run each replica graph's backward in a thread of its own."""
        tasks = [partial(backward_one, i) for i, _ in enumerate(self.timings)]
        devices = [timing.device for timing in self.timings]
        where = [f"the backward of {place}" for place in self.where]
        with one_pass(self.passes.contexts) as contexts:
            # No variable may hold the outcomes: an error's traceback refers to this frame.
            values_or_raise(run_together(tasks, devices, contexts, self.passes.timeout_s, self.where), where)


@contextlib.contextmanager
def gradients_aside(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let leaves have no `.grad` meanwhile."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def any_batched(grads: Iterable[torch.Tensor | None]) -> bool:
    return bool([grad for grad in grads if grad is not None and torch_private.is_batched(grad)])
