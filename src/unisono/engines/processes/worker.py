"""A worker: runs one replica in a process of its own, and replies to the caller's messages.

It replies to each message before it reads the next:

    1. map the segments that came with the message, and drop what the caller has released
    2. forward: bring the worker's module up to date, stamp a replica from it, call the replica, keep its graph
       backward: run a kept graph's backward, and reduce or return the leaves' gradients
    3. send the reply: tensors in the send buffer, or the error, with its warnings and log messages
    4. after the reply, stamp the next replica, while the caller is busy

Its module (worker_module.py) has parameters in shared memory, or its own. fork_server.py starts and ends the process.
"""

import contextlib
import importlib
import logging
import os
import pickle
import sys
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from unisono.autograd.replica_graph import Gradients, ReplicaGraph, gradients_of
from unisono.engines.processes.channel import Channel
from unisono.engines.processes.messages import Backward, Forward, RemoteError, Reply, TensorRef
from unisono.engines.processes.pickling import classes_by_value, dumps, loads
from unisono.engines.processes.reducers.base import WorkerReducer
from unisono.engines.processes.reducers.collectives import CollectiveReducer, ProcessGroups, Rendezvous
from unisono.engines.processes.reducers.shared_memory import ReduceBuffers, SharedMemoryConfig, SharedMemoryReducer
from unisono.engines.processes.remote_exchange import RemoteExchange
from unisono.engines.processes.shared_memory import Segment, SendBuffer
from unisono.engines.processes.worker_module import WorkerModule
from unisono.engines.replica import Replicas, call_with_shard, look_for_live_tensors
from unisono.primitives.outputs import Group
from unisono.primitives.placements import Single
from unisono.runtime import affinity, timeline, torch_private
from unisono.runtime import devices as _devices
from unisono.runtime.buckets import Bucket
from unisono.runtime.errors import log
from unisono.runtime.rng import digest_of_states
from unisono.runtime.thread_pool import PassContext, ReplicaContext, one_pass, run_together
from unisono.runtime.timeline import StepRecording
from unisono.sync_batch_norm.function_mode import exchange_contexts

_SPIN_S = 0.0002


@dataclass(slots=True)
class Graph:
    """A replica's graph as the worker keeps it.

    Attributes:
        keys: the numbers of its inputs' leaves.
        replica_context: the context of each pass.
        replicas: what it needs.
        has_higher: whether a graph of its gradients shares nodes with it.
    """

    graph: ReplicaGraph
    keys: list[int]
    replica_context: ReplicaContext
    replicas: Replicas
    has_higher: bool = False

    @property
    def all_keys(self) -> list[int]:
        """The numbers of all its leaves."""
        return [*self.keys, *range(len(self.graph.parameters))]

    def mask_of(self, needed: frozenset[int | None] | None) -> list[bool] | None:
        """Return for each of its leaves whether it is one of `needed`, by number; None: all are needed."""
        return None if needed is None else [key in needed for key in self.all_keys]


class Worker:
    """Replies to messages."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._segments: dict[int, Segment] = {}
        self._send_buffer = SendBuffer()
        self._known_segment = -1
        self._graphs: dict[int, Graph] = {}
        self._idle: Replicas | None = None  # to be given back after the reply
        self._module: WorkerModule | None = None
        self._placed: dict[int, torch.Tensor] = {}  # the places of small gradients, by leaf
        self._device = torch.device("cpu")
        self._reduce_buffers: ReduceBuffers | None = None
        self._groups: ProcessGroups | None = None
        self._parameter_buckets: Sequence[Bucket] = ()
        self._gradient_buckets: Sequence[Bucket] = ()
        self._in_collective = False  # whether the other replicas wait for this one's part in a collective
        self._in_update = False  # whether the module is not as it is in the caller, yet
        self._found: list[weakref.ref[torch.Tensor]] = []  # leaves in its graphs that are not the module's
        self._log_messages: list[str] = []
        self._clocks = cache(_devices.DeviceClock)
        log.addHandler(_LogCollector(self._log_messages))
        log.propagate = False

    def serve(self) -> None:
        """Reply to messages until the channel closes."""
        while True:
            self._channel.spin(_SPIN_S)
            try:
                message = self._next_message()
            except OSError as error:  # no memory, or no file descriptor, for what the caller shares
                self._send(Reply(error=RemoteError.of(error), out_of_step=True))
                continue
            tracked = message.thread.grad_enabled or isinstance(message, Backward)
            reply = self._reply_with_warnings(message)
            del message
            has_failed = reply.error is not None
            self._send(reply)
            del reply
            self._make_ready(tracked, has_failed)

    def _send(self, reply: Reply) -> None:
        segment = self._send_buffer.segment
        is_new, self._known_segment = segment.number != self._known_segment, segment.number
        if is_new:
            reply.segments = [(segment.number, segment.num_bytes)]
        sys.stdout.flush()
        body = pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)
        self._channel.send(body, [segment.fd] if is_new else [])

    def _make_ready(self, tracked: bool, has_failed: bool) -> None:
        """Give back the last replica, and stamp the next one, while the caller is busy."""
        idle, self._idle = self._idle, None
        if has_failed:
            return
        if idle is not None:
            idle.give_back()
            del idle
        if self._module is not None:
            self._module.prepare(tracked)

    def _next_message(self) -> Forward | Backward:
        """Wait for a message and do what every message asks for.

        Raises:
            OSError: the system refuses what that takes.
        """
        body, fds = self._channel.receive()
        message: Forward | Backward = pickle.loads(body)
        if message.cores is not None:
            affinity.bind(message.cores)
        if message.segments:
            self._map_segments(message.segments, deque(fds))
        for number in message.freed:
            del self._segments[number]
        for number in message.released_graphs:
            kept = self._graphs.pop(number, None)
            if kept is not None and not kept.has_higher:
                kept.graph.outputs = ()
                kept.replicas.give_back()
        if message.process is not None:
            message.process.set()
        return message

    def _map_segments(self, segments: Sequence[tuple[int, int]], fds: deque[int]) -> None:
        try:
            for number, num_bytes in segments:
                self._segments[number] = Segment(fds.popleft(), num_bytes, number)
        finally:
            for fd in fds:  # those that were not taken
                os.close(fd)

    def _reply_with_warnings(self, message: Forward | Backward) -> Reply:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            reply = self._recorded_reply_to(message) if message.is_recorded else self._reply_to(message)
            reply.warnings = [(str(w.message), _builtin(w.category), w.filename, w.lineno) for w in recorded]
            reply.log_messages, self._log_messages[:] = self._log_messages[:], []
        return reply

    def _recorded_reply_to(self, message: Forward | Backward) -> Reply:
        step = StepRecording(self._clocks)
        phase = timeline.FORWARD if isinstance(message, Forward) else timeline.BACKWARD
        with timeline.while_recording(), step.recorded(phase, timeline.SCATTER):
            reply = self._reply_to(message)
        reply.spans = next((replica.track.spans() for replica in step.replicas.values() if replica.track), [])
        return reply

    def _reply_to(self, message: Forward | Backward) -> Reply:
        reply = Reply()
        collective = message.rendezvous if isinstance(message, Forward) else message.reducer_config
        self._in_collective = collective is not None
        self._in_update = isinstance(message, Forward)
        try:
            if torch.get_num_threads() != message.num_threads:
                torch.set_num_threads(message.num_threads)
            if isinstance(message, Forward):
                self._device = message.device
            _devices.seed(self._device, message.seed)
            random_states = _devices.generator_states(self._device)
            started = time.perf_counter()
            if isinstance(message, Forward):
                self._forward(message, reply)
            elif message.create_graph_as is not None:
                self._differentiate(message, message.create_graph_as, reply)
            else:
                self._backward(message, reply)
            reply.seconds += time.perf_counter() - started
            states_now = _devices.generator_states(self._device)
            reply.random_digest = digest_of_states(random_states, states_now)
            reply.specs = self._send_buffer.flush()
        except BaseException as error:  # noqa: BLE001 - the caller handles it
            self._send_buffer.clear()
            reply.value, reply.gradients, reply.all_placed = None, [], False
            reply.error = RemoteError.of(error)
            reply.out_of_step, reply.missed_update = self._in_collective, self._in_update
            traceback.clear_frames(error.__traceback__)
        return reply

    # ---- forward ----

    def _forward(self, message: Forward, reply: Reply) -> None:
        timeline.mark(timeline.REPLICATE)
        module = self._updated_module(message)
        if message.shard is None:
            return
        tracked = message.thread.grad_enabled
        leaves: dict[int, torch.Tensor] = {}  # of the inputs, and of tensors from outside the module
        with message.thread.applied():
            replicas = module.take(tracked)
            (root,) = replicas.roots
            timeline.mark(timeline.SCATTER)
            shard = self._shard(message, message.shard, leaves)
            leaves.update(enumerate(module.outside if tracked else (), len(replicas.leaves[0])))
            replica_context = self._replica_context(message, root)
            run = partial(call_with_shard, root, message.method, shard, message.parts, self._device)
            del shard, root
            output = _run(run, self._device, replica_context)
        del run
        timeline.mark(timeline.GATHER)
        outputs = self._put_output(output, reply)
        del output
        if not tracked:
            self._idle = replicas
            return
        (of_parameters,), (hooks,) = replicas.leaves, replicas.hooks
        if message.is_searched:
            reply.found_leaves = self._finds_leaves(module, outputs, [*leaves.values(), *of_parameters])
        graph = ReplicaGraph(list(leaves.values()), of_parameters, outputs, hooks)
        self._graphs[message.graph] = kept = Graph(graph, list(leaves), replica_context, replicas)
        if [leaf for leaf in graph.leaves if leaf is not None and leaf.grad is not None]:  # forward has called backward
            self._put_gradients(kept, graph.take_gradients(), {}, reply)  # the places may be for other leaves

    def _updated_module(self, message: Forward) -> WorkerModule:
        """Return the worker's module, brought up to date."""
        update = message.update
        if message.rescue:
            torch_private.load_checkpoints()
        if update.buckets is not None:
            self._parameter_buckets = update.buckets
        buckets, flats = [self._parameter_buckets[b] for b in update.sent], []
        if message.rendezvous is not None:  # before anything that may fail: the others wait for it
            replicas = tuple(range(message.num_replicas))
            flats = self._process_groups_for(message.rendezvous).receive(buckets, replicas)
            self._in_collective = False
        if update.module is not None:
            sys.path[:] = update.path
            importlib.invalidate_caches()
            self._module = None
            self._module = WorkerModule(update.module, self._segments, self._device)
        assert self._module is not None
        self._module.apply(update)
        self._module.load_parameters(buckets, flats)
        self._in_update = False
        return self._module

    def _shard(self, message: Forward, shard: bytes, leaves: dict[int, torch.Tensor]) -> Any:
        """Return the replica's inputs; note their leaves, by number."""

        def from_reference(sent: TensorRef) -> torch.Tensor:
            tensor = sent.tensor(message.specs, self._segments)
            if sent.leaf is not None:
                leaves[sent.leaf] = tensor = tensor.requires_grad_()
            # The next message overwrites the received memory, and a leaf must not be written into.
            own = tensor.to(sent.device or tensor.device, copy=True)
            # Also without grad mode: the module may switch it on inside.
            return own.requires_grad_() if sent.requires_grad and sent.leaf is None else own

        return loads(shard, from_reference)

    def _replica_context(self, message: Forward, root: nn.Module) -> ReplicaContext:
        """Return the context of the replica in each pass: batch norm of all replicas, or none."""
        if not message.sync_batch_norm:
            return lambda _: nullcontext()
        channel, index = self._channel, message.replica
        contexts: list[PassContext] = []
        replicas = [root if i == index else None for i in range(message.num_replicas)]
        contexts += exchange_contexts(
            replicas, lambda _: RemoteExchange(channel), sync_batch_norm=message.sync_batch_norm
        )

        @contextlib.contextmanager
        def one_pass_of_replica(_: int) -> Iterator[None]:
            with one_pass(contexts) as replica_context, replica_context(index):
                yield

        return one_pass_of_replica

    def _put_output(self, output: Any, reply: Reply) -> list[torch.Tensor]:
        """Put an output into the reply; return its tensors, by number."""
        outputs: list[torch.Tensor] = []

        def to_reference(tensor: torch.Tensor) -> TensorRef:
            outputs.append(tensor)
            return TensorRef.put(self._send_buffer, tensor, output=len(outputs) - 1, requires_grad=tensor.requires_grad)

        try:
            reply.value = dumps(output, to_reference, known=set(classes_by_value()))
        except Exception as error:
            raise TypeError(
                f"cannot gather the output, which cannot leave the worker process ({error}). Return tensors, numbers "
                "or strings, in tuples, lists, dicts or dataclasses."
            ) from error
        return outputs

    def _finds_leaves(self, module: WorkerModule, outputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> bool:
        """Return whether a graph reaches leaves that are not its own: globals, or made by forward.

        Raises:
            RuntimeError: one is a global, whose gradient would be lost: an earlier forward has reached it, too. What
                forward makes is gone with its graph. Or the graph reaches a tensor of the module itself.
        """
        known = [leaf for reference in self._found if (leaf := reference()) is not None]
        groups = [Group((tensor,), Single(0)) for tensor in outputs]
        leaves = look_for_live_tensors(module.blueprint, groups, ["a replica in a worker"], own).leaves
        self._found = [*map(weakref.ref, [*known, *leaves])]
        for leaf in leaves:
            if any(leaf is other for other in known):
                raise RuntimeError(
                    f"a replica used a tensor of shape {tuple(leaf.shape)} that needs a gradient and is not the "
                    'module\'s: with engine="processes" the gradients of workers cannot reach it. Make it a '
                    'parameter of the module, give it to the model as an input, or use engine="threads".'
                )
        return bool(leaves)

    # ---- backward ----

    def _backward(self, message: Backward, reply: Reply) -> None:
        kept = self._graphs[message.graph]
        if message.placed is not None:
            self._placed = {k: self._segments[spec.segment].view(spec) for k, spec in message.placed.items()}
        graph, grads, _ = self._outputs_with_gradients(kept, message)
        if not message.keep:
            del self._graphs[message.graph]
        reducer, needed = self._new_reducer(message), kept.mask_of(message.needed)
        run = partial(graph.gradients, grads, message.keep, into_grad=needed is None, needed=needed, reducer=reducer)
        del graph, grads
        try:
            with message.thread.applied():
                of_inputs, of_parameters = _run(run, self._device, kept.replica_context)
        except BaseException:
            if reducer:
                reducer.fail()
                self._in_collective = False
            raise
        del run
        timeline.mark(timeline.REDUCE)
        if reducer:
            for n, (key, grad) in enumerate(zip(kept.keys, of_inputs, strict=True)):
                if grad is not None and reducer.add(key, grad):
                    of_inputs[n] = None
            reply.seconds -= reducer.end()
            self._in_collective = False
        self._put_gradients(kept, (of_inputs, of_parameters), self._placed, reply)
        if not message.keep and not kept.has_higher:
            kept.graph.outputs = ()
            self._idle = kept.replicas

    def _differentiate(self, message: Backward, number: int, reply: Reply) -> None:
        """Run a graph's backward so that the gradients have a graph, and keep that as `number`."""
        kept = self._graphs[message.graph]
        graph, grads, incoming = self._outputs_with_gradients(kept, message)
        needed = kept.mask_of(message.needed)
        run = partial(gradients_of, [graph], [grads], needed, create_graph=True)
        with message.thread.applied(), torch.enable_grad():
            (found,) = _run(run, self._device, kept.replica_context)
        outputs: list[torch.Tensor] = []
        for key, result in zip(kept.all_keys, found, strict=True):
            if result is not None:
                tensor_ref = TensorRef.put(
                    self._send_buffer, result, output=len(outputs), requires_grad=result.requires_grad
                )
                reply.gradients.append((key, tensor_ref))
                outputs.append(result)
        inputs = [*graph.inputs, *incoming.values()]
        higher = ReplicaGraph(inputs, graph.parameters, outputs, graph.hooks)
        kept.has_higher = True
        self._graphs[number] = replace(kept, graph=higher, keys=[*kept.keys, *incoming])

    def _outputs_with_gradients(
        self, kept: Graph, message: Backward
    ) -> tuple[ReplicaGraph, Gradients, dict[int, torch.Tensor]]:
        """Return a graph with those of its outputs that have gradients, these, and their leaves, by number."""
        ends: Gradients = []
        grads: Gradients = []
        incoming: dict[int, torch.Tensor] = {}
        for output, tensor_ref in message.grads:
            end = kept.graph.outputs[output]
            assert end is not None
            ends.append(end)
            grads.append(grad := tensor_ref.tensor(message.specs, self._segments).to(end.device, copy=True))
            if tensor_ref.leaf is not None:
                incoming[tensor_ref.leaf] = grad.requires_grad_()
        return replace(kept.graph, outputs=ends), grads, incoming

    def _new_reducer(self, message: Backward) -> WorkerReducer | None:
        """Return this replica's reducer for one backward; None if no gradient is reduced."""
        config = message.reducer_config
        if config is None:
            return None
        if isinstance(config, SharedMemoryConfig):
            if config.specs is not None:
                self._reduce_buffers = ReduceBuffers(config.specs, self._segments, self._segments[config.turns])
                for number in config.freed:
                    del self._segments[number]
            assert self._reduce_buffers is not None
            return SharedMemoryReducer(self._reduce_buffers, config.replica, config.replicas)
        if config.buckets is not None:
            self._gradient_buckets = config.buckets
        groups = self._process_groups_for(config.rendezvous)
        return CollectiveReducer(
            self._gradient_buckets, groups.of(config.replicas), groups.bucket_device(), self._device
        )

    def _process_groups_for(self, rendezvous: Rendezvous) -> ProcessGroups:
        if self._groups is None:
            self._groups = ProcessGroups(self._segments[rendezvous.store], rendezvous, self._device)
        return self._groups

    def _put_gradients(
        self, kept: Graph, gradients: tuple[Gradients, Gradients], placed: Mapping[int, torch.Tensor], reply: Reply
    ) -> None:
        """Move gradients of the leaves to their places in `placed`, or into the reply."""
        of_inputs, of_parameters = gradients
        found = [of_parameters[k] for k in placed]
        plain = [grad for grad in found if grad is not None and grad.layout is torch.strided]
        if placed and len(plain) == len(placed) and {torch.Tensor}.issuperset(map(type, plain)):
            with torch.no_grad():
                torch_private.copy_all_in_place([*placed.values()], plain)
            reply.all_placed = True
            for k in placed:
                of_parameters[k] = None
        keyed = zip(kept.all_keys, [*of_inputs, *of_parameters], strict=True)
        reply.gradients = [(key, TensorRef.put(self._send_buffer, grad)) for key, grad in keyed if grad is not None]


class _LogCollector(logging.Handler):
    """Collects what unisono logs in this process; the caller logs it."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


def _run(task: Callable[[], Any], device: torch.device, replica_context: ReplicaContext) -> Any:
    """Run a task as a replica on `device` does, in its context; raise what it raises."""
    (outcome,) = run_together([partial(timeline.run_as_replica, task, device)], [device], replica_context)
    try:
        if outcome.error is not None:
            raise outcome.error
        return outcome.value
    finally:
        del outcome


def _builtin(category: type[Warning]) -> type[Warning]:
    """Return the nearest base class of a warning that is Python's own."""
    return next(cls for cls in category.__mro__ if cls.__module__ == "builtins")
