"""The replica graphs of one forward: what goes into them, what comes out, and the backward through all of them.

Each replica has a graph of its own, from its tensors for its shard and its parameters to its outputs. They are outputs
of nodes (linked.py), at which a backward through the graph ends. The boundary (boundary.py) is what the caller's graph
sees of all replicas (`ReplicaGraphs`).

Each replica graph's backward is a call of its own from a thread of its own, as forward was: on the CPU torch runs it in
that thread, on an accelerator in the thread that it has for the device. One call runs all of them where they have
something in common: a mode that cannot follow into other threads, or tensors that replicas have exchanged.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress, product, repeat
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch

from unisono.autograd.gradient_sums import BucketSums, Contribution
from unisono.autograd.linked import BoundaryTensor, LeafTensors, LinkedParameters, LinkedTensors
from unisono.autograd.live_gradients import Collector, Receivers
from unisono.distributed.gradient_sync import RankReduction, SyncContext
from unisono.leftovers.buffers_in_backward import BuffersInBackward
from unisono.primitives.placements import Replicate, Single, WeightedSum
from unisono.runtime import devices as _devices
from unisono.runtime import timeline
from unisono.runtime.buckets import Gradients
from unisono.runtime.errors import ReplicaNames
from unisono.runtime.stand_ins import StandIns
from unisono.runtime.streams import keep_for_reader
from unisono.runtime.thread_pool import (
    OBJECTS_HAVE_THREADS,
    OF_REPLICAS,
    PassContext,
    free_in_workers,
    one_pass,
    run_together,
    values_or_raise,
)
from unisono.runtime.thread_state import modes_that_stay
from unisono.runtime.timeline import ReplicaTiming, StepRecording
from unisono.runtime.torch_private import engine, graph_nodes, modes
from unisono.runtime.torch_private.checkpoints import checkpoints_allowed

T = TypeVar("T")
Tensors: TypeAlias = Sequence[torch.Tensor]

while_backward_runs = StandIns()
while_backward_runs.add(checkpoints_allowed)

_BACKWARD_INSIDE = (
    "the module calls backward inside forward, where gradients cannot be summed over processes. Return the "
    "loss and call backward outside, or do not sum over processes: DataParallel(..., process_group=False)."
)

_REENTRANT = (
    "torch.autograd.grad, backward(inputs=...) or backward(create_graph=True) reaches a reentrant activation "
    "checkpoint, which torch cannot differentiate this way: use checkpoint(..., use_reentrant=False), or call "
    "backward() without inputs and create_graph."
)

_NO_GRADIENT = (
    "the gradient of {ends} by {name} was asked for (by torch.autograd.grad, retain_grad or a hook). Both are outputs "
    "of the module, and {reason}. Compute what needs this gradient in forward and return it, or wrap the part of the "
    "module that computes {name} separately from the part behind it."
)


class Repeater(Protocol):
    """Runs a backward of `graphs`, again after a failure from which it recovers; engines/rescue.py has it."""

    def run(self, graphs: "ReplicaGraphs", backward: Callable[[], T]) -> T: ...


class Joined(NamedTuple):
    """An output that lies on the way to others, as the caller has it. It is not kept alive."""

    ref: "weakref.ref[torch.Tensor]"
    hooks: dict[int, Any]  # its hooks, which stay if it is gone
    has_hooks_inside: bool  # whether forward has put hooks on the replicas' tensors

    @classmethod
    def of(cls, tensor: torch.Tensor, of_replicas: Sequence[torch.Tensor | None]) -> Self:
        num_inside = graph_nodes.num_hooks([each for each in of_replicas if each is not None])
        return cls(weakref.ref(tensor), graph_nodes.hooks_of(tensor), num_inside > 0)

    def is_seen(self, node: Any) -> bool:
        """Return whether something sees its gradient in the running backward, or may see it. `node` is its node."""
        if engine.backward_is_restricted():
            return engine.backward_reaches(node)
        tensor = self.ref()
        return bool(self.hooks) or (tensor is not None and tensor.retains_grad)

    def skip_hooks(self) -> None:
        """Let its hooks not be called without a gradient."""
        graph_nodes.call_with_gradient_only(self.hooks)


class OutputPaths(NamedTuple):
    """Which outputs lie on the way to others, inside the replica graphs.

    Attributes:
        levels: of each output; it leads only to outputs of lower levels. () where no output leads to another one.
        on_way: those that others lead to.
    """

    levels: Sequence[int] = ()
    on_way: Sequence[int] = ()


class CapturedTensors(NamedTuple):
    """What replicas' graphs lead to, beside the replicas' own tensors.

    Attributes:
        tensors: leaves that are neither the module's nor a replica's: globals, or made by forward.
        has_reentrant_checkpoint: whether a node runs a backward of its own for a checkpoint.
        are_linked: whether a replica's graph leads to another replica's tensors.
        has_batch_norm: whether a replica has normalised its rows by their statistics.
        share_nodes: whether two replicas' graphs lead to one node, such as the history of a captured tensor.
        has_checkpoint: whether an activation checkpoint runs forward again in backward.
        paths: those between outputs.
    """

    tensors: Sequence[torch.Tensor] = ()
    has_reentrant_checkpoint: bool = False
    are_linked: bool = False
    has_batch_norm: bool = False
    share_nodes: bool = False
    has_checkpoint: bool = False
    paths: OutputPaths = OutputPaths()


class Passes(NamedTuple):
    """What is around each pass of a step: its forward, and each backward of its graphs."""

    contexts: Sequence[PassContext] = ()  # entered around a pass
    timeout_s: float | None = None  # for how long the caller waits for a replica without progress; None: for ever
    # Whether the replicas wait for each other: no two are on one accelerator, and one call cannot run all of them.
    wait_for_each_other: bool = False
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
    # Called when a backward has freed the graphs; keeps alive what they need.
    on_release: Callable[[], object]
    on_higher_order: Callable[[], object] | None  # called by a backward with create_graph=True
    # Called when the first backward has run, whether or not it has freed the graphs; None: nothing is.
    on_backward: Callable[[], object] | None
    # What these graphs count for when several processes sum the parameters' gradients; None: they do not.
    sync_context: SyncContext | None
    replay: "Repeater | None"  # runs a backward of these graphs, again after a failure; None: a failure is final
    recording: StepRecording | None  # the one that these graphs are part of, if it is recorded
    why_no_paths: str  # why outputs have no gradients by others to which they lead; "": they have
    buffers: BuffersInBackward | None  # for activation checkpoints; None: there are none
    levels: Sequence[int]  # of each output, as in `OutputPaths`
    on_way: dict[int, Joined | None]  # those that others lead to, by number; None: not joined yet
    keep: bool = False  # whether graphs of a higher order share nodes with these, so that a backward must not free them
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
        if self.buffers is not None:
            self.buffers.end()
        self.parameters, self.buffers = self.parameters._replace(own=(), nodes=()), None

    def take_from(self, other: Self, leaves: Sequence[torch.Tensor]) -> None:
        """Take the replica graphs of another object, which has none after it: the same forward's, run again.

        Args:
            leaves: those of these graphs, in the order in which their gradients are returned. A leaf that forward has
                made gets none: the other graphs lead to others.
        """
        none = [None for _ in other.timings]
        of_other = {id(leaf.live): leaf.tensors for leaf in other.leaves}
        own = [of_other.get(id(leaf), BoundaryTensor(Replicate(), leaf.device, none)) for leaf in leaves]
        kept = {"replay": self.replay, "levels": self.levels, "on_way": self.on_way}
        self.__dict__.update({**other.__dict__, **kept, "leaves": [*map(LeafTensors, leaves, own)]})
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

    def live_node_to_sum(self, boundary: Any) -> Any:
        """Return the node of the live parameters, if the running backward of the node `boundary` reaches it and their
        gradients are to be summed over processes; else None.
        """
        if self.sync_context is None:
            return None
        live_node = _nodes(boundary)[len(self.inputs)]
        return live_node if live_node is not None and engine.backward_reaches(live_node) else None

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
        by_bucket = any(isinstance(key, Collector) for key in engine.backward_context())  # in one of ours
        if by_bucket or not engine.backward_is_restricted():
            return None
        nodes = _nodes(boundary)
        first = len(self.inputs) + 1
        live_nodes, leaves = nodes[:first], nodes[first : first + len(self.leaves)]
        needed = [self._needed(node, group) for node, group in zip(live_nodes, self.groups, strict=True)]
        of_leaves = [node is not None and engine.backward_reaches(node) for node in leaves]
        return [*chain.from_iterable(needed[:-1]), *of_leaves, *needed[-1]]

    @staticmethod
    def _needed(live_node: Any, group: LinkedTensors | LinkedParameters) -> list[bool]:
        if live_node is None or not engine.backward_reaches(live_node):
            return [False] * len(group.collector.live)
        return [node is not None and engine.backward_reaches(node) for node in _nodes(live_node)]

    def buckets_will_run(self) -> bool:
        """Return whether the running backward of the caller's reaches a replica's bucket in another way."""
        nodes = chain.from_iterable(group.nodes for group in self.groups)
        return any(map(engine.backward_runs, nodes))

    def backward(
        self,
        output_grads: Sequence[torch.Tensor | None],
        reduction: RankReduction | None,
        needed: Sequence[bool] | None,
        *,
        totals: Collection[int],
        keep: bool,
        in_device_thread: bool,
        outputs: Sequence[int] | None = None,
    ) -> Gradients:
        """Run backward in every replica graph; return the gradient of each of the boundary's inputs.

        Gradients that `reduction` has got meanwhile are missing; None: it gets all of them later.

        Args:
            needed: for each input, whether its gradient is needed; None: all are.
            totals: the outputs whose gradients take the place of what reaches them inside the graphs.
            outputs: the numbers of those whose gradients are returned instead: they lie on the way to others.
            keep: whether the graphs are needed after it.
            in_device_thread: whether the calling thread is the one that torch has for an accelerator.
        """
        batched = any_batched(output_grads)
        in_one_call = batched or self._needs_one_call(in_device_thread=in_device_thread)
        here = self._on_device_of(output_grads) if in_device_thread else None
        run: _Run = self._run_in_one_call if in_one_call else partial(self._run_together, here=here)
        # The first replica's backward must not free what another one's graph leads to.
        keep = keep or (self.captured.share_nodes and not in_one_call)
        grads = self._parts_of(output_grads)
        if totals:
            run = self._with_totals(totals, output_grads, grads, run)
        if self.buffers is not None:
            run = partial(self.buffers.around, run, self.keep or bool(self.on_way))
        if outputs is not None:
            inputs = self._outputs_on_way(outputs, output_grads)
            found = self._gradients(grads, inputs, run, refused=(), keep=keep)
            return [each.join_gradients(found[k]) for k, each in inputs.items()]
        if needed is None and not batched:
            return self._gradients_by_bucket(grads, reduction, run, keep=keep)
        every = self.all_inputs
        inputs = dict(compress(enumerate(every), repeat(True) if needed is None else needed))
        parts = self._gradients(grads, inputs, run, refused=None if needed is None else inputs, keep=keep)
        return [each.join_gradients(parts[k]) if k in parts else None for k, each in enumerate(every)]

    def _outputs_on_way(
        self, outputs: Sequence[int], output_grads: Sequence[torch.Tensor | None]
    ) -> dict[int, BoundaryTensor]:
        """Return outputs as inputs of a backward, by number. Raises RuntimeError as `check_have_gradients`."""
        self.check_have_gradients(outputs, output_grads)  # the replicas may have been run again, in parts
        return {k: self.outputs[k].of_gradients() for k in outputs}

    def why_no_gradient(self, output: int) -> str | None:
        """Return why an output that lies on the way to others has no gradient by these; None if it has one."""
        each = self.outputs[output]
        if self.why_no_paths:
            return self.why_no_paths
        if isinstance(each.placement, Single) and each.placement.is_common:
            return f"all replicas return the same {each.name} (out_dims=None)"
        if isinstance(each.placement, WeightedSum):
            return f"{each.name} is a mean or a sum over the replicas (scalars=)"
        if (joined := self.on_way[output]) is not None and joined.has_hooks_inside:
            return f"forward itself has put a hook on {each.name}"
        return None

    def check_have_gradients(self, outputs: Collection[int], output_grads: Sequence[torch.Tensor | None]) -> None:
        """Check that outputs that lie on the way to others have a gradient by these.

        Raises:
            RuntimeError: one has none; names it, those that have been given a gradient, and the remedies.
        """
        for k in outputs:
            if reason := self.why_no_gradient(k):
                above = [
                    n for n, grad in enumerate(output_grads) if grad is not None and self.levels[n] > self.levels[k]
                ]
                ends = " and ".join([self.outputs[n].name for n in above])
                raise RuntimeError(_NO_GRADIENT.format(ends=ends, name=self.outputs[k].name, reason=reason))

    def _needs_one_call(self, *, in_device_thread: bool) -> bool:
        """Return whether one call has to run the backward of all replica graphs. (It has to for batched gradients.)"""
        return (
            (in_device_thread and not self.passes.wait_for_each_other)
            or modes_that_stay()  # which cannot follow into other threads; nor can batched gradients
            or self.captured.are_linked
        )

    def _gradients_by_bucket(
        self, grads: Sequence[Gradients], reduction: RankReduction | None, run: "_Run", *, keep: bool
    ) -> Gradients:
        """Return the gradient of each of the boundary's inputs; backward ends at the buckets, and sums them there.

        torch's engine is asked for the gradients of the marks, so that it runs the bucket nodes and stops behind them.
        These are None: those of the buckets' tensors have gone to the `receivers` by then. The way of a gradient is at
        the head of live_gradients.py.
        """
        marks = [group.collector.mark for group in self.groups]
        of_inputs: list[list[Contribution]] = [[] for _ in self.inputs]
        of_leaves: list[Gradients] = [[None] * len(self.timings) for _ in self.leaves]
        leaves = dict(enumerate([leaf.tensors for leaf in self.leaves]))

        def compute(ends: Tensors, tensors: Tensors, end_grads: Tensors) -> Sequence[torch.Tensor | None]:
            return engine.gradients(ends, [*marks, *tensors], end_grads, keep=keep)[len(marks) :]

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
            with while_backward_runs.enter():
                run(backward_of)
            if timeline.recording:
                timeline.mark(timeline.REDUCE)
            of_parameters = sums.end()
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
        found: Mapping[int, Gradients] | Sequence[Gradients],
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
                if (tensor := each.tensors[i]) is not None and tensor.requires_grad:
                    places.setdefault(id(tensor), (tensor, k, i))
        with engine.with_backward_context({**receivers, OF_REPLICAS: True}):
            tensors = [tensor for tensor, _, _ in places.values()]
            results = compute([end for end, _ in ends], tensors, [grad for _, grad in ends])
        for (_, k, i), gradient in zip(places.values(), results, strict=True):
            found[k][i] = gradient

    def differentiable_backward(
        self,
        output_grads: Sequence[torch.Tensor | None],
        totals: Collection[int],
        wanted: Sequence[int],
        refused: Collection[int] | None,
        *,
        of_outputs: bool,
    ) -> tuple[Self, list[BoundaryTensor | None]]:
        """Run backward with create_graph=True; return its graphs, and the gradients that are wanted, None without.

        Args: as for `backward` and `_gradients`; `wanted` are the numbers of inputs, or `of_outputs`.
        """
        if of_outputs:
            inputs = self._outputs_on_way(wanted, output_grads)
        else:
            every = self.all_inputs
            inputs = {k: every[k] for k in wanted}
        self.keep = True
        if self.on_higher_order is not None:
            self.on_higher_order()
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
        run: _Run = self._run_in_one_call if in_one_call else self._run_together
        if totals:
            run = self._with_totals(totals, output_grads, end_grads, run)
        if self.buffers is not None:
            run = partial(self.buffers.around, run, True)
        of_inputs = self._gradients(end_grads, inputs, run, refused=refused, create_graph=True)
        gradients = [
            BoundaryTensor(each.placement, each.device, each.with_every_part(of_inputs[k]))
            if any(part is not None for part in of_inputs[k])
            else None
            for k, each in inputs.items()
        ]
        outputs = [each for each in gradients if each is not None]
        # The outputs that lie on the way to others may lie on the way to the gradients, too.
        first, above = len(outputs), max(self.levels) + 1 if self.on_way else 0
        higher = replace(
            self,
            leaves=[*self.leaves, *incoming],
            outputs=[*outputs, *[self.outputs[k] for k in self.on_way]],
            levels=[*[above] * first, *[self.levels[k] for k in self.on_way]],
            on_way=dict(enumerate(self.on_way.values(), first)),
            keep=True,
            replay=None,
        )
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

    def _with_totals(
        self,
        totals: Collection[int],
        output_grads: Sequence[torch.Tensor | None],
        grads: Sequence[Gradients],
        run: "_Run",
    ) -> "_Run":
        """Return what runs backward so that the gradients of outputs take the place of what reaches them in the graphs.

        Args:
            totals: the outputs. `grads`, the replicas' parts, get zeros where these have none.
            run: runs backward without that.
        """
        self.check_have_gradients(totals, output_grads)  # the replicas may have been run again, in parts
        instead: list[tuple[torch.Tensor, torch.Tensor]] = []
        key = object()  # by which hooks tell this backward from others of the same graphs
        for i, k in product(range(len(grads)), totals):
            tensor = self.outputs[k].tensors[i]
            if tensor is not None and tensor.requires_grad:
                given = grads[i][k]
                grads[i][k] = part = torch.zeros_like(tensor) if given is None else given
                instead.append((tensor, part))

        def run_with_totals(backward_of: "_BackwardOf") -> None:
            def seen(replicas: Sequence[int]) -> None:
                with engine.with_backward_context({key: True}):
                    backward_of(replicas)

            def hook(part: torch.Tensor, _: torch.Tensor) -> torch.Tensor | None:
                return part if key in engine.backward_context() else None

            register: Any = torch.Tensor.register_hook
            handles = [register(tensor, partial(hook, part)) for tensor, part in instead]
            try:
                run(seen)
            finally:
                for handle in handles:
                    handle.remove()

        return run_with_totals

    def _gradients(
        self,
        grads: Sequence[Gradients],
        inputs: Mapping[int, BoundaryTensor],
        run: "_Run",
        *,
        refused: Collection[int] | None,
        **options: Any,
    ) -> dict[int, Gradients]:
        """Return the gradients of each input's tensors, one a replica, without the buckets.

        A tensor that several replicas share has its gradient in the first, where one call runs them all.

        Args:
            inputs: some of all inputs, or of the outputs, by number.
            refused: those which may have no gradient from inside a reentrant checkpoint; None: all inputs are needed,
                and it reaches them.
        """
        found: dict[int, Gradients] = {k: [None] * len(self.timings) for k in inputs}
        # A reentrant checkpoint runs a backward of its own. It is not needed where it is reached only because
        # parameters share a bucket.
        has_checkpoint = self.captured.has_reentrant_checkpoint and refused is not None
        receivers = self._refusing({*(refused or ())}) if has_checkpoint else {}
        compute = partial(engine.gradients, **options)
        with while_backward_runs.enter() if has_checkpoint else contextlib.nullcontext():
            run(lambda replicas: self._backward_of(replicas, grads, inputs, found, receivers, compute))
        if not self.on_host and not any_batched(chain.from_iterable(grads)):  # of which vmap hides the memory
            _keep_for_reader(found.values())
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


def pass_on_gradients(reached: Sequence[tuple[torch.Tensor, torch.Tensor]], sync_context: SyncContext | None) -> None:
    """Pass gradients of the module's own call of backward, inside forward, on to the live tensors.

    Args:
        reached: the live tensors, each with its gradient.

    Raises:
        RuntimeError: gradients are to be summed over processes.
    """
    if sync_context is not None:
        raise RuntimeError(_BACKWARD_INSIDE)
    # Kept: the module may have asked for that (retain_graph=True), for the backward after forward.
    engine.run_backward([tensor for tensor, _ in reached], [grad for _, grad in reached], keep=True)


def _keep_for_reader(found: Iterable[Gradients]) -> None:
    """Keep gradients for the calling thread's streams: torch has let these wait, but others have made them."""
    keep_for_reader([gradient for gradient in chain.from_iterable(found) if gradient is not None])


def _nodes(node: Any) -> list[Any]:
    """Return the nodes that follow a node, one a tensor that it was given."""
    return [following for following, _ in node.next_functions]


def any_batched(grads: Iterable[torch.Tensor | None]) -> bool:
    return bool([grad for grad in grads if grad is not None and modes.is_batched(grad)])
