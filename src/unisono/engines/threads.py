"""The threads engine: one replica a thread, all in this process.

Its part of a forward (step.py):

    1. take a blueprint of the live module and check where its tensors are
    2. split the inputs into shards; they are leaves of the replica graphs
    3. stamp one replica a shard, with leaves of its own for the parameters
    4. call the replicas in parallel; the caller's thread runs the first
    5. if the structure is new, look for live tensors in the replica graphs

Assumes that the module does not change while a forward runs. Calls from several threads may overlap; each has replicas
of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from unisono.autograd.replica_graph import BackwardContext, BoundaryTensor, ParameterLeaves, Passes, ReplicaGraphs
from unisono.engines.base import Call, LaneCall, Lanes, OneGraphNeededError
from unisono.engines.compile_lock import CompileLock, kind_of, prepare_accelerators
from unisono.engines.failure_policy import FailureOptions, FailurePolicy
from unisono.engines.lanes import open_local_lanes
from unisono.engines.replay import Replay, run_recovering
from unisono.engines.replica import GraphSearch, Inputs, ReplicaPool, call_replica, carries_objects
from unisono.engines.step import ForwardPass
from unisono.primitives.blueprint import Blueprint, collector_paused, warn_of_observers
from unisono.primitives.checks import check_flag
from unisono.primitives.outputs import Group
from unisono.primitives.parallel_apply import values_or_raise
from unisono.primitives.placements import Replicate
from unisono.primitives.replicate import check_device, unchanged_on_failure
from unisono.runtime import devices as _devices
from unisono.runtime import timeline
from unisono.runtime.exchange import Exchange, LocalExchange, exchanging
from unisono.runtime.rng import own_streams
from unisono.runtime.streams import Copies
from unisono.runtime.thread_pool import PassContext, ReplicaContext, inside_replica, one_pass, run_together
from unisono.runtime.timeline import ReplicaTiming
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
            same within float rounding. How many rows fit is logged and remembered.
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
            step = _ThreadsForward(self, module, call, copies, again)
            if not inside_replica():
                self._timings = step.timings
            return step.forward()

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
            blueprint.keep()
            pool = ReplicaPool(blueprint, source, separate_memory=self._separate_memory)
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


class _ThreadsForward(ForwardPass[ReplicaContext]):
    """One forward; made, it has its inputs and its replicas, whose copies may still be in flight."""

    def __init__(self, engine: Threads, module: nn.Module, call: Call, copies: Copies, again: Replay | None) -> None:
        super().__init__(call, again)
        self._engine, self._copies = engine, copies
        self.graphs = ReplicaGraphs(self.timings, call.where())
        with collector_paused:
            if timeline.recording:
                timeline.mark(timeline.REPLICATE)
            pool = self.pool = engine._pool_for(module, call.source)
            if timeline.recording:
                timeline.mark(timeline.SCATTER)
            self._inputs = Inputs(call, self.tracked, copies)
            if timeline.recording:
                timeline.mark(timeline.REPLICATE)
            self.replicas = pool.take(call.devices, self.tracked, copies)
        if pool.blueprint.observers:
            if self.tracked and again is None and call.sync_context is None:
                raise OneGraphNeededError
            warn_of_observers(pool.blueprint, call.devices)
        if pool.blueprint.compiled:
            prepare_accelerators(pool.blueprint, call.devices, _CUDA_GRAPHS if len(call.devices) > 1 else None)
        self.buffers = unchanged_on_failure(pool.buffers)
        policy = engine._policy
        if policy.rescue and self.tracked and again is None and not inside_replica():
            forward = partial(engine._forward, module)
            self.replay = Replay(policy, call, pool.blueprint, self.buffers, call.devices, forward)
        self.graphs.passes = self._passes(module)

    def _passes(self, module: nn.Module) -> Passes:
        """Return what is around each pass over the replicas."""
        call, timeout_s, name = self.call, self._engine._policy.timeout, type(module).__name__
        contexts: list[PassContext] = [partial(own_streams, name, call.devices)]
        one_call: BackwardContext = nullcontext
        if call.sync_batch_norm:
            contexts, one_call = _contexts_with_exchange(name, call, self.replicas.roots, timeout_s)
        elif self.pool.blueprint.compiled:  # not where replicas wait for each other: then none may wait for a lock
            kinds = [(self.tracked, module.training, *kind_of(shard)) for shard in self._inputs.shards]
            contexts += self._engine._compile_lock.if_new(kinds, timeout_s)
        if timeline.recording and (step := timeline.current_step()) is not None:
            self.graphs.step = step
            contexts += timeline.contexts(call.replica_numbers, self.timings)
        return Passes(contexts, one_call, timeout_s)

    def opened(self) -> AbstractContextManager[ReplicaContext]:
        return one_pass(self.graphs.passes.contexts)

    def run(self, opened: ReplicaContext) -> list[Any]:
        call, graphs, policy = self.call, self.graphs, self._engine._policy
        of_call = call, policy.row_limits, self._inputs, self.replicas.roots, self._copies, self.timings
        tasks = [partial(call_replica, *of_call, i) for i, _ in enumerate(call.devices)]
        # No variable may hold the outcomes: an error's traceback refers to this frame.
        return values_or_raise(run_together(tasks, call.devices, opened, policy.timeout, graphs.where), graphs.where)

    def link(self, groups: Sequence[Group]) -> Sequence[torch.Tensor]:
        call, graphs, pool, replicas, inputs = self.call, self.graphs, self.pool, self.replicas, self._inputs
        own_leaves = [leaf for given in inputs.of_boundary for leaf in given.tensors if leaf is not None]
        own_leaves += chain.from_iterable(replicas.leaves)
        graphs.keep = carries_objects(call)
        graphs.outside = self._engine._search.outside_leaves(pool, call, groups, graphs.where, own_leaves, graphs.keep)
        outside = graphs.outside.leaves
        of_all = len(call.devices)
        graphs.inputs = inputs.of_boundary + [
            BoundaryTensor(Replicate(), leaf.device, [leaf] * of_all) for leaf in outside
        ]
        buckets = pool.reduce_buckets if replicas.is_remote else None
        graphs.parameters = ParameterLeaves(pool.live_parameters, replicas.leaves, replicas.hooks, pool.large, buckets)
        graphs.on_release = replicas.give_back
        graphs.sync_context = call.sync_context
        live = [*inputs.live, *outside]
        if [leaf for leaf in own_leaves if leaf.grad is not None] and not self.is_again:
            graphs.pass_on(live, graphs.joined([graph.take_gradients() for graph in graphs.graphs()]))
        return live


def _contexts_with_exchange(
    name: str, call: Call, roots: Sequence[nn.Module], timeout_s: float | None
) -> tuple[list[PassContext], BackwardContext]:
    """Return the contexts of each pass over the replicas, and that of one backward through all graphs.

    In them the replicas exchange values for batch norm over all rows. Messages call the model `name`; a replica waits
    for others for `timeout_s` without progress, None: for ever.
    """
    alone = len(roots) == 1
    contexts: list[PassContext] = [partial(own_streams, name, call.devices)]
    if alone and call.cross_process is None:
        return contexts, nullcontext
    new_exchange: Callable[[int], Exchange] = partial(
        LocalExchange, cross_process=call.cross_process, timeout_s=timeout_s, names=call.where()
    )
    contexts.append(exchanging(len(roots), new_exchange))
    on_host = all(map(_devices.computes_on_host, call.devices))
    if call.cross_process is not None and not alone and not on_host:
        raise RuntimeError(_TOO_MANY_ACCELERATORS)
    backward_mode = BackwardMode.PER_REPLICA if on_host or alone else BackwardMode.ONE_CALL
    batch_norm = BatchNormOverReplicas(roots, backward_mode)
    contexts.append(batch_norm.one_pass)
    if on_host:
        return contexts, nullcontext
    if backward_mode is BackwardMode.ONE_CALL:
        return contexts, batch_norm.recomputation
    return contexts, partial(batch_norm.single_replica, new_exchange)
