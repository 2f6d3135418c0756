"""The replicas of a module: what each is made of, and when they are used again.

A `ReplicaPool` has replicas, each with parameters of its own, linked to the live ones (autograd/linked.py). Copies to
other devices may still be in flight when they exist: see `streams.py`.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unisono.autograd.linked import LinkedParameters, link_parameters, own_parameter
from unisono.engines.broadcast import CoalescedBroadcast
from unisono.leftovers.attributes import (
    counts,
    has_rows,
    ids_of_leaves,
    keep_hooks,
    kept_of_only,
    path_of,
    registered,
    told_apart,
)
from unisono.leftovers.buffers import buffer_registries, commit_buffers, commit_values, histories, versions_of
from unisono.leftovers.buffers_in_backward import BuffersInBackward
from unisono.leftovers.report import Kind, Leftovers
from unisono.leftovers.shared import SharedWrites
from unisono.leftovers.written_parameters import WrittenParameters, in_each
from unisono.primitives import pytree
from unisono.primitives.blueprint import Blueprint, collector_paused, unlinked_at_deletion
from unisono.primitives.change_tracking import (
    GONE,
    Change,
    ContainerSnapshot,
    DictSnapshot,
    TensorSnapshot,
    attribute_dicts,
    fill,
)
from unisono.primitives.references import MODES
from unisono.primitives.visitor import INERT
from unisono.runtime import devices as _devices
from unisono.runtime.buckets import BUCKET_BYTES, SHARED_BUCKET_BYTES, BucketPlan, is_plain
from unisono.runtime.streams import Copies
from unisono.runtime.torch_private import foreach, graph_nodes


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
        self._unlinked = unlinked_at_deletion(links)  # takes the links apart when the replica goes
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
        commit_values(self.live_buffers, self.own_buffers, self.versions)
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
        run_whole: whether each replica runs once, with its part of one batch; else it runs that in parts.
        in_map: whether they run batches of a map, one after the other.
        in_callers_graph: whether the graph of the one replica may be a part of the caller's, as in `StepPlan`.
        writes: what looks at hooks that keep what they see in backward; None: nothing does.
        kernel_graphs: the `Graphs` of their kernels (graphed.py); None: there are none.
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
        self.kernel_graphs: Any = None
        self._devices = kept.devices
        self._in_backward: BuffersInBackward | None = None
        self._returns_to = returns_to
        self.are_new = True
        here = [replica for replica in each if not replica.is_remote]
        own_buffers = foreach.of_one_kind([own for replica in here for own in replica.own_buffers])
        live_buffers = foreach.of_one_kind([live for replica in here for live in replica.live_buffers])
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
        self.run_whole = self.in_map = self.in_callers_graph = False
        self._dicts = DictSnapshot(attribute_dicts(self._modules))
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
        """Return what lets checkpoints of the last forward read the live buffers, on `source`, in its backward."""
        if self._in_backward is None:
            modules = [replica.modules for replica in self.each]
            live, names = self._blueprint.modules, self._blueprint.names
            self._in_backward = BuffersInBackward(modules, live, names, self._devices, source)
        self._in_backward.streams = _devices.current_streams([*self._devices, source])
        return self._in_backward

    def memory_of(self, index: int) -> dict[int, torch.Tensor]:
        """Return the memory of one replica in use for live tensors, by their ids; empty where it has theirs."""
        assert self._kept is not None
        return self._kept.broadcast.memory_of(index)

    def are_unchanged(self) -> bool:
        """Return whether the replicas are as they were made.

        Hooks of a user's on their tensors are a change, too.
        """
        return (
            self._dicts.is_current()
            and self._rebound.is_current()
            and [*map(type, self._modules)] == self._classes
            and self._tensors.is_current()
            and not graph_nodes.have_hooks(self._own_parameters)
        )

    def can_run_again(self) -> bool:
        """Undo what forward and the program have assigned; return whether the replicas are as they were made.

        They are the same objects from step to step, also for a program that refers to them, as the live module is.
        """
        if self.are_unchanged():
            return True
        self._dicts.restore()
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
        if self.in_callers_graph and self.run_whole:
            own = self.live_of[0] | dict(zip(map(id, modules[0]), blueprint.modules, strict=True))
            kept, lost = kept_of_only(changes, before, modules[0], own)
            if not keep_hooks(self._dicts, self._modules, blueprint.modules):
                self._leftovers.add(Kind.ASSIGNED, registered(self._dicts, self._modules, blueprint.names))
                kept, lost = [], [*kept, *lost]  # one may be the flag that a layer is there
            self._note_lost(lost)
            return kept
        alike, lost, unread = told_apart(changes, before, modules, rows, returned, blueprint.assigned)
        all_hooks_kept = self.run_whole and keep_hooks(self._dicts, self._modules, blueprint.modules)
        lost_hooks: list[str] = []
        if not all_hooks_kept:
            lost_hooks += registered(self._dicts, self._modules, blueprint.names * len(self.each))
            self._leftovers.add(Kind.ASSIGNED, lost_hooks)
        if len(changes) == num_changes and not (lost or unread):
            in_parts = not (self.run_whole or self.in_map or lost_hooks)
            if all_hooks_kept or (in_parts and {type(value) for *_, value in alike} <= MODES):
                return alike
        lost += [change for change in alike if counts(before[change[0]].get(change[1]), change[2])]
        if not (self.run_whole or self.in_map):
            lost += [change for change in alike if type(change[2]) in MODES]
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
            self._blueprint.assign(number, key, value if self.in_callers_graph else _on(value, self._source))
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
                foreach.copy_all_in_place(own, live)

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

    def end_backward(self, *, may_run_again: bool = True) -> None:
        """Give them back after a backward, if a later forward may run them; say what they were left with."""
        if may_run_again:
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
    return pytree.map_tensors(lambda tensor: _devices.moved_to(tensor, device), value)


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


_MOST_BYTES = 1 << 30  # of memory that replicas have of their own because forward may write
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
        self.buffers = foreach.of_one_kind(blueprint.buffers.values())
        self._idle: list[KeptReplicas] = []
        self._plans: dict[bool, BucketPlan] = {}
        self._for_one_forward: dict[tuple[Any, ...], ReplicaPool] = {}  # by the kind of their replicas

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
        may_write: bool = False,
    ) -> Replicas:
        """Return a replica for each device, the first with the live module's buffers unless these are elsewhere.

        Args:
            plan: the parameters' buckets; None: those for this process alone.
            may_write: whether forward may write parameters: no step has shown the contrary. Then replicas that would
                share the live module's memory have their own, if that is not too much, for this forward only.
        """
        kind = (tracked, torch.is_inference_mode_enabled(), with_live_buffers, plan, *devices)
        if may_write and self._can_have_own_memory(devices):
            pool = ReplicaPool(self.blueprint, self.source, self.leftovers, writes=True, has_wrappers=self.has_wrappers)
            self._for_one_forward[kind] = pool
            return pool.take(devices, tracked, copies, plan)
        # In a steady step nothing is linked: the nodes by which gradients reach the live parameters are those of
        # the first one (`_stamp`), and the replicas' parameters get the live values (`Replicas.renew`).
        kept = self._take_kept(devices, kind)
        replicas = kept.by_kind.pop(kind, None)
        if replicas is not None and replicas.can_run_again():
            replicas.are_new = False
            replicas.renew(copies, kept, self._idle)
            return replicas
        with collector_paused:
            each, linked = self._stamp(kept.broadcast, devices, tracked, copies, with_live_buffers, plan)
            self._for_one_forward.pop(kind, None)  # not before: no id of a layer comes again for another one
            returns_to = self._idle if self.blueprint.is_reusable else None
            times = self._times or in_each(len(devices))
            return Replicas(each, linked, kept, kind, returns_to, self.leftovers, self.blueprint, times, self.source)

    def _can_have_own_memory(self, devices: Sequence[torch.device]) -> bool:
        """Return whether replicas would share the live module's memory, and could have their own instead."""
        num_here = [_devices.same_device(device, self.source) for device in devices].count(True)
        tensors = self.blueprint.tensors
        if self.has_separate_memory or num_here < 2 or not all(map(is_plain, tensors)):
            return False
        return (num_here - 1) * sum([tensor.nbytes for tensor in tensors]) <= _MOST_BYTES

    def _take_kept(self, devices: Sequence[torch.device], kind: tuple[Any, ...]) -> KeptReplicas:
        """Return what is kept for these devices and is not in use, best with replicas of this kind; or a new one."""
        idle = self._idle[::-1]
        of_kind = [kept for kept in idle if kind in kept.by_kind]
        for kept in of_kind or [kept for kept in idle if kept.devices == [*devices]]:
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
