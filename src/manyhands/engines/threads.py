"""The threads engine: one replica a thread, all in this process.

One forward, step by step:

    1. take a blueprint of the live module and check where its tensors are
    2. cut the inputs into shards; on the replicas' side of the autograd boundary they are leaves
    3. stamp one replica a shard, with leaves of its own for the parameters
    4. call the replicas, all at once; the caller's thread runs the first
    5. match the outputs; where the structure is new, look for live tensors in the replicas' graphs
    6. join the outputs through the boundary

Buffers: the first replica has the live ones (so its updates persist), the others have copies. If anything fails in
steps 4 or 5, the live buffers get back what they held before.

Assumes that nobody changes the module while a forward runs. Calls from several threads may overlap; each has replicas
of its own.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from manyhands import devices as _devices
from manyhands import nested
from manyhands.batch_norm import BatchNormOverReplicas, Walk
from manyhands.batch_types import batch_type_of
from manyhands.engines.base import BeginPass, Call, Engine, ReplicaTiming, called, one_pass
from manyhands.engines.boundary import Alias, Boundary, Edge, Graphs
from manyhands.engines.turns import Turns
from manyhands.layouts import Layout, Whole
from manyhands.outputs import Group, Outputs
from manyhands.parallel_apply import values_or_raise
from manyhands.random_streams import own_streams
from manyhands.rebind import INERT
from manyhands.replicate import Blueprint, check_device, collector_paused, constant_for, unchanged_on_failure
from manyhands.workers import inside_replica, run_together

_MOST_STRUCTURES = 64


class ThreadsEngine(Engine):
    """See the module's docstring."""

    def __init__(self) -> None:
        # Structures whose replicas' graphs have been looked at and led nowhere but to the replicas' own leaves.
        self._self_contained: set[tuple[Any, ...]] = set()
        self._timings: list[ReplicaTiming] = []
        self._turns = Turns()

    def forward(self, module: nn.Module, call: Call) -> Any:
        tracked = torch.is_grad_enabled()
        where = call.where()
        timings = [ReplicaTiming(device, size) for device, size in zip(call.devices, call.sizes, strict=True)]
        with collector_paused:
            blueprint = Blueprint(module)
            check_device(module, [*blueprint.parameters.values(), *blueprint.buffers.values()], call.source)
            inputs = _Inputs(call, tracked)
            stamps = [_Stamp(blueprint, call.source, device, i == 0, tracked) for i, device in enumerate(call.devices)]
        structure = (call.method, *blueprint.signature()) if tracked else None
        carries_objects = _carries_objects(call)
        if not inside_replica():
            self._timings = timings

        begin_pass: list[BeginPass] = [partial(own_streams, type(module).__name__, call.devices)]
        around_walk: Callable[[], AbstractContextManager[Any]] = nullcontext
        if call.sync_batch_norm and len(stamps) > 1:
            walk = Walk.APART if all(map(_devices.computes_on_host, call.devices)) else Walk.TOGETHER
            batch_norm = BatchNormOverReplicas([stamp.replica for stamp in stamps], walk)
            begin_pass.append(batch_norm.one_pass)
            if walk is Walk.TOGETHER:
                around_walk = batch_norm.repeating
        if blueprint.compiled and not call.sync_batch_norm:  # there replicas wait for each other, and cannot take turns
            begin_pass += self._turns.if_new([(tracked, module.training, *_kind(shard)) for shard in inputs.shards])

        def task(index: int) -> Callable[[], Any]:
            def run() -> Any:
                started = time.perf_counter()
                args, kwargs = inputs.shards[index]
                output = called(stamps[index].replica, call.method)(*args, **kwargs)
                timings[index].forward_s = time.perf_counter() - started
                return output

            return run

        own_leaves = [leaf for edge in inputs.edges for leaf in edge.tensors if leaf is not None]
        own_leaves += [leaf for stamp in stamps for leaf in stamp.leaves]
        with unchanged_on_failure(blueprint.buffers.values()), one_pass(begin_pass) as surroundings:
            tasks = [task(i) for i in range(len(call.devices))]
            outputs = values_or_raise(run_together(tasks, call.devices, surroundings), where)
            matched = Outputs(outputs, call.rules, call.sizes)
            edges = [Edge(group.layout, call.output_device, group.tensors) for group in matched.groups]
            if structure is None:
                joined: Sequence[torch.Tensor] = [edge.join(edge.tensors) for edge in edges]
            else:
                outside: list[torch.Tensor] = []
                if carries_objects or structure not in self._self_contained:
                    outside = _look_for_live_tensors(blueprint, matched.groups, where, own_leaves)
                    self._remember(structure, self_contained=not outside and not carries_objects)
                live_parameters = stamps[0].live_parameters
                graphs = Graphs(
                    timings=timings,
                    where=where,
                    inputs=[
                        *inputs.edges,
                        *_edges(live_parameters, [stamp.leaves for stamp in stamps]),
                        *(Edge(Whole(), leaf.device, [leaf] * len(stamps)) for leaf in outside),
                    ],
                    outputs=edges,
                    shared_leaves=bool(outside),
                    keep=carries_objects,
                    keep_alive=stamps,
                    begin_walk=begin_pass,
                    around_walk=around_walk,
                )
                joined = _join(graphs, [*inputs.live, *live_parameters, *outside], own_leaves)
            output = matched.put_together(joined)
        stamps[0].commit_buffers()
        return output

    def _remember(self, structure: tuple[Any, ...], *, self_contained: bool) -> None:
        if self_contained:
            if len(self._self_contained) >= _MOST_STRUCTURES:
                self._self_contained.clear()
            self._self_contained.add(structure)

    def timings(self) -> list[ReplicaTiming]:
        return self._timings

    def close(self) -> None:
        self._timings = []


def _join(graphs: Graphs, live: Sequence[torch.Tensor], own_leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the joined outputs, linked to the `live` tensors through the boundary if any of them needs a gradient."""
    if any(leaf.grad is not None for leaf in own_leaves):
        _pass_on_gradients(graphs, live)
    if not any(t is not None and t.requires_grad for edge in graphs.outputs for t in edge.tensors):
        return [edge.join(edge.tensors) for edge in graphs.outputs]
    aliases = [t if t.is_leaf else Alias.apply(t) for t in live]  # type: ignore[no-untyped-call]
    joined: tuple[torch.Tensor, ...] = Boundary.apply(graphs, *aliases)  # type: ignore[no-untyped-call]
    return joined


class _Inputs:
    """The inputs of every replica, and the leaves behind those that need a gradient.

    Attributes:
        shards: (positional, keyword) inputs, one a replica.
        live, edges: the caller's tensors that need a gradient, and the boundary's edges from them to the leaves.
    """

    def __init__(self, call: Call, tracked: bool) -> None:
        self.live: list[torch.Tensor] = []
        self.edges: list[Edge] = []

        def place(tensor: torch.Tensor, layout: Layout) -> list[torch.Tensor | None]:
            parts = [layout.part(tensor.detach(), i) for i in range(len(call.devices))]
            if tracked and tensor.requires_grad:
                parts = [part if part is None else part.detach().requires_grad_() for part in parts]
                self.live.append(tensor)
                self.edges.append(Edge(layout, tensor.device, parts))
            # A copy even on the same device, so that a module that writes into its input writes into its own; and
            # made in the replica's graph, because writing into a leaf is forbidden.
            copies = [p if p is None else p.to(d, copy=True) for p, d in zip(parts, call.devices, strict=True)]
            if tensor.requires_grad and not tracked:  # a module may switch gradients on for what it does inside
                copies = [copy if copy is None else copy.requires_grad_() for copy in copies]
            return copies

        self.shards = call.arguments.deal(call.sizes, place)


def _kind(shard: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[Hashable]:
    """Yield what torch.compile looks at in inputs, more or less."""
    for _, tensor in nested.tensors(shard):
        yield tensor.shape, tensor.dtype, tensor.requires_grad


class _Stamp:
    """One replica, and the leaves that stand in it for the live parameters."""

    def __init__(
        self, blueprint: Blueprint, source: torch.device, device: torch.device, first: bool, tracked: bool
    ) -> None:
        self.live_parameters: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        tensors: dict[int, torch.Tensor] = {}
        for key, parameter in blueprint.parameters.items():
            if tracked and parameter.requires_grad:
                tensors[key] = leaf = _leaf(parameter, device)
                self.live_parameters.append(parameter)
                self.leaves.append(leaf)
            elif not _devices.same_device(parameter.device, device):
                tensors[key] = _leaf(parameter, device)
        copies = blueprint.buffers_for(device, shared=first)
        self._buffers = [(blueprint.buffers[key], copy) for key, copy in copies.items()]
        tensors.update(copies)
        for key, constant in blueprint.constants.items():
            tensors[key] = constant_for(constant, source, device)
        self._stamped = blueprint.stamp(tensors)

    @property
    def replica(self) -> nn.Module:
        return self._stamped.root

    def __del__(self) -> None:
        if hasattr(self, "_stamped"):  # else it was never made
            self._stamped.unlink()

    def commit_buffers(self) -> None:
        """Write this replica's buffers into the live ones, where it does not have those themselves."""
        for live, own in self._buffers:
            live.data.copy_(own)


def _leaf(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a parameter of its own for a replica on `device`; it shares storage where the device is the same."""
    here = _devices.same_device(parameter.device, device)
    data = parameter if here else parameter.detach().to(device)
    leaf: torch.Tensor
    if type(parameter) in (nn.Parameter, torch.Tensor):
        leaf = nn.Parameter(data, parameter.requires_grad)
    elif isinstance(parameter, nn.Parameter) and type(parameter.detach()) is torch.Tensor:  # a user's subclass of it
        leaf = data.detach().as_subclass(type(parameter)).requires_grad_(parameter.requires_grad)
    else:  # a subclass of Tensor, which detach() keeps
        leaf = nn.Parameter(data.detach(), parameter.requires_grad)
    for name, value in parameter.__dict__.items():
        leaf.__dict__.setdefault(name, value)
    return leaf


def _carries_objects(call: Call) -> bool:
    """Return whether the inputs hold objects of unknown classes.

    Every replica gets the same object, and its graph may lead through a tensor in it, into one graph for all of them:
    then no replica's backward may free what it walks.
    """
    return any(
        not isinstance(leaf, torch.Tensor) and type(leaf) not in INERT and batch_type_of(leaf) is None
        for leaf in call.arguments.leaves
    )


def _edges(live: Sequence[torch.Tensor], leaves: Sequence[Sequence[torch.Tensor]]) -> Iterator[Edge]:
    """Yield the boundary's edges of parameters: `leaves[i][k]` is replica i's leaf for live tensor k."""
    for tensor, of_edge in zip(live, zip(*leaves, strict=True), strict=True):
        yield Edge(Whole(), tensor.device, of_edge)


def _pass_on_gradients(graphs: Graphs, live: Sequence[torch.Tensor]) -> None:
    """Pass on what a module's own call of backward, inside forward, has left in the replicas' leaves."""
    parts = zip(graphs.inputs, graphs.take_leaf_gradients(), strict=True)
    gradients = [edge.join_gradients(of_edge) for edge, of_edge in parts]
    reached = [(tensor, grad) for tensor, grad in zip(live, gradients, strict=True) if grad is not None]
    torch.autograd.backward([tensor for tensor, _ in reached], [grad for _, grad in reached])


def _look_for_live_tensors(
    blueprint: Blueprint, groups: Sequence[Group], where: Sequence[str], own_leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Check that no replica's graph leads to a tensor of the live module instead of the replica's own.

    Returns:
        The leaves found that belong neither to the module nor to a replica: tensors from outside.

    Raises:
        RuntimeError: one does; its gradient would be wrong, so the forward fails. Names the tensor.
    """
    if not groups:  # outputs without tensors
        return []
    own = set(map(id, own_leaves))
    outside: dict[int, torch.Tensor] = {}
    histories = {tensor.grad_fn: tensor for tensor in blueprint.histories.values()}
    for place, outputs in zip(where, zip(*(group.tensors for group in groups), strict=True), strict=True):
        for reached in leaves_and_nodes([output for output in outputs if output is not None]):
            if isinstance(reached, torch.Tensor) and id(reached) in blueprint.parameters:
                raise RuntimeError(
                    f"{place} used {blueprint.name_of(reached)} of the original module instead of its own: something "
                    "in the module refers to the original in a way that cannot be followed, such as an object that "
                    "holds the module or one of its methods. Reach it through self, in forward."
                )
            if isinstance(reached, torch.Tensor) and reached.requires_grad and id(reached) not in own:
                outside[id(reached)] = reached
            if not isinstance(reached, torch.Tensor) and reached in histories:
                raise RuntimeError(
                    f"{place} used {blueprint.name_of(histories[reached])}, a tensor that was computed outside "
                    "forward and needs gradients. Pass it to the model as an input, compute it in forward, or "
                    "detach() it."
                )
    return list(outside.values())


def leaves_and_nodes(outputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield every leaf tensor and every node in the graph behind `outputs`."""
    pending: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            pending.append(output.grad_fn)
        elif output.requires_grad:
            yield output
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
