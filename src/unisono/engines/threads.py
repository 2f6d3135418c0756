"""One forward: each replica runs in a thread of this process, and has a graph of its own.

    1. take a blueprint of the live module and check where its tensors are
    2. split the inputs into shards; those that need a gradient are outputs of bucket nodes (autograd/bucket.py)
    3. stamp one replica a shard, with parameters of its own, outputs of bucket nodes too
    4. call the replicas in parallel; the caller's thread runs the first
    5. match their outputs, leaf by leaf
    6. give the graphs what their backwards need; the live tensors are the boundary's inputs. If the structure is new,
       look for live tensors in the replica graphs
    7. join the outputs through the boundary, whose backward runs the replicas' (autograd/boundary.py)
    8. give the live module the first replica's buffers

Buffers: the first replica has the live ones, so its updates persist; the others have copies. Those that forward has
reassigned in the first replica are put into the live module at the end. If anything fails, the live buffers get their
old values back.

`Threads` is what a model keeps from one forward to the next, `Forward` is one of them. How a step is run again is in
rescue.py. Assumes that the module does not change while a forward runs. Calls from several threads may overlap; each
has replicas of its own.
"""

import re
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.autograd.boundary import join
from unisono.autograd.bucket import OverRanks, order_of_sums
from unisono.autograd.one_graph import OneGraph
from unisono.autograd.replica_graph import (
    BoundaryTensor,
    CapturedTensors,
    LeafTensors,
    LinkedParameters,
    LinkedTensors,
    Passes,
    ReplicaGraphs,
    pass_on,
)
from unisono.distributed.gradient_sync import SyncContext
from unisono.engines.call import Call, OneGraphNeededError
from unisono.engines.compile_lock import CompileLock, check_cuda_graphs, compiler_prepared, kind_of
from unisono.engines.lanes import Lane, LaneCall, open_lanes
from unisono.engines.replica import (
    GraphSearch,
    Inputs,
    ReplicaPool,
    Replicas,
    call_replica,
    carries_objects,
    structure_of,
)
from unisono.engines.rescue import Replay, run_rescued
from unisono.leftovers.buffers import BuffersInBackward, histories
from unisono.leftovers.first_steps import NOT_SYNCHRONISED, FirstSteps, Look, ScriptedBatchNorm
from unisono.leftovers.shared import Search, SharedWrites
from unisono.leftovers.written_parameters import LookAtParameters
from unisono.primitives.blueprint import Blueprint, collector_paused, warn_of_observers
from unisono.primitives.change_tracking import Change, ContainerSnapshot
from unisono.primitives.outputs import Group, Outputs
from unisono.primitives.parallel_apply import values_or_raise
from unisono.primitives.placements import Replicate, Single
from unisono.primitives.replicate import check_device, unchanged_on_failure
from unisono.runtime import devices as _devices
from unisono.runtime import draws_off, timeline, torch_private
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import ReplicaTimeout, add_note, text_of
from unisono.runtime.exchange import Exchange, exchanging
from unisono.runtime.model_warnings import ModelWarnings
from unisono.runtime.rng import own_streams
from unisono.runtime.stand_ins import StandIns, while_replicas_run, while_running
from unisono.runtime.streams import Copies
from unisono.runtime.thread_pool import (
    OBJECTS_HAVE_THREADS,
    PassContext,
    ReplicaContext,
    free_in_workers,
    inside_replica,
    nothing_around,
    one_pass,
    run_together,
)
from unisono.runtime.timeline import ReplicaTiming
from unisono.sync_batch_norm.function_mode import BatchNormOverReplicas, not_running_together

_CUDA_GRAPHS = (
    'the module is compiled with CUDA graphs (torch.compile(mode="reduce-overhead" or "max-autotune")): a '
    "graph has one fixed input and output, which replicas cannot share. Compile it in another mode "
    '(mode="max-autotune-no-cudagraphs", or none), or wrap it for one device, DataParallel(model, [0]).'
)

_STEP_INSIDE = (
    "an optimizer's step inside forward ({optimizer}): each replica would apply it to the parameters that "
    "all share, before gradients are summed. Return the loss from forward; call backward and step outside."
)
_ASSIGNED_FLAG = (
    "a replica's parameters are not leaves: in forward, write parameter.requires_grad_(False) instead of "
    "parameter.requires_grad = False."
)
_OPTIMIZER_INSIDE = (
    "a replica's parameters are not leaves, so an optimizer cannot be made of them inside forward; it would "
    "step once in each replica. Return the loss from forward; make the optimizer, call backward and step "
    "outside."
)
_TRACED_PARAMETER = (
    "a replica's parameters are not leaves, so torch.fx cannot trace a function that uses them, as "
    "torch.func.linearize and make_fx do. In forward, write torch.func.jvp(function, (x,), (tangent,))[1] "
    "instead of linearize."
)
_OPEN_LEVEL = (
    "torch has one level of forward-mode differentiation, for all threads, and one is open: forward, or the program "
    "before it, has begun it (enter_dual_level) and not ended it. In forward, and around it, write "
    "`with torch.autograd.forward_ad.dual_level():`, without one inside another."
)
_GIVEN_WITH_HISTORY = (
    "a backward inside forward reaches an input that was computed from other tensors, and each replica passes through "
    "what has computed it: in forward, write backward(retain_graph=True). Where that input's gradient is not needed, "
    "give the wrapper x.detach()."
)
_SECOND_TIME = "backward through the graph a second time"  # torch's words
# What is added to torch's errors, by a part of their text.
NOTES = {
    "Nested forward mode AD": _OPEN_LEVEL,
    "requires_grad flags of leaf": _ASSIGNED_FLAG,
    "can't optimize a non-leaf Tensor": _OPTIMIZER_INSIDE,
    "Cannot assign non-leaf Tensor to parameter '_param_constant": _TRACED_PARAMETER,
}

# torch warns where `.grad` of a tensor that is no leaf is read, as torch.compile does. A replica's parameters have one.
_GRAD_OF_NO_LEAF = ("ignore", re.compile("The .grad attribute of a Tensor that is not a leaf"), UserWarning, None, 0)
_while_one_replica_runs = StandIns()
for stand_ins in (while_replicas_run, _while_one_replica_runs):
    stand_ins.add(lambda: [(warnings, "filters", lambda filters: [_GRAD_OF_NO_LEAF, *filters])])
    stand_ins.add(torch_private.checkpoints_noted)
# Where it is set (Python 3.14 without the lock), `warnings.catch_warnings` has filters in a context variable instead of
# `warnings.filters`. Without the private functions of Python for it the warning is seen in such a block.
_CATCHING_HAS_FILTERS = bool(getattr(sys.flags, "context_aware_warnings", False)) and hasattr(warnings, "_set_context")


class Threads:
    """Runs the replicas of one wrapper's module. A copied or unpickled wrapper has a new one.

    Attributes:
        row_limits: how many rows fit in each replica's memory, by its number, as far as rescues have shown.
        written: the numbers of the parameters that forwards write (see `LookAtParameters`).
        writing: the replicas of forwards that have written.
        search: finds tensors in replica graphs that are not the replicas' own.
        first_steps: looks for what is looked for in the first steps of a structure.
        compile_lock: the model's.
        frozen: the live parameters that the last forward has left frozen.
    """

    def __init__(self) -> None:
        self.row_limits: dict[int, int] = {}
        self.written: set[int] = set()
        self.writing: weakref.WeakSet[Replicas] = weakref.WeakSet()
        self.search = GraphSearch()
        self.first_steps = FirstSteps()
        self.compile_lock = CompileLock()
        self.frozen: list[torch.Tensor] = []
        self._pool: ReplicaPool | None = None
        self._timings: list[ReplicaTiming] = []

    def forward(self, module: nn.Module, call: Call) -> Any:
        """Run `module` on every shard of `call` at once; return the gathered output, differentiable.

        Raises:
            OneGraphNeededError: the plain composition has to run instead.
            RuntimeError: parameters or buffers that are not on `call.source`, or that a replica reaches in a way
                that cannot be followed.
            BaseException: what a replica raised, the same object with a note. Then no buffer has changed.
        """
        if call.rescue:
            return run_rescued(self.row_limits, call, module, lambda _: self.run(module, call))
        return self.run(module, call)

    def run(self, module: nn.Module, call: Call, again: Replay | None = None) -> Any:
        """Do what `forward` does, once. `again` takes the graphs where a forward is rerun: the output is dropped.

        A first forward that writes into parameters that its replicas share has changed nothing, and runs again with
        replicas that have memory of their own: what it does outside of the module, such as a line that it prints, it
        does twice.
        """
        frozen: Sequence[torch.Tensor] = again.frozen if again is not None else ()
        if self.frozen and again is None and torch.is_grad_enabled() and not inside_replica():
            frozen = [parameter for parameter in self.frozen if not parameter.requires_grad]
        for parameter in frozen:  # so that the replicas' can be trained again; they begin frozen
            parameter.requires_grad_(True)
        try:
            while True:
                with Copies(call.devices) as copies:
                    step = Forward(self, module, call, copies, again, frozen)
                    if not inside_replica():
                        self._timings = step.timings
                    try:
                        output = step.forward()
                    except Exception as error:
                        if _SECOND_TIME in text_of(error) and not all([live.is_leaf for live, _ in step.reached]):
                            add_note(error, _GIVEN_WITH_HISTORY)
                        if issubclass(type(error), ReplicaTimeout):  # a replica may write even now
                            raise
                        if not step.has_put_back() or _devices.is_out_of_memory(error):
                            raise
                    else:
                        frozen = step.linked.frozen() if step.linked.collector.frozen else ()
                        return output
                    finally:
                        if OBJECTS_HAVE_THREADS:
                            free_in_workers()
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
            if (frozen or self.frozen) and again is None and torch.is_grad_enabled():
                self.frozen = [*frozen]

    def open_lanes(self, module: nn.Module, call: LaneCall) -> list[Lane]:
        """Return lanes on the devices of `call`, all with the module as it is now. Gradients are off.

        Forwards work as usual meanwhile, and so do other lanes; either may be slower.

        Raises:
            RuntimeError: parameters or buffers that are not on `call.source`.
        """
        blueprint = self.pool_for(module, call.source).blueprint
        structure = "lanes", call.method, blueprint.signature
        if self.first_steps.is_first(structure):
            self.first_steps.counted(structure).end()
            call = replace(call, is_first=True)
        return open_lanes(blueprint, call, self.compile_lock, self.first_steps)

    def pool_for(self, module: nn.Module, source: torch.device) -> ReplicaPool:
        """Return the replicas of `module` as it is now: those of the last forward, if nothing has changed."""
        pool, writes = self._pool, bool(self.written)
        if pool is None or not pool.is_current(module, source, writes=writes):
            blueprint = Blueprint(module)
            tensors = [*blueprint.without_data, *blueprint.parameters.values(), *blueprint.buffers.values()]
            check_device(module, tensors, source)
            blueprint.keep()
            has_wrappers = any(isinstance(part.__dict__.get("_threads"), Threads) for part in blueprint.modules)
            leftovers = self.first_steps.leftovers
            pool = ReplicaPool(blueprint, source, leftovers, writes=writes, has_wrappers=has_wrappers)
            if not inside_replica():  # there, each replica of an outer module has this object
                self._pool = pool if blueprint.is_reusable else None
        return pool

    def sum_over_ranks(self, linked: LinkedParameters, sync_context: SyncContext | None) -> None:
        """Have the gradients that come to the live parameters beside a boundary summed over the ranks, if there are."""
        linked.collector.over_ranks = None
        if sync_context is not None:
            number = order_of_sums.next_forward(linked.token)
            linked.collector.over_ranks = OverRanks(partial(sync_context.sum, linked.live), number)

    @property
    def warnings(self) -> ModelWarnings:
        """What the model has been warned of."""
        return self.first_steps.warnings

    def timings(self) -> list[ReplicaTiming]:
        """Return what each replica did in the last step; an empty list before the first."""
        return self._timings

    def refresh(self) -> None:
        """Forget what is known about the module; the next forward looks at all of it again."""
        self.search.clear()
        self._pool = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class Forward:
    """One forward; made, it has its inputs and its replicas, whose copies may still be in flight.

    Args:
        model: what the model keeps.
        module, call, copies: what is called, with what, and what copies to other devices.
        again: as in `Threads.run`.
        frozen: live parameters of which the replicas' begin frozen.

    Attributes:
        timings: one a replica.
        linked: the parameters.
        reached: the live tensors that have got gradients inside forward, each with its gradient.
    """

    def __init__(
        self,
        model: Threads,
        module: nn.Module,
        call: Call,
        copies: Copies,
        again: Replay | None,
        frozen: Sequence[torch.Tensor] = (),
    ) -> None:
        self._model, self._call, self._copies = model, call, copies
        self._tracked = torch.is_grad_enabled()
        self._replay, self._is_again = again, again is not None
        self._buffers_in_backward: BuffersInBackward | None = None
        self.reached: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.timings = [ReplicaTiming(device, size) for device, size in zip(call.devices, call.sizes, strict=True)]
        with collector_paused:
            if timeline.recording:
                timeline.mark(timeline.REPLICATE)
            pool = self._pool = model.pool_for(module, call.source)
            if timeline.recording:
                timeline.mark(timeline.SCATTER)
            self._inputs = Inputs(call, self._tracked, copies)
            if timeline.recording:
                timeline.mark(timeline.REPLICATE)
            is_summed = call.sync_context is not None and self._tracked and pool.live_parameters
            plan = call.sync_context.plan(pool.live_parameters) if is_summed else None
            self._replicas = pool.take(call.devices, self._tracked, copies, plan)
        self.linked = self._replicas.linked
        if frozen:
            self.linked.freeze(frozen)
        self._linked: list[LinkedTensors | LinkedParameters] = [*self._inputs.linked, self._replicas.linked]
        self._where = call.where()
        if pool.blueprint.observers:
            if self._tracked and again is None and call.sync_context is None:
                raise OneGraphNeededError
            warn_of_observers(pool.blueprint, call.devices_of_runs, model.warnings)
        if len(call.devices) > 1:
            check_cuda_graphs(pool.blueprint, call.devices, _CUDA_GRAPHS)
        self._buffers = unchanged_on_failure(pool.buffers)
        if call.rescue and self._tracked and again is None and not inside_replica():
            run = partial(model.run, module)
            self._replay = Replay(model.row_limits, call, pool.blueprint, self._buffers, run, frozen)
        self._step = timeline.current_step() if timeline.recording else None
        self._passes = self._passes_of(module)
        self._carries_objects = self._tracked and carries_objects(call)
        limits = model.row_limits
        self._is_in_parts = call.parts > 1 or (  # whether a replica runs its shard in parts
            bool(limits) and any(limits.get(n, k) < k for n, k in zip(call.replica_numbers, call.sizes, strict=True))
        )
        # A wrapper inside would run as a wrapper of its own where a checkpoint calls it in backward.
        self._is_one_graph = call.in_one_graph and not pool.has_wrappers
        if self._step is not None and not _devices.all_on_host(call.devices):  # where a backward is recorded by events
            self._is_one_graph = False
        self._parameters: LookAtParameters | None = None
        self._writes: SharedWrites | None = None
        self._containers: ContainerSnapshot | None = None
        self._seen: dict[str, Any] = {}  # what `GraphSearch` needs of the forward

    def forward(self) -> Any:
        """Return the joined output."""
        looks, leftovers = self._looks(), self._model.first_steps.leftovers
        with self._buffers, one_pass(self._passes.contexts) as contexts:
            for group in self._linked:
                group.begin_forward()
            for look in looks:
                look.begin()
            refusal = register_optimizer_step_pre_hook(partial(_refuse_step, self._pool.blueprint))
            try:
                with while_running(_while_one_replica_runs) if len(self.timings) == 1 else nullcontext():
                    outputs = self._run_replicas(contexts)
            except (RuntimeError, ValueError) as error:
                for text, note in NOTES.items():
                    if text in text_of(error):
                        add_note(error, note)
                raise
            finally:
                refusal.remove()
                self.reached += chain.from_iterable([group.collector.end_forward() for group in self._linked])
            for look in looks:
                look.end(outputs)
            self._replicas.writes = (
                self._writes if self._writes is not None and self._writes.looks_at_backward else None
            )
            call = self._call
            runs_whole = call.parts == 1 and not call.rescue and not self._model.row_limits
            self._replicas.run_whole, self._replicas.rows = runs_whole, call.sizes if runs_whole else call.sizes_of_runs
            self._replicas.is_only = call.in_one_graph
            is_as_before = not self._replicas.are_new and self._replicas.attributes.is_current()
            kept = [] if is_as_before else self._replicas.assigned(outputs)
            if self._model.written and not inside_replica():
                self._pass_on_written()
            if timeline.recording:
                timeline.mark(timeline.GATHER)
            is_summed = call.sync_context is not None and self._tracked
            matched = Outputs(outputs, call.rules, call.sizes, self._replicas.live_of, is_summed=is_summed)
            del outputs
            if self._replay is not None:
                self._replay.forward_has_run()
            changes = self._replicas.each[0].registries.changes()
            of_buffers = _groups_of(changes, len(call.devices)) if changes and self._tracked else []
            outputs_of_boundary = _boundary_outputs(call, matched.groups, of_buffers, self._pool.source)
            if self._tracked:
                # A reentrant checkpoint runs a backward inside the caller's; and around backward, checkpoints are given
                # what they read of buffers that forward has reassigned.
                runs_again = self._seen["has_reentrant_checkpoint"] or (self._seen["has_hooks"] and changes)
                is_one_graph = self._is_one_graph and not runs_again
                captured = self._captured_tensors([*matched.groups, *of_buffers], in_one_graph=is_one_graph)
                graphs = None if is_one_graph else self._graphs(captured, outputs_of_boundary)
                if graphs is not None and self._replay is not None and self._is_again:
                    return self._replay.take(graphs)
                if self.reached:
                    pass_on(self.reached, call.sync_context)
                joined = self._in_one_graph(captured, outputs_of_boundary) if graphs is None else join(graphs)
            else:
                joined = [each.join(each.tensors) for each in outputs_of_boundary]
            output = matched.put_together(joined, call.output_device)
        new = joined[len(matched.groups) :]
        self._replicas.each[0].commit_buffers(self._pool, changes, new, call.devices[0])
        if kept:
            self._replicas.commit_attributes(kept)
        if self._buffers_in_backward is not None:
            self._buffers_in_backward.forward_has_run(reassigns=bool(changes), in_parts=self._is_in_parts)
        if not self._tracked:
            self._replicas.give_back()
        if leftovers.has_more:
            leftovers.say(self._pool.blueprint.root)
        return output

    def _pass_on_written(self) -> None:
        """Give the parameters that this forward has written to the graphs of earlier ones, which wait for backward."""
        writing = self._model.writing
        for earlier in [*writing]:
            if earlier is not self._replicas and earlier.are_in_use:
                earlier.written.follow(self._model.written)
        if self._tracked:
            writing.add(self._replicas)

    def has_put_back(self) -> bool:
        """Return whether this forward, which has failed, has written where replicas share memory, and can run again.

        Parameters, and the containers in the module's attributes, are then as they were.
        """
        # Other processes take part in the first run's exchanges, and not in those of a second run.
        if self._call.cross_process is not None or self._parameters is None or not self._parameters.put_back():
            return False
        if self._containers is not None:
            self._containers.restore()
        return True

    def _looks(self) -> list[Look]:
        """Return what looks at this forward; in a steady step only at parameters that it writes."""
        call, pool = self._call, self._pool
        # Runs of the module, or of a part of it.
        has_several = len(call.devices) > 1 or (call.parts > 1 and call.sizes[0] > 1) or pool.has_wrappers
        kind = call.method, call.arguments.flags, self._tracked, has_several
        known = kind in pool.blueprint.kinds_past or self._is_again
        structure = None if known else self._structure_of_first_steps(kind, has_several)
        looks: list[Look] = []
        runs_whole = call.parts == 1 and not call.rescue  # each replica once, so it may write as the module does
        written = self._model.written if runs_whole else None
        runs_as_module = runs_whole and len(call.devices) == 1 and not self._replicas.is_remote
        if not runs_as_module or call.sync_context is not None or structure is not None or written:
            note = None if call.sync_context is None else call.sync_context.gradient_sync.note_written
            with_values = structure is not None and self._model.first_steps.is_first(structure)
            may_differ = structure is not None and draws_off.are_off()  # `verify` compares parameters by itself
            self._parameters = LookAtParameters(self._replicas.written, note, with_values, written, may_differ)
            looks = [self._parameters]
            if with_values:
                self._containers = ContainerSnapshot(
                    chain(*[vars(module).values() for module in pool.blueprint.modules])
                )
        return looks if structure is None else [*looks, *self._first_looks(structure, has_several)]

    def _structure_of_first_steps(self, kind: tuple[Any, ...], has_several: bool) -> Hashable | None:
        """Return the structure of a forward of this kind, if it is one of the first steps of it; else None."""
        call, pool, first_steps = self._call, self._pool, self._model.first_steps
        if inside_replica():  # the pool is for one step, and each outer replica has such objects
            structure: Hashable = (*kind, pool.blueprint.root.training)
            return None if first_steps.are_past(structure) else structure
        structure = (has_several, *structure_of(pool, call))
        if first_steps.are_past(structure):
            pool.blueprint.kinds_past.add(kind)
            return None
        return structure

    def _first_looks(self, structure: Hashable, has_several: bool) -> list[Look]:
        """Return what else looks at one of the first steps of a structure."""
        call, pool, first_steps = self._call, self._pool, self._model.first_steps
        if inside_replica():
            return [first_steps.counted(structure)]
        looks: list[Look] = []
        if self._synchronises():
            looks.append(ScriptedBatchNorm(self._replicas.roots[0]))
        if self._normalises_shards():
            looks.append(first_steps.batch_norm(self._replicas.roots[0], in_one_process=len(call.devices) > 1))
        if not has_several:
            return [*looks, first_steps.counted(structure)]
        inputs = dict(zip(call.arguments.paths(), call.arguments.leaves, strict=True))
        blueprint, replicas = pool.blueprint, self._replicas.each
        own = [module for replica in replicas for module in replica.modules]
        search = Search(blueprint.modules, blueprint.names, inputs, blueprint.observers, own)
        of_call = inputs.values(), call.devices_of_runs
        found = first_steps.looks(structure, search, *of_call, in_threads=len(call.devices) > 1)
        self._writes = next((look for look in found if isinstance(look, SharedWrites)), None)
        return [*looks, *found]

    def _normalises_shards(self) -> bool:
        """Return whether batch norm would see a part of the rows, no option says so, and it is this rank's to say.

        With `parts=` it is an error.
        """
        call = self._call
        if call.sync_batch_norm is not None or call.parts > 1 or inside_replica():
            return False
        return len(call.devices) > 1 or (
            call.sync_context is not None and call.sync_context.gradient_sync.communicator.rank == 0
        )

    def _synchronises(self) -> bool:
        """Return whether batch norm is to see more rows than those of one replica."""
        call = self._call
        return bool(call.sync_batch_norm) and (len(call.devices) > 1 or call.cross_process is not None)

    def _passes_of(self, module: nn.Module) -> Passes:
        """Return what is around each pass over the replicas."""
        call, name = self._call, type(module).__name__
        contexts: list[PassContext] = [partial(own_streams, name, call.devices)]
        if _CATCHING_HAS_FILTERS:
            contexts.append(_grad_of_no_leaf_ignored)
        if call.sync_batch_norm:
            contexts += _contexts_of_batch_norm(call, self._replicas.roots)
        elif self._pool.blueprint.compiled:  # not where replicas wait for each other: then none may wait for a lock
            kinds = [(self._tracked, module.training, *kind_of(shard)) for shard in self._inputs.shards]
            contexts += self._model.compile_lock.if_new(kinds, call.timeout_s)
        if self._pool.blueprint.compiled:
            contexts.append(compiler_prepared)
        if self._step is not None:
            contexts += timeline.contexts(call.replica_numbers, self.timings)
        if call.sync_batch_norm:
            return Passes(contexts, call.timeout_s, have_exchanges=True, in_one_call=not_running_together)
        return Passes(contexts, call.timeout_s)

    def _run_replicas(self, contexts: ReplicaContext) -> list[Any]:
        call = self._call
        of_call = call, self._model.row_limits, self._inputs, self._replicas.roots, self._copies, self.timings
        num_nodes, begun = [0] * len(call.devices), torch_private.begun
        hooks, reentrant = begun.hooks, begun.reentrant
        tasks = [partial(call_replica, *of_call, num_nodes, i) for i, _ in enumerate(call.devices)]
        try:
            # No variable may hold the outcomes: an error's traceback refers to this frame.
            return values_or_raise(
                run_together(tasks, call.devices, contexts, call.timeout_s, self._where), self._where
            )
        finally:
            has_hooks, has_reentrant = begun.hooks is not hooks, begun.reentrant is not reentrant
            self._seen = {"num_nodes": (*num_nodes,), "has_hooks": has_hooks, "has_reentrant_checkpoint": has_reentrant}

    def _captured_tensors(self, groups: Sequence[Group], *, in_one_graph: bool) -> CapturedTensors:
        """Return what the graphs behind the replicas' outputs lead to; refuse or warn of what is wrong there."""
        call = self._call
        captured = self._model.search.captured_tensors(
            self._pool,
            call,
            groups,
            self._where,
            [group.collector for group in self._linked],
            numbers_of_linked=self._inputs.numbers_of_linked,
            may_differ=self._carries_objects,
            in_parts=self._is_in_parts,
            in_one_graph=in_one_graph,
            **self._seen,
        )
        if captured.has_batch_norm and self._synchronises():
            raise RuntimeError(NOT_SYNCHRONISED.format(layer="A batch norm"))
        if captured.has_batch_norm and self._normalises_shards():
            self._model.first_steps.say_of_functional_batch_norm()
        return captured

    def _in_one_graph(self, captured: CapturedTensors, outputs: Sequence[BoundaryTensor]) -> list[torch.Tensor]:
        """Return the outputs of a rank's only replica, whose graph is a part of the caller's."""
        sync_context, replicas = self._call.sync_context, self._replicas
        assert sync_context is not None
        self._model.sum_over_ranks(replicas.linked, sync_context)
        buffers = replicas.buffers_in_backward(self._pool.source) if captured.has_checkpoint else None
        of_replica = self.timings[0], buffers, replicas.end_backward, self._step
        graph = OneGraph(replicas.linked, sync_context, *of_replica)
        return [graph.output(each.join(each.tensors)) for each in outputs]

    def _graphs(self, captured: CapturedTensors, outputs: list[BoundaryTensor]) -> ReplicaGraphs:
        """Return the replica graphs behind the replicas' outputs, with all that their backwards need."""
        call, parameters = self._call, self._replicas.linked
        for collector, _ in captured.earlier:
            collector.is_earlier = True
        self._model.sum_over_ranks(parameters, call.sync_context)
        if captured.has_checkpoint:
            self._buffers_in_backward = self._replicas.buffers_in_backward(self._pool.source)
        return ReplicaGraphs(
            timings=self.timings,
            where=self._where,
            roots=self._replicas.roots,
            inputs=self._inputs.linked,
            parameters=parameters,
            leaves=[
                LeafTensors(leaf, BoundaryTensor(Replicate(), leaf.device, [leaf] * len(call.devices)))
                for leaf in captured.tensors
            ],
            outputs=outputs,
            captured=captured,
            passes=self._passes,
            keep=self._carries_objects or bool(captured.earlier),
            on_release=self._replicas.end_backward,
            on_backward=self._replicas.backward_has_run if self._replicas.writes is not None else None,
            sync_context=call.sync_context,
            replay=None if self._replay is None or self._is_again else self._replay.repeatable(),
            step=self._step,
            is_in_parts=self._is_in_parts,
            buffers=self._buffers_in_backward,
            levels=captured.ways.levels or [0] * len(outputs),
            on_way=dict.fromkeys(captured.ways.on_way) if captured.ways.on_way else {},
        )


@contextmanager
def _grad_of_no_leaf_ignored() -> Iterator[ReplicaContext]:
    """Add the filter to those of the caller's `catch_warnings`; there may be none, and then the stand-in does it.

    Not with `catch_warnings`: Python then forgets what it has warned of, and would repeat all warnings in each step.
    """
    of_python: Any = warnings
    before = of_python._get_context()
    if before._filters is warnings.filters:
        yield nothing_around
        return
    own = before.copy()
    own._filters.insert(0, _GRAD_OF_NO_LEAF)
    of_python._set_context(own)
    try:
        yield nothing_around
    finally:
        of_python._set_context(before)


def _refuse_step(blueprint: Blueprint, optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise RuntimeError where an optimizer steps on the live module's parameters inside a replica's forward."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if inside_replica() and any(id(parameter) in blueprint.parameters for parameter in parameters):
        raise RuntimeError(_STEP_INSIDE.format(optimizer=type(optimizer).__name__))


def _groups_of(changes: Sequence[Change], num_replicas: int) -> list[Group]:
    """Return the buffers that forward has reassigned and that have a history: they are outputs of the first replica."""
    others = [None] * (num_replicas - 1)
    return [Group((tensor, *others), Single(0), "a buffer") for tensor in histories(changes)]


def _boundary_outputs(
    call: Call, groups: Sequence[Group], of_buffers: Sequence[Group], source: torch.device
) -> list[BoundaryTensor]:
    """Return the boundary's outputs: those of forward on the output device, then buffers on `source`, the module's."""
    outputs = [BoundaryTensor(group.placement, call.output_device, group.tensors, group.path) for group in groups]
    for group in of_buffers:
        for tensor in [tensor for tensor in group.tensors if tensor is not None]:
            device = source if _devices.same_device(tensor.device, call.devices[0]) else tensor.device
            outputs.append(BoundaryTensor(group.placement, device, group.tensors, group.path))
    return outputs


def _contexts_of_batch_norm(call: Call, roots: Sequence[nn.Module]) -> list[PassContext]:
    """Return the contexts of each pass over the replicas in which they exchange the statistics of batch norm."""
    if len(roots) == 1 and call.cross_process is None:
        return []
    new_exchange: Callable[[int], Exchange] = partial(
        Exchange, cross_process=call.cross_process, timeout_s=call.timeout_s, names=call.where()
    )
    return [exchanging(len(roots), new_exchange), BatchNormOverReplicas(roots, call.devices).one_pass]
