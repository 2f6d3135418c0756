"""The processes engine: the first replica in this process, each other in a worker process of its own.

One forward, step by step:

    1. take a blueprint of the live module; see what changed since the workers were last updated (module_sync.py)
    2. cut the inputs into shards; write each worker's shard into memory that it maps, and send it one message
    3. stamp the first replica and call it in this thread, meanwhile
    4. read the workers' replies; their outputs are in memory that this process maps
    5. match the outputs and join them through the boundary

Backward does the same with gradients: output gradients go to the workers, the leaves' gradients come back, one message
and one reply a worker (remote_graph.py). A worker keeps the graph of a forward as long as the caller keeps its own.

The transport decides how parameters reach the workers and how their gradients come back (reducers/base.py).

Guarantees
    - No tensor that a caller gets is in the memory of messages, so that memory can be reused at once.
    - An engine runs one step at a time: calls from several threads wait for each other. A call from inside a step of
      the same thread (a hook that calls the model) runs all replicas in this process, one after the other.
    - If a step is left half done (a dead worker, Ctrl-C), the worker group is ended; the next forward starts another.

Assumes, as the threads engine does, that the module does not change while a forward runs.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.autograd.replica_graph import BoundaryTensor, ParameterLeaves, Passes
from unisono.engines.base import Call, LaneCall, Lanes
from unisono.engines.compile_lock import CompileLock
from unisono.engines.failure_policy import FailureOptions, FailurePolicy
from unisono.engines.lanes import open_local_lanes
from unisono.engines.processes.lanes import WorkerLanes, forward_of_lane
from unisono.engines.processes.messages import Forward, Reply, TensorRef, number_of_input
from unisono.engines.processes.module_sync import ModuleSync, Update
from unisono.engines.processes.pickling import dumps
from unisono.engines.processes.remote_graph import RemoteGraphs
from unisono.engines.processes.worker_group import StepLock, WorkerGroup
from unisono.engines.replay import Replay, parts_of, run_recovering
from unisono.engines.replica import GraphSearch, Inputs, ReplicaPool, call_replica, carries_objects
from unisono.engines.step import ForwardPass
from unisono.engines.threads import Threads
from unisono.primitives.blueprint import HOOKS, Blueprint
from unisono.primitives.checks import check_flag
from unisono.primitives.outputs import Group
from unisono.primitives.placements import Replicate
from unisono.primitives.replicate import check_device, check_layouts, unchanged_on_failure
from unisono.runtime import devices as _devices
from unisono.runtime import timeline, torch_private
from unisono.runtime.errors import annotate, log_once
from unisono.runtime.rng import SeededStreams
from unisono.runtime.streams import Copies
from unisono.runtime.thread_pool import (
    Outcome,
    PassContext,
    divided_intra_op_threads,
    inside_replica,
    one_pass,
    run_together,
)
from unisono.runtime.thread_state import ProcessState, ThreadState
from unisono.runtime.timeline import ReplicaTiming
from unisono.sync_batch_norm.function_mode import exchange_contexts

_HOOKS_OF_EVERY_MODULE = (
    "hooks are registered for every module of this process, and workers do not have them: as long as they are, all "
    'replicas run in this process, as with engine="threads".'
)
_WORKERS_OF_A_MAP = (
    "the outputs of a map are being iterated over, and its batches have the model's workers: until it ends, or is "
    "closed, other forwards and maps of the model run in this process, which is slower."
)
_NO_WORKERS = (
    'engine="processes" forks worker processes and shares memory with them by file descriptors, which this system '
    '({platform}) does not have: use engine="threads".'
)


class Processes(FailureOptions):
    """Run each replica but the first in a process of its own: `engine="processes"`, or this class with options.

        >>> engine = unisono.Processes(on_worker_loss="retry", timeout=60)
        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"], engine=engine)
        >>> model(torch.zeros(30, 5)).shape
        torch.Size([30, 2])
        >>> model.close()

    Workers start with the first forward, and end with the wrapper or with `close()`. Each wrapper needs an engine of
    its own.

    Args:
        on_worker_loss: what becomes of a step whose worker process dies. "raise": `ReplicaDied`; parameters, gradients
            and buffers are as before the step, and the next forward starts other workers. "retry": the step is run
            again on other workers, from the same inputs, buffers and random state, so it ends with exactly the numbers
            that it would have had. Its inputs are copied for that. Other effects of the module's forward happen twice.
            See docs/reliability.md.
        rescue, timeout: as in `Threads`.
        share_memory: whether replicas on the CPU share parameters in memory. If not, torch.distributed sends parameters
            and reduces gradients, as on other devices.

    Raises:
        TypeError, ValueError: options that cannot be used, with what was expected; also when one is assigned.
        OSError: the system has no `fork` (Windows).
    """

    def __init__(
        self,
        *,
        on_worker_loss: str = "raise",
        rescue: bool = False,
        timeout: float | None = None,
        share_memory: bool = True,
    ) -> None:
        if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
            raise OSError(_NO_WORKERS.format(platform=sys.platform))
        super().__init__(FailurePolicy(on_worker_loss, rescue, timeout))
        self._share_memory = check_flag(share_memory, "share_memory")
        self._threads_engine = Threads.with_policy(self._policy)  # for calls that cannot leave this thread
        self._step_lock = StepLock()
        self._module_sync = ModuleSync()
        self._worker_group: WorkerGroup | None = None
        self._lanes: WorkerLanes | None = None  # the last ones that were opened
        self._timings: list[ReplicaTiming] = []
        self._pool: ReplicaPool | None = None  # of the first replica
        self._linked_pool: ReplicaPool | None = None  # the one whose leaves are described by the following
        self._remote_leaves: dict[int, torch.Tensor] = {}
        self._leaf_forms: list[tuple[Any, ...]] = []
        self._search = GraphSearch()

    @property
    def on_worker_loss(self) -> str:
        """What becomes of a step whose worker process dies: "raise" or "retry"."""
        return self._policy.on_worker_loss

    @on_worker_loss.setter
    def on_worker_loss(self, value: str) -> None:
        self._policy.on_worker_loss = value

    def forward(self, module: nn.Module, call: Call) -> Any:
        if inside_replica() or len(call.devices) == 1 or self._workers_belong_to_lanes():
            return self._threads_engine.forward(module, call)
        with self._step_lock as is_outermost:
            if self._runs_here(is_outermost):
                return self._threads_engine.forward(module, call)
            if self._policy.recovers:
                return run_recovering(self._policy, call, module, lambda _: self._forward(module, call))
            return self._forward(module, call)

    def open_lanes(self, module: nn.Module, call: LaneCall) -> Lanes:
        if inside_replica() or len(call.devices) == 1 or self._workers_belong_to_lanes():
            return self._threads_engine.open_lanes(module, call)
        with self._step_lock as is_outermost:
            if self._runs_here(is_outermost):
                return self._threads_engine.open_lanes(module, call)
            worker_group, pool = self._prepared(module, call)
            [here] = open_local_lanes(pool.blueprint, replace(call, devices=call.devices[:1]), CompileLock())
            update = self._pack(pool.blueprint, call, worker_group)
            if update.has_content:
                self._send_update(worker_group, update, call)
            self._module_sync.commit()
            self._lanes = WorkerLanes(worker_group, self._step_lock, call, here, retries=self._policy.retries)
            return self._lanes

    def _runs_here(self, is_outermost: bool) -> bool:
        """Return whether all replicas of a call run in this process, although workers are free."""
        if is_outermost and torch_private.hooks_of_every_module():
            log_once(_HOOKS_OF_EVERY_MODULE)
            return True
        return not is_outermost

    def _prepared(self, module: nn.Module, call: Call | LaneCall) -> tuple[WorkerGroup, ReplicaPool]:
        """Return the workers for a call, and the first replicas of the module as it is now (step 1)."""
        worker_group = self._worker_group_for(call.devices)
        if len(call.devices) - 1 > worker_group.num_in_sync:
            self._module_sync.invalidate()  # some workers have missed an update
        return worker_group, self._pool_of(self._module_sync.diff(module), call.source)

    def _workers_belong_to_lanes(self) -> bool:
        """Return whether lanes are open that go on to use the workers; say once what that means."""
        if self._lanes is None or not self._lanes.are_open:
            return False
        log_once(_WORKERS_OF_A_MAP)
        return True

    def _forward_again(self, module: nn.Module, call: Call, again: Replay) -> None:
        with self._step_lock as is_outermost:
            if not is_outermost:
                raise RuntimeError("a step cannot be run again inside another step of the same model")
            self._forward(module, call, again)

    def _forward(self, module: nn.Module, call: Call, again: Replay | None = None) -> Any:
        """Run a forward and return its output; where it is run `again`, its graphs are all that is wanted."""
        step = _ProcessesForward(self, module, call, again)
        self._timings = step.timings
        return step.forward()

    def _pool_of(self, blueprint: Blueprint, source: torch.device) -> ReplicaPool:
        """Return the pool of the first replicas; those of other blueprints are dropped, with what they refer to."""
        if self._pool is None or self._pool.blueprint is not blueprint or self._pool.source != source:
            check_device(blueprint.root, [*blueprint.parameters.values(), *blueprint.buffers.values()], source)
            check_layouts(blueprint.root)
            self._pool, self._linked_pool = ReplicaPool(blueprint, source), None
            self._threads_engine.refresh()
        return self._pool

    def _pack(self, blueprint: Blueprint, call: Call | LaneCall, worker_group: WorkerGroup) -> Update:
        """Return what the workers have to be sent so that they have the module as it is, and take it as sent."""
        update = self._module_sync.pack(blueprint, call.source, worker_group.transport.shares_parameters)
        if update.module is not None:
            _log_if_hooks(blueprint)
        if update.has_content:
            worker_group.num_in_sync = len(call.devices) - 1
        return update

    def _send(
        self,
        worker_group: WorkerGroup,
        update: Update,
        num_replicas: int,
        message_for: Callable[[int], Forward],
    ) -> None:
        """Send the workers the messages for their replicas, and what changed in the module."""
        transport = worker_group.transport
        segments = [*self._module_sync.segments, *(transport.segments if update.sent else ())]
        for i in range(1, num_replicas):
            message = message_for(i)
            message.update, message.rendezvous = update, transport.rendezvous(i) if update.sent else None
            worker_group.send(i - 1, message, segments)
        if not transport.shares_parameters:
            with worker_group.collective():
                flats = self._module_sync.take_flats()
                transport.begin_sending(flats, tuple(range(num_replicas)), worker_group.poll)

    def _send_update(self, worker_group: WorkerGroup, update: Update, call: LaneCall) -> None:
        """Send all workers what changed in the module, and wait until they have it."""
        where = call.where()
        with torch.no_grad(), worker_group.step(where):
            self._send(worker_group, update, len(where), lambda i: forward_of_lane(call, i, None, seed=0))
            self._end_sending(worker_group)
            replies = worker_group.replies()
            if errors := [(where[i + 1], reply.error.exception()) for i, reply in replies.items() if reply.error]:
                raise annotate(errors)

    def _end_sending(self, worker_group: WorkerGroup) -> None:
        """Wait until the workers have what `_send` has begun to send."""
        if not worker_group.transport.shares_parameters:
            with worker_group.collective():
                worker_group.transport.end_sending(worker_group.poll)

    def _leaves_of(self, pool: ReplicaPool, from_outside: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return a tensor like each leaf that workers have; the same object, as long as they are of the same forms."""
        if self._linked_pool is pool:
            return self._remote_leaves
        self._linked_pool, leaves = pool, [*pool.live_parameters, *from_outside]
        forms = [(leaf.dtype, leaf.size(), leaf.stride(), leaf.layout, type(leaf)) for leaf in leaves]
        if forms != self._leaf_forms:
            self._leaf_forms, self._remote_leaves = forms, {}
        self._remote_leaves.update(enumerate(leaves))
        return self._remote_leaves

    def check(self, devices: Sequence[torch.device], *, sync_batch_norm: bool) -> None:
        named = ", ".join(map(str, devices))
        if not all(map(_devices.exists_for_other_processes, devices)):
            raise ValueError(
                f'engine="processes" on {named}: simulated devices exist in this process only. Use engine="threads".'
            )
        if sync_batch_norm and not all(map(_devices.is_cpu, devices)):
            raise ValueError(
                f'sync_batch_norm=True with engine="processes" on {named}: replicas in other processes can exchange '
                'statistics on the CPU only, as yet. Use engine="threads".'
            )

    def why_no_verbs(self, module: nn.Module) -> str | None:
        return 'engine="processes" does not call it: replicas are in other processes. Use engine="threads".'

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), share_memory=self._share_memory), (), vars(self._policy)

    def timings(self) -> list[ReplicaTiming]:
        return self._timings or self._threads_engine.timings()

    def refresh(self) -> None:
        with self._step_lock:
            self._module_sync.invalidate()
            self._search.clear()

    def close(self) -> None:
        with self._step_lock:
            self._timings = []
            self._threads_engine.close()
            self._end_worker_group()

    def _worker_group_for(self, devices: Sequence[torch.device]) -> WorkerGroup:
        """Return the worker group, with more workers if need be; another one if it has ended, or cannot have them."""
        group, timeout_s = self._worker_group, self._policy.timeout
        if group is not None and group.timeout_s != timeout_s:
            group.set_timeout(timeout_s)
        if group is not None and not group.ended and group.devices[: len(devices)] == [*devices]:
            return group
        if group is not None and group.can_grow(devices, self._share_memory):
            group.grow(devices)
            return group
        self._end_worker_group()
        self._worker_group = WorkerGroup(devices, self._share_memory, timeout_s)
        if group is not None:
            self._worker_group.transport.succeed(group.transport)
        return self._worker_group

    def _end_worker_group(self) -> None:
        worker_group, self._worker_group, self._lanes = self._worker_group, None, None
        self._module_sync.invalidate()
        if worker_group is not None:
            worker_group.end(graceful=True)


class _ProcessesForward(ForwardPass[int]):
    """One forward; made, it has its workers."""

    graphs: RemoteGraphs

    def __init__(self, engine: Processes, module: nn.Module, call: Call, again: Replay | None) -> None:
        super().__init__(call, again)
        self._engine = engine
        self._objects: list[torch.Tensor] = []  # tensors inside objects in the inputs
        self._replies: dict[int, Reply] = {}
        where = call.where()
        if timeline.recording:
            timeline.mark(timeline.REPLICATE)
        self._group, self.pool = engine._prepared(module, call)
        policy, self.buffers = engine._policy, unchanged_on_failure(self.pool.buffers)
        if again is None and self.tracked and policy.recovers:
            forward = partial(engine._forward_again, module)
            self.replay = Replay(policy, call, self.pool.blueprint, self.buffers, call.devices[:1], forward)
        number = next(self._group.graph_numbers)
        self.graphs = RemoteGraphs(
            self.timings,
            where,
            worker_group=self._group,
            step_lock=engine._step_lock,
            new_streams=partial(SeededStreams, len(where)),
            number=number,
            kept=self._group.keep_graph(number),
        )

    @contextmanager
    def opened(self) -> Iterator[int]:
        devices = self.call.devices
        with (
            divided_intra_op_threads(devices) as num_threads,
            self._group.step(self.graphs.where),
            Copies(devices[:1]) as self._copies,
        ):
            yield num_threads

    def run(self, opened: int) -> list[Any]:
        call, graphs, limits = self.call, self.graphs, self._engine._policy.row_limits
        if timeline.recording:
            timeline.mark(timeline.SCATTER)
            graphs.step = timeline.current_step()
        inputs = self._inputs = Inputs(call, self.tracked, self._copies, num_here=1)
        streams = graphs.new_streams()
        self._send(streams.seeds, num_threads=opened)
        if timeline.recording:
            timeline.mark(timeline.REPLICATE)
        self.replicas = self.pool.take(call.devices[:1], self.tracked, self._copies)
        graphs.on_release = self.replicas.give_back
        graphs.passes = Passes(self._contexts())
        first = partial(call_replica, call, limits, inputs, self.replicas.roots, self._copies, self.timings, 0)
        with streams as of_streams, one_pass([*of_streams, *graphs.passes.contexts]) as replica_context:
            outcomes: list[Outcome[Any]] = run_together([first], call.devices[:1], replica_context)
            return graphs.values_of(outcomes, streams, self._sent, self._output_of)

    def _contexts(self) -> list[PassContext]:
        """Return what is around each pass of this process's replica, beside the random streams."""
        call = self.call
        contexts: list[PassContext] = []
        if call.sync_batch_norm:
            contexts += exchange_contexts(
                [*self.replicas.roots, *[None] * (len(call.devices) - 1)],
                partial(self._group.open_exchange, cross_process=call.cross_process),
                sync_batch_norm=call.sync_batch_norm,
            )
        if timeline.recording:
            contexts += timeline.contexts(call.replica_numbers, self.timings)
        return contexts

    def _sent(self, _: bool) -> None:
        """Take note that the workers have what they were sent."""
        self._engine._module_sync.commit()
        self._engine._end_sending(self._group)

    def _output_of(self, index: int, reply: Reply) -> Any:
        self._replies[index], self.timings[index + 1].forward_s = reply, reply.seconds
        return self.graphs.output_of(index, reply)

    def _send(self, seeds: Sequence[int | bytes], num_threads: int) -> None:
        """Send every worker its forward; note the tensors inside objects in the inputs that need a gradient."""
        call, engine, root = self.call, self._engine, self.pool.blueprint.root
        limits, thread, process = engine._policy.row_limits, ThreadState.capture(), ProcessState.capture()
        numbered = [(leaf, number_of_input(k)) for k, of in enumerate(self._inputs.of_boundary) for leaf in of.tensors]
        leaves = {id(leaf): number for leaf, number in numbered if leaf is not None}
        self._with_objects = self.tracked and carries_objects(call)
        may_search = self.tracked and not self.is_again
        is_searched = may_search and (self._with_objects or engine._search.is_due(self.pool, call))

        def message_for(i: int) -> Forward:
            return Forward(
                thread=thread,
                process=process,
                graph=self.graphs.number,
                method=call.method,
                shard=dumps(self._inputs.shards[i], partial(self._reference, i, leaves)),
                seed=seeds[i],
                num_threads=num_threads,
                replica=i,
                num_replicas=len(call.devices),
                device=call.devices[i],
                parts=parts_of(limits, call, root, i) if call.parts > 1 or limits else None,
                rescue=engine._policy.rescue,
                is_searched=is_searched,
                sync_batch_norm=call.sync_batch_norm,
                is_recorded=self.graphs.step is not None,
            )

        update = engine._pack(self.pool.blueprint, call, self._group)
        engine._send(self._group, update, len(call.devices), message_for)

    def _reference(self, replica: int, leaves: dict[int, int], tensor: torch.Tensor) -> TensorRef:
        """Put a tensor of a worker's inputs into its send buffer; return its reference.

        `leaves` has the number of the leaf of each tensor that needs a gradient, by its id.
        """
        send_buffer = self._group.workers[replica - 1].send_buffer
        leaf = None
        if self.tracked and tensor.requires_grad:
            leaf = leaves.get(id(tensor))
            if leaf is None:  # not one of the inputs' leaves: it was inside an object
                leaf = leaves[id(tensor)] = number_of_input(len(self._inputs.of_boundary) + len(self._objects))
                self._objects.append(tensor)
        target = self.call.devices[replica] if id(tensor) in self._inputs.parts_elsewhere else tensor.device
        return TensorRef.put(send_buffer, tensor, leaf=leaf, requires_grad=tensor.requires_grad, device=target)

    def link(self, groups: Sequence[Group]) -> Sequence[torch.Tensor]:
        call, graphs, pool, replicas, inputs = self.call, self.graphs, self.pool, self.replicas, self._inputs
        own_leaves = [given.tensors[0] for given in inputs.of_boundary if given.tensors[0] is not None]
        own_leaves += replicas.leaves[0]
        of_first = [Group(group.tensors[:1], group.placement) for group in groups]
        search = self._engine._search
        may_differ = self._with_objects or any([reply.found_leaves for reply in self._replies.values()])
        graphs.outside = search.outside_leaves(pool, call, of_first, graphs.where[:1], own_leaves, may_differ)
        live = self._link_inputs()
        leaves = replicas.leaves * len(graphs.where)
        graphs.parameters = ParameterLeaves(pool.live_parameters, leaves, replicas.hooks)
        graphs.sync_context, graphs.keep = call.sync_context, bool(self._objects)
        if not self.is_again:
            has_own = bool([leaf for leaf in own_leaves if leaf.grad is not None])
            if has_own or any([reply.gradients for reply in self._replies.values()]):
                of_inputs, of_parameters = graphs.graph(0).take_gradients()
                graphs.pass_on(live, graphs.joined_with_replies(of_inputs, of_parameters, self._replies))
        return live

    def _link_inputs(self) -> list[torch.Tensor]:
        """Give the graphs the boundary's inputs; return the live tensors behind them."""
        graphs, pool, objects = self.graphs, self.pool, self._objects
        num_workers = len(graphs.where) - 1
        replicate = Replicate()
        boundary_inputs = [*self._inputs.of_boundary]
        for tensor in objects:  # the first replica's graph contains it already
            boundary_inputs.append(BoundaryTensor(replicate, tensor.device, [None, *[tensor.detach()] * num_workers]))
        graphs.keys = [*map(number_of_input, range(len(boundary_inputs)))]
        from_outside = self._engine._module_sync.tensors_from_outside()
        in_workers = {id(tensor): n for n, tensor in enumerate(from_outside, len(pool.live_parameters))}
        in_first = {id(leaf): leaf for leaf in graphs.outside.leaves}
        outside = {id(tensor): tensor for tensor in from_outside} | in_first
        for key, tensor in outside.items():
            of_workers = tensor if key in in_workers else None
            of_first = in_first.get(key)
            boundary_inputs.append(BoundaryTensor(replicate, tensor.device, [of_first, *[of_workers] * num_workers]))
            graphs.keys.append(in_workers.get(key))
        graphs.remote_leaves = self._engine._leaves_of(pool, from_outside)
        graphs.inputs = boundary_inputs
        return [*self._inputs.live, *objects, *outside.values()]

    def release(self) -> None:
        self.graphs.release()


def _log_if_hooks(blueprint: Blueprint) -> None:
    for module in blueprint.modules:
        for name in HOOKS:
            for hook in module.__dict__[name].values():
                if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                    log_once(
                        f'{type(module).__name__} has hooks: with engine="processes" they run in every worker on '
                        "copies of what they refer to; what they change there stays there."
                    )
                    return
