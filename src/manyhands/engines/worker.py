"""What runs in other processes: the fork server, and the workers that come from it.

The fork server is started by the first forward: a fresh interpreter that has imported torch and does nothing else, so
that it may be forked at any time. Each worker is a fork of it, holds one end of a channel, and answers each message
before it reads the next. It has a module of its own (unpickled; parameters in shared memory), stamps a replica from it
for every forward, as the threads engine does from the live module, and keeps the replica's graph until the caller lets
it go.

Guarantees
    - A worker ends when the caller's end of its channel does. While it computes it does not look; then it ends with the
      fork server, which ends at once when the caller does (Linux; elsewhere after its step).
    - Ctrl-C is the caller's affair: workers ignore it.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import logging
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from manyhands import cores, torch_private
from manyhands import devices as _devices
from manyhands.batch_norm import BatchNormOverReplicas, Walk
from manyhands.buckets import Bucket
from manyhands.copy_streams import Copies
from manyhands.engines.base import called
from manyhands.engines.changes import GONE
from manyhands.engines.channel import Channel, ChannelClosedError
from manyhands.engines.collectives import Groups, Meeting, ReducedPart
from manyhands.engines.far_meeting import MeetingElsewhere
from manyhands.engines.messages import Answer, Backward, Failed, Forward, Message, Sent, sent
from manyhands.engines.mirror import Described, Update
from manyhands.engines.pickling import classes_by_value, dumps, loads
from manyhands.engines.replicas import Stamp, look_for_live_tensors, stamped
from manyhands.engines.shared_memory import Outbox, Segment, can_lie_in_memory
from manyhands.engines.shared_sums import Ground, SummedPart, Summing
from manyhands.engines.transport import Part
from manyhands.errors import log
from manyhands.layouts import Only
from manyhands.outputs import Group
from manyhands.replicate import Blueprint
from manyhands.thread_state import ProcessState
from manyhands.workers import run_together

Around: TypeAlias = Callable[[], AbstractContextManager[None]]

_SPIN_S = 0.0002
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Module:
    """The worker's own module: what replicas are stamped from."""

    def __init__(self, update: bytes, segments: dict[int, Segment], device: torch.device) -> None:
        self._device = device
        tensors, pickled, self._outside = pickle.loads(update)
        self.described: list[Described] = pickle.loads(tensors)
        self.tensors = [_tensor(described, segments, device) for described in self.described]
        # The places of tensors that were copied from where they lie, to be copied again when they are written anew.
        self._copied = [
            (tensor, segments[d.place.segment].view(d.place))
            for tensor, d in zip(self.tensors, self.described, strict=True)
            if d.place is not None and not d.is_shared
        ]
        modules, class_attributes = loads(pickled, lambda number: self.tensors[number])
        self.modules = modules[::-1]
        for cls, attributes in class_attributes:
            for name, value in attributes.items():
                if cls.__dict__.get(name) != value:
                    type.__setattr__(cls, name, value)
        self.blueprint = Blueprint(self.modules[0])
        self._number = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._prepared: tuple[bool, Stamp] | None = None

    def change(self, update: Update) -> None:
        """Make it what the live module is now."""
        for number, name, value in update.changes:
            attributes = self.modules[number].__dict__
            if value is GONE:
                del attributes[name]
            else:
                attributes[name] = value
        if update.requires_grad is not None:
            for tensor, flag in zip(self.tensors, update.requires_grad, strict=False):
                tensor.requires_grad_(flag)
        if update.rewritten and self._copied:
            for tensor, written in self._copied:
                tensor.data = written.to(tensor.device, copy=True)
        if update.changes or update.requires_grad is not None:
            self.blueprint = Blueprint(self.blueprint.root)
            self._prepared = None
        if update.rewritten and self._prepared is not None:
            self._prepared[1].renew_buffers()

    def prepare(self, tracked: bool) -> None:
        """Stamp the next replica, while the caller has other things to do."""
        with Copies([self._device]) as copies:
            (stamp,) = stamped(self.blueprint, self._device, [self._device], tracked, copies, with_live_buffers=False)
            copies.arrive(0)
        self._prepared = tracked, stamp

    def take(self, buckets: Sequence[Bucket], flats: Sequence[torch.Tensor]) -> None:
        """Take parameters that were sent.

        It does not count as a write: what the caller has written by way of `.data` is none of the graphs' business, and
        of all else the first replica's graph knows.
        """
        for bucket, flat in zip(buckets, flats, strict=True):
            pieces = bucket.pieces(flat)
            torch_private.copy_all_in_place([self.tensors[number].data for number in pieces], [*pieces.values()])

    def stamp(self, tracked: bool) -> tuple[Stamp, dict[int, torch.Tensor]]:
        """Return a new replica, and its leaves by number."""
        if self._prepared is None or self._prepared[0] != tracked:
            self.prepare(tracked)
        assert self._prepared is not None
        (_, stamp), self._prepared = self._prepared, None
        pairs = zip(stamp.live_parameters, stamp.leaves, strict=True)
        leaves = {self._number[id(parameter)]: leaf for parameter, leaf in pairs}
        leaves.update((number, self.tensors[number]) for number in self._outside if tracked)
        return stamp, leaves


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
        self._outbox = Outbox()
        self._known_segment = -1
        self._graphs: dict[int, Graph] = {}
        self._module: Module | None = None
        self._gradients: dict[int, torch.Tensor] = {}
        self._device = torch.device("cpu")
        self._ground: Ground | None = None
        self._groups: Groups | None = None
        self._of_parameters: Sequence[Bucket] = ()  # the buckets in which they are sent
        self._of_gradients: Sequence[Bucket] = ()  # those in which they are reduced
        self._is_awaited = False  # by the others: it has not done its part yet in what all do together
        self._state: ProcessState | None = None
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
                answer = self._answer(message)
                answer.warnings = [(str(w.message), _builtin(w.category), w.filename, w.lineno) for w in said]
                answer.said, self._to_be_said[:] = self._to_be_said[:], []
            assert self._state is not None
            tracked = self._state.thread.grad_enabled or isinstance(message, Backward)
            del message, said
            segment = self._outbox.segment
            new = segment.number != self._known_segment
            self._known_segment = segment.number
            if new:
                answer.segments = [(segment.number, segment.num_bytes)]
            sys.stdout.flush()
            self._channel.send(_pickled(answer), [segment.fd] if new else [])
            failed = answer.error is not None
            del answer
            if self._module is not None and not failed:
                self._module.prepare(tracked)

    def _begin(self, message: Message, fds: Sequence[int]) -> None:
        for (number, num_bytes), fd in zip(message.segments, fds, strict=True):
            self._segments[number] = Segment(fd, num_bytes, number)
        for number in message.gone:
            del self._segments[number]
        for graph in message.forgotten:
            self._graphs.pop(graph, None)
        if message.state is not None:
            self._state = pickle.loads(message.state)
            self._state.set_process()

    def _answer(self, message: Forward | Backward) -> Answer:
        answer = Answer(None, [], 0.0, None, [], [], False, [], [])
        together = message.meeting if isinstance(message, Forward) else message.walk
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
                self._forward(message, answer)
            else:
                self._backward(message, answer)
            answer.seconds += time.perf_counter() - started
            states_now = _devices.generator_states(self._device)
            answer.drew = not all(torch.equal(*pair) for pair in zip(random_states, states_now, strict=True))
            answer.places = self._outbox.flush()
        except BaseException as error:  # noqa: BLE001 - it is the caller's to handle
            self._outbox.forget()
            answer.value, answer.gradients = None, []
            answer.error = self._failed(error)
            answer.out_of_step = self._is_awaited
            traceback.clear_frames(error.__traceback__)
        return answer

    def _forward(self, message: Forward, answer: Answer) -> None:
        update = message.update
        if update.buckets is not None:
            self._of_parameters = update.buckets
        buckets, flats = [self._of_parameters[b] for b in update.sent], []
        if message.meeting is not None:  # before anything that may fail: the others count on it
            flats = self._groups_of(message.meeting).receive(buckets, message.replicas)
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
        assert self._state is not None
        tracked = self._state.thread.grad_enabled
        module = self._module
        with self._state.thread.applied():
            stamp, leaves = module.stamp(tracked)
            call = [self._shard(message, leaves)]
            around = self._around(message, stamp)

            def run() -> Any:
                args, kwargs = call.pop()
                return called(stamp.replica, message.method)(*args, **kwargs)

            output = _run(run, self._device, around)
        outputs: list[torch.Tensor] = []
        numbers: dict[int, Sent] = {}

        def take(tensor: torch.Tensor) -> Sent:
            if id(tensor) not in numbers:
                outputs.append(tensor)
                standing = sent(tensor, self._outbox)
                numbers[id(tensor)] = standing._replace(output=len(outputs) - 1, requires_grad=tensor.requires_grad)
            return numbers[id(tensor)]

        answer.value = dumps(output, take, known=set(classes_by_value()) - self._own_classes)
        del output
        if not tracked:
            return
        self._look_for_strangers(message, outputs, leaves)
        self._graphs[message.graph] = Graph(leaves, outputs, stamp, around)
        if any(leaf.grad is not None for leaf in leaves.values()):  # forward has called backward
            self._take_gradients(leaves, answer)

    def _around(self, message: Forward, stamp: Stamp) -> Around:
        """Return what surrounds the replica in each pass: batch norm over all replicas, or nothing."""
        if message.seat is None:
            return nullcontext
        index, num_replicas = message.seat
        replicas = [stamp.replica if i == index else None for i in range(num_replicas)]
        channel = self._channel
        batch_norm = BatchNormOverReplicas(replicas, Walk.APART, lambda _: MeetingElsewhere(channel))
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
        groups = [Group((tensor,), Only(0)) for tensor in outputs]
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
        def give(sent: Sent) -> torch.Tensor:
            tensor = self._received(sent, message)
            if sent.leaf is not None:
                leaves[sent.leaf] = tensor = tensor.requires_grad_()
            # The place is written over by the next message; and a leaf must not be written into.
            own = tensor.to(sent.device or tensor.device, copy=True)
            # Where nothing is tracked, a module may switch gradients on for what it does inside.
            return own.requires_grad_() if sent.requires_grad and sent.leaf is None else own

        return loads(message.shard, give)

    def _backward(self, message: Backward, answer: Answer) -> None:
        graph = self._graphs[message.graph]
        if message.gradients is not None:
            places = message.gradients.items()
            self._gradients = {number: self._segments[place.segment].view(place) for number, place in places}
        received = []
        for output, standing in message.grads:
            grad = self._received(standing, message).to(graph.outputs[output].device, copy=True)
            received.append((output, grad, standing.leaf))
        ends = [graph.outputs[output] for output, _, _ in received]
        assert self._state is not None
        if message.derive is None:
            if not message.keep:
                del self._graphs[message.graph]
            leaves, keep_alive, around = graph.leaves, graph.keep_alive, graph.around
            grads = [grad for _, grad, _ in received]
            del graph, received
            part = self._part(message)
            try:
                with self._state.thread.applied(), part.hooked(leaves) if part else contextlib.nullcontext():
                    _run(lambda: torch.autograd.backward(ends, grads, retain_graph=message.keep), self._device, around)
            except BaseException:
                if part:
                    part.fail()
                    self._is_awaited = False
                raise
            del ends, grads, keep_alive, around
            if part:
                answer.seconds -= part.end()
                self._is_awaited = False
            self._take_gradients(leaves, answer)
            return
        leaves = dict(graph.leaves)
        for _, grad, leaf in received:
            if leaf is not None:
                leaves[leaf] = grad.requires_grad_()
        keys, inputs = list(graph.leaves), list(graph.leaves.values())
        grads = [grad for _, grad, _ in received]
        results: list[torch.Tensor | None] = []

        def differentiate() -> None:
            results.extend(torch.autograd.grad(ends, inputs, grads, create_graph=True, allow_unused=True))

        with self._state.thread.applied(), torch.enable_grad():
            _run(differentiate, self._device, graph.around)
        outputs: list[torch.Tensor] = []
        for key, result in zip(keys, results, strict=True):
            if result is not None:
                standing = sent(result, self._outbox)
                answer.gradients.append(
                    (key, standing._replace(output=len(outputs), requires_grad=result.requires_grad))
                )
                outputs.append(result)
        self._graphs[message.derive] = Graph(leaves, outputs, graph.keep_alive, graph.around)

    def _part(self, message: Backward) -> Part | None:
        """Return this replica's part in what is done with gradients; None if there is none."""
        walk = message.walk
        if walk is None:
            return None
        if isinstance(walk, Summing):
            if walk.places is not None:
                self._ground = Ground(walk.places, self._segments, self._segments[walk.turns])
                for gone in walk.gone:
                    del self._segments[gone]
            assert self._ground is not None
            return SummedPart(self._ground, walk.replica, walk.replicas)
        if walk.buckets is not None:
            self._of_gradients = walk.buckets
        groups = self._groups_of(walk.meeting)
        return ReducedPart(self._of_gradients, groups.of(walk.replicas), groups.place(), self._device)

    def _groups_of(self, meeting: Meeting) -> Groups:
        if self._groups is None:
            self._groups = Groups(self._segments[meeting.store], meeting, self._device)
        return self._groups

    def _take_gradients(self, leaves: dict[int, torch.Tensor], answer: Answer) -> None:
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
                answer.gradients.append((number, None))
            else:
                answer.gradients.append((number, sent(grad, self._outbox)))
        with torch.no_grad():
            torch_private.copy_all_in_place(targets, sources)

    def _received(self, sent: Sent, message: Message) -> torch.Tensor:
        if sent.inline is not None:
            tensor: torch.Tensor = pickle.loads(sent.inline)
            return tensor
        place = message.places[sent.place]
        return self._segments[place.segment].view(place)

    def _failed(self, error: BaseException) -> Failed:
        known = set(classes_by_value()) - self._own_classes
        text = "".join(traceback.format_exception_only(error)).strip()
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        where = "".join(traceback.format_exception(error))
        for attempt in (error, (type(error), error.args, dict(error.__dict__)), (type(error), error.args, {})):
            try:
                pickled = dumps(attempt, lambda tensor: None, known=known)
                again = loads(pickled, lambda reference: reference)
                if attempt is not error or (type(again) is type(error) and again.args == error.args):
                    return Failed(pickled, text, where, notes, not isinstance(error, Exception))
            except Exception:  # noqa: BLE001 - whatever its class raises: then another way
                continue
        return Failed(None, text, where, notes, not isinstance(error, Exception))


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


def _tensor(described: Described, segments: dict[int, Segment], device: torch.device) -> torch.Tensor:
    """Return the worker's own of one of the module's tensors; on `device`, unless it says otherwise."""
    device = described.device or device
    if described.later is not None:
        form = described.later
        tensor = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=device)
    elif described.place is None:
        assert described.inline is not None
        tensor = described.inline.to(device)
    else:
        tensor = segments[described.place.segment].view(described.place).to(device)
        if not described.is_shared:
            tensor = tensor.clone()
    if described.kind is nn.Parameter:
        tensor = nn.Parameter(tensor, described.requires_grad)
    elif issubclass(described.kind, nn.Parameter):
        tensor = tensor.as_subclass(described.kind).requires_grad_(described.requires_grad)
    elif described.requires_grad:
        tensor = tensor.requires_grad_()
    for name, value in described.attributes.items():
        tensor.__dict__.setdefault(name, value)
    return tensor


def _builtin(category: type[Warning]) -> type[Warning]:
    """Return the nearest of Python's own classes of warnings."""
    return next(cls for cls in category.__mro__ if cls.__module__ == "builtins")


def _pickled(answer: Answer) -> bytes:
    return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)


# ---- processes -----------------------------------------------------------------------------------


def serve_forks(fd: int) -> None:
    """Fork a worker whenever asked to, until the caller goes; tell how workers ended. The fork server's whole life.

    Messages, each answered: ("fork", environment, cores) with the worker's end of a channel, and what its standard
    output and error are to be -> its process id; ("status", process id) -> its exit status, as `os.waitpid` has it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    _import_what_workers_need()
    gc.collect()
    gc.freeze()  # workers share these objects' memory as long as nobody writes into it
    statuses: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _collect(statuses))
    while True:
        try:
            body, fds = channel.receive()
        except ChannelClosedError:
            os._exit(0)
        request, *given = pickle.loads(body)
        if request == "fork":
            pid = os.fork()
            if not pid:
                os.close(fd)
                _be_a_worker(fds, *given)
            for received in fds:
                os.close(received)
            channel.send(pickle.dumps(pid))
        else:
            (pid,) = given
            if pid not in statuses:
                with contextlib.suppress(ChildProcessError):
                    statuses[pid] = os.waitpid(pid, 0)[1]
            channel.send(pickle.dumps(statuses.pop(pid, None)))


def _collect(statuses: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            statuses[pid] = status


def _import_what_workers_need() -> None:
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # the first backward of a process imports it


def _be_a_worker(fds: Sequence[int], environment: dict[str, str], own_cores: Sequence[int], seed: int) -> None:
    """Answer messages until the channel closes. Does not return."""
    status = 1
    try:
        _die_with_the_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, stdout, stderr = fds
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        # Whole lines: what is printed leaves with the end of its line, in one write.
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        random.seed(seed)
        cores.bind(own_cores)
        Worker(Channel(socket.socket(fileno=connection))).serve()
    except ChannelClosedError:
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here, whatever it was
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def _die_with_the_parent() -> None:
    """Have the kernel end this process with the fork server, also in the middle of a step (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent or parent == 1:
            os._exit(0)
