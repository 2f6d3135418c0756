"""A replica's inputs, its parameters, and a search of its graph.

`Inputs` splits the caller's inputs into shards. A `ReplicaPool` has replicas, each with parameters of its own. Both are
linked to the caller's tensors where these need a gradient (autograd/bucket.py). `look_for_live_tensors` finds tensors
in a replica's graph that are not its own.
Copies to other devices may still be in flight when these objects exist: see `streams.py`.
"""

import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from unisono.autograd.broadcast import CoalescedBroadcast
from unisono.autograd.bucket import (
    Collector,
    is_bucket_node,
    joined_gradients,
    lead_to,
    lead_to_others,
    leaf_on,
    own_tensors,
    token_of,
)
from unisono.autograd.replica_graph import CapturedTensors, LinkedParameters, LinkedTensors, ReplicaGraphs, Ways
from unisono.engines.parts import parts_of, run_in_parts
from unisono.engines.step_plan import Call, StepPlan, called
from unisono.leftovers.attributes import (
    attribute_dicts_of,
    counts,
    has_rows,
    ids_of_leaves,
    keep_hooks,
    kept_of_only,
    path_of,
    registered,
    told_apart,
)
from unisono.leftovers.buffers import (
    BuffersInBackward,
    buffer_registries,
    commit_buffers,
    histories,
    versions_of,
)
from unisono.leftovers.report import Kind, Leftovers
from unisono.leftovers.shared import SharedWrites
from unisono.leftovers.written_parameters import WrittenParameters, in_each
from unisono.primitives import pytree
from unisono.primitives.blueprint import Blueprint, unlinked_at_deletion
from unisono.primitives.change_tracking import GONE, Change, ContainerSnapshot, DictSnapshot, TensorSnapshot, fill
from unisono.primitives.outputs import Group
from unisono.primitives.placements import Placement
from unisono.primitives.tensor_attributes import carry_attributes
from unisono.primitives.visitor import INERT
from unisono.runtime import devices as _devices
from unisono.runtime import torch_private
from unisono.runtime.buckets import BUCKET_BYTES, SHARED_BUCKET_BYTES, BucketPlan
from unisono.runtime.interrupts import interruptible
from unisono.runtime.streams import Copies
from unisono.runtime.timeline import ReplicaTiming


class Inputs:
    """The inputs of every replica.

    Attributes:
        shards: (positional, keyword) inputs, one a replica, on its device.
        linked: the caller's tensors that need a gradient, with the replicas' parts of them.
        numbers_of_linked: which of all tensors these are.
    """

    def __init__(self, call: Call, tracked: bool, copies: Copies) -> None:
        plan, devices = call.plan, call.plan.devices
        num_replicas = len(devices)
        self.linked: list[LinkedTensors] = []
        self.numbers_of_linked: tuple[int, ...] = ()
        all_on_cpu = _devices.are_cpu(devices)
        number = 0

        def place(tensor: torch.Tensor, placement: Placement) -> list[torch.Tensor | None]:
            nonlocal number
            number += 1
            data = tensor.detach()
            parts = [placement.part(data, i) for i in range(num_replicas)]
            if tracked and tensor.requires_grad:
                # On the replica's own device: its nodes do not run in the thread that torch has for another one, which
                # may be waiting for this replica in batch norm.
                parts = [
                    None if part is None else _devices.copy_to(part, device)
                    for part, device in zip(parts, devices, strict=True)
                ]
                linked = LinkedTensors.of_input(tensor, placement, parts)
                self.linked.append(linked)
                self.numbers_of_linked += (number,)
                parts = [*linked.tensors.tensors]
            # A copy even on the same device, so that a module that writes into its input writes into its own; and
            # made in the replica's graph, so that the gradient is that of what the caller gave.
            if all_on_cpu and _devices.is_cpu(tensor.device):  # the common case, with few calls
                placed = _devices.copies_on_cpu(parts)
            else:
                placed = [None if p is None else _copied(p, i, devices[i], copies) for i, p in enumerate(parts)]
            if tensor.requires_grad and not tracked:  # a module may switch gradients on for what it does inside
                placed = [copy if copy is None else copy.requires_grad_() for copy in placed]
            if tensor.__dict__:
                carry_attributes(tensor, placed)
            return placed

        self.shards = call.arguments.split(plan.sizes, place)


def _copied(part: torch.Tensor, replica: int, device: torch.device, copies: Copies) -> torch.Tensor:
    """Return a copy for a replica; a copy with a history is made at once, on the stream of the rest of the graph."""
    if part.requires_grad or _devices.same_device(part.device, device):
        return _devices.copied_to(part, device)
    return copies.to(part, replica)


@interruptible
def call_replica(
    plan: StepPlan,
    row_limits: Mapping[int, int],
    inputs: Inputs,
    roots: Sequence[nn.Module],
    copies: Copies,
    timings: Sequence[ReplicaTiming],
    num_nodes: list[int],
    index: int,
) -> Any:
    """Call a replica with its inputs, in its thread, as a whole or in parts; note how long it took.

    Args:
        num_nodes: takes how many nodes of graphs it has made, one number a replica.
    """
    started, first_node = time.perf_counter(), torch_private.sequence_number()
    copies.wait_copies(index)
    root, (args, kwargs) = roots[index], inputs.shards[index]
    function = called(root, plan.method)
    parts = parts_of(row_limits, plan, root, index) if plan.parts > 1 or row_limits else None
    if parts is None:
        output = function(*args, **kwargs)
    else:
        output = run_in_parts(root, function, args, kwargs, parts, plan.devices[index])
    num_nodes[index] = torch_private.sequence_number() - first_node
    if plan.is_timed:
        _devices.queued_work(plan.devices[index])(True)
    timings[index].forward_s = time.perf_counter() - started
    return output


class Replica:
    """One replica: its modules, its own parameters in place of the live ones, and its own buffers.

    Args:
        blueprint: of the live module.
        copied: by id, copies of the tensors that are not on the replica's device already.
        own: by id, its own parameters for those live ones that need a gradient; none where no graph is built.
        shares_buffers: whether the replica has the live buffers themselves.

    Attributes:
        modules: its modules, the root first.
        rebound: the values of attributes that refer to its own modules and tensors, each with the live module's.
        registries: its buffers as it was made.
        copied_parameters: live parameters, each with the replica's own that is in memory of its own.
        own_buffers, live_buffers: its own buffers, and the live ones that they are copies of.
        versions: of its own buffers, before forward.
        is_remote: whether its parameters are copies in memory of their own.
        tensors: all that are its own.
        live_of: the live parameters and buffers by the ids of its own.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        copied: Mapping[int, torch.Tensor],
        own: Mapping[int, torch.Tensor],
        shares_buffers: bool,
    ) -> None:
        self.own_parameters = [*own.values()]
        tensors = dict(own)
        for key, parameter in blueprint.parameters.items():
            if key not in own and key in copied:
                tensors[key] = own_parameter(parameter, copied[key]).requires_grad_(parameter.requires_grad)
        self.copied_parameters = [(p, tensors[key]) for key, p in blueprint.parameters.items() if key in copied]
        own_buffers = blueprint.buffers_for(copied, shared=shares_buffers)
        self.own_buffers = list(own_buffers.values())
        self.live_buffers = [blueprint.buffers[key] for key in own_buffers]
        self.versions = versions_of(self.own_buffers)
        tensors.update(own_buffers)
        live = {**blueprint.parameters, **blueprint.buffers}
        self.live_of = {id(tensors.get(key, tensor)): tensor for key, tensor in live.items()}
        for key, constant in blueprint.constants.items():
            tensors[key] = copied.get(key, constant)
        self.is_remote, self.tensors = bool(copied), list(tensors.values())
        self.modules, links = blueprint.stamp(tensors)
        self.registries = buffer_registries(self.modules)
        self._unlinked = unlinked_at_deletion(links)
        self.rebound = [(owner[name], live) for _, owner, name, live in links if isinstance(owner, dict)]

    def commit_buffers(
        self, pool: "ReplicaPool", changes: Sequence[Change], joined: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        """Give the live module this replica's buffers, after a forward that has succeeded.

        Args:
            changes: those that forward has reassigned.
            joined: for each of their `histories`, the tensor with a history in the caller's graph.
            device: the replica's.
        """
        for live, own, before in zip(self.live_buffers, self.own_buffers, self.versions, strict=True):
            _devices.copy_into(live.data, own)
            if versions_of([own]) != [before] and not live.is_inference():
                torch.autograd.graph.increment_version(live)
        if not changes:
            return
        pairs = [
            *zip(self.own_buffers, self.live_buffers, strict=True),
            *zip(self.own_parameters, pool.live_parameters[: len(self.own_parameters)], strict=True),
            *zip(histories(changes)[: len(joined)], joined, strict=True),
        ]
        live_tensors = {id(own): live for own, live in pairs}
        commit_buffers(changes, self.modules, pool.blueprint.modules, live_tensors, device, pool.source)


class Replicas:
    """The replicas of one forward, and of the backward passes that belong to it: nothing else uses them meanwhile.

    Args:
        each: one a device.
        linked: the live parameters that need a gradient, with the replicas' own.
        kept: has their memory on other devices.
        kind: of the forwards that they fit.
        returns_to: where to put them when they are given back; None: nowhere.
        leftovers: takes note of what forwards leave behind in them.
        blueprint: the live module's.
        times: how often forward writes into a parameter (see `WrittenParameters`).
        source: the live module's device.

    Attributes:
        written: finds the parameters that forward writes into.
        are_new: whether their first forward has not run yet.
        attributes: of the first replica's modules, as they were made.
        rows: how many rows the replicas, or their parts, have in this forward.
        run_whole: whether each replica runs once, with its part of one batch.
        is_only: whether the module has one replica, in each forward.
        writes: what looks at hooks that keep what they see in backward; None: nothing does.
    """

    def __init__(
        self,
        each: Sequence[Replica],
        linked: LinkedParameters,
        kept: "KeptReplicas",
        kind: tuple[Any, ...],
        returns_to: "list[KeptReplicas] | None",
        leftovers: Leftovers,
        blueprint: Blueprint,
        times: str,
        source: torch.device,
    ) -> None:
        self._leftovers, self._blueprint, self._source = leftovers, blueprint, source
        self.writes: SharedWrites | None = None
        self._num_assigned = blueprint.num_assigned
        self.each, self.linked, self.kind = each, linked, kind
        self.roots = [replica.modules[0] for replica in each]
        self.live_of = [replica.live_of for replica in each]
        self.is_remote = any([replica.is_remote for replica in each])
        self._kept: KeptReplicas | None = kept
        self._devices = kept.devices
        self._in_backward: BuffersInBackward | None = None
        self._returns_to = returns_to
        self.are_new = True
        here = [replica for replica in each if not replica.is_remote]
        own_buffers = torch_private.of_one_kind([own for replica in here for own in replica.own_buffers])
        live_buffers = torch_private.of_one_kind([live for replica in here for live in replica.live_buffers])
        self._buffers = [*zip(own_buffers, live_buffers, strict=True)]
        copies = [pair for replica in each for pair in replica.copied_parameters]
        in_memory_of_module = [
            tensors for replica, tensors in zip(each, linked.own, strict=True) if not replica.is_remote
        ]
        own = [pair for tensors in in_memory_of_module for pair in zip(linked.live, tensors, strict=True)]
        self.written = WrittenParameters(
            blueprint.root, [*blueprint.parameters.values()], copies, own, blueprint.name_of, times, len(here)
        )
        self.attributes = DictSnapshot([module.__dict__ for module in each[0].modules])
        self._modules = [module for replica in each for module in replica.modules]
        self.rows: Sequence[int] = ()
        self.run_whole = self.is_only = False
        self._dicts = DictSnapshot(attribute_dicts_of(self._modules))
        if self.is_remote:
            self._take_assigned(0)
        if returns_to is None:
            return
        rebound = [pair for replica in each for pair in replica.rebound]
        # What is inside, and refers to nothing of the replica's, is the live module's: what forward writes there stays.
        self._rebound = ContainerSnapshot([own for own, _ in rebound], [live for _, live in rebound])
        self._classes = [*map(type, self._modules)]
        self._tensors = TensorSnapshot([tensor for replica in each for tensor in replica.tensors])
        self._num_references = self._count_references()
        self._own_parameters = [parameter for replica in each for parameter in replica.own_parameters]

    def buffers_in_backward(self, source: torch.device) -> BuffersInBackward:
        """Return what lets activation checkpoints read the live buffers, on `source`, as they are in backward."""
        if self._in_backward is None:
            modules = [replica.modules for replica in self.each]
            live, names = self._blueprint.modules, self._blueprint.names
            self._in_backward = BuffersInBackward(modules, live, names, self._devices, source)
        return self._in_backward

    def are_unchanged(self) -> bool:
        """Return whether the replicas are as they were made.

        Hooks of a user's on their tensors are a change, too.
        """
        return (
            self._dicts.is_current()
            and self._rebound.is_current()
            and [*map(type, self._modules)] == self._classes
            and self._tensors.is_current()
            and not torch_private.num_hooks(self._own_parameters)
        )

    def can_run_again(self) -> bool:
        """Undo what forward and the program have assigned; return whether the replicas are as they were made.

        They are the same objects from step to step, also for a program that refers to them, as the live module is.
        """
        if self.are_unchanged():
            return True
        self._dicts.restore()
        self._rebound.restore()
        self._tensors.restore_attributes()
        for module, cls in zip(self._modules, self._classes, strict=True):
            if type(module) is not cls:
                module.__class__ = cls
        return self.are_unchanged()

    def assigned(self, outputs: Sequence[Any] = ()) -> list[Change]:
        """Return the attributes that all replicas have set alike, and note those that are lost.

        Args:
            outputs: of the replicas.
        """
        blueprint, before, returned = self._blueprint, self.attributes.copies, ids_of_leaves(outputs)
        has_all = len(self.rows) == 1 and self.run_whole  # one replica, as one device
        rows = set[int]() if has_all else {*self.rows}
        changes = self.attributes.changes()
        num_changes, changes = len(changes), [change for change in changes if change[:2] not in blueprint.lost]
        modules = [replica.modules for replica in self.each]
        if self.is_only and self.run_whole:
            own = self.live_of[0] | dict(zip(map(id, modules[0]), blueprint.modules, strict=True))
            kept, lost = kept_of_only(changes, before, modules[0], own)
            if not keep_hooks(self._dicts, self._modules, blueprint.modules):
                self._leftovers.add(Kind.ASSIGNED, registered(self._dicts, self._modules, blueprint.names))
                kept, lost = [], [*kept, *lost]  # one may be the flag that a layer is there
            self._note_lost(lost)
            return kept
        alike, lost, unread = told_apart(changes, before, modules, rows, returned, blueprint.assigned)
        if not self.run_whole or not keep_hooks(self._dicts, self._modules, blueprint.modules):
            names = blueprint.names * len(self.each)
            self._leftovers.add(Kind.ASSIGNED, registered(self._dicts, self._modules, names))
        elif len(changes) == num_changes and not lost and not unread:
            return alike
        lost += [change for change in alike if counts(before[change[0]].get(change[1]), change[2])]
        if not self.run_whole:  # a part, or a batch of a map: others come after it
            lost += [
                change for change in [*alike, *unread] if id(change[2]) not in returned and has_rows(change[2], rows)
            ]
        blueprint.lost.update(change[:2] for change in unread)
        self._note_lost(lost)
        return []

    def _note_lost(self, changes: Sequence[Change]) -> None:
        self._blueprint.lost.update(change[:2] for change in changes)
        paths = [path_of(self._blueprint.names[number], key) for number, key, _ in changes]
        self._leftovers.add(Kind.ASSIGNED, paths)

    def commit_attributes(self, changes: Sequence[Change]) -> None:
        """Give the live module what all replicas have set alike; each replica keeps its own value."""
        for number, key, value in changes:
            self._blueprint.assign(number, key, value if self.is_only else _on(value, self._source))
            for index, replica in enumerate(self.each):
                self._put(index, number, key, replica.modules[number].__dict__.get(key, GONE))
        self._num_assigned = self._blueprint.num_assigned

    def _take_assigned(self, after: int) -> None:
        """Give the replicas what other replicas have left on the live module."""
        for (number, key), (number_of_value, value) in [*self._blueprint.assigned.items()]:
            if number_of_value > after:
                for index, (replica, device) in enumerate(zip(self.each, self._devices, strict=True)):
                    own = _on(value, device)
                    attributes = replica.modules[number].__dict__
                    attributes.pop(key, None) if own is GONE else attributes.update({key: own})
                    self._put(index, number, key, own)
        self._num_assigned = self._blueprint.num_assigned

    def _put(self, index: int, number: int, key: str, value: Any) -> None:
        if index == 0:
            self.attributes.put(number, key, value)
        self._dicts.put(index * len(self.each[0].modules) + number, key, value)

    def _count_references(self) -> list[int]:
        return [*map(sys.getrefcount, self._modules)]

    def renew(self, copies: Copies, kept: "KeptReplicas", returns_to: "list[KeptReplicas]") -> None:
        """Take the values that the live module's tensors have now: on other devices all, here the buffers'."""
        self._kept, self._returns_to = kept, returns_to
        self.linked.collector.drop()
        if self._num_assigned != self._blueprint.num_assigned:
            self._take_assigned(self._num_assigned)
        if self.is_remote:
            kept.broadcast.renew(copies)
        self.renew_buffers()
        if (first := self.each[0]).own_buffers:
            first.versions = versions_of(first.own_buffers)

    def renew_buffers(self) -> None:
        """Write the live buffers into the replicas' copies."""
        if not self._buffers:
            return
        with torch.set_grad_enabled(False):
            for own, live in self._buffers:
                torch_private.copy_all_in_place(own, live)

    @property
    def are_in_use(self) -> bool:
        """Whether a graph of theirs is left."""
        return self._kept is not None

    def give_back(self) -> None:
        """Let a later forward use them. To be called when no graph of theirs is left.

        If something outside refers to a module of theirs, they are as forward has left them until then.
        """
        kept, returns_to = self._kept, self._returns_to
        self._kept = self._returns_to = None
        if self.writes is not None:
            self._end_look()
        self._keep(kept, returns_to)

    def backward_has_run(self) -> None:
        """Say what hooks keep that a backward has called, which may not have freed the graphs."""
        self._end_look()
        if self._leftovers.has_more:
            self._leftovers.say(self._blueprint.root)

    def _end_look(self) -> None:
        writes, self.writes = self.writes, None
        if writes is not None:
            writes.backward_has_run()

    def end_backward(self) -> None:
        """Give them back after a backward; say what they were left with."""
        self.give_back()
        if self._leftovers.has_more:
            self._leftovers.say(self._blueprint.root)

    def _keep(self, kept: "KeptReplicas | None", returns_to: "list[KeptReplicas] | None") -> None:
        if kept is None or returns_to is None:
            return
        changed = not self._dicts.is_current()
        if changed:
            self.commit_attributes(self.assigned())  # of hooks in backward
            names = self._blueprint.names * len(self.each)
            self._leftovers.add(Kind.ASSIGNED, registered(self._dicts, self._modules, names))
        held = self._dicts.restore() if changed else []  # undo what forward has assigned
        if held and self._count_references() != self._num_references:
            for attributes, items in held:
                fill(attributes, items)
        if self.is_remote:
            kept.broadcast.note_readers()
        kept.by_kind[self.kind] = self
        returns_to.append(kept)
        del returns_to[:-_MOST_IDLE]


def _on(value: Any, device: torch.device) -> Any:
    """Return a value of an attribute with its tensors on a device."""
    if type(value) in INERT:
        return value
    return pytree.map_all_tensors(lambda tensor: _devices.copy_to(tensor, device), value)


class KeptReplicas:
    """Replicas for several kinds of forward on the same devices, with one memory on other devices for all of them.

    One forward uses it at a time.

    Attributes:
        broadcast: what copies the live module's tensors into that memory.
        by_kind: the replicas, without those that are in use.
    """

    def __init__(self, broadcast: CoalescedBroadcast, devices: Sequence[torch.device]) -> None:
        self.broadcast, self.devices = broadcast, [*devices]
        self.by_kind: dict[tuple[Any, ...], Replicas] = {}


_MOST_IDLE = 3  # that are kept: forwards may follow each other before a backward


class ReplicaPool:
    """The replicas of one blueprint: stamped when there are none, and used again as long as they are as they were.

    Overlapping forwards have replicas of their own. What forward changed in a replica is undone when it is given back;
    a replica that cannot be as it was is dropped.

    Args:
        times: how often forward writes into a parameter (see `WrittenParameters`); "": once in each replica.
        writes: whether replicas write into parameters, so that each but the first has to have copies.

    Attributes:
        source: the live module's device.
        leftovers: takes note of what forwards leave behind in the replicas.
        live_parameters: those that need a gradient.
        has_wrappers: whether a part of the module is wrapped, and has replicas of its own.
        has_separate_memory: whether each replica but the first has copies, as if it were on a device of its own.
        buffers: the live buffers, in lists of one kind each.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        source: torch.device,
        leftovers: Leftovers,
        times: str = "",
        *,
        writes: bool = False,
        has_wrappers: bool = False,
    ) -> None:
        self.leftovers, self._times, self.has_wrappers = leftovers, times, has_wrappers
        self.blueprint, self.source, self.has_separate_memory = (
            blueprint,
            source,
            writes or _devices.has_separate_memory(),
        )
        self.live_parameters = [parameter for parameter in blueprint.parameters.values() if parameter.requires_grad]
        self.buffers = torch_private.of_one_kind(blueprint.buffers.values())
        self._idle: list[KeptReplicas] = []
        self._plans: dict[bool, BucketPlan] = {}

    def is_current(self, module: nn.Module, source: torch.device, *, writes: bool) -> bool:
        """Return whether these are the replicas of `module` as it is now, on `source`."""
        same_memory = self.source == source and self.has_separate_memory is (writes or _devices.has_separate_memory())
        return same_memory and self.blueprint.is_current(module)

    def take(
        self,
        devices: Sequence[torch.device],
        tracked: bool,
        copies: Copies,
        plan: BucketPlan | None = None,
        *,
        with_live_buffers: bool = True,
    ) -> Replicas:
        """Return a replica for each device, the first with the live module's buffers unless these are elsewhere.

        Args:
            plan: the parameters' buckets; None: those for this process alone.
        """
        kind = (tracked, torch.is_inference_mode_enabled(), with_live_buffers, plan, *devices)
        kept = self._take_kept(devices, kind)
        replicas = kept.by_kind.pop(kind, None)
        if replicas is not None and replicas.can_run_again():
            replicas.are_new = False
            replicas.renew(copies, kept, self._idle)
            return replicas
        each, linked = self._stamp(kept.broadcast, devices, tracked, copies, with_live_buffers, plan)
        returns_to = self._idle if self.blueprint.is_reusable else None
        times = self._times or in_each(len(devices))
        return Replicas(each, linked, kept, kind, returns_to, self.leftovers, self.blueprint, times, self.source)

    def _take_kept(self, devices: Sequence[torch.device], kind: tuple[Any, ...]) -> KeptReplicas:
        """Return what is kept for these devices and is not in use, best with replicas of this kind; or a new one."""
        idle = [kept for kept in self._idle[::-1] if kept.devices == [*devices]]
        for kept in sorted(idle, key=lambda kept: kind not in kept.by_kind):
            try:
                self._idle.remove(kept)
            except ValueError:  # another thread has taken it
                continue
            return kept
        return KeptReplicas(self._broadcast_to(devices), devices)

    def stamp_untracked(self, devices: Sequence[torch.device], copies: Copies) -> list[Replica]:
        """Return new replicas without a graph and without the live buffers; they share memory with none of the pool."""
        return self._stamp(self._broadcast_to(devices), devices, False, copies, False)[0]

    def _stamp(
        self,
        broadcast: CoalescedBroadcast,
        devices: Sequence[torch.device],
        tracked: bool,
        copies: Copies,
        with_live_buffers: bool,
        plan: BucketPlan | None = None,
    ) -> tuple[list[Replica], LinkedParameters]:
        copied = broadcast(copies)
        is_flat = any(copied) or not _devices.all_on_host(devices)
        if plan is None or not tracked:
            plan = self._plan(is_flat, tracked)
        linked = link_parameters(self.live_parameters if tracked else [], copied, plan, is_flat=is_flat)
        keys = [*map(id, linked.live)]
        each = [
            Replica(self.blueprint, copied[i], dict(zip(keys, own, strict=True)), with_live_buffers and i == 0)
            for i, own in enumerate(linked.own)
        ]
        return each, linked

    def _broadcast_to(self, devices: Sequence[torch.device]) -> CoalescedBroadcast:
        blueprint = self.blueprint
        tensors = {**blueprint.parameters, **blueprint.buffers, **blueprint.constants_on(self.source)}
        return CoalescedBroadcast(tensors, devices, separate_memory=self.has_separate_memory)

    def _plan(self, is_flat: bool, tracked: bool) -> BucketPlan:
        if not tracked:
            return BucketPlan.of([], [])
        if is_flat not in self._plans:
            full_bytes = BUCKET_BYTES if is_flat else SHARED_BUCKET_BYTES
            self._plans[is_flat] = BucketPlan.of_replicas(self.live_parameters, full_bytes)
        return self._plans[is_flat]


def link_parameters(
    live: Sequence[torch.Tensor], copied: Sequence[Mapping[int, torch.Tensor]], plan: BucketPlan, *, is_flat: bool
) -> LinkedParameters:
    """Return parameters like the live ones for each replica: outputs of its bucket nodes.

    Args:
        copied: for each replica, copies of the parameters that are not on its device, by id.
        is_flat: whether any has memory of its own.
    """
    collector = Collector(live, partial(joined_gradients, live, plan))
    token = token_of(collector)
    own: list[list[torch.Tensor]] = []
    nodes: list[Any] = []
    for replica, of_replica in enumerate(copied):
        found: dict[int, torch.Tensor] = {}
        for b, numbers in enumerate(plan.numbers):
            if not numbers:
                continue
            given = [own_parameter(live[n], of_replica.get(id(live[n]), live[n])) for n in numbers]
            of_bucket = own_tensors(token, collector, b, replica, given, leaf_on(given[0].device))
            found.update(zip(numbers, of_bucket, strict=True))
            nodes.append(found[numbers[0]].grad_fn)
        own.append([found[n] for n, _ in enumerate(live)])
    return LinkedParameters(collector, token, own, nodes, plan, is_flat)


def own_parameter(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a parameter like the live one in the memory of `data`, which needs no gradient yet."""
    own: torch.Tensor
    if type(parameter) is torch.Tensor:  # a buffer, or a value that functional_call has put there
        own = data.detach()
    elif type(parameter) is not nn.Parameter and isinstance(parameter, nn.Parameter) and _is_plain_inside(parameter):
        own = data.detach().as_subclass(type(parameter))
    else:  # a parameter; or one of a subclass of Tensor, which detach() keeps
        own = nn.Parameter(data.detach(), requires_grad=False)
    return own


def _is_plain_inside(parameter: torch.Tensor) -> bool:
    """Return whether a parameter of a user's class is a plain tensor otherwise."""
    return type(parameter.detach()) is torch.Tensor


class GraphSearch:
    """Searches the graphs of replicas with `look_for_live_tensors`, once per structure if nothing is found there.

    A structure is that of the module and of the inputs, and what a global or a buffer may decide: how many nodes
    forward has made, and whether a checkpoint has begun. Whether graphs go on into those of earlier forwards depends on
    what forward finds where it keeps tensors, and whether outputs lead to others may depend on a buffer: both are
    looked for each time, by torch.
    """

    def __init__(self) -> None:
        # Structures in whose graphs no captured tensor was found; what else was.
        self._self_contained: dict[tuple[Any, ...], CapturedTensors] = {}

    def captured_tensors(
        self,
        pool: "ReplicaPool",
        plan: StepPlan,
        groups: Sequence[Group],
        collectors: Sequence[Collector],
        *,
        numbers_of_linked: tuple[int, ...],
        in_parts: bool,
        in_one_graph: bool,
        num_nodes: tuple[int, ...],
        has_hooks: bool,
        has_reentrant_checkpoint: bool,
    ) -> CapturedTensors:
        """Return the leaves in the graphs behind `groups` that belong neither to the module nor to a replica.

        In replicas `in_parts` outputs are joined of parts.
        `numbers_of_linked` are those of `Inputs`. `in_one_graph` with the caller's, graphs may go on into those of
        earlier forwards, and outputs may lead to others: that is torch's matter.

        Args:
            num_nodes: that each replica has made.
            has_hooks, has_reentrant_checkpoint: whether saved-tensor hooks, which a checkpoint has, or a reentrant
                checkpoint have begun in forward, or in one that runs at the same time.
        """
        ends = [tensor for group in groups for tensor in group.tensors if tensor is not None]
        flags = (*map(_requires_grad, ends),)
        seen = num_nodes, has_hooks, has_reentrant_checkpoint, in_one_graph
        structure = (len(groups), in_parts, numbers_of_linked, flags, seen, plan.structure)
        may_differ = plan.carries_objects
        found = None if may_differ else self._self_contained.get(structure)
        if found is not None and (
            in_one_graph or (are_ways(found.ways, groups) and not lead_to_others(ends, collectors))
        ):
            return found
        captured = look_for_live_tensors(pool.blueprint, groups, plan.names, collectors, in_one_graph=in_one_graph)
        has_reentrant_checkpoint |= captured.has_reentrant_checkpoint
        captured = captured._replace(
            has_reentrant_checkpoint=has_reentrant_checkpoint,
            has_checkpoint=has_reentrant_checkpoint or has_hooks,
            ways=Ways() if in_one_graph else ways_between(groups, in_parts=in_parts),
        )
        if in_one_graph or not (captured.tensors or captured.earlier or may_differ):
            if len(self._self_contained) >= _MOST_STRUCTURES:
                self.clear()
            self._self_contained[structure] = captured
        return captured

    def clear(self) -> None:
        """Search again."""
        self._self_contained.clear()


_MOST_STRUCTURES = 64
_requires_grad = attrgetter("requires_grad")


def look_for_live_tensors(
    blueprint: Blueprint,
    groups: Sequence[Group],
    where: Sequence[str],
    collectors: Sequence[Collector],
    *,
    in_one_graph: bool,
) -> CapturedTensors:
    """Check that no replica's graph leads to a tensor of the live module; return those that it has captured.

    Args:
        collectors: those of the forward.
        in_one_graph: as in `GraphSearch.captured_tensors`.

    Raises:
        RuntimeError: one does, and its gradient would be wrong. Names the tensor, and the cause.
    """
    if not groups:  # outputs without tensors
        return CapturedTensors()
    captured: dict[int, torch.Tensor] = {}
    earlier: dict[Collector, torch.Tensor] = {}
    has_reentrant_checkpoint = are_linked = has_batch_norm = False
    histories = {tensor.grad_fn: tensor for tensor in blueprint.histories.values()}
    of_replicas = zip(where, zip(*(group.tensors for group in groups), strict=True), strict=True)
    for index, (place, outputs) in enumerate(of_replicas):
        for reached in leaves_and_nodes([output for output in outputs if output is not None]):
            if isinstance(reached, torch.Tensor) and id(reached) in blueprint.parameters:
                if not any(reached is live for collector in collectors for live in collector.live):
                    raise RuntimeError(
                        f"{place}: forward has switched on the gradient of {blueprint.name_of(reached)}, which was off "
                        "when forward began, so replicas collect none for it. Switch it on before the call "
                        "(model.module.requires_grad_(True), or only that of this layer)."
                    )
                raise RuntimeError(
                    f"{place} used {blueprint.name_of(reached)} of the original module instead of its own "
                    "copy: something in the module refers to the original, and unisono cannot replace it. "
                    "Examples are an object that stores the module or one of its methods, or a hook that "
                    "uses a variable for its module. In forward, use self; in a hook, use its argument."
                )
            if isinstance(reached, torch.Tensor):
                if reached.requires_grad:
                    captured[id(reached)] = reached
                continue
            if is_bucket_node(reached):
                are_linked |= reached.replica != index
                if reached.collector not in collectors:
                    earlier[reached.collector] = reached.token
            has_reentrant_checkpoint |= is_reentrant_checkpoint(reached)
            has_batch_norm |= torch_private.is_batch_norm_in_training(reached)
            # In one graph, that of an earlier forward goes on; what leads to live parameters is not summed over ranks.
            if reached in histories and (not in_one_graph or _leads_to_parameters(histories[reached], blueprint)):
                raise RuntimeError(
                    f"{place} used {blueprint.name_of(histories[reached])}, a tensor that was computed "
                    "outside forward and requires grad. Pass it to the model as an input, compute it in "
                    "forward, or detach() it."
                )
    found = has_reentrant_checkpoint, [*earlier.items()], are_linked, has_batch_norm
    return CapturedTensors([*captured.values()], *found)


def _leads_to_parameters(tensor: torch.Tensor, blueprint: Blueprint) -> bool:
    """Return whether a tensor was computed from live parameters, not by way of a forward's buckets."""
    reached = leaves_and_nodes([tensor])
    return any(id(each) in blueprint.parameters for each in reached if isinstance(each, torch.Tensor))


def ways_between(groups: Sequence[Group], *, in_parts: bool) -> Ways:
    """Return which outputs lie on the way to others, in the graph of any replica."""
    upstream: list[set[int]] = [set() for _ in groups]
    for tensors in zip(*(group.tensors for group in groups), strict=True):
        edges = {k: torch.autograd.graph.get_gradient_edge(t) for k, t in enumerate(tensors) if _needs_gradient(t)}
        if len(edges) < 2:
            continue
        places: dict[tuple[Any, int], set[int]] = {}
        for k, edge in edges.items():
            for place in edge.node.next_functions if in_parts else [(edge.node, edge.output_nr)]:
                places.setdefault(place, set()).add(k)
        reached: dict[Any, set[int]] = {}  # the outputs behind each node
        for k, edge in edges.items():
            pending: list[Any] = [edge.node]
            while pending:
                following = () if is_bucket_node(pending[-1]) else pending[-1].next_functions
                following = [place for place in following if place[0] is not None]
                if missing := [node for node, _ in following if node not in reached]:
                    pending += missing
                else:
                    behind = [places.get(place, set()) | reached[place[0]] for place in following]
                    reached[pending.pop()] = set().union(*behind)
            upstream[k] |= reached[edge.node] - {k}
    on_way = sorted(set().union(*upstream))
    levels = [0] * len(groups)
    for _ in on_way:  # the longest way has no more outputs
        levels = [max([levels[other] + 1 for other in behind], default=0) for behind in upstream]
    looks = [] if in_parts else _looks_at_ways(upstream, on_way)
    return Ways(levels, on_way, looks) if on_way else Ways(looks=looks)


def _looks_at_ways(
    upstream: Sequence[Collection[int]], on_way: Sequence[int]
) -> list[tuple[Collection[int], Collection[int], Collection[int]]]:
    """Return what `Ways.looks` are: one a target, in which each way is looked for as far as the next output."""
    every = range(len(upstream))
    ends = [k for k in every if k not in on_way]
    looks: list[tuple[Collection[int], Collection[int], Collection[int]]] = []
    for targets in [ends, *[[k] for k in on_way]]:
        asked = [k for k in every if not all(n == k or k in upstream[n] for n in targets)]  # else all lead to it
        asked = [k for k in asked if not any(n in upstream[other] for other in upstream[k] for n in targets)]
        if asked:
            looks.append((asked, targets, {k for k in asked if any(n in upstream[k] for n in targets)}))
    return looks


def are_ways(ways: Ways, groups: Sequence[Group]) -> bool:
    """Return whether the ways between outputs are these, in the graph of any replica, as far as outputs are whole."""
    linked = [[t for t in g.tensors if t is not None and t.requires_grad] for g in groups] if ways.looks else []
    for asked, targets, wanted in ways.looks:
        ends = [(k, t) for k in asked for t in linked[k]]
        behind = [t for k in targets for t in linked[k]]
        leading = lead_to([t for _, t in ends], behind) if ends and behind else ()
        if {k for (k, _), leads in zip(ends, leading, strict=False) if leads} != wanted:
            return False
    return True


def _needs_gradient(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def is_reentrant_checkpoint(node: Any) -> bool:
    """Return whether a node of a graph runs a backward inside backward for an activation checkpoint.

    The checkpoint may be in the replicas of a wrapper inside the module, behind the node of its boundary.
    """
    inner = getattr(node, "graphs", None)
    if isinstance(inner, ReplicaGraphs):
        return inner.captured.has_reentrant_checkpoint
    return "CheckpointFunctionBackward" in node.name()


def leaves_and_nodes(outputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield every leaf tensor and every node in the graph behind `outputs`, as far as the nodes of buckets."""
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
        if is_bucket_node(node):
            continue
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
