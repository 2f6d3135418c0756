"""A replica's forward and backward as graphs of kernels: the host launches a graph, and calls no layer.

        the replica's thread                                       the thread of its backward

    (1) inputs ──copied──► inputs of the graph                 (4) gradients ──copied──► gradients of the graph
    (2) graph of forward: launched                             (5) graphs of backward, one up to each full bucket
    (3) outputs of the graph ──copied──► outputs               (6) each bucket ──copied──► where buckets go

The first steps of a kind run as without graphs, and show whether graphs can take their place (`why_not`). Then a second
replica, in the same memory, runs once while a stream of its device is captured: no kernel runs, and they become (2).
The first backward that gives these outputs gradients is captured in the same way, and becomes (5). What is captured
belongs to one set of replicas, and so to one forward and its backwards: no other forward overwrites what these need.

Guarantees
    - The same numbers as without graphs, bit for bit: the same kernels on the same numbers.
    - What cannot be captured runs as without graphs, and the reason is logged once.

Assumes what torch assumes of captured code: Python in forward runs once and never again. So what forward decides by
numbers in tensors, or takes from a global, is that of the captured step.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, Self, TypeAlias

import torch

from unisono.autograd.linked import own_parameter
from unisono.autograd.live_gradients import with_bucket_node
from unisono.autograd.replica_graph import CapturedTensors, OutputPaths
from unisono.engines.replica import Replica, Replicas
from unisono.engines.step_plan import StepPlan, called
from unisono.leftovers.buffers import versions_of
from unisono.leftovers.generators import GeneratorStates
from unisono.primitives import pytree
from unisono.primitives.blueprint import Blueprint, collector_paused
from unisono.primitives.change_tracking import GONE, HOOKS, OF_EVERY_MODULE, ContainerSnapshot, DictSnapshot
from unisono.runtime import devices as _devices
from unisono.runtime import draws_off
from unisono.runtime.buckets import Bucket, Gradients, is_plain
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import log_once, text_of
from unisono.runtime.interrupts import uninterruptible
from unisono.runtime.streams import capture_stream, wait_for_makers
from unisono.runtime.thread_state import autocast_types, modes_that_stay
from unisono.runtime.torch_private import checkpoints, engine, process_wide
from unisono.runtime.torch_private.modes import WatchedOperations

_RUNS_WITHOUT = "graphs=True: the steps of {name} run without graphs, because {reason}."
_TOO_MANY_KINDS = (
    "graphs=True: {most} kinds of inputs of {name} have graphs; inputs of other shapes run without. Pad them to a few "
    "shapes."
)
_HIGHER_ORDER = (
    "backward(create_graph=True), or torch.autograd.grad with it, reaches a step that ran as a graph of kernels "
    "(graphs=True), which cannot be differentiated. Set model.graphs = False before this forward."
)
_FREED = (
    "Trying to backward through the replicas a second time, after a later forward has used their graphs (graphs=True). "
    "Call backward before the next forward, or set model.graphs = False."
)
_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a parameter or a "
    "buffer of the module was written between forward and backward (graphs=True)."
)
CREATES_GRAPH = "a backward has create_graph=True"
_CANNOT = "it cannot be captured ({})"
_NUM_BEFORE = 2  # steps of a kind that run without graphs: libraries choose their kernels in these
_MOST_KINDS = 3  # that have graphs, in one set of replicas; each keeps the memory of its activations
_MOST_BACKWARDS = 3  # of one kind, which differ in the outputs that have gradients
_MOST_COUNTED = 64  # kinds
_CONTAINERS = frozenset({tuple, list, dict})
_CONSTANTS = frozenset({bool, int, float, str, type(None)})
_NEEDS_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_capturing = threading.Lock()  # one replica at a time


# ---- which steps have graphs ----------------------------------------------------------------------


def why_without_graphs(blueprint: Blueprint, plan: StepPlan, *, in_ranks: bool, has_wrappers: bool) -> str:
    """Return why steps of a plan cannot have graphs, as far as the module and the options tell; "": they can."""
    accelerators = [device for device in plan.devices if not _devices.computes_on_host(device)]
    reasons = {
        "the CPU has none": not accelerators,
        f"torch has none for {plan.devices[0].type}": bool(accelerators) and not _devices.has_graphs(accelerators[0]),
        "two replicas are on one device": len({*plan.devices}) < len(plan.devices),
        "parts or rescue run forward again": not plan.runs_whole,
        "batch norm sees the rows of all replicas": bool(plan.sync_batch_norm)
        and (in_ranks or not plan.has_one_replica),
        "a part of the module is wrapped": has_wrappers,
        "the module is compiled": blueprint.compiled,
        "its replicas are made anew in each step": not blueprint.is_reusable,
        "an input is an object of an unknown class": plan.carries_objects,
        "a module has hooks": any(m.__dict__[kind] for m in blueprint.modules for kind in HOOKS),
    }
    return _first_that_holds(reasons)


def why_not(
    outputs: Sequence[Any],
    live_of: Sequence[dict[int, torch.Tensor]],
    captured: CapturedTensors,
    *,
    assigns: bool,
    has_new_buffers: bool,
    has_more: bool,
) -> str:
    """Return why a step that has run without graphs cannot have them; "": it can.

    Args:
        outputs: of the replicas.
        live_of: of each replica, the live tensors by the ids of its own.
        captured: what its graphs lead to.
        assigns, has_new_buffers: whether forward has assigned attributes, or buffers.
        has_more: whether it has written or frozen parameters, or called backward.
    """
    leaves = [[leaf for _, leaf in pytree.leaves(output)] for output in outputs]
    tensors = [[leaf for leaf in each if isinstance(leaf, torch.Tensor)] for each in leaves]
    others = [leaf for each in leaves for leaf in each if leaf is not None and not isinstance(leaf, torch.Tensor)]
    own = [tensor for each, live in zip(tensors, live_of, strict=True) for tensor in each if id(tensor) in live]
    reasons = {
        "forward assigns attributes": assigns,
        "forward assigns buffers": has_new_buffers,
        "forward writes or freezes parameters, or calls backward": has_more,
        "forward has an activation checkpoint": captured.has_checkpoint or captured.has_reentrant_checkpoint,
        "forward uses tensors from outside that need gradients": bool(captured.tensors),
        "the replicas' graphs are linked": captured.are_linked or captured.share_nodes,
        "forward returns what is no tensor, such as a number": bool(others),
        "forward returns a parameter or a buffer": bool(own),
        "an output is sparse, nested or of a subclass": not all(is_plain(t) for each in tensors for t in each),
    }
    return _first_that_holds(reasons)


def _first_that_holds(reasons: Mapping[str, bool]) -> str:
    return next((reason for reason, holds in reasons.items() if holds), "")


def refuse(blueprint: Blueprint, reason: str, *, for_good: bool = True) -> None:
    """Let the steps of a module run without graphs for this reason, if it is one, and log it once.

    Args:
        for_good: whether this holds for all steps of the module as it is now.
    """
    if reason:
        if for_good:
            blueprint.why_not_captured = reason
        log_once(_RUNS_WITHOUT.format(name=type(blueprint.root).__name__, reason=reason))


class Graphs:
    """The graphs of one set of replicas, by the kind of step.

    Args:
        blueprint: of the live module.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self._kind: Hashable = None  # of the step that runs
        self._paths: dict[Hashable, OutputPaths] = {}
        self._containers: ContainerSnapshot | None = None  # what modules hold
        self._num_seen: Counter[Hashable] = Counter()
        self._by_kind: dict[Hashable, list[GraphedReplica]] = {}

    def of_step(self, plan: StepPlan, replicas: Replicas, shards: Sequence[Any]) -> "Sequence[GraphedReplica] | None":
        """Return what runs in the place of each replica in a step that begins; None: the replicas themselves.

        Args:
            replicas: those that have these graphs.
            shards: (positional, keyword) inputs of each replica.
        """
        if self._blueprint.why_not_captured:
            self._by_kind.clear()
            return None
        # `verify` compares, with other numbers; or there are hooks for all modules.
        if draws_off.are_off() or any(process_wide.hooks_of_every_module().values()):
            return None
        if self._containers is None or not self._containers.is_current():
            self._forget()
        self._kind = kind = _kind_of(plan, shards)
        if kind is None or kind in self._by_kind:
            return None if kind is None else self._by_kind[kind]
        self._num_seen[kind] += 1
        if self._num_seen[kind] <= _NUM_BEFORE:
            if len(self._num_seen) > _MOST_COUNTED:
                self._num_seen.clear()
                self._paths = {kind: self._paths[kind] for kind in self._by_kind}
            return None
        if len(self._by_kind) >= _MOST_KINDS:
            log_once(_TOO_MANY_KINDS.format(name=type(self._blueprint.root).__name__, most=_MOST_KINDS))
            return None
        of_step = self._blueprint, replicas, plan
        self._by_kind[kind] = [GraphedReplica(*of_step, index) for index, _ in enumerate(shards)]
        return self._by_kind[kind]

    def _forget(self) -> None:
        """Begin anew: a container of the module, which forward may read, has changed."""
        for of_kind in (self._num_seen, self._by_kind, self._paths):
            of_kind.clear()
        attributes = [item for module in self._blueprint.modules for item in module.__dict__.items()]
        self._containers = ContainerSnapshot([value for name, value in attributes if name not in OF_EVERY_MODULE])

    @property
    def paths(self) -> OutputPaths:
        """Those between the outputs of the step that runs, as they were in one without graphs."""
        return self._paths.get(self._kind, OutputPaths())

    @paths.setter
    def paths(self, paths: OutputPaths) -> None:
        self._paths[self._kind] = paths


def _kind_of(plan: StepPlan, shards: Sequence[Any]) -> Hashable | None:
    """Return what is equal for steps that launch the same kernels; None: an input says too little about that."""
    found: list[Hashable] = [plan.method, plan.flags, autocast_types()]
    for shard in shards:
        leaves, spec = pytree.flatten(shard)
        if not _has_plain_containers(spec):
            return None
        found.append(spec.kind())
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if not is_plain(leaf) or leaf.__dict__ or _devices.computes_on_host(leaf.device):
                    return None
                found.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
            elif type(leaf) in _CONSTANTS:
                found.append((type(leaf), repr(leaf)))  # -0.0 equals 0.0
            else:
                return None
    return (*found,)


def _has_plain_containers(spec: pytree.Spec) -> bool:
    """Return whether a value has no containers with a state of their own."""
    return spec.keys is None or (type(spec.value) in _CONTAINERS and all(map(_has_plain_containers, spec.specs)))


# ---- one replica ----------------------------------------------------------------------------------


class GraphedReplica:
    """One replica's forward and backwards of one kind of step, as graphs of kernels.

    Args:
        blueprint: of the live module.
        replicas: the set. It is not kept.
        plan: of the step.
        index: the replica's number in its set.

    Attributes:
        number: of the forward that has run last.
    """

    def __init__(self, blueprint: Blueprint, replicas: Replicas, plan: StepPlan, index: int) -> None:
        self._blueprint, self._linked = blueprint, replicas.linked
        self._method, self._device, self._index = plan.method, plan.devices[index], index
        self._modules, self._copied = replicas.each[index].modules, replicas.memory_of(index)
        self._own = self._linked.own[index]
        self._receiver = _Receiver()  # of what reaches the buckets of the second replica
        self._graph: _devices.Graph | None = None  # of forward
        self.number = 0
        self._stream: torch.Stream | None = None  # on which the graphs were launched last
        self._last_use: _devices.Event | None = None  # after that
        self._backwards: dict[Hashable, _Backward] = {}  # by the gradients of the outputs that they get

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward."""
        if self._graph is None and not self._blueprint.why_not_captured:
            self._capture(args, kwargs)
        if self._graph is None:
            return called(self._modules[0], self._method)(*args, **kwargs)
        inputs = [leaf for leaf in pytree.flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if torch.is_grad_enabled():
            linked = [*self._own, *[each for each in inputs if each.requires_grad]]
            outputs: Sequence[torch.Tensor] = _graphed(self, inputs, *linked)
        else:
            outputs = self.launch(inputs)
        copies = dict(zip(map(id, self._ends), outputs, strict=True))
        leaves = [copies.get(id(leaf), leaf) for leaf in self._leaves]
        return pytree.unflatten(self._spec, leaves, rebuild_all=True)

    def launch(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the outputs for these inputs (1) to (3)."""
        assert self._graph is not None
        self.number += 1
        with self._memory_in_use(), torch.no_grad():
            for slot, given in zip(self._inputs, inputs, strict=True):
                slot.fill(given)
            self._graph.launch()
            if self._written:
                torch.autograd.graph.increment_version(self._written)
            self._versions = [*map(_version, self._saved)] if self._saved else []
            return [end.clone() for end in self._ends]

    @contextmanager
    def _memory_in_use(self) -> Iterator[None]:
        """Within the block, use the graphs' memory on the calling thread's stream: after its last use on another."""
        stream = torch.accelerator.current_stream(self._device)
        if self._last_use is not None and stream != self._stream:
            self._last_use.let_wait(stream)
            for slot in [*self._inputs, *chain.from_iterable([each.slots for each in self._backwards.values()])]:
                slot.tensor.record_stream(stream)
        self._stream = stream
        try:
            yield
        finally:
            self._last_use = _devices.Event(stream)

    def without_gradients(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those outputs that need no gradient."""
        return [output for output, end in zip(outputs, self._ends, strict=True) if not end.requires_grad]

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture forward; say why, if it cannot be captured."""
        host, of_torch = GeneratorStates([torch.default_generator]), torch.default_generator.get_state()
        leaves, spec = pytree.flatten((args, kwargs))
        slots = [_Slot(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        inputs = [slot.tensor if isinstance(slot, _Slot) else slot for slot in slots]
        own_args, own_kwargs = pytree.unflatten(spec, inputs, rebuild_all=True)
        try:
            with _Capture(self._device) as capture:
                replica = self._second_replica()
                attributes = DictSnapshot([module.__dict__ for module in replica.modules])
                buffers = [b for module in replica.modules for b in module._buffers.values() if b is not None]
                versions = versions_of(buffers)
                # torch would compare versions with those of the captured forward; see `_saved`.
                saved: set[int] = set()
                hooks, operands, noted = partial(_pack, saved), _Operands(), checkpoints.begun.hooks
                with torch.autograd.graph.saved_tensors_hooks(hooks, _unpack), WatchedOperations(operands):
                    checkpoints.begun.hooks = noted  # these hooks are no checkpoint's
                    output = called(replica.modules[0], self._method)(*own_args, **own_kwargs)
                self._leaves, self._spec = pytree.flatten(output)
                tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
                self._ends = [*{id(tensor): tensor for tensor in tensors}.values()]
                if replica.registries.changes() or not attributes.is_current() or host.moved():
                    raise _CannotBeCapturedError("forward assigns attributes, or draws random numbers on the host")
                if len(tensors) < len([leaf for leaf in self._leaves if leaf is not None]):
                    raise _CannotBeCapturedError("forward returns what is no tensor")
        except Exception as error:  # noqa: BLE001 - said
            host.restore()
            torch.default_generator.set_state(of_torch)
            refuse(self._blueprint, _CANNOT.format(_first_line(error)))
            return
        self._inputs = [slot for slot in slots if isinstance(slot, _Slot)]
        self._inputs_with_gradients = [slot.tensor for slot in self._inputs if slot.tensor.requires_grad]
        now = versions_of(buffers)
        self._written = [each for each, a, b in zip(buffers, versions, now, strict=True) if a != b]
        # The module's own among what backward reads.
        self._saved = [each for each in (*replica.tensors, *buffers) if _memory_of(each) in saved]
        self._keeps = replica, operands.from_outside  # the memory that kernels read
        self._graph = capture.last

    def _second_replica(self) -> Replica:
        """Return a replica in the memory of the one that is replaced, with parameters of its own."""
        live, own = self._linked.live, dict[int, torch.Tensor]()
        for b, numbers in enumerate(self._linked.plan.numbers):
            given = [own_parameter(live[n], self._copied.get(id(live[n]), live[n])) for n in numbers]
            of_bucket = with_bucket_node(self._receiver.mark, self._receiver, b, self._index, given)
            own.update(zip([id(live[n]) for n in numbers], of_bucket, strict=True))
        replica = Replica(self._blueprint, self._copied, own, shares_buffers=self._index == 0)
        for number, key in self._blueprint.assigned:  # by earlier forwards, on all replicas alike
            value = self._modules[number].__dict__.get(key, GONE)
            replica.modules[number].__dict__.pop(key, None)
            if value is not GONE:
                replica.modules[number].__dict__[key] = value
        return replica

    def backward(self, number: int, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of the replica's parameters and inputs (4) to (6).

        Those of parameters are left out where the collector of their buckets takes them.

        Args:
            number: of the forward.
            grads: of its outputs.

        Raises:
            RuntimeError: a later forward has run in the same memory; or what backward reads of the module's parameters
                and buffers was written since then.
        """
        if number != self.number:
            raise RuntimeError(_FREED)
        if [*map(_version, self._saved)] != self._versions:
            raise RuntimeError(_MODIFIED)
        collector, numbers = self._linked.collector, self._linked.plan.numbers
        by_bucket = collector in engine.backward_context() or not engine.backward_is_restricted()
        found: dict[int, torch.Tensor | None] = {}

        def take(b: int, gradients: Sequence[torch.Tensor | None]) -> None:
            if by_bucket:
                collector.receive(b, self._index, gradients)
            else:
                found.update(zip(numbers[b], gradients, strict=True))

        given = {k: grad for k, grad in enumerate(grads) if grad is not None and self._ends[k].requires_grad}
        of_inputs = self._backward(given, take) if given else [None] * len(self._inputs_with_gradients)
        return [*map(found.get, range(len(self._own))), *of_inputs]

    def _backward(self, given: Mapping[int, torch.Tensor], take: "_Take") -> Gradients:
        """Return the gradients of the inputs, and give those of buckets to `take`."""
        if modes_that_stay():  # around this backward: they see its operations
            return self._backward_without_graph(given, take)
        kind = autocast_types(), *[(k, grad.stride()) for k, grad in given.items()]
        backward = self._backwards.get(kind)
        if backward is None and not self._blueprint.why_not_captured and len(self._backwards) < _MOST_BACKWARDS:
            backward = self._capture_backward(given)
            if backward is not None:
                self._backwards[kind] = backward
        if backward is None:
            return self._backward_without_graph(given, take)
        with self._memory_in_use():
            for slot, grad in zip(backward.slots, given.values(), strict=True):
                slot.fill(grad)
            for graph, number, bucket, flat in backward.parts:
                graph.launch()
                pieces = bucket.pieces(flat.clone())
                take(number, [*map(pieces.get, self._linked.plan.numbers[number])])
            backward.last.launch()
            return [grad if grad is None else grad.clone() for grad in backward.of_inputs]

    def _backward_without_graph(self, given: Mapping[int, torch.Tensor], take: "_Take") -> Gradients:
        """Do what `_backward` does, by the autograd graph of the captured forward, whose memory has this forward's."""
        found: list[tuple[int, Sequence[torch.Tensor | None]]] = []
        with self._memory_in_use():
            with _capturing:  # this runs on the stream of captures
                of_inputs = self._gradients(given, [*given.values()], lambda *of_bucket: found.append(of_bucket))
            every = [*of_inputs, *chain.from_iterable([gradients for _, gradients in found])]
            wait_for_makers([capture_stream(self._device)], every)
        for b, gradients in found:
            take(b, gradients)
        return of_inputs

    def _gradients(self, ends: Iterable[int], grads: Sequence[torch.Tensor], take: "_Take") -> Gradients:
        self._receiver.take = take
        try:
            given = [self._ends[k] for k in ends], [self._receiver.mark, *self._inputs_with_gradients], grads
            return [*engine.gradients(*given, keep=True)[1:]]
        finally:
            self._receiver.take = None

    def _capture_backward(self, given: Mapping[int, torch.Tensor]) -> "_Backward | None":
        """Capture the backward for gradients of these outputs, as one graph up to each bucket; None if it cannot be."""
        assert self._graph is not None
        plan, parts = self._linked.plan, list[_Part]()

        def take(b: int, gradients: Sequence[torch.Tensor | None]) -> None:
            grads = [gradient for gradient in gradients if gradient is not None]
            if not grads:
                return
            if plan.forms[b] is None or not all(map(is_plain, grads)):
                raise _CannotBeCapturedError("a gradient is sparse, or of a subclass")
            bucket = plan.part(b, [gradient is not None for gradient in gradients])
            flat = bucket.flat(dict(zip(bucket.numbers, grads, strict=True)))
            parts.append(_Part(capture.cut(), b, bucket, flat))

        slots = [_Slot(grad) for grad in given.values()]
        try:
            with _Capture(self._device, self._graph.pool) as capture:
                of_inputs = self._gradients(given, [slot.tensor for slot in slots], take)
                torch.zeros((), device=self._device)  # torch warns of an empty graph
        except Exception as error:  # noqa: BLE001 - said
            refuse(self._blueprint, _CANNOT.format(_first_line(error)))
            return None
        return _Backward(slots, parts, capture.last, of_inputs)


class _CannotBeCapturedError(Exception):
    pass


class _Part(NamedTuple):
    """A part of a backward, up to a bucket that is full then."""

    graph: _devices.Graph
    number: int  # the bucket's
    bucket: Bucket  # of those of its parameters that get a gradient
    flat: torch.Tensor  # their gradients


class _Backward(NamedTuple):
    slots: Sequence["_Slot"]  # the gradients of outputs
    parts: Sequence[_Part]
    last: _devices.Graph  # what comes after the last bucket
    of_inputs: Gradients


class _Slot:
    """Memory from which kernels of a graph read a tensor that each step brings, of the size and strides of a first one.

    Attributes:
        tensor: what they read.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._strides = like.stride()
        sizes_and_strides = zip(like.shape, self._strides, strict=True)
        self._sizes = [1 if size and not stride else size for size, stride in sizes_and_strides]
        self._memory = torch.empty_strided(self._sizes, self._strides, dtype=like.dtype, device=like.device)
        self.tensor = self._memory.expand(like.shape).detach().requires_grad_(like.requires_grad)

    def fill(self, given: torch.Tensor) -> None:
        """Copy a tensor into it; what an expanded one has once is copied once."""
        self._memory.copy_(given.detach().as_strided(self._sizes, self._strides, given.storage_offset()))


class _Capture:
    """Captures what the calling thread queues on one stream of a device: one graph, or several, one after the other.

    Attributes:
        last: the graph that is captured now, or was captured last.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self._device, self._pool = device, pool

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_capturing)
            stack.enter_context(collector_paused)
            stack.enter_context(_devices.using(self._device, [capture_stream(self._device)]))
            # A weight that was cast in a capture has no numbers yet.
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            self._begin()
            self._entered = stack.pop_all()
        return self

    def _begin(self) -> None:
        self.last = _devices.Graph(self._device, self._pool)
        self.last.begin()

    def cut(self) -> _devices.Graph:
        """End the graph, and begin the next one; return the one that has ended."""
        ended = self.last
        ended.end()
        self._pool = ended.pool
        self._begin()
        return ended

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._entered:
            try:
                self.last.end()
            except Exception:
                if kind is None:
                    raise


class _Operands:
    """Looks at the operations of a captured forward: keeps what kernels read from outside, and refuses what cannot be.

    It refuses before the operation runs, because an error of the device would leave more than a failed capture.

    Attributes:
        from_outside: tensors that no operation of the forward has made.
    """

    def __init__(self) -> None:
        self.from_outside: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()

    def __call__(self, operation: Any, operands: Sequence[torch.Tensor], device: Any, call: Callable[[], Any]) -> Any:
        if _NEEDS_NUMBERS & {*operation.tags}:
            raise _CannotBeCapturedError(f"{operation} waits for numbers of the device")
        if any(_devices.computes_on_host(tensor.device) for tensor in operands if not tensor.is_meta):
            raise _CannotBeCapturedError("forward uses a tensor of the host")
        if operands and device is not None and _devices.computes_on_host(torch.device(device)):
            raise _CannotBeCapturedError("forward copies to the host")
        for tensor in filter(is_plain, operands):
            if _memory_of(tensor) not in self._made:
                self.from_outside.setdefault(_memory_of(tensor), tensor.detach())
        result = call()
        self._made.update([_memory_of(tensor) for _, tensor in pytree.tensors(result) if is_plain(tensor)])
        return result


class _Receiver:
    """Gets the gradients of buckets of the replica that is captured, as a `Collector` does of others.

    Attributes:
        mark: the leaf behind its bucket nodes.
        take: called with them while a backward runs.
    """

    take: "_Take | None" = None

    def __init__(self) -> None:
        self.mark = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)

    def receive(self, bucket: int, _: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Receive the gradients of a bucket. Called by torch's engine."""
        assert self.take is not None
        self.take(bucket, gradients)


_Take: TypeAlias = Callable[[int, Sequence[torch.Tensor | None]], object]  # called with a bucket's number


class _Graphed(torch.autograd.Function):
    """The node of a forward that is a graph of kernels: `_graphed(replica, inputs, *linked)`.

    `linked` are the replica's parameters, and those of the inputs that need gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, replica: GraphedReplica, inputs: Sequence[torch.Tensor], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = replica.launch(inputs)
        ctx.replica, ctx.number = replica, replica.number
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*replica.without_gradients(outputs))
        return tuple(outputs)

    @staticmethod
    @uninterruptible
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(_HIGHER_ORDER)
        return None, None, *ctx.replica.backward(ctx.number, grads)


_graphed: Any = super(torch.autograd.Function, _Graphed).apply  # as in boundary.py


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _pack(saved: set[int], tensor: torch.Tensor) -> torch.Tensor:
    if is_plain(tensor.detach()):
        saved.add(_memory_of(tensor))
    return tensor.detach()


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_version = attrgetter("_version")


def _first_line(error: BaseException) -> str:
    return text_of(error).split("\n", 1)[0]
