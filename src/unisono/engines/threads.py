"""The threads engine: one replica a thread, all in this process.

One forward, step by step:

    1. take a blueprint of the live module and check where its tensors are
    2. split the inputs into shards; they are leaves of the replica graphs
    3. stamp one replica a shard, with leaves of its own for the parameters
    4. call the replicas in parallel; the caller's thread runs the first
    5. match the outputs; if the structure is new, look for live tensors in the replica graphs
    6. join the outputs through the boundary

Buffers: the first replica has the live ones, so its updates persist; the others have copies. Those that forward has
reassigned in the first replica are put into the live module at the end. If step 4 or 5 fails, the
live buffers are restored.

Assumes that the module does not change while a forward runs. Calls from several threads may overlap; each has replicas
of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from unisono.autograd.boundary import join
from unisono.autograd.replica_graph import BackwardContext, BoundaryTensor, ReplicaGraphs
from unisono.engines.base import Call, LaneCall, Lanes, OneGraphNeededError
from unisono.engines.compile_lock import CompileLock, kind_of, prepare_accelerators
from unisono.engines.failure_policy import FailureOptions, FailurePolicy
from unisono.engines.lanes import open_local_lanes
from unisono.engines.replay import Replay, run_recovering
from unisono.engines.replica import (
    GraphSearch,
    Inputs,
    ReplicaPool,
    boundary_outputs,
    call_replica,
    carries_objects,
    groups_of_buffers,
)
from unisono.primitives.blueprint import Blueprint, collector_paused, warn_of_observers
from unisono.primitives.checks import check_flag
from unisono.primitives.outputs import Outputs
from unisono.primitives.parallel_apply import values_or_raise
from unisono.primitives.placements import Replicate
from unisono.primitives.replicate import check_device, unchanged_on_failure
from unisono.runtime import devices as _devices
from unisono.runtime import timeline
from unisono.runtime.exchange import Exchange, LocalExchange, exchanging
from unisono.runtime.rng import own_streams
from unisono.runtime.streams import Copies
from unisono.runtime.thread_pool import PassContext, inside_replica, one_pass, run_together
from unisono.runtime.timeline import ReplicaTiming
from unisono.runtime.whole_batch_draws import no_draws, one_stream
from unisono.sync_batch_norm.function_mode import BackwardMode, BatchNormOverReplicas

_CUDA_GRAPHS = (
    'the module is compiled with CUDA graphs (torch.compile(mode="reduce-overhead" or "max-autotune")): a graph reads '
    "its input and writes its output in one place, which replicas cannot share. Compile it in another mode "
    '(mode="max-autotune-no-cudagraphs", or none), or wrap it for one device, DataParallel(model, [0]).'
)
_TOO_MANY_ACCELERATORS = (
    "sync_batch_norm=True over several processes, with several accelerators in this one: replicas on accelerators "
    "cannot wait for other processes in backward. Start one process for each accelerator."
)


class Threads(FailureOptions):
    """Run each replica in a thread of this process: `engine="threads"`, or this class, where it needs options.

        >>> engine = unisono.Threads(rescue=True, timeout=60)
        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"], engine=engine)
        >>> model(torch.zeros(30, 5)).shape
        torch.Size([30, 2])

    `model.engine.timeout = None` changes an option between steps. Each wrapper needs an engine of its own.

    Args:
        rescue: whether a step in which a replica runs out of memory is run again with that replica's shard in parts,
            each computed once more in backward, so that only one part's activations are in memory. Gradients are the
            same within float rounding. What the replica can bear is logged and remembered.
        timeout: after how many seconds without progress a wait for a replica ends in `ReplicaTimeout`, which has the
            Python stack of the stuck replica; progress is any message of a replica, and any part that one has finished.
            None: never. So it has to be longer than a replica's whole forward, or backward, may take after the first
            replica's. The first replica runs in the calling thread: where it is stuck itself, nothing is raised.
        separate_memory: give every replica but the first its own copies of parameters and buffers even where it could
            share the module's, as if each were on a device of its own: to try on one device what several do.

    Raises:
        TypeError, ValueError: options that cannot be used, with what was expected; also when one is assigned.
    """

    def __init__(self, *, rescue: bool = False, timeout: float | None = None, separate_memory: bool = False) -> None:
        super().__init__(FailurePolicy(rescue=rescue, timeout=timeout))
        self._separate_memory = check_flag(separate_memory, "separate_memory")
        self._search = GraphSearch()
        self._pool: ReplicaPool | None = None
        self._timings: list[ReplicaTiming] = []
        self._compile_lock = CompileLock()

    @classmethod
    def with_policy(cls, policy: FailurePolicy) -> "Threads":
        """Return an engine whose options are those of another engine, also when they change."""
        engine = cls()
        engine._policy = policy
        return engine

    def forward(self, module: nn.Module, call: Call) -> Any:
        if self._policy.recovers:
            return run_recovering(self._policy, call, module, lambda _: self._forward(module, call))
        return self._forward(module, call)

    def _forward(self, module: nn.Module, call: Call, again: Replay | None = None) -> Any:
        """Run a forward and return its output; where it is run `again`, its graphs are all that is wanted."""
        with Copies(call.devices) as copies:
            return self._run(module, call, copies, again)

    def _run(self, module: nn.Module, call: Call, copies: Copies, again: Replay | None) -> Any:
        tracked, policy = torch.is_grad_enabled(), self._policy
        where = call.where()
        timings = [ReplicaTiming(device, size) for device, size in zip(call.devices, call.sizes, strict=True)]
        with collector_paused:  # steps 1 to 3
            if timeline.recording:
                timeline.mark(timeline.REPLICATE)
            pool = self._pool_for(module, call.source)
            if timeline.recording:
                timeline.mark(timeline.SCATTER)
            inputs = Inputs(call, tracked, copies)
            if timeline.recording:
                timeline.mark(timeline.REPLICATE)
            replicas = pool.take(call.devices, tracked, copies, separate_memory=self._separate_memory)
        blueprint, roots = pool.blueprint, replicas.roots
        if blueprint.observers:
            if tracked and again is None and call.sync_context is None and not call.one_device_randomness:
                raise OneGraphNeededError
            warn_of_observers(blueprint, call.devices)
        if blueprint.compiled:
            prepare_accelerators(blueprint, call.devices, _CUDA_GRAPHS if len(call.devices) > 1 else None)
        if not inside_replica():
            self._timings = timings

        contexts: list[PassContext] = [partial(own_streams, type(module).__name__, call.devices)]
        backward_context: BackwardContext = nullcontext
        if call.sync_batch_norm or call.one_device_randomness:
            contexts, backward_context = _contexts_with_exchange(type(module).__name__, call, roots, policy.timeout)
        elif blueprint.compiled:  # not where replicas wait for each other: then no replica may wait for a lock
            contexts += self._compile_lock.if_new(
                [(tracked, module.training, *kind_of(shard)) for shard in inputs.shards], policy.timeout
            )

        step = timeline.current_step() if timeline.recording else None
        if step is not None:
            contexts += timeline.contexts(call.replica_numbers, timings)
        replay, buffers = again, unchanged_on_failure(pool.buffers)
        if policy.rescue and tracked and again is None and not inside_replica():
            replay = Replay(policy, call, pool.blueprint, buffers, call.devices, partial(self._forward, module))
        with buffers, one_pass(contexts) as replica_context:
            run = partial(call_replica, call, policy.row_limits, inputs, roots, copies, timings)
            tasks = [partial(run, i) for i, _ in enumerate(call.devices)]  # step 4
            outputs = values_or_raise(run_together(tasks, call.devices, replica_context, policy.timeout, where), where)
            if timeline.recording:
                timeline.mark(timeline.GATHER)
            matched = Outputs(outputs, call.rules, call.sizes)  # step 5
            del outputs
            if replay is not None:
                replay.see_outputs(matched.groups)
            changes = replicas.each[0].registries.changes()
            of_buffers = groups_of_buffers(changes, len(roots)) if changes and tracked else []
            graphs = ReplicaGraphs(
                timings=timings, where=where, outputs=boundary_outputs(call, matched.groups, of_buffers), step=step
            )
            if tracked:
                own_leaves = [leaf for edge in inputs.edges for leaf in edge.tensors if leaf is not None]
                own_leaves += chain.from_iterable(replicas.leaves)
                with_objects = carries_objects(call)
                outside = self._search.outside_leaves(
                    pool, call, [*matched.groups, *of_buffers], where, own_leaves, with_objects
                )
                graphs.inputs = inputs.edges + [
                    BoundaryTensor(Replicate(), leaf.device, [leaf] * len(roots)) for leaf in outside.leaves
                ]
                graphs.live_parameters, graphs.large = pool.live_parameters, pool.large
                graphs.leaves, graphs.hooks = replicas.leaves, replicas.hooks
                graphs.callers_leaves, graphs.through_grad = outside.leaves, outside.through_grad
                graphs.has_reentrant_checkpoint = outside.with_reentrant_checkpoint
                graphs.keep = with_objects
                graphs.on_release = replicas.give_back
                graphs.pass_contexts, graphs.backward_context = contexts, backward_context
                graphs.sync_context = call.sync_context
                graphs.separate_memory, graphs.timeout_s = self._separate_memory, policy.timeout
                if replicas.is_remote:
                    graphs.buckets = pool.reduce_buckets
                if again is not None:
                    return again.take(graphs)
                graphs.replay = replay
                joined = join(graphs, [*inputs.live, *outside.leaves], own_leaves)  # step 6
            else:
                joined = graphs.joined_outputs()
            output = matched.put_together(joined)
        replicas.each[0].commit_buffers(pool, changes, joined[len(matched.groups) :])
        if not tracked:
            replicas.give_back()
        return output

    def open_lanes(self, module: nn.Module, call: LaneCall) -> Lanes:
        pool = self._pool_for(module, call.source)
        lanes = open_local_lanes(pool.blueprint, call, self._compile_lock, separate_memory=self._separate_memory)
        return Lanes(lanes, self._policy.timeout)

    def _pool_for(self, module: nn.Module, source: torch.device) -> ReplicaPool:
        """Return the replicas of `module` as it is now: those of the last forward, if nothing has changed."""
        pool = self._pool
        if pool is None or pool.source != source or not pool.blueprint.is_current(module):
            blueprint = Blueprint(module)
            check_device(module, [*blueprint.parameters.values(), *blueprint.buffers.values()], source)
            pool = ReplicaPool(blueprint, source)
            if not inside_replica():  # there, each replica of an outer module has this engine
                self._pool = pool if blueprint.is_reusable else None
        return pool

    def timings(self) -> list[ReplicaTiming]:
        return self._timings

    def refresh(self) -> None:
        self._search.clear()
        self._pool = None

    def close(self) -> None:
        self._timings = []
        self._pool = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), separate_memory=self._separate_memory), (), vars(self._policy)


def _contexts_with_exchange(
    name: str, call: Call, roots: Sequence[nn.Module], timeout_s: float | None
) -> tuple[list[PassContext], BackwardContext]:
    """Return the contexts of each pass over the replicas, and that of one backward through all graphs.

    In them the replicas exchange values: for random numbers of one device, for batch norm over all rows, or for both.

    Args:
        name: what messages call the model.
        timeout_s: for how long a replica waits for others without progress; None: for ever.

    Raises:
        RuntimeError: replicas on accelerators would have to wait for other processes in backward.
    """
    alone = len(roots) == 1
    contexts: list[PassContext] = [partial(own_streams, name, call.devices)]
    if alone and call.cross_process is None:
        return contexts, nullcontext
    if call.one_device_randomness and not alone:
        contexts = [partial(one_stream, name, call.sizes)]
    new_exchange: Callable[[int], Exchange] = partial(
        LocalExchange, cross_process=call.cross_process, timeout_s=timeout_s, names=call.where()
    )
    contexts.append(exchanging(len(roots), new_exchange))
    on_host = all(map(_devices.computes_on_host, call.devices))
    if not call.sync_batch_norm:
        return contexts, no_draws
    if call.cross_process is not None and not alone and not on_host:
        raise RuntimeError(_TOO_MANY_ACCELERATORS)
    backward_mode = BackwardMode.PER_REPLICA if on_host or alone else BackwardMode.ONE_CALL
    batch_norm = BatchNormOverReplicas(roots, backward_mode)
    contexts.append(batch_norm.one_pass)
    if on_host:
        return contexts, no_draws if call.one_device_randomness else nullcontext
    if backward_mode is BackwardMode.ONE_CALL:
        return contexts, batch_norm.recomputation
    return contexts, partial(batch_norm.single_replica, new_exchange)
