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

from unisono.autograd.replica_graph import ReplicaGraph, gradients_of
from unisono.engines.base import called
from unisono.engines.processes.channel import Channel
from unisono.engines.processes.messages import Backward, Forward, RemoteError, Reply, TensorRef
from unisono.engines.processes.pickling import classes_by_value, dumps, loads
from unisono.engines.processes.reducers.base import WorkerReducer
from unisono.engines.processes.reducers.collectives import CollectiveReducer, ProcessGroups, Rendezvous
from unisono.engines.processes.reducers.shared_memory import ReduceBuffers, SharedMemoryConfig, SharedMemoryReducer
from unisono.engines.processes.remote_exchange import RemoteExchange
from unisono.engines.processes.shared_memory import Segment, SendBuffer
from unisono.engines.processes.worker_module import WorkerModule
from unisono.engines.replay import run_in_parts
from unisono.engines.replica import MOST_STRUCTURES, Replicas, look_for_live_tensors
from unisono.primitives.blueprint import Blueprint
from unisono.primitives.inputs import Flags, flags_of
from unisono.primitives.outputs import Group
from unisono.primitives.placements import Single
from unisono.runtime import affinity, timeline, torch_private
from unisono.runtime import devices as _devices
from unisono.runtime.buckets import Bucket
from unisono.runtime.errors import log
from unisono.runtime.rng import digest_of_states
from unisono.runtime.thread_pool import PassContext, ReplicaContext, one_pass, run_together
from unisono.runtime.timeline import StepRecording
from unisono.runtime.tracebacks import summaries
from unisono.runtime.whole_batch_draws import one_stream
from unisono.sync_batch_norm.function_mode import exchange_contexts

_SPIN_S = 0.0002
_LONGEST_CHAIN = 10  # of an exception, its cause, and so on


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

    def mask_of(self, needed: frozenset[int] | None) -> list[bool] | None:
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
        # How often replicas' graphs have been checked, by the method and its flags; of the module as it is.
        self._num_checks: dict[tuple[Any, ...], int] = {}
        self._checked_blueprint: Blueprint | None = None
        self._outside_leaves: list[weakref.ref[torch.Tensor]] = []  # leaves in those graphs that are not the module's
        self._log_messages: list[str] = []
        self._clocks = cache(_devices.DeviceClock)
        log.addHandler(_LogCollector(self._log_messages))
        log.propagate = False

    def serve(self) -> None:
        while True:
            self._channel.spin(_SPIN_S)
            try:
                message = self._next_message()
            except OSError as error:  # no memory, or no file descriptor, for what the caller shares
                reply = Reply(error=self._remote_error(error), out_of_step=True)
                self._channel.send(pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL))
                continue
            with warnings.catch_warnings(record=True) as recorded:
                warnings.simplefilter("always")
                reply = self._recorded_reply_to(message) if message.is_recorded else self._reply_to(message)
                reply.warnings = [(str(w.message), _builtin(w.category), w.filename, w.lineno) for w in recorded]
                reply.log_messages, self._log_messages[:] = self._log_messages[:], []
            tracked = message.thread.grad_enabled or isinstance(message, Backward)
            del message, recorded
            segment = self._send_buffer.segment
            new = segment.number != self._known_segment
            self._known_segment = segment.number
            if new:
                reply.segments = [(segment.number, segment.num_bytes)]
            sys.stdout.flush()
            body = pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)
            self._channel.send(body, [segment.fd] if new else [])
            failed = reply.error is not None
            del reply, body
            idle, self._idle = self._idle, None
            if idle is not None and not failed:
                idle.give_back()
            del idle
            if self._module is not None and not failed:
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
            else:
                self._backward(message, reply)
            reply.seconds += time.perf_counter() - started
            states_now = _devices.generator_states(self._device)
            reply.random_digest = digest_of_states(random_states, states_now)
            reply.specs = self._send_buffer.flush()
        except BaseException as error:  # noqa: BLE001 - the caller handles it
            self._send_buffer.clear()
            reply.value, reply.gradients, reply.all_placed = None, [], False
            reply.error = self._remote_error(error)
            reply.out_of_step, reply.missed_update = self._in_collective, self._in_update
            traceback.clear_frames(error.__traceback__)
        return reply

    def _forward(self, message: Forward, reply: Reply) -> None:
        update = message.update
        timeline.mark(timeline.REPLICATE)
        if message.rescue:
            torch_private.load_checkpoints()
        if update.buckets is not None:
            self._parameter_buckets = update.buckets
        buckets, flats = [self._parameter_buckets[b] for b in update.sent], []
        if message.rendezvous is not None:  # before anything that may fail: the others wait for it
            flats = self._process_groups_for(message.rendezvous).receive(buckets, message.replicas)
            self._in_collective = False
        if update.module is not None:
            sys.path[:] = update.path
            importlib.invalidate_caches()
            self._module, self._checked_blueprint = None, None
            self._module = WorkerModule(update.module, self._segments, self._device)
        assert self._module is not None
        self._module.apply(update)
        self._module.load_parameters(buckets, flats)
        self._in_update = False
        del flats
        if message.shard is None:
            return
        tracked, module = message.thread.grad_enabled, self._module
        with message.thread.applied():
            replicas = module.take(tracked)
            root = replicas.roots[0]
            leaves: dict[int, torch.Tensor] = {}  # of the inputs, and of tensors from outside the module
            timeline.mark(timeline.SCATTER)
            call = [self._shard(message, leaves)]
            flags = flags_of(*call[0])
            leaves.update(enumerate(module.outside if tracked else (), len(replicas.leaves[0])))
            replica_context = self._replica_context(message, root)

            def run() -> Any:
                args, kwargs = call.pop()
                function = called(root, message.method)
                if message.parts is not None:
                    return run_in_parts(root, function, args, kwargs, message.parts, self._device)
                return function(*args, **kwargs)

            output = _run(run, self._device, replica_context)
        timeline.mark(timeline.GATHER)
        outputs: list[torch.Tensor] = []
        numbers: dict[int, TensorRef] = {}

        def to_reference(tensor: torch.Tensor) -> TensorRef:
            if id(tensor) not in numbers:
                outputs.append(tensor)
                numbers[id(tensor)] = TensorRef.put(
                    self._send_buffer, tensor, output=len(outputs) - 1, requires_grad=tensor.requires_grad
                )
            return numbers[id(tensor)]

        try:
            reply.value = dumps(output, to_reference, known=set(classes_by_value()))
        except Exception as error:
            raise TypeError(
                f"cannot gather the output, which cannot leave the worker process ({error}). Return tensors, numbers "
                "or strings, in tuples, lists, dicts or dataclasses."
            ) from error
        del output
        if not tracked:
            del root, run
            self._idle = replicas
            return
        replica = replicas.each[0]
        self._check_for_outside_leaves(message, flags, outputs, [*leaves.values(), *replica.leaves])
        graph = ReplicaGraph(list(leaves.values()), replica.leaves, outputs, [replica.hooks])
        kept = Graph(graph, list(leaves), replica_context, replicas)
        self._graphs[message.graph] = kept
        if [leaf for leaf in graph.leaves if leaf is not None and leaf.grad is not None]:  # forward has called backward
            self._reply_with_gradients(kept, reply, placed={})  # the places may be for other leaves

    def _replica_context(self, message: Forward, root: nn.Module) -> ReplicaContext:
        """Return the context of the replica in each pass: random numbers, and batch norm, of all replicas, or none."""
        if message.exchange_rank is None:
            return lambda _: nullcontext()
        index, num_replicas = message.exchange_rank
        channel = self._channel
        contexts: list[PassContext] = []
        if message.rows is not None:
            contexts.append(partial(one_stream, type(root).__name__, message.rows))
        replicas = [root if i == index else None for i in range(num_replicas)]
        contexts += exchange_contexts(
            replicas, lambda _: RemoteExchange(channel), sync_batch_norm=message.sync_batch_norm
        )

        @contextlib.contextmanager
        def one_pass_of_replica(_: int) -> Iterator[None]:
            with one_pass(contexts) as replica_context, replica_context(index):
                yield

        return one_pass_of_replica

    def _check_for_outside_leaves(
        self, message: Forward, flags: Flags, outputs: list[torch.Tensor], leaves: list[torch.Tensor]
    ) -> None:
        """Check that no gradient is lost in a leaf that is not the module's.

        A leaf that forward itself made is gone with its graph; a leaf that two forwards reach is a global.
        """
        assert self._module is not None
        if self._checked_blueprint is not self._module.blueprint or len(self._num_checks) > MOST_STRUCTURES:
            self._checked_blueprint, self._num_checks = self._module.blueprint, {}
        structure = message.method, flags
        num_checks = self._num_checks.get(structure, 0)
        if num_checks == 2:
            return
        self._num_checks[structure] = num_checks + 1
        groups = [Group((tensor,), Single(0)) for tensor in outputs]
        known = [reference for reference in self._outside_leaves if reference() is not None]
        outside = look_for_live_tensors(self._module.blueprint, groups, [message.where], leaves).leaves
        self._outside_leaves = [*known, *map(weakref.ref, outside)]
        for tensor in outside:
            if any(reference() is tensor for reference in known):
                raise RuntimeError(
                    f"{message.where} used a tensor of shape {tuple(tensor.shape)} that needs a gradient and is not "
                    'the module\'s: with engine="processes" its gradient cannot reach the original. Make it a '
                    'parameter of the module, give it to the model as an input, or use engine="threads".'
                )

    def _shard(self, message: Forward, leaves: dict[int, torch.Tensor]) -> Any:
        def from_reference(sent: TensorRef) -> torch.Tensor:
            tensor = sent.tensor(message.specs, self._segments)
            if sent.leaf is not None:
                leaves[sent.leaf] = tensor = tensor.requires_grad_()
            # The next message overwrites the received memory, and a leaf must not be written into.
            own = tensor.to(sent.device or tensor.device, copy=True)
            # Also without grad mode: the module may switch it on inside.
            return own.requires_grad_() if sent.requires_grad and sent.leaf is None else own

        assert message.shard is not None
        return loads(message.shard, from_reference)

    def _backward(self, message: Backward, reply: Reply) -> None:
        kept = self._graphs[message.graph]
        if message.placed is not None:
            self._placed = {k: self._segments[spec.segment].view(spec) for k, spec in message.placed.items()}
        ends: list[torch.Tensor | None] = []
        grads: list[torch.Tensor | None] = []
        incoming: dict[int, torch.Tensor] = {}
        for output, tensor_ref in message.grads:
            end = kept.graph.outputs[output]
            assert end is not None
            ends.append(end)
            grads.append(grad := tensor_ref.tensor(message.specs, self._segments).to(end.device, copy=True))
            if tensor_ref.leaf is not None:
                incoming[tensor_ref.leaf] = grad.requires_grad_()
        graph = replace(kept.graph, outputs=ends)
        del end, ends
        if message.create_graph_as is not None:
            self._differentiate(message.create_graph_as, kept, graph, grads, incoming, message, reply)
            return
        if not message.keep:
            del self._graphs[message.graph]
        reducer = self._new_reducer(message)
        needed = kept.mask_of(message.needed)
        run = partial(graph.backward, grads, message.keep, reducer)
        if needed is not None:
            run = partial(_backward_to, needed, graph, grads, message.keep)
        del graph, grads
        try:
            with message.thread.applied():
                _run(run, self._device, kept.replica_context)
        except BaseException:
            if reducer:
                reducer.fail()
                self._in_collective = False
            raise
        del run
        timeline.mark(timeline.REDUCE)
        if reducer:
            for key, leaf in zip(kept.keys, kept.graph.inputs, strict=True):
                if leaf is not None and leaf.grad is not None and reducer.add(key, leaf.grad):
                    leaf.grad = None
            reply.seconds -= reducer.end()
            self._in_collective = False
        self._reply_with_gradients(kept, reply, self._placed)
        if not message.keep and not kept.has_higher:
            kept.graph.outputs = ()
            self._idle = kept.replicas

    def _differentiate(
        self,
        number: int,
        kept: Graph,
        graph: ReplicaGraph,
        grads: Sequence[torch.Tensor | None],
        incoming: Mapping[int, torch.Tensor],
        message: Backward,
        reply: Reply,
    ) -> None:
        """Run a graph's backward so that the gradients have a graph, and keep that as `number`.

        Args:
            grads: of the outputs of `graph`; `incoming` are those that need a gradient themselves, by the numbers of
                their leaves.
        """
        found: list[list[torch.Tensor | None]] = []
        needed = kept.mask_of(message.needed)

        def differentiate() -> None:
            found.extend(gradients_of([graph], [grads], needed, create_graph=True))

        with message.thread.applied(), torch.enable_grad():
            _run(differentiate, self._device, kept.replica_context)
        outputs: list[torch.Tensor] = []
        for key, result in zip(kept.all_keys, found[0], strict=True):
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

    def _reply_with_gradients(self, kept: Graph, reply: Reply, placed: Mapping[int, torch.Tensor]) -> None:
        """Move the leaves' gradients to their places in `placed`, or into the send buffer."""
        of_inputs, of_parameters = kept.graph.take_gradients()
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

    def _remote_error(self, error: BaseException, above: Sequence[BaseException] = ()) -> RemoteError:
        """Describe an exception.

        Args:
            above: the exceptions of which it is the cause or the context.
        """
        text = "".join(traceback.format_exception_only(error)).strip()
        frames, notes = summaries(error.__traceback__), [str(note) for note in getattr(error, "__notes__", ())]
        remote = RemoteError(self._pickled_error(error), text, frames, notes, not isinstance(error, Exception))
        above = (*above, error)
        if len(above) < _LONGEST_CHAIN:
            if error.__cause__ is not None:
                remote.cause = self._remote_error(error.__cause__, above)
            elif error.__context__ is not None and not error.__suppress_context__:
                remote.context = self._remote_error(error.__context__, above)
        return remote

    def _pickled_error(self, error: BaseException) -> bytes | None:
        known = set(classes_by_value())
        for attempt in (error, (type(error), error.args, dict(error.__dict__)), (type(error), error.args, {})):
            try:
                pickled = dumps(attempt, known=known)
                again = loads(pickled)
                if attempt is not error or (type(again) is type(error) and again.args == error.args):
                    return pickled
            except Exception:  # noqa: BLE001 - whatever its class raises: try the next form
                continue
        return None


def _backward_to(needed: Sequence[bool], graph: ReplicaGraph, grads: Sequence[torch.Tensor | None], keep: bool) -> None:
    """Run a backward to some of a graph's leaves; the gradients are in their `.grad` then."""
    (gradients,) = gradients_of([graph], [grads], needed, keep=keep)
    for leaf, grad in zip(graph.leaves, gradients, strict=True):
        if leaf is not None:
            leaf.grad = grad


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
