"""The replica graphs of one forward: what goes into them, what comes out, and the backward through all of them.

Each replica has a graph of its own, from its tensors for its shard and its parameters to its outputs. They are outputs
of nodes (bucket.py), at which a backward through the graph ends. The boundary (boundary.py) is what the caller's graph
sees of all replicas (`ReplicaGraphs`).

Each replica graph's backward is a call of its own from a thread of its own, as forward was: on the CPU torch runs it in
that thread, on an accelerator in the thread that it has for the device. One call runs all of them where they have
something in common: a mode that cannot follow into other threads, or tensors that replicas have exchanged.

The parameters are many, and go through in bulk: as one list a replica, without an object or a call for each.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress, repeat
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch

from unisono.autograd.bucket import (
    BucketSums,
    Collector,
    Contribution,
    Gradients,
    InsideForward,
    Receivers,
    own_tensors,
    token_of,
)
from unisono.distributed.gradient_sync import RankReduction, SyncContext
from unisono.primitives.parallel_apply import values_or_raise
from unisono.primitives.placements import Placement, Replicate
from unisono.runtime import devices as _devices
from unisono.runtime import timeline, torch_private
from unisono.runtime.buckets import BucketPlan, added
from unisono.runtime.errors import ReplicaNames
from unisono.runtime.stand_ins import StandIns, while_running
from unisono.runtime.streams import keep_for_reader
from unisono.runtime.thread_pool import OBJECTS_HAVE_THREADS, PassContext, free_in_workers, one_pass, run_together
from unisono.runtime.thread_state import modes_that_stay
from unisono.runtime.timeline import ReplicaTiming, StepRecording

T = TypeVar("T")
Tensors: TypeAlias = Sequence[torch.Tensor]

while_backward_runs = StandIns()
while_backward_runs.add(torch_private.checkpoints_allowed)

_BACKWARD_INSIDE = (
    "the module calls backward inside forward, where gradients cannot be summed over processes. Return the "
    "loss and call backward outside, or do not sum over processes: DataParallel(..., process_group=False)."
)

_REENTRANT = (
    "torch.autograd.grad or backward(inputs=...) reaches a reentrant activation checkpoint, which torch "
    "cannot differentiate this way: use checkpoint(..., use_reentrant=False), or call backward() without "
    "inputs."
)

_KEPT_GRAPHS = (
    "an input is an object of a class that unisono does not know. Its tensors may have a graph that all "
    "replicas share, so backward must keep the graphs. Give its tensors and numbers as separate inputs; or "
    "set torch._functorch.config.donated_buffer = False before you compile the module."
)
_GOES_ON = (
    "a backward with {way}, of a forward that used a tensor stored by an earlier forward (in a dict or an "
    "object that is not a module) without detach(). Return that tensor from the earlier forward and pass it "
    "to this one as an input; or detach() it."
)


class Repeater(Protocol):
    """Runs a backward of `graphs`, again after a failure from which it recovers; engines/rescue.py has it."""

    def run(self, graphs: "ReplicaGraphs", backward: Callable[[], T]) -> T: ...

    def of_gradients(self, graphs: "ReplicaGraphs", make: Callable[[], "ReplicaGraphs"]) -> "Repeater":
        """Return that of the graphs of the gradients of `graphs`, which `make` makes."""


class BoundaryTensor(NamedTuple):
    """One input or output of the boundary: its placement, its device, and each replica's tensor.

    Of an input the tensors are those that replicas have of it (None: the replica has no part of it). Of an output they
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
        on_device = [p if p is None or p.device == self.device else _devices.copy_to(p, self.device) for p in parts]
        return self.placement.join(on_device)

    def join_gradients(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the gradient of an input from those of the replicas' tensors; None if no replica has one."""
        has_any = bool([part for part in parts if part is not None])
        return self.join(self.with_every_part(parts)) if has_any else None

    def with_every_part(self, parts: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return gradients with zeros for rows on which no output depends."""
        if not self.placement.needs_every_part:
            return parts
        return [
            torch.zeros(own.shape, dtype=own.dtype, device=self.device) if part is None and own is not None else part
            for part, own in zip(parts, self.tensors, strict=True)
        ]


class _Alias(torch.autograd.Function):
    """The same tensor with the same history, as another object.

    If a graph referred to the caller's own object, `h += model(h)` would make a cycle of h and the graph.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # None, where no replica used the tensor, stays None
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


class LinkedTensors(NamedTuple):
    """One of the boundary's inputs: a live tensor behind a token, and the replicas' tensors of it."""

    collector: Collector
    token: torch.Tensor
    tensors: BoundaryTensor
    nodes: Sequence[Any]  # the bucket nodes

    @classmethod
    def of_input(cls, tensor: torch.Tensor, placement: Placement, parts: Sequence[torch.Tensor | None]) -> Self:
        """Link parts of one live tensor, one a replica, which need no gradient."""
        if not tensor.is_leaf:
            tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
        # The replicas' tensors themselves would make a reference cycle: they refer to the collector.
        forms = [None if p is None else torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parts]
        of_forms = BoundaryTensor(placement, tensor.device, forms)

        def join(contributions: Sequence[Contribution]) -> Gradients:
            return [of_forms.join_gradients(_parts_of(contributions, len(forms)))]

        collector = Collector([tensor], join)
        token = token_of(collector)
        own = [
            None if part is None else own_tensors(token, collector, 0, i, [part.detach()])[0]
            for i, part in enumerate(parts)
        ]
        nodes = [tensor.grad_fn for tensor in own if tensor is not None]
        return cls(collector, token, BoundaryTensor(placement, tensor.device, own), nodes)

    def begin_forward(self) -> None:
        """Keep the gradients of backwards inside forward, for `Collector.end_forward`."""
        self.collector.inside = InsideForward((), ())


def _parts_of(contributions: Sequence[Contribution], num_replicas: int) -> Gradients:
    """Return each replica's gradient of a single tensor."""
    parts: Gradients = [None] * num_replicas
    for each in contributions:
        parts[each.replica] = added(parts[each.replica], each.gradients[0])
    return parts


class LinkedParameters(NamedTuple):
    """The live parameters that need a gradient, and the replicas'."""

    collector: Collector
    token: torch.Tensor
    own: Sequence[Sequence[torch.Tensor]]  # `own[i]` are replica i's, one for each live one
    nodes: Sequence[Any]  # the bucket nodes
    plan: BucketPlan
    is_flat: bool  # whether a replica has memory of its own

    @property
    def live(self) -> Sequence[torch.Tensor]:
        return self.collector.live

    def begin_forward(self) -> None:
        """As `LinkedTensors.begin_forward`."""
        self.collector.inside = InsideForward(self.own, self.plan.numbers)


class LeafTensors(NamedTuple):
    """One of the boundary's inputs behind which the replicas' tensors are leaves: nothing else can lead to them."""

    live: torch.Tensor
    tensors: BoundaryTensor


class CapturedTensors(NamedTuple):
    """What replicas' graphs lead to, beside the replicas' own tensors.

    Attributes:
        tensors: leaves that are neither the module's nor a replica's: globals, or made by forward.
        has_reentrant_checkpoint: whether a node runs a backward of its own for a checkpoint.
        earlier: the tokens behind other forwards' bucket nodes, where a replica's graph goes on into an earlier one's.
        are_linked: whether a replica's graph leads to another replica's tensors.
        has_batch_norm: whether a replica has normalised its rows by their statistics.
    """

    tensors: Sequence[torch.Tensor] = ()
    has_reentrant_checkpoint: bool = False
    earlier: Sequence[tuple[Collector, torch.Tensor]] = ()
    are_linked: bool = False
    has_batch_norm: bool = False


class Passes(NamedTuple):
    """How backwards of the graphs run."""

    contexts: Sequence[PassContext] = ()  # entered around a backward
    timeout_s: float | None = None  # for how long the caller waits for a replica without progress; None: for ever
    # Whether the replicas wait for each other: no two are on one accelerator, and one call cannot run all of them.
    have_exchanges: bool = False
    in_one_call: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around one call for all of them


_NO_PASSES = Passes()


@dataclass
class ReplicaGraphs:
    """The replica graphs of one forward, and the boundary's inputs and outputs.

    The boundary's inputs are the live tensors of `inputs` and `leaves`, and the live parameters.
    """

    timings: list[ReplicaTiming]  # one a replica; `timings[i].device` is its device
    where: ReplicaNames  # each replica's name in messages
    roots: Sequence[torch.nn.Module]  # the replicas' modules
    inputs: list[LinkedTensors]
    parameters: LinkedParameters
    leaves: list[LeafTensors]  # captured tensors; incoming gradients
    outputs: list[BoundaryTensor]
    captured: CapturedTensors
    passes: Passes  # how backwards run
    keep: bool  # whether graphs of a higher order share nodes with these, so that a backward must not free them
    # Called when a backward has freed the graphs; keeps alive what they need.
    on_release: Callable[[], object]
    # Called when the first backward has run, whether or not it has freed the graphs; None: nothing is.
    on_backward: Callable[[], object] | None
    # What these graphs count for when several processes sum the parameters' gradients; None: they do not.
    sync_context: SyncContext | None
    replay: "Repeater | None"  # runs a backward of these graphs, again after a failure; None: a failure is final
    step: StepRecording | None  # the one that these graphs are part of, if it is recorded
    released: bool = field(default=False, init=False)

    def release(self, *, failed: bool = False, give_back: bool = True) -> None:
        """Drop the replica graphs.

        Args:
            failed: whether a backward has failed, half done: then their replicas are not used again.
            give_back: whether the replicas may be used again.
        """
        on_release = self.on_release
        self.drop()
        self.replay, self.released = None, True
        if give_back and not (failed or self.keep):
            on_release()

    def drop(self) -> None:
        """Drop what refers to the replica graphs."""
        self.on_release, self.on_backward = lambda: None, None
        self.inputs, self.leaves, self.outputs, self.passes, self.roots = [], [], [], _NO_PASSES, ()
        self.parameters = self.parameters._replace(own=(), nodes=())

    def take_from(self, other: Self) -> None:
        """Take the replica graphs of another object, which has none after it: the same forward's, run again."""
        replay = self.replay
        self.__dict__.update(other.__dict__)
        self.replay = replay
        other.released, other.replay = True, None
        other.drop()

    @property
    def groups(self) -> list[LinkedTensors | LinkedParameters]:
        """The live tensors behind each token; the parameters are last."""
        return [*self.inputs, self.parameters]

    @property
    def all_inputs(self) -> list[BoundaryTensor]:
        """The boundary's inputs, with one object for each parameter too: for what is not done in bulk."""
        of_parameters = zip(self.parameters.live, zip(*self.parameters.own, strict=True), strict=True)
        return [
            *(group.tensors for group in self.inputs),
            *(leaf.tensors for leaf in self.leaves),
            *(BoundaryTensor(Replicate(), live.device, own) for live, own in of_parameters),
        ]

    def begin_sum(self, boundary: Any) -> RankReduction | None:
        """Begin to sum the parameters' gradients over processes, in the running backward of the node `boundary`.

        None if that reaches no parameter.
        """
        if self.sync_context is None:
            return None
        live_node = _nodes(boundary)[len(self.inputs)]
        if live_node is None or not torch_private.backward_reaches(live_node):
            return None
        return self.sync_context.begin(self.parameters.live, live_node, self.parameters.plan)

    @property
    def are_needed_later(self) -> bool:
        """Whether a backward must not free the graphs, since others go on from them."""
        return self.keep or any(group.collector.is_earlier for group in self.groups)

    @property
    def on_host(self) -> bool:
        """Whether torch computes backward in the threads that call it, and in no thread of a device."""
        return _devices.all_on_host([timing.device for timing in self.timings])

    def has_module_hooks(self) -> bool:
        """Return whether a replica's module has hooks for backward."""
        modules = chain.from_iterable(root.modules() for root in self.roots)
        return any(module._backward_hooks or module._backward_pre_hooks for module in modules)

    def needed_inputs(self, boundary: Any) -> list[bool] | None:
        """Return which of its inputs the running backward of the node `boundary` needs gradients of; None: all.

        A backward for given inputs (`torch.autograd.grad`) does not compute what is not asked for.
        """
        if not torch_private.backward_is_restricted() or torch_private.seen_in_backward():  # the latter: in one of ours
            return None
        nodes = _nodes(boundary)
        first = len(self.inputs) + 1
        live_nodes, leaves = nodes[:first], nodes[first : first + len(self.leaves)]
        needed = [self._needed(node, group) for node, group in zip(live_nodes, self.groups, strict=True)]
        of_leaves = [node is not None and torch_private.backward_reaches(node) for node in leaves]
        return [*chain.from_iterable(needed[:-1]), *of_leaves, *needed[-1]]

    @staticmethod
    def _needed(live_node: Any, group: LinkedTensors | LinkedParameters) -> list[bool]:
        if live_node is None or not torch_private.backward_reaches(live_node):
            return [False] * len(group.collector.live)
        return [node is not None and torch_private.backward_reaches(node) for node in _nodes(live_node)]

    def buckets_will_run(self) -> bool:
        """Return whether the running backward of the caller's reaches a replica's bucket in another way."""
        nodes = chain.from_iterable(group.nodes for group in self.groups)
        return any(map(torch_private.backward_runs, nodes))

    def backward(
        self,
        output_grads: Sequence[torch.Tensor | None],
        reduction: RankReduction | None,
        needed: Sequence[bool] | None,
        *,
        keep: bool,
        in_device_thread: bool,
    ) -> Gradients:
        """Run backward in every replica graph; return the gradient of each of the boundary's inputs.

        Gradients that `reduction` has got meanwhile are missing; None: it gets all of them later.

        Args:
            needed: for each input, whether its gradient is needed; None: all are.
            keep: whether the graphs are needed after it.
            in_device_thread: whether the calling thread is the one that torch has for an accelerator.
        """
        batched = any_batched(output_grads)
        in_one_call = batched or self._needs_one_call(in_device_thread=in_device_thread)
        here = self._on_device_of(output_grads) if in_device_thread else None
        run = self._run_in_one_call if in_one_call else partial(self._run_together, here=here)
        # Graphs that share a tensor may share nodes, which the first replica's backward must not free.
        keep = keep or (bool(self.leaves) and not in_one_call)
        grads = self._parts_of(output_grads)
        # What is needed of an earlier forward's tensors comes by bucket only.
        if (needed is None or self.captured.earlier) and not batched:
            return self._gradients_by_bucket(grads, reduction, run, keep=keep)
        self._check_ends_here("batched gradients")
        parts = self._gradients(grads, needed, run, keep=keep)
        return [each.join_gradients(of) for each, of in zip(self.all_inputs, parts, strict=True)]

    def _check_ends_here(self, way: str) -> None:
        if self.captured.earlier:
            raise RuntimeError(_GOES_ON.format(way=way))

    def _needs_one_call(self, *, in_device_thread: bool) -> bool:
        """Return whether one call has to run the backward of all replica graphs. (It has to for batched gradients.)"""
        captured = self.captured
        return (
            (in_device_thread and not self.passes.have_exchanges)
            or modes_that_stay()  # which cannot follow into other threads; nor can batched gradients
            or captured.are_linked
            or bool(captured.earlier and captured.tensors)
        )

    def _gradients_by_bucket(
        self, grads: Sequence[Gradients], reduction: RankReduction | None, run: "_Run", *, keep: bool
    ) -> Gradients:
        """Return the gradient of each of the boundary's inputs; backward ends at the buckets, and sums them there."""
        earlier = [collector for collector, _ in self.captured.earlier]
        marks = [collector.mark for collector in [*(group.collector for group in self.groups), *earlier]]
        of_inputs: list[list[Contribution]] = [[] for _ in self.inputs]
        of_leaves: list[Gradients] = [[None] * len(self.timings) for _ in self.leaves]
        leaves = dict(enumerate([leaf.tensors for leaf in self.leaves]))

        def compute(ends: Tensors, tensors: Tensors, end_grads: Tensors) -> Sequence[torch.Tensor | None]:
            try:
                return torch_private.gradients(ends, [*marks, *tensors], end_grads, keep=keep)[len(marks) :]
            except RuntimeError as error:
                if self.keep and "donated buffers" in str(error):
                    error.add_note(_KEPT_GRAPHS)
                raise

        def backward_of(replicas: Sequence[int]) -> None:
            started = time.perf_counter()
            self._backward_of(replicas, grads, leaves, of_leaves, receivers, compute)
            for i in replicas:
                self.timings[i].backward_s = time.perf_counter() - started

        on_ready = reduction.add if reduction is not None and reduction.takes_buckets else None
        devices, is_flat = [timing.device for timing in self.timings], self.parameters.is_flat
        with BucketSums(self.parameters.plan, devices, is_flat=is_flat, on_ready=on_ready) as sums:
            receivers: Receivers = {self.parameters.collector: sums.add}
            for group, contributions in zip(self.inputs, of_inputs, strict=True):
                receivers[group.collector] = partial(_append, contributions)
            of_earlier: list[list[Contribution]] = [[] for _ in earlier]
            for collector, contributions in zip(earlier, of_earlier, strict=True):
                receivers[collector] = partial(_append, contributions)
            with while_running(while_backward_runs):
                run(backward_of)
            if timeline.recording:
                timeline.mark(timeline.REDUCE)
            of_parameters = sums.end()
        for collector, contributions in zip(earlier, of_earlier, strict=True):
            collector.add_of_later(contributions)
        if self.leaves:
            _keep_for_reader(of_leaves)
        return [
            *chain.from_iterable(
                [group.collector.joined(each) for group, each in zip(self.inputs, of_inputs, strict=True)]
            ),
            *(leaf.tensors.join_gradients(parts) for leaf, parts in zip(self.leaves, of_leaves, strict=True)),
            *of_parameters,
        ]

    def _backward_of(
        self,
        replicas: Sequence[int],
        grads: Sequence[Gradients],
        inputs: Mapping[int, BoundaryTensor],
        found: Sequence[Gradients],
        receivers: Receivers,
        compute: Callable[[Tensors, Tensors, Tensors], Sequence[torch.Tensor | None]],
    ) -> None:
        """Run backward in the graphs of some replicas, in one call.

        A tensor that several of them share has its gradient in the first.

        Args:
            grads: each replica's part of the output gradients.
            inputs: those whose gradients are written into `found`, by number and replica.
            receivers: get the gradients that reach the buckets.
            compute: from the graphs' ends, tensors, and the gradients of the ends, returns those of the tensors.
        """
        ends = [
            (end, grad)
            for i in replicas
            for each, grad in zip(self.outputs, grads[i], strict=True)
            if (end := each.tensors[i]) is not None and grad is not None and end.requires_grad
        ]
        if not ends:
            return
        places: dict[int, tuple[torch.Tensor, int, int]] = {}
        for i in replicas:
            for k, each in inputs.items():
                if (tensor := each.tensors[i]) is not None:
                    places.setdefault(id(tensor), (tensor, k, i))
        with torch_private.seen_by_backward(receivers):
            tensors = [tensor for tensor, _, _ in places.values()]
            results = compute([end for end, _ in ends], tensors, [grad for _, grad in ends])
        for (_, k, i), gradient in zip(places.values(), results, strict=True):
            found[k][i] = gradient

    def differentiable_backward(
        self, output_grads: Sequence[torch.Tensor | None], needed: Sequence[bool] | None
    ) -> tuple[Self, list[BoundaryTensor | None]]:
        """Run backward with create_graph=True; return its graphs, and the gradient of each input, None without one.

        Raises:
            RuntimeError: the graphs go on into those of an earlier forward.
        """
        self._check_ends_here("create_graph=True")
        self.keep = True
        incoming: list[LeafTensors] = []
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
                if grad.requires_grad:
                    incoming.append(
                        LeafTensors(grad, BoundaryTensor(each.placement.of_gradients(), grad.device, parts))
                    )
            for i, part in enumerate(parts):
                end_grads[i].append(part)
        in_one_call = any_batched(output_grads) or self._needs_one_call(in_device_thread=False)
        run = self._run_in_one_call if in_one_call else self._run_together
        of_inputs = self._gradients(end_grads, needed, run, create_graph=True)
        gradients = [
            BoundaryTensor(each.placement, each.device, each.with_every_part(of_input))
            if any(part is not None for part in of_input)
            else None
            for each, of_input in zip(self.all_inputs, of_inputs, strict=True)
        ]
        outputs = [each for each in gradients if each is not None]
        higher = replace(self, leaves=[*self.leaves, *incoming], outputs=outputs, keep=True, replay=None)
        return higher, gradients

    def _parts_of(self, output_grads: Sequence[torch.Tensor | None]) -> list[Gradients]:
        """Return each replica's part of the output gradients; None for an output that needs none."""
        found: list[Gradients] = []
        for i, _ in enumerate(self.timings):
            parts: Gradients = []
            for each, grad in zip(self.outputs, output_grads, strict=True):
                end = each.tensors[i]
                is_needed = grad is not None and end is not None and end.requires_grad
                parts += [each.part(grad, i, end.device) if is_needed else None]  # type: ignore[arg-type,union-attr]
            found += [parts]
        return found

    def _gradients(
        self, grads: Sequence[Gradients], needed: Sequence[bool] | None, run: "_Run", **options: Any
    ) -> list[Gradients]:
        """Return the gradients of each input's tensors, one a replica: of those that are needed, without the buckets.

        A tensor that several replicas share has its gradient in the first, where one call runs them all.
        """
        inputs = dict(compress(enumerate(self.all_inputs), repeat(True) if needed is None else needed))
        found: list[Gradients] = [[None] * len(self.timings) for _ in self.all_inputs]
        # A reentrant checkpoint runs a backward of its own. It is not needed where it is reached only because
        # parameters share a bucket.
        has_checkpoint = self.captured.has_reentrant_checkpoint and needed is not None
        receivers = self._refusing({*inputs}) if has_checkpoint else {}
        compute = partial(torch_private.gradients, **options)
        with while_running(while_backward_runs) if has_checkpoint else contextlib.nullcontext():
            run(lambda replicas: self._backward_of(replicas, grads, inputs, found, receivers, compute))
        if not self.on_host and not any_batched(chain.from_iterable(grads)):  # of which vmap hides the memory
            _keep_for_reader(found)
        return found

    def _refusing(self, wanted: set[int]) -> Receivers:
        """Return what gets gradients from inside a reentrant checkpoint: raises RuntimeError where one is wanted."""
        first = len(self.inputs) + len(self.leaves)

        def refuse(numbers: Sequence[Sequence[int]], b: int, _: int, gradients: Sequence[torch.Tensor | None]) -> None:
            given = {n for n, gradient in zip(numbers[b], gradients, strict=True) if gradient is not None}
            if given & wanted:
                raise RuntimeError(_REENTRANT)

        receivers: Receivers = {group.collector: partial(refuse, [(k,)]) for k, group in enumerate(self.inputs)}
        numbers = [tuple(first + n for n in bucket) for bucket in self.parameters.plan.numbers]
        receivers[self.parameters.collector] = partial(refuse, numbers)
        return receivers

    def _on_device_of(self, output_grads: Sequence[torch.Tensor | None]) -> int | None:
        """Return the replica on the device whose thread the calling one is: its nodes have to run here."""
        devices = {grad.device for grad in output_grads if grad is not None}
        return next((i for i, timing in enumerate(self.timings) if timing.device in devices), None)

    def _run_in_one_call(self, backward_of: "_BackwardOf") -> None:
        """Run the backward of all replica graphs in one call."""
        with timeline.one_backward_of(self.timings), self.passes.in_one_call():
            backward_of(range(len(self.timings)))

    def _run_together(self, backward_of: "_BackwardOf", here: int | None = None) -> None:
        """Run each replica graph's backward in a thread of its own; on accelerators that of `here` in this thread."""
        tasks = [partial(backward_of, (i,)) for i, _ in enumerate(self.timings)]
        devices = [timing.device for timing in self.timings]
        where = [f"the backward of {place}" for place in self.where]
        if timeline.recording and not self.on_host:
            timeline.mark(timeline.BACKWARD)  # the calling thread waits for the others
        with one_pass(self.passes.contexts) as contexts:
            # No variable may hold the outcomes: an error's traceback refers to this frame.
            # In the calling thread, a call that waits for an accelerator would run nodes of the caller's, too.
            here = 0 if _devices.all_on_host(devices) else here
            options: Any = {"names": self.where, "here": here, "may_have_modes": False}
            values_or_raise(run_together(tasks, devices, contexts, self.passes.timeout_s, **options), where)
        if OBJECTS_HAVE_THREADS:
            free_in_workers()


_BackwardOf: TypeAlias = Callable[[Sequence[int]], None]  # called with numbers of replicas
_Run: TypeAlias = Callable[[_BackwardOf], None]  # calls it for all of them, some at a time


def _append(contributions: list[Contribution], b: int, replica: int, gradients: Sequence[torch.Tensor | None]) -> None:
    contributions.append(Contribution.of(b, replica, gradients))


def pass_on(reached: Sequence[tuple[torch.Tensor, torch.Tensor]], sync_context: SyncContext | None) -> None:
    """Pass gradients of the module's own call of backward, inside forward, on to the live tensors.

    Args:
        reached: the live tensors, each with its gradient.

    Raises:
        RuntimeError: gradients are to be summed over processes.
    """
    if sync_context is not None:
        raise RuntimeError(_BACKWARD_INSIDE)
    torch_private.run_backward([tensor for tensor, _ in reached], [grad for _, grad in reached], keep=False)


def _keep_for_reader(found: Sequence[Gradients]) -> None:
    """Keep gradients for the calling thread's streams: torch has let these wait, but others have made them."""
    keep_for_reader([gradient for gradient in chain.from_iterable(found) if gradient is not None])


def _nodes(node: Any) -> list[Any]:
    """Return the nodes that follow a node, one a tensor that it was given."""
    return [following for following, _ in node.next_functions]


def any_batched(grads: Iterable[torch.Tensor | None]) -> bool:
    return bool([grad for grad in grads if grad is not None and torch_private.is_batched(grad)])
