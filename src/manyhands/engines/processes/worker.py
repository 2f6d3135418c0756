"""A worker: what answers the caller's messages in a process of its own.

It answers each message before it reads the next. It has a module of its own (worker_module.py; parameters in shared
memory), stamps a replica from it for every forward, and keeps the replica's graph until the caller lets it go. Where
the process comes from, and when it ends, is fork_server.py's.
"""

import contextlib
import importlib
import logging
import pickle
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from manyhands.engines.base import called
from manyhands.engines.processes.channel import Channel
from manyhands.engines.processes.messages import Backward, Forward, Message, RemoteError, Reply, TensorRef
from manyhands.engines.processes.pickling import classes_by_value, dumps, loads
from manyhands.engines.processes.reducers.base import Reducer
from manyhands.engines.processes.reducers.collectives import CollectiveReducer, Groups, Rendezvous
from manyhands.engines.processes.reducers.shared_memory import ReduceBuffers, SharedMemoryConfig, SharedMemoryReducer
from manyhands.engines.processes.remote_exchange import RemoteExchange
from manyhands.engines.processes.shared_memory import Segment, SendBuffer, can_lie_in_memory
from manyhands.engines.processes.worker_module import Module
from manyhands.engines.replica import Stamp, look_for_live_tensors
from manyhands.primitives.outputs import Group
from manyhands.primitives.placements import Single
from manyhands.runtime import devices as _devices
from manyhands.runtime import torch_private
from manyhands.runtime.buckets import Bucket
from manyhands.runtime.errors import log
from manyhands.runtime.thread_pool import run_together
from manyhands.sync_batch_norm.function_mode import BackwardMode, BatchNormOverReplicas

Around: TypeAlias = Callable[[], AbstractContextManager[None]]

_SPIN_S = 0.0002


@dataclass(slots=True)
class Graph:
    """A replica's graph: where it begins, where it ends, what must not go before it, what surrounds a walk of it."""

    leaves: dict[int, torch.Tensor]
    outputs: list[torch.Tensor]
    keep_alive: Any = None
    around: Around = nullcontext


class Worker:
    """Answers messages."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._segments: dict[int, Segment] = {}
        self._outbox = SendBuffer()
        self._known_segment = -1
        self._graphs: dict[int, Graph] = {}
        self._module: Module | None = None
        self._gradients: dict[int, torch.Tensor] = {}
        self._device = torch.device("cpu")
        self._ground: ReduceBuffers | None = None
        self._groups: Groups | None = None
        self._of_parameters: Sequence[Bucket] = ()  # the buckets in which they are sent
        self._of_gradients: Sequence[Bucket] = ()  # those in which they are reduced
        self._is_awaited = False  # by the others: it has not done its part yet in what all do together
        self._looked: list[Any] = []  # the signature of the module whose replicas' graphs have been looked at
        self._num_looks = 0
        self._strangers: list[weakref.ref[torch.Tensor]] = []  # leaves found there that are not the module's
        self._own_classes: set[type] = set()
        self._to_be_said: list[str] = []
        log.addHandler(_HandsOver(self._to_be_said))
        log.propagate = False

    def serve(self) -> None:
        while True:
            self._channel.spin(_SPIN_S)
            body, fds = self._channel.receive()
            message = pickle.loads(body)
            del body
            self._begin(message, fds)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                reply = self._answer(message)
                reply.warnings = [(str(w.message), _builtin(w.category), w.filename, w.lineno) for w in said]
                reply.said, self._to_be_said[:] = self._to_be_said[:], []
            tracked = message.thread.grad_enabled or isinstance(message, Backward)
            del message, said
            segment = self._outbox.segment
            new = segment.number != self._known_segment
            self._known_segment = segment.number
            if new:
                reply.segments = [(segment.number, segment.num_bytes)]
            sys.stdout.flush()
            self._channel.send(_pickled(reply), [segment.fd] if new else [])
            failed = reply.error is not None
            del reply
            if self._module is not None and not failed:
                self._module.prepare(tracked)

    def _begin(self, message: Message, fds: Sequence[int]) -> None:
        for (number, num_bytes), fd in zip(message.segments, fds, strict=True):
            self._segments[number] = Segment(fd, num_bytes, number)
        for number in message.gone:
            del self._segments[number]
        for graph in message.forgotten:
            self._graphs.pop(graph, None)
        if message.process is not None:
            message.process.set()

    def _answer(self, message: Forward | Backward) -> Reply:
        reply = Reply()
        together = message.rendezvous if isinstance(message, Forward) else message.reducer_config
        self._is_awaited = together is not None
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
            reply.drew = not all(torch.equal(*pair) for pair in zip(random_states, states_now, strict=True))
            reply.places = self._outbox.flush()
        except BaseException as error:  # noqa: BLE001 - it is the caller's to handle
            self._outbox.forget()
            reply.value, reply.gradients = None, []
            reply.error = self._failed(error)
            reply.out_of_step = self._is_awaited
            traceback.clear_frames(error.__traceback__)
        return reply

    def _forward(self, message: Forward, reply: Reply) -> None:
        update = message.update
        if update.buckets is not None:
            self._of_parameters = update.buckets
        buckets, flats = [self._of_parameters[b] for b in update.sent], []
        if message.rendezvous is not None:  # before anything that may fail: the others count on it
            flats = self._groups_of(message.rendezvous).receive(buckets, message.replicas)
            self._is_awaited = False
        if update.module is not None:
            sys.path[:] = update.path
            importlib.invalidate_caches()
            self._module, self._looked, self._gradients = None, [], {}
            self._module = Module(update.module, self._segments, self._device)
        assert self._module is not None
        self._module.change(update)
        self._module.take(buckets, flats)
        del flats
        tracked = message.thread.grad_enabled
        module = self._module
        with message.thread.applied():
            stamp, leaves = module.stamp(tracked)
            call = [self._shard(message, leaves)]
            around = self._around(message, stamp)

            def run() -> Any:
                args, kwargs = call.pop()
                return called(stamp.replica, message.method)(*args, **kwargs)

            output = _run(run, self._device, around)
        outputs: list[torch.Tensor] = []
        numbers: dict[int, TensorRef] = {}

        def take(tensor: torch.Tensor) -> TensorRef:
            if id(tensor) not in numbers:
                outputs.append(tensor)
                tensor_ref = TensorRef.by(self._outbox, tensor)
                numbers[id(tensor)] = tensor_ref._replace(output=len(outputs) - 1, requires_grad=tensor.requires_grad)
            return numbers[id(tensor)]

        try:
            reply.value = dumps(output, take, known=set(classes_by_value()) - self._own_classes)
        except Exception as error:
            raise TypeError(
                f"cannot gather the output, which cannot leave the worker process ({error}). Return tensors, numbers "
                "or strings, in tuples, lists, dicts or dataclasses."
            ) from error
        del output
        if not tracked:
            return
        self._look_for_strangers(message, outputs, leaves)
        self._graphs[message.graph] = Graph(leaves, outputs, stamp, around)
        if any(leaf.grad is not None for leaf in leaves.values()):  # forward has called backward
            self._take_gradients(leaves, reply)

    def _around(self, message: Forward, stamp: Stamp) -> Around:
        """Return what surrounds the replica in each pass: batch norm over all replicas, or nothing."""
        if message.seat is None:
            return nullcontext
        index, num_replicas = message.seat
        replicas = [stamp.replica if i == index else None for i in range(num_replicas)]
        channel = self._channel
        batch_norm = BatchNormOverReplicas(replicas, BackwardMode.PER_REPLICA, lambda _: RemoteExchange(channel))
        return lambda: batch_norm.begin()(index)

    def _look_for_strangers(
        self, message: Forward, outputs: list[torch.Tensor], leaves: dict[int, torch.Tensor]
    ) -> None:
        """Check that no gradient is lost in a leaf that is not the module's.

        One that forward has made itself is gone with its graph; one that is met in two forwards is a global.
        """
        assert self._module is not None
        signature = [message.method, *self._module.blueprint.signature()]
        if self._looked != signature:
            self._looked, self._num_looks = signature, 0
        if self._num_looks == 2:
            return
        self._num_looks += 1
        groups = [Group((tensor,), Single(0)) for tensor in outputs]
        known = self._strangers
        strangers = look_for_live_tensors(self._module.blueprint, groups, [message.where], list(leaves.values()))
        self._strangers = [weakref.ref(tensor) for tensor in strangers]
        for tensor in strangers:
            if any(reference() is tensor for reference in known):
                raise RuntimeError(
                    f"{message.where} used a tensor of shape {tuple(tensor.shape)} that needs a gradient and is not "
                    'the module\'s: with engine="processes" its gradient cannot reach the original. Make it a '
                    'parameter of the module, give it to the model as an input, or use engine="threads".'
                )

    def _shard(self, message: Forward, leaves: dict[int, torch.Tensor]) -> Any:
        def add(sent: TensorRef) -> torch.Tensor:
            tensor = self._received(sent, message)
            if sent.leaf is not None:
                leaves[sent.leaf] = tensor = tensor.requires_grad_()
            # The place is written over by the next message; and a leaf must not be written into.
            own = tensor.to(sent.device or tensor.device, copy=True)
            # Where nothing is tracked, a module may switch gradients on for what it does inside.
            return own.requires_grad_() if sent.requires_grad and sent.leaf is None else own

        return loads(message.shard, add)

    def _backward(self, message: Backward, reply: Reply) -> None:
        graph = self._graphs[message.graph]
        if message.gradients is not None:
            places = message.gradients.items()
            self._gradients = {number: self._segments[place.segment].view(place) for number, place in places}
        received = []
        for output, tensor_ref in message.grads:
            grad = self._received(tensor_ref, message).to(graph.outputs[output].device, copy=True)
            received.append((output, grad, tensor_ref.leaf))
        if message.derive is not None:
            self._differentiate(message.derive, graph, received, message, reply)
            return
        if not message.keep:
            del self._graphs[message.graph]
        leaves, keep_alive, around = graph.leaves, graph.keep_alive, graph.around
        ends, grads = [graph.outputs[output] for output, _, _ in received], [grad for _, grad, _ in received]
        run_backward = partial(torch.autograd.backward, ends, grads, retain_graph=message.keep)
        del graph, received, ends, grads
        part = self._part(message)
        try:
            with message.thread.applied(), part.hooked(leaves) if part else contextlib.nullcontext():
                _run(run_backward, self._device, around)
        except BaseException:
            if part:
                part.fail()
                self._is_awaited = False
            raise
        del run_backward, keep_alive, around
        if part:
            reply.seconds -= part.end()
            self._is_awaited = False
        self._take_gradients(leaves, reply)

    def _differentiate(
        self,
        number: int,
        graph: Graph,
        received: Sequence[tuple[int, torch.Tensor, int | None]],
        message: Backward,
        reply: Reply,
    ) -> None:
        """Walk a graph so that the gradients have one, and keep that as `number`.

        Args:
            received: (number of the output, its gradient, the leaf that is to stand before that).
        """
        leaves = dict(graph.leaves)
        for _, grad, leaf in received:
            if leaf is not None:
                leaves[leaf] = grad.requires_grad_()
        keys, inputs = list(graph.leaves), list(graph.leaves.values())
        ends = [graph.outputs[output] for output, _, _ in received]
        grads = [grad for _, grad, _ in received]
        results: list[torch.Tensor | None] = []

        def differentiate() -> None:
            results.extend(torch.autograd.grad(ends, inputs, grads, create_graph=True, allow_unused=True))

        with message.thread.applied(), torch.enable_grad():
            _run(differentiate, self._device, graph.around)
        outputs: list[torch.Tensor] = []
        for key, result in zip(keys, results, strict=True):
            if result is not None:
                tensor_ref = TensorRef.by(self._outbox, result)
                reply.gradients.append(
                    (key, tensor_ref._replace(output=len(outputs), requires_grad=result.requires_grad))
                )
                outputs.append(result)
        self._graphs[number] = Graph(leaves, outputs, graph.keep_alive, graph.around)

    def _part(self, message: Backward) -> Reducer | None:
        """Return this replica's part in what is done with gradients; None if there is none."""
        config = message.reducer_config
        if config is None:
            return None
        if isinstance(config, SharedMemoryConfig):
            if config.places is not None:
                self._ground = ReduceBuffers(config.places, self._segments, self._segments[config.turns])
                for gone in config.gone:
                    del self._segments[gone]
            assert self._ground is not None
            return SharedMemoryReducer(self._ground, config.replica, config.replicas)
        if config.buckets is not None:
            self._of_gradients = config.buckets
        groups = self._groups_of(config.rendezvous)
        return CollectiveReducer(self._of_gradients, groups.of(config.replicas), groups.place(), self._device)

    def _groups_of(self, rendezvous: Rendezvous) -> Groups:
        if self._groups is None:
            self._groups = Groups(self._segments[rendezvous.store], rendezvous, self._device)
        return self._groups

    def _take_gradients(self, leaves: dict[int, torch.Tensor], reply: Reply) -> None:
        """Write the leaves' gradients to their places, or into the outbox, and take them away."""
        targets, sources = [], []
        for number, leaf in leaves.items():
            grad, leaf.grad = leaf.grad, None
            if grad is None:
                continue
            own = self._gradients.get(number)
            if own is not None and own.dtype == grad.dtype and own.shape == grad.shape and can_lie_in_memory(grad):
                targets.append(own)
                sources.append(grad)
                reply.gradients.append((number, None))
            else:
                reply.gradients.append((number, TensorRef.by(self._outbox, grad)))
        with torch.no_grad():
            torch_private.copy_all_in_place(targets, sources)

    def _received(self, sent: TensorRef, message: Message) -> torch.Tensor:
        if sent.inline is not None:
            tensor: torch.Tensor = pickle.loads(sent.inline)
            return tensor
        place = message.places[sent.place]
        return self._segments[place.segment].view(place)

    def _failed(self, error: BaseException) -> RemoteError:
        known = set(classes_by_value()) - self._own_classes
        text = "".join(traceback.format_exception_only(error)).strip()
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        where = "".join(traceback.format_exception(error))
        for attempt in (error, (type(error), error.args, dict(error.__dict__)), (type(error), error.args, {})):
            try:
                pickled = dumps(attempt, lambda tensor: None, known=known)
                again = loads(pickled, lambda reference: reference)
                if attempt is not error or (type(again) is type(error) and again.args == error.args):
                    return RemoteError(pickled, text, where, notes, not isinstance(error, Exception))
            except Exception:  # noqa: BLE001 - whatever its class raises: then another way
                continue
        return RemoteError(None, text, where, notes, not isinstance(error, Exception))


class _HandsOver(logging.Handler):
    """Puts what manyhands logs in this process into a list, for the caller to log."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


def _run(task: Callable[[], Any], device: torch.device, around: Around) -> Any:
    """Run a task as a replica on `device` does, surrounded; raise what it raises."""
    (outcome,) = run_together([task], [device], lambda _: around())
    try:
        if outcome.error is not None:
            raise outcome.error
        return outcome.value
    finally:
        del outcome


def _builtin(category: type[Warning]) -> type[Warning]:
    """Return the nearest of Python's own classes of warnings."""
    return next(cls for cls in category.__mro__ if cls.__module__ == "builtins")


def _pickled(reply: Reply) -> bytes:
    return pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)
