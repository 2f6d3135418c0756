"""One forward of several replicas: each runs in a thread of this process, and has a graph of its own.

        caller's thread                                                        thread i

    (1) inputs, cut by their placements ─────────────────────────────────────► shard i
    (2) live module ──► blueprint ──► replicas, with parameters of their own ─► replica i
    (3)                                                                        replica i runs on shard i: graph i
    (4) outputs, matched leaf by leaf ◄─────────────────────────────────────── outputs i
    (5) joined output
    (6) caller's graph: inputs, live parameters ──► Boundary ──► joined output        (autograd/boundary.py)
    (7) live module ◄── what forward has left in the replicas: buffers, what all have assigned alike

Each is a method of `Step`, or a part of one, in this order. What does not differ between steps of one kind is in the
`StepPlan`. Inputs that need a gradient, and parameters, are outputs of bucket nodes in the replicas
(autograd/live_gradients.py), made with the replicas: in a steady step (2) takes replicas that an earlier one has given
back, and links nothing. If the structure is new, (6) looks for live tensors in the replica graphs.

Buffers: the first replica has the live ones, so its updates persist; the others have copies. Those that forward has
reassigned in the first replica are put into the live module at the end. If anything fails, the live buffers get their
old values back. How a step is run again is in rescue.py.
"""

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.autograd.boundary import join
from unisono.autograd.callers_graph import CallersGraph
from unisono.autograd.graph_search import Recorded, paths_between
from unisono.autograd.linked import BoundaryTensor, LeafTensors, LinkedParameters, LinkedTensors
from unisono.autograd.replica_graph import CapturedTensors, Passes, ReplicaGraphs, pass_on_gradients
from unisono.engines.compiled_modules import compiler_prepared, kind_of
from unisono.engines.graphed import CREATES_GRAPH, GraphedReplica, Graphs, refuse, why_not
from unisono.engines.parts import parts_of, run_in_parts
from unisono.engines.replica import ReplicaPool
from unisono.engines.rescue import Replay, run_rescued
from unisono.engines.shards import Shards
from unisono.engines.step_memory import StepMemory, freeze
from unisono.engines.step_plan import Call, StepPlan, called
from unisono.leftovers.buffers import histories, unchanged_on_failure
from unisono.leftovers.buffers_in_backward import BuffersInBackward
from unisono.leftovers.first_steps import NOT_SYNCHRONISED, AtEnd, Look, refuse_scripted_batch_norm
from unisono.leftovers.shared import Search, SharedWrites
from unisono.leftovers.written_parameters import LookAtParameters
from unisono.primitives.blueprint import Blueprint
from unisono.primitives.change_tracking import Change
from unisono.primitives.gather import Group, Outputs
from unisono.primitives.placements import Replicate, Single
from unisono.runtime import devices as _devices
from unisono.runtime import draws_off, timeline
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import add_note, text_of
from unisono.runtime.exchange import Exchange, exchanging
from unisono.runtime.interrupts import interruptible
from unisono.runtime.rng import own_streams
from unisono.runtime.stand_ins import StandIns, while_replicas_run
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
    values_or_raise,
)
from unisono.runtime.timeline import ReplicaTiming
from unisono.runtime.torch_private import checkpoints, graph_nodes
from unisono.sync_batch_norm.over_replicas import BatchNormOverReplicas, not_running_together

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
_OPEN_LEVEL = (
    "torch has one level of forward-mode differentiation, for all threads, and one is open: forward, or the program "
    "before it, has begun it (enter_dual_level) and not ended it. In forward, and around it, write "
    "`with torch.autograd.forward_ad.dual_level():`, without one inside another."
)
# What is added to torch's errors, by a part of their text.
NOTES = {
    "Nested forward mode AD": _OPEN_LEVEL,
    "requires_grad flags of leaf": _ASSIGNED_FLAG,
    "can't optimize a non-leaf Tensor": _OPTIMIZER_INSIDE,
}

# Why an output has no gradient by another one to which it leads.
_IN_PARTS = "replicas may compute them in parts (parts=, or rescue=)"
_AS_GRAPHS = "replicas run as graphs of kernels (graphs=)"

# torch warns where `.grad` of a tensor that is no leaf is read, as torch.compile does. A replica's parameters have one.
_GRAD_OF_NO_LEAF = ("ignore", re.compile("The .grad attribute of a Tensor that is not a leaf"), UserWarning, None, 0)
_while_one_replica_runs = StandIns()
for _stand_ins in (while_replicas_run, _while_one_replica_runs):
    _stand_ins.add(lambda: [(warnings, "filters", lambda filters: [_GRAD_OF_NO_LEAF, *filters])])
    _stand_ins.add(checkpoints.checkpoints_noted)
# Where it is set (Python 3.14 without the lock), `warnings.catch_warnings` has filters in a context variable instead of
# `warnings.filters`. Without the private functions of Python for it the warning is seen in such a block.
_CATCHING_HAS_FILTERS = bool(getattr(sys.flags, "context_aware_warnings", False)) and hasattr(warnings, "_set_context")


_collector = attrgetter("collector")
_NOTHING_CAPTURED = CapturedTensors()


def run_step(memory: StepMemory, pool: ReplicaPool, frozen: Sequence[torch.Tensor], call: Call) -> Any:
    """Run the module on every shard of `call` at once; return the gathered output, differentiable.

    Args:
        memory: the model's.
        pool: of the module as it is now.
        frozen: live parameters that the last forward has frozen: those of the replicas need no gradient at first.

    Raises:
        RuntimeError: a replica reaches parameters or buffers in a way that cannot be followed.
        BaseException: what a replica raised, the same object with a note. Then no buffer has changed.
    """
    if not call.plan.rescue:
        return _run_once(memory, pool, call, None, frozen)
    module = pool.blueprint.root

    def run(has_failed: bool) -> Any:
        again = memory.pool_for(module, call.plan.source) if has_failed else pool
        return _run_once(memory, again, call, None, frozen)

    return run_rescued(memory.row_limits, call.plan, module, run)


def _run_again(memory: StepMemory, module: nn.Module, call: Call, replay: Replay) -> None:
    """Run a forward again, in a backward: `replay` takes its graphs, and the output is dropped."""
    _run_once(memory, memory.pool_for(module, call.plan.source), call, replay, replay.frozen)


def _run_once(
    memory: StepMemory,
    pool: ReplicaPool,
    call: Call,
    replay: Replay | None,
    frozen: Sequence[torch.Tensor],
) -> Any:
    with call.plan.copies_on_host or Copies(call.plan.devices) as copies:
        step = Step(memory, pool, call, copies, replay, frozen)
        if not inside_replica():
            memory.timings = step.timings
        try:
            output = step.forward()
        finally:
            if OBJECTS_HAVE_THREADS:
                free_in_workers()
        if replay is None and torch.is_grad_enabled():
            memory.frozen = []
            if step.parameters.collector.frozen:
                memory.frozen = step.parameters.frozen()
                freeze(memory.frozen)
        return output


@dataclass(slots=True)
class _LeftBehind:
    """What a forward has left behind in its replicas."""

    assigns: bool  # whether it has assigned attributes
    alike: Sequence[Change]  # those that all replicas have assigned alike
    buffers: Sequence[Change]  # those of the first replica that it has reassigned
    outputs: Sequence[Any]  # of the replicas, where later steps may be captured (graphed.py); else none


class Step:
    """One forward, by its plan.

    Args:
        memory: the model's.
        pool: has the replicas.
        call, copies: what is called, and what copies to other devices.
        replay: takes the graphs where a forward is run again; None: it is not.
        frozen: live parameters that the last forward has frozen: those of the replicas need no gradient at first.

    Attributes:
        timings: one a replica.
        parameters: the live ones that need a gradient, with the replicas'.
    """

    def __init__(
        self,
        memory: StepMemory,
        pool: ReplicaPool,
        call: Call,
        copies: Copies,
        replay: Replay | None,
        frozen: Sequence[torch.Tensor],
    ) -> None:
        self._memory, self._pool, self._call, self._plan, self._copies = memory, pool, call, call.plan, copies
        self._replay, self._is_run_again = replay, replay is not None  # what runs this forward again, in backward
        self._frozen, self._tracked = frozen, torch.is_grad_enabled()
        self._is_early = call.plan.is_early and replay is None
        self._is_first = self._is_early and memory.first_steps.is_first(call.plan.counts_as)
        self._recording = timeline.current_step() if timeline.recording else None
        self._buffers_in_backward: BuffersInBackward | None = None
        self._writes: SharedWrites | None = None
        self._recorded: Recorded  # by the replicas, in forward
        # The live tensors that have got gradients inside forward, each with its gradient.
        self._reached: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.timings = [*map(ReplicaTiming, call.plan.devices, call.plan.sizes)]

    def forward(self) -> Any:
        """Return the joined output."""
        self._cut()
        try:
            with self._buffers, one_pass(self._passes.contexts) as contexts:
                outputs = self._run(contexts)
                left = self._left_behind(outputs)
                matched = self._match(outputs)
                del outputs  # what is not matched is freed before the replicas are given back
                output, buffers = self._link(matched, left)
        except Exception as error:
            self._note(error)
            raise
        if not (self._is_run_again and self._tracked):  # its graphs are all that is wanted
            self._commit(left, buffers)
        return output

    def _cut(self) -> None:
        """Split the inputs (1), and take replicas (2); make what is around their passes, and what runs them again."""
        plan, pool, call = self._plan, self._pool, self._call
        self._shards = Shards(call, self._tracked, self._copies)
        if timeline.recording:
            timeline.mark(timeline.REPLICATE)
        is_summed = call.sync_context is not None and self._tracked and pool.live_parameters
        buckets = call.sync_context.plan(pool.live_parameters) if is_summed else None
        may_write = self._is_first and plan.runs_whole
        self._replicas = pool.take(plan.devices, self._tracked, self._copies, buckets, may_write=may_write)
        self.parameters = self._replicas.linked
        if self._frozen:
            self.parameters.freeze(self._frozen)
        self._all_linked: list[LinkedTensors | LinkedParameters] = [*self._shards.linked, self.parameters]
        self._buffers = unchanged_on_failure(pool.buffers)
        if plan.rescue and self._tracked and not self._is_run_again and not inside_replica():
            run = partial(_run_again, self._memory, pool.blueprint.root)
            self._replay = Replay(self._memory.row_limits, call, pool.blueprint, self._buffers, run, self._frozen)
        limits = self._memory.row_limits
        self._is_in_parts = plan.parts > 1 or (  # whether a replica runs its shard in parts
            bool(limits) and any(limits.get(n, k) < k for n, k in zip(plan.replica_numbers, plan.sizes, strict=True))
        )
        self._passes = self._passes_of(pool.blueprint)
        self._graphed = self._graphed_replicas() if plan.kernel_graphs and not plan.is_early else None

    def _graphed_replicas(self) -> Sequence[GraphedReplica] | None:
        """Return what runs in the replicas' place in this step, as graphs of kernels; None: they run themselves."""
        replicas = self._replicas
        if replicas.kernel_graphs is None:
            replicas.kernel_graphs = Graphs(self._pool.blueprint)
        found: Sequence[GraphedReplica] | None = replicas.kernel_graphs.of_step(
            self._plan, replicas, self._shards.of_replicas
        )
        return found

    def _run(self, contexts: ReplicaContext) -> list[Any]:
        """Run the replicas on their shards (3); return their outputs."""
        looks = self._looks()
        for group in self._all_linked:
            group.begin_forward()
        for look in looks:
            look.begin()
        refusal = register_optimizer_step_pre_hook(partial(_refuse_step, self._pool.blueprint))
        try:
            with _while_one_replica_runs.enter() if len(self.timings) == 1 else nullcontext():
                outputs = self._run_replicas(contexts)
        finally:
            refusal.remove()
            for group in self._all_linked:
                self._reached += group.collector.end_forward()
        for look in looks:
            look.end(outputs)
        return outputs

    def _left_behind(self, outputs: Sequence[Any]) -> _LeftBehind:
        """Tell the replicas how forward has run; return what it has left behind in them."""
        plan, replicas = self._plan, self._replicas
        replicas.writes = self._writes if self._writes is not None and self._writes.looks_at_backward else None
        runs_whole = plan.parts == 1 and not self._memory.row_limits
        replicas.run_whole, replicas.rows = runs_whole, plan.sizes if runs_whole else plan.sizes_of_runs
        replicas.in_callers_graph = plan.may_be_in_callers_graph
        assigns = not replicas.attributes.is_current()
        alike: list[Change] = []
        if (replicas.are_new or assigns) and not self._is_run_again:  # in a forward that is run again all was seen
            alike = replicas.assigned(outputs)
        is_looked_at = plan.kernel_graphs and self._graphed is None and not self._pool.blueprint.why_not_captured
        return _LeftBehind(assigns, alike, replicas.each[0].registries.changes(), outputs if is_looked_at else ())

    def _match(self, outputs: Sequence[Any]) -> Outputs:
        """Match the outputs leaf by leaf (4)."""
        plan = self._plan
        if timeline.recording:
            timeline.mark(timeline.GATHER)
        is_summed = self._call.sync_context is not None and self._tracked
        return Outputs(outputs, plan.rules, plan.sizes, self._replicas.live_of, is_summed=is_summed)

    def _link(self, matched: Outputs, left: _LeftBehind) -> tuple[Any, Sequence[torch.Tensor]]:
        """Join the outputs (5), linked to the replicas' graphs (6); return what they make, and the joined buffers."""
        plan, changes = self._plan, left.buffers
        if self._replay is not None:
            self._replay.forward_has_run()
        of_buffers = _groups_of(changes, len(plan.devices)) if changes and self._tracked else []
        outputs, captured = _boundary_outputs(plan, matched.groups, of_buffers), _NOTHING_CAPTURED
        if self._tracked:
            in_callers_graph = plan.may_be_in_callers_graph and self._can_be_in_callers_graph(changes)
            captured = self._captured_tensors([*matched.groups, *of_buffers], in_callers_graph=in_callers_graph)
            graphs = None if in_callers_graph else self._replica_graphs(captured, outputs)
            if graphs is not None and self._replay is not None and self._is_run_again:
                self._replay.take(graphs)
                return None, ()
            if self._reached:
                pass_on_gradients(self._reached, self._call.sync_context)
            joined = self._in_callers_graph(captured, outputs) if graphs is None else join(graphs)
        else:
            joined = [each.join(each.tensors) for each in outputs]
        if left.outputs:
            self._look_if_captured(left, captured, matched.groups)
        return matched.put_together(joined, plan.output_device), joined[len(matched.groups) :]

    def _can_be_in_callers_graph(self, changes: Sequence[Change]) -> bool:
        """Return whether the only replica's graph can be a part of the caller's in this step.

        A reentrant checkpoint runs a backward inside the caller's; and around backward, checkpoints are given what they
        read of buffers that forward has reassigned, which are the `changes`. A wrapper inside would run as a wrapper of
        its own where a checkpoint calls it in backward. A profile records backwards of accelerators by events.
        """
        runs_again = self._recorded.has_reentrant_checkpoint or (self._recorded.has_hooks and changes)
        is_recorded_by_events = self._recording is not None and not self._plan.on_host
        return not (runs_again or self._pool.has_wrappers or self._graphed or is_recorded_by_events)

    def _look_if_captured(self, left: _LeftBehind, captured: CapturedTensors, groups: Sequence[Group]) -> None:
        """Look at a step that has run without graphs of kernels: may later ones have them?"""
        of_step = {"assigns": left.assigns, "has_new_buffers": bool(left.buffers)}
        of_step["has_more"] = bool(self._memory.written or self._reached or self._frozen or self.parameters.frozen())
        if self._replicas.kernel_graphs is not None:
            paths = paths_between(groups, in_parts=False) if self._plan.may_be_in_callers_graph else captured.paths
            self._replicas.kernel_graphs.paths = paths
        refuse(self._pool.blueprint, why_not(left.outputs, self._replicas.live_of, captured, **of_step))

    def _commit(self, left: _LeftBehind, buffers: Sequence[torch.Tensor]) -> None:
        """Give the live module what the replicas have for it (7)."""
        replicas, leftovers = self._replicas, self._memory.first_steps.leftovers
        replicas.each[0].commit_buffers(self._pool, left.buffers, buffers, self._plan.devices[0])
        if left.alike:
            replicas.commit_attributes(left.alike)
        if self._buffers_in_backward is not None:
            reassigns = bool(left.buffers)
            self._buffers_in_backward.forward_has_run(reassigns=reassigns, in_parts=self._is_in_parts)
        if not self._tracked:
            replicas.give_back()
        if leftovers.has_more:
            leftovers.say(self._pool.blueprint.root)

    def _note(self, error: Exception) -> None:
        """Say in torch's errors what they mean in a replica."""
        for text, note in NOTES.items():
            if text in text_of(error):
                add_note(error, note)

    def _looks(self) -> list[Look]:
        """Return what looks at this forward; in a steady step only at parameters that it writes."""
        plan, memory, sync_context = self._plan, self._memory, self._call.sync_context
        written = memory.written if plan.runs_whole else None
        runs_as_module = plan.runs_whole and plan.has_one_replica and not self._replicas.is_remote
        if runs_as_module and sync_context is None and not self._is_early and not written:
            return []
        note = None if sync_context is None else sync_context.gradient_sync.note_written
        with_values = self._is_first
        may_differ = self._is_early and draws_off.are_off()  # `verify` compares parameters by itself
        parameters = LookAtParameters(self._replicas.written, note, with_values, written, may_differ)
        return [parameters, *(self._first_looks() if self._is_early else ())]

    def _first_looks(self) -> list[Look]:
        """Return what else looks at one of the first steps of a structure."""
        plan, blueprint, first_steps = self._plan, self._pool.blueprint, self._memory.first_steps
        counted = first_steps.counted(plan.counts_as)
        if inside_replica():
            return [counted]
        looks: list[Look] = []
        if self._synchronises():
            looks.append(AtEnd(partial(refuse_scripted_batch_norm, self._replicas.roots[0])))
        if self._normalises_shards():
            looks.append(first_steps.batch_norm(self._replicas.roots[0], in_one_process=not plan.has_one_replica))
        if not plan.has_several:
            return [*looks, counted]
        arguments = self._call.arguments
        inputs = dict(zip(arguments.paths(), arguments.leaves, strict=True))
        own = [module for replica in self._replicas.each for module in replica.modules]
        search = Search(blueprint.modules, blueprint.names, inputs, blueprint.observers, own)
        of_call = inputs.values(), plan.devices_of_runs
        found = first_steps.looks(plan.counts_as, search, *of_call, in_threads=not plan.has_one_replica)
        self._writes = next((look for look in found if isinstance(look, SharedWrites)), None)
        return [*looks, *found]

    def _normalises_shards(self) -> bool:
        """Return whether batch norm would see a part of the rows, no option says so, and it is this rank's to say.

        With `parts=` it is an error.
        """
        plan, sync_context = self._plan, self._call.sync_context
        if plan.sync_batch_norm is not None or plan.parts > 1 or inside_replica():
            return False
        return not plan.has_one_replica or (
            sync_context is not None and sync_context.gradient_sync.communicator.rank == 0
        )

    def _synchronises(self) -> bool:
        """Return whether batch norm is to see more rows than those of one replica."""
        return bool(self._plan.sync_batch_norm) and (
            not self._plan.has_one_replica or self._call.cross_process is not None
        )

    def _passes_of(self, blueprint: Blueprint) -> Passes:
        """Return what is around each pass over the replicas."""
        plan, root = self._plan, blueprint.root
        contexts: list[PassContext] = []
        if not plan.has_one_replica:
            contexts.append(partial(own_streams, type(root).__name__, plan.devices))
        if _CATCHING_HAS_FILTERS:
            contexts.append(_grad_of_no_leaf_ignored)
        if plan.sync_batch_norm:
            contexts += self._contexts_of_batch_norm()
        elif blueprint.compiled:  # not where replicas wait for each other: then none may wait for a lock
            kinds = [(self._tracked, root.training, *kind_of(shard)) for shard in self._shards.of_replicas]
            contexts += self._memory.compile_lock.if_new(kinds, plan.timeout_s)
        if blueprint.compiled:
            contexts.append(compiler_prepared)
        if self._recording is not None:
            contexts += timeline.contexts(plan.replica_numbers, self.timings)
        if plan.sync_batch_norm:
            return Passes(contexts, plan.timeout_s, wait_for_each_other=True, in_one_call=not_running_together)
        return Passes(contexts, plan.timeout_s)

    def _contexts_of_batch_norm(self) -> list[PassContext]:
        """Return the contexts of each pass over the replicas in which they exchange the statistics of batch norm."""
        plan, cross_process, roots = self._plan, self._call.cross_process, self._replicas.roots
        if len(roots) == 1 and cross_process is None:
            return []
        new_exchange: Callable[[int], Exchange] = partial(
            Exchange, cross_process=cross_process, timeout_s=plan.timeout_s, names=plan.names
        )
        return [exchanging(len(roots), new_exchange), BatchNormOverReplicas(roots, plan.devices).one_pass]

    def _run_replicas(self, contexts: ReplicaContext) -> list[Any]:
        plan = self._plan
        of_call = plan, self._memory.row_limits, self._shards, self._replicas.roots, self._copies, self.timings
        num_replicas, begun = len(plan.devices), checkpoints.begun
        graphed: Sequence[GraphedReplica | None] = self._graphed or [None] * num_replicas
        num_nodes = [0] * num_replicas
        hooks, reentrant = begun.hooks, begun.reentrant
        tasks = [partial(_call_replica, *of_call, num_nodes, i, graphed[i]) for i in range(num_replicas)]
        try:
            # No variable may hold the outcomes: an error's traceback refers to this frame.
            return values_or_raise(run_together(tasks, plan.devices, contexts, plan.timeout_s, plan.names), plan.names)
        finally:
            self._recorded = Recorded((*num_nodes,), begun.hooks is not hooks, begun.reentrant is not reentrant)

    def _captured_tensors(self, groups: Sequence[Group], *, in_callers_graph: bool) -> CapturedTensors:
        """Return what the graphs behind the replicas' outputs lead to; refuse or warn of what is wrong there."""
        captured = self._memory.search.captured_tensors(
            self._pool.blueprint,
            groups,
            self._plan.names,
            [*map(_collector, self._all_linked)],
            self._recorded,
            structure=self._plan.structure,
            may_differ=self._plan.carries_objects,
            numbers_of_linked=self._shards.numbers_of_linked,
            in_parts=self._is_in_parts,
            in_callers_graph=in_callers_graph,
        )
        if captured.has_batch_norm and self._synchronises():
            raise RuntimeError(NOT_SYNCHRONISED.format(layer="A batch norm"))
        if captured.has_batch_norm and self._normalises_shards():
            self._memory.first_steps.say_of_functional_batch_norm()
        return captured._replace(paths=self._replicas.kernel_graphs.paths) if self._graphed else captured

    def _in_callers_graph(self, captured: CapturedTensors, outputs: Sequence[BoundaryTensor]) -> list[torch.Tensor]:
        """Return the outputs of a rank's only replica, whose graph is a part of the caller's."""
        sync_context, replicas = self._call.sync_context, self._replicas
        assert sync_context is not None
        replicas.linked.sum_over_ranks(sync_context)
        buffers = replicas.buffers_in_backward(self._pool.source) if captured.has_checkpoint else None
        of_replica = self.timings[0], buffers, replicas.end_backward, self._recording
        graph = CallersGraph(replicas.linked, sync_context, *of_replica)
        return [graph.output(each.join(each.tensors)) for each in outputs]

    def _replica_graphs(self, captured: CapturedTensors, outputs: list[BoundaryTensor]) -> ReplicaGraphs:
        """Return the replica graphs behind the replicas' outputs, with all that their backwards need."""
        plan, call, parameters = self._plan, self._call, self._replicas.linked
        parameters.sum_over_ranks(call.sync_context)
        if captured.has_checkpoint:
            self._buffers_in_backward = self._replicas.buffers_in_backward(self._pool.source)
        # Another rank may have run out of memory, and backward has to come to equally many boundaries in all ranks.
        may_be_in_parts = self._is_in_parts or (plan.rescue and call.sync_context is not None)
        return ReplicaGraphs(
            timings=self.timings,
            where=plan.names,
            roots=self._replicas.roots,
            inputs=self._shards.linked,
            parameters=parameters,
            leaves=[
                LeafTensors(leaf, BoundaryTensor(Replicate(), leaf.device, [leaf] * len(plan.devices)))
                for leaf in captured.tensors
            ],
            outputs=outputs,
            captured=captured,
            passes=self._passes,
            # What a forward assigns that is run again is not the live module's.
            on_release=partial(self._replicas.end_backward, may_run_again=not self._is_run_again),
            on_higher_order=partial(refuse, self._pool.blueprint, CREATES_GRAPH) if plan.kernel_graphs else None,
            on_backward=self._replicas.backward_has_run if self._replicas.writes is not None else None,
            sync_context=call.sync_context,
            replay=None if self._is_run_again else self._replay,
            recording=self._recording,
            why_no_paths=_AS_GRAPHS if self._graphed else _IN_PARTS if may_be_in_parts else "",
            buffers=self._buffers_in_backward,
            levels=captured.paths.levels or [0] * len(outputs),
            on_way=dict.fromkeys(captured.paths.on_way) if captured.paths.on_way else {},
        )


@interruptible
def _call_replica(
    plan: StepPlan,
    row_limits: Mapping[int, int],
    shards: Shards,
    roots: Sequence[nn.Module],
    copies: Copies,
    timings: Sequence[ReplicaTiming],
    num_nodes: list[int],
    index: int,
    graphed: GraphedReplica | None,
) -> Any:
    """Call a replica with its inputs, in its thread, as a whole or in parts; note how long it took.

    Args:
        num_nodes: takes how many nodes of graphs it has made, one number a replica.
        graphed: what runs in its place; None: itself.
    """
    started, first_node = time.perf_counter(), graph_nodes.sequence_number()
    copies.wait_copies(index)
    root, (args, kwargs) = roots[index], shards.of_replicas[index]
    function = graphed or called(root, plan.method)
    parts = parts_of(row_limits, plan, root, index) if plan.parts > 1 or row_limits else None
    if parts is None:
        output = function(*args, **kwargs)
    else:
        output = run_in_parts(root, function, args, kwargs, parts, plan.devices[index])
    num_nodes[index] = graph_nodes.sequence_number() - first_node
    if plan.is_timed:
        _devices.queued_work(plan.devices[index])(True)
    timings[index].forward_s = time.perf_counter() - started
    return output


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


def _boundary_outputs(plan: StepPlan, groups: Sequence[Group], of_buffers: Sequence[Group]) -> list[BoundaryTensor]:
    """Return the boundary's outputs: those of forward on the output device, then buffers on the module's."""
    outputs = [BoundaryTensor(group.placement, plan.output_device, group.tensors, group.path) for group in groups]
    for group in of_buffers:
        for tensor in [tensor for tensor in group.tensors if tensor is not None]:
            device = plan.source if _devices.same_device(tensor.device, plan.devices[0]) else tensor.device
            outputs.append(BoundaryTensor(group.placement, device, group.tensors, group.path))
    return outputs
