"""A replica's inputs, its parameters, and a search of its graph.

`Inputs` splits the caller's inputs into shards, with leaves where a gradient is needed. A `ReplicaPool` has replicas,
each with leaves of its own for the parameters. `look_for_live_tensors` finds tensors in a replica's graph that are not
its own.
Copies to other devices may still be in flight when these objects exist: see `streams.py`.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from unisono.autograd.broadcast import CoalescedBroadcast, ReduceBuckets
from unisono.autograd.reducer import LeafHooks
from unisono.autograd.replica_graph import BoundaryTensor, OutsideLeaves, ReplicaGraphs
from unisono.engines.call import Call, called
from unisono.engines.parts import parts_of, run_in_parts
from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.blueprint import Blueprint, unlinked_at_deletion
from unisono.primitives.change_tracking import ContainerSnapshot, DictSnapshot, TensorSnapshot, fill
from unisono.primitives.outputs import Group
from unisono.primitives.placements import Placement
from unisono.primitives.reassigned_buffers import Change, buffer_registries, commit_buffers, histories
from unisono.primitives.references import INERT
from unisono.runtime import devices as _devices
from unisono.runtime import torch_private
from unisono.runtime.buckets import LARGE_BYTES
from unisono.runtime.interrupts import interruptible
from unisono.runtime.streams import Copies
from unisono.runtime.timeline import ReplicaTiming


class Inputs:
    """The inputs of every replica, and the leaves behind those that need a gradient.

    Attributes:
        shards: (positional, keyword) inputs, one a replica, on its device.
        live, of_boundary: the caller's tensors that need a gradient, and the boundary's inputs made of them.
    """

    def __init__(self, call: Call, tracked: bool, copies: Copies) -> None:
        num_replicas = len(call.devices)
        self.live: list[torch.Tensor] = []
        self.of_boundary: list[BoundaryTensor] = []
        all_on_cpu = _devices.are_cpu(call.devices)

        def place(tensor: torch.Tensor, placement: Placement) -> list[torch.Tensor | None]:
            data = tensor.detach()
            parts = [placement.part(data, i) for i in range(num_replicas)]
            if tracked and tensor.requires_grad:
                parts = [part if part is None else part.detach().requires_grad_() for part in parts]
                self.live.append(tensor)
                self.of_boundary.append(BoundaryTensor(placement, tensor.device, parts))
            # A copy even on the same device, so that a module that writes into its input writes into its own; and
            # made in the replica's graph, because writing into a leaf is forbidden.
            if all_on_cpu and _devices.is_cpu(tensor.device):  # the common case, with few calls
                placed = _devices.copies_on_cpu(parts)
            else:
                placed = [None if p is None else _copied(p, i, call.devices[i], copies) for i, p in enumerate(parts)]
            if tensor.requires_grad and not tracked:  # a module may switch gradients on for what it does inside
                placed = [copy if copy is None else copy.requires_grad_() for copy in placed]
            return placed

        self.shards = call.arguments.split(call.sizes, place)


def _copied(part: torch.Tensor, replica: int, device: torch.device, copies: Copies) -> torch.Tensor:
    """Return a copy for a replica; a copy linked to a leaf is made at once, on the stream of the rest of the graph."""
    if part.requires_grad or _devices.same_device(part.device, device):
        return _devices.copied_to(part, device)
    return copies.to(part, replica)


@interruptible
def call_replica(
    call: Call,
    row_limits: Mapping[int, int],
    inputs: Inputs,
    roots: Sequence[nn.Module],
    copies: Copies,
    timings: Sequence[ReplicaTiming],
    index: int,
) -> Any:
    """Call a replica with its inputs, in its thread, as a whole or in parts; note how long it took."""
    started = time.perf_counter()
    copies.wait_copies(index)
    root, (args, kwargs) = roots[index], inputs.shards[index]
    parts = parts_of(row_limits, call, root, index) if call.parts > 1 or row_limits else None
    if parts is None:
        output = called(root, call.method)(*args, **kwargs)
    else:
        output = run_in_parts(root, called(root, call.method), args, kwargs, parts, call.devices[index])
    if call.is_timed:
        _devices.queued_work(call.devices[index])(True)
    timings[index].forward_s = time.perf_counter() - started
    return output


class Replica:
    """One replica: its modules, its own leaves in place of the live parameters, and its own buffers.

    Args:
        blueprint: of the live module.
        copied: by id, copies of the tensors that are not on the replica's device already.
        tracked: whether a graph is built.
        shares_buffers: whether the replica has the live buffers themselves.

    Attributes:
        leaves: one for each live parameter that needs a gradient; empty where no graph is built.
        hooks: on these leaves.
        modules: its modules, the root first.
        rebound: the values of attributes that refer to its own modules and tensors.
        registries: its buffers as it was made.
        own_buffers, live_buffers: its own buffers, and the live ones that they are copies of.
        tensors_in_place: its tensors that are not copies on another device.
    """

    def __init__(
        self, blueprint: Blueprint, copied: Mapping[int, torch.Tensor], tracked: bool, shares_buffers: bool
    ) -> None:
        self.leaves: list[torch.Tensor] = []
        tensors: dict[int, torch.Tensor] = {}
        for key, parameter in blueprint.parameters.items():
            if tracked and parameter.requires_grad:
                tensors[key] = leaf = own_leaf(parameter, copied.get(key, parameter))
                self.leaves.append(leaf)
            elif key in copied:
                tensors[key] = own_leaf(parameter, copied[key])
        own_buffers = blueprint.buffers_for(copied, shared=shares_buffers)
        self.own_buffers = list(own_buffers.values())
        self.live_buffers = [blueprint.buffers[key] for key in own_buffers]
        tensors.update(own_buffers)
        for key, constant in blueprint.constants.items():
            tensors[key] = copied.get(key, constant)
        self.hooks = LeafHooks(dict(enumerate(self.leaves)))
        self.copied = [(key, tensors[key]) for key in copied]
        self.modules, links = blueprint.stamp(tensors)
        self.registries = buffer_registries(self.modules)
        self._unlinked = unlinked_at_deletion(links)
        self.rebound = [module.__dict__[name] for module, name, _ in links]
        self.tensors_in_place = [tensor for key, tensor in tensors.items() if key not in copied]

    @property
    def is_remote(self) -> bool:
        """Whether its parameters are copies in memory of their own."""
        return bool(self.copied)

    def renew_copies(self, copied: Mapping[int, torch.Tensor]) -> None:
        """Use new copies of what is not on the replica's device."""
        for key, own in self.copied:
            own.data = copied[key]

    def commit_buffers(self, pool: "ReplicaPool", changes: Sequence[Change], joined: Sequence[torch.Tensor]) -> None:
        """Give the live module this replica's buffers, after a forward that has succeeded.

        Args:
            changes: those that forward has reassigned.
            joined: for each of their `histories`, the tensor with a history in the caller's graph.
        """
        for live, own in zip(self.live_buffers, self.own_buffers, strict=True):
            live.data.copy_(own)
        if not changes:
            return
        pairs = [
            *zip(self.own_buffers, self.live_buffers, strict=True),
            *zip(self.leaves, pool.live_parameters[: len(self.leaves)], strict=True),
            *zip(histories(changes)[: len(joined)], joined, strict=True),
        ]
        commit_buffers(changes, self.modules, pool.blueprint.modules, {id(own): live for own, live in pairs})

    def drop_copies(self) -> None:
        """Free memory of its own, until the next forward."""
        for _, own in self.copied:
            own.data = own.data.new_empty(0)


_STAMPED_REGISTRIES = ("_parameters", "_buffers", "_modules")  # those that each replica has of its own


class Replicas:
    """The replicas of one forward, and of the backward passes that belong to it: nothing else uses them meanwhile.

    Args:
        each: one a device.
        broadcast: what copies the live module's tensors to them.
        kind: of the forwards that they fit.
        returns_to: where to put them when they are given back; None: nowhere.
    """

    def __init__(
        self,
        each: Sequence[Replica],
        broadcast: CoalescedBroadcast,
        kind: tuple[Any, ...],
        returns_to: "list[Replicas] | None",
    ) -> None:
        self.each, self.kind = each, kind
        self.roots = [replica.modules[0] for replica in each]
        self.leaves = [replica.leaves for replica in each]
        self.hooks = [replica.hooks for replica in each]
        self.is_remote = any([replica.is_remote for replica in each])
        self._broadcast, self._returns_to = broadcast, returns_to
        here = [replica for replica in each if not replica.is_remote]
        own_buffers = torch_private.of_one_kind([own for replica in here for own in replica.own_buffers])
        live_buffers = torch_private.of_one_kind([live for replica in here for live in replica.live_buffers])
        self._buffers = [*zip(own_buffers, live_buffers, strict=True)]
        if returns_to is None:
            return
        self._modules = [module for replica in each for module in replica.modules]
        registries = [module.__dict__[name] for name in _STAMPED_REGISTRIES for module in self._modules]
        self._dicts = DictSnapshot([*[module.__dict__ for module in self._modules], *registries])
        self._rebound = ContainerSnapshot([value for replica in each for value in replica.rebound])
        self._classes = [*map(type, self._modules)]
        self._tensors = TensorSnapshot([tensor for replica in each for tensor in replica.tensors_in_place])
        self._copies = TensorSnapshot([own for replica in each for _, own in replica.copied], with_memory=False)
        self._num_references = self._count_references()
        self._all_leaves = [leaf for leaves in self.leaves for leaf in leaves]

    def are_unchanged(self) -> bool:
        """Return whether the replicas are as they were made, and nothing outside refers to their modules.

        Hooks of a user's on their tensors are a change, too.
        """
        return (
            self._dicts.is_current()
            and self._rebound.is_current()
            and [*map(type, self._modules)] == self._classes
            and self._tensors.is_current()
            and (not self.is_remote or self._copies.is_current())
            and self._count_references() == self._num_references
            and torch_private.num_hooks(self._all_leaves) == sum(map(len, [hooks.installed for hooks in self.hooks]))
            and not [leaf for leaf in self._all_leaves if leaf.grad is not None]
        )

    def _count_references(self) -> list[int]:
        return [*map(sys.getrefcount, self._modules)]

    def renew(self, copies: Copies, returns_to: "list[Replicas]") -> None:
        """Take what the live module's tensors are now: new copies of those elsewhere, and the buffers' values."""
        self._returns_to = returns_to
        if self.is_remote:
            for replica, copied in zip(self.each, self._broadcast(copies), strict=True):
                replica.renew_copies(copied)
        self.renew_buffers()

    def renew_buffers(self) -> None:
        """Write the live buffers into the replicas' copies."""
        if not self._buffers:
            return
        with torch.set_grad_enabled(False):
            for own, live in self._buffers:
                torch_private.copy_all_in_place(own, live)

    def give_back(self) -> None:
        """Let a later forward use them. To be called when no graph of theirs is left.

        If something outside refers to a module of theirs, they are left to it as forward has left them.
        """
        returns_to, self._returns_to = self._returns_to, None
        if returns_to is None:
            return
        assigned = [] if self._dicts.is_current() else self._dicts.restore()  # undo what forward has assigned
        if self._count_references() != self._num_references:
            for attributes, items in assigned:
                fill(attributes, items)
            return
        if self.is_remote:
            for replica in self.each:
                replica.drop_copies()
        returns_to.append(self)
        del returns_to[:-_MOST_IDLE]


_MOST_IDLE = 3  # sets of replicas that are kept: forwards may follow each other before a backward


class ReplicaPool:
    """The replicas of one blueprint: stamped when there are none, and used again as long as they are as they were.

    Overlapping forwards have replicas of their own. What forward changed in a replica is undone when it is given back;
    a replica that cannot be as it was is dropped.

    Attributes:
        source: the live module's device.
        live_parameters: those that need a gradient.
        has_separate_memory: whether each replica but the first has copies, as if it were on a device of its own.
        large: which of them have large gradients.
        buffers: the live buffers, in lists of one kind each.
    """

    def __init__(self, blueprint: Blueprint, source: torch.device) -> None:
        self.blueprint, self.source, self.has_separate_memory = blueprint, source, _devices.has_separate_memory()
        self.live_parameters = [parameter for parameter in blueprint.parameters.values() if parameter.requires_grad]
        self.large = [
            k
            for k, parameter in enumerate(self.live_parameters)
            if parameter.layout == torch.strided and parameter.nbytes >= LARGE_BYTES
        ]
        self.buffers = torch_private.of_one_kind(blueprint.buffers.values())
        self._idle: list[Replicas] = []

    def is_current(self, module: nn.Module, source: torch.device) -> bool:
        """Return whether these are the replicas of `module` as it is now, on `source`."""
        same_memory = self.source == source and self.has_separate_memory is _devices.has_separate_memory()
        return same_memory and self.blueprint.is_current(module)

    @cached_property
    def reduce_buckets(self) -> ReduceBuckets:
        """The buckets in which gradients of replicas in memory of their own are reduced."""
        return ReduceBuckets(self.live_parameters)

    def take(
        self,
        devices: Sequence[torch.device],
        tracked: bool,
        copies: Copies,
        *,
        with_live_buffers: bool = True,
    ) -> Replicas:
        """Return a replica for each device, the first with the live module's buffers unless these are elsewhere."""
        kind = (tracked, torch.is_inference_mode_enabled(), with_live_buffers, *devices)
        for replicas in self._idle[::-1]:
            if replicas.kind == kind:
                try:
                    self._idle.remove(replicas)
                except ValueError:  # another thread has taken it
                    continue
                if replicas.are_unchanged():
                    replicas.renew(copies, self._idle)
                    return replicas
        each, broadcast = self.stamp(devices, tracked, copies, with_live_buffers=with_live_buffers)
        return Replicas(each, broadcast, kind, self._idle if self.blueprint.is_reusable else None)

    def stamp(
        self, devices: Sequence[torch.device], tracked: bool, copies: Copies, *, with_live_buffers: bool
    ) -> tuple[list[Replica], CoalescedBroadcast]:
        """Return new replicas, as `take` does, and what copies the live module's tensors to them."""
        blueprint = self.blueprint
        tensors = {**blueprint.parameters, **blueprint.buffers, **blueprint.constants_on(self.source)}
        broadcast = CoalescedBroadcast(tensors, devices)
        each = [
            Replica(blueprint, copied, tracked, with_live_buffers and i == 0)
            for i, copied in enumerate(broadcast(copies))
        ]
        return each, broadcast


def own_leaf(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a parameter like the live one in the memory of `data`: the live one itself, or a copy of it."""
    leaf: torch.Tensor
    if type(parameter) is nn.Parameter:
        leaf = nn.Parameter(data, parameter.requires_grad)
    elif type(parameter) is torch.Tensor:  # a buffer, or a value that functional_call has put there
        leaf = data.detach().requires_grad_(parameter.requires_grad)
    elif isinstance(parameter, nn.Parameter) and type(parameter.detach()) is torch.Tensor:  # a user's subclass of it
        leaf = data.detach().as_subclass(type(parameter)).requires_grad_(parameter.requires_grad)
    else:  # a subclass of Tensor, which detach() keeps
        leaf = nn.Parameter(data.detach(), parameter.requires_grad)
    for name, value in parameter.__dict__.items():
        leaf.__dict__.setdefault(name, value)
    return leaf


class GraphSearch:
    """Searches the graphs of replicas with `look_for_live_tensors`, once per structure if nothing is found there."""

    def __init__(self) -> None:
        # Structures in whose graphs no leaf was found; whether they have reentrant checkpoints.
        self._self_contained: dict[tuple[Any, ...], bool] = {}

    def outside_leaves(
        self,
        pool: "ReplicaPool",
        call: Call,
        groups: Sequence[Group],
        where: Sequence[str],
        own_leaves: Sequence[torch.Tensor],
        may_differ: bool,
    ) -> OutsideLeaves:
        """Return the leaves in the graphs behind `groups` that belong neither to the module nor to a replica.

        The next call `may_differ` where the inputs carry objects.
        """
        structure = _structure(pool, call)
        if not may_differ and structure in self._self_contained:
            return OutsideLeaves((), self._self_contained[structure])
        outside = look_for_live_tensors(pool.blueprint, groups, where, own_leaves)
        if not outside.leaves and not may_differ:
            if len(self._self_contained) >= _MOST_STRUCTURES:
                self.clear()
            self._self_contained[structure] = outside.with_reentrant_checkpoint
        return outside

    def clear(self) -> None:
        """Search again."""
        self._self_contained.clear()


def _structure(pool: "ReplicaPool", call: Call) -> tuple[Any, ...]:
    return call.method, call.arguments.flags, pool.blueprint.signature


def carries_objects(call: Call) -> bool:
    """Return whether the inputs hold objects of unknown classes.

    Every replica gets the same object. Through a tensor in it the replicas' graphs may share nodes, which no replica's
    backward may free.
    """
    others = [leaf for leaf in call.arguments.leaves if type(leaf) not in _CARRIES_NOTHING]
    return bool([leaf for leaf in others if not isinstance(leaf, torch.Tensor) and batch_type_of(leaf) is None])


_MOST_STRUCTURES = 64
_CARRIES_NOTHING = INERT | {torch.Tensor}


def look_for_live_tensors(
    blueprint: Blueprint, groups: Sequence[Group], where: Sequence[str], own_leaves: Sequence[torch.Tensor]
) -> OutsideLeaves:
    """Check that no replica's graph leads to a tensor of the live module; return those from outside.

    Raises:
        RuntimeError: one does, and its gradient would be wrong. Names the tensor.
    """
    if not groups:  # outputs without tensors
        return OutsideLeaves()
    own = set(map(id, own_leaves))
    outside: dict[int, tuple[torch.Tensor, set[str]]] = {}  # each with the replicas in whose graphs it is
    has_reentrant_checkpoint = False
    histories = {tensor.grad_fn: tensor for tensor in blueprint.histories.values()}
    for place, outputs in zip(where, zip(*(group.tensors for group in groups), strict=True), strict=True):
        for reached in leaves_and_nodes([output for output in outputs if output is not None]):
            if isinstance(reached, torch.Tensor) and id(reached) in blueprint.parameters:
                raise RuntimeError(
                    f"{place} used {blueprint.name_of(reached)} of the original module instead of its own: something "
                    "in the module refers to the original in a way that cannot be followed, such as an object that "
                    "holds the module or one of its methods, or a hook that has a variable for the module that it is "
                    "given. Reach it through self, in forward; in a hook, through its argument."
                )
            if isinstance(reached, torch.Tensor) and reached.requires_grad and id(reached) not in own:
                outside.setdefault(id(reached), (reached, set()))[1].add(place)
            if isinstance(reached, torch.Tensor):
                continue
            has_reentrant_checkpoint = has_reentrant_checkpoint or is_reentrant_checkpoint(reached)
            if reached in histories:
                raise RuntimeError(
                    f"{place} used {blueprint.name_of(histories[reached])}, a tensor that was computed outside "
                    "forward and needs gradients. Pass it to the model as an input, compute it in forward, or "
                    "detach() it."
                )
    are_shared = any(len(places) > 1 for _, places in outside.values())
    return OutsideLeaves([leaf for leaf, _ in outside.values()], has_reentrant_checkpoint, are_shared)


def is_reentrant_checkpoint(node: Any) -> bool:
    """Return whether a node of a graph runs a backward inside backward for an activation checkpoint.

    The checkpoint may be in the replicas of a wrapper inside the module, behind the node of its boundary.
    """
    inner = getattr(node, "graphs", None)
    if isinstance(inner, ReplicaGraphs):
        return inner.outside.with_reentrant_checkpoint
    return "CheckpointFunctionBackward" in node.name()


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
