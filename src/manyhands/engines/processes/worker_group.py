"""The workers of one engine, as the caller sees them: started together, asked together, ended together.

A `WorkerGroup` is never mended. If one of its workers dies, or the caller leaves in the middle of a step (Ctrl-C), the
whole
team is ended, the graphs that it kept are lost, and the next forward starts another: the live parameters were never in
it. Starting one is a few forks of the fork server, which is shared by all teams of the process.
"""

import atexit
import contextlib
import itertools
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from manyhands.engines.processes import fork_server
from manyhands.engines.processes.channel import Channel, ChannelClosedError, ready
from manyhands.engines.processes.messages import Forward, Message, Reply
from manyhands.engines.processes.reducers.base import Transport
from manyhands.engines.processes.reducers.collectives import CollectiveTransport
from manyhands.engines.processes.reducers.shared_memory import SharedMemoryTransport
from manyhands.engines.processes.remote_exchange import Left, packed
from manyhands.engines.processes.shared_memory import Segment, SendBuffer
from manyhands.runtime import affinity
from manyhands.runtime import devices as _devices
from manyhands.runtime.errors import annotate
from manyhands.runtime.thread_state import ProcessState
from manyhands.sync_batch_norm.exchange import CrossProcess, LocalExchange, Request, Result

_SPIN_S = 0.0005
_ENDING_TAKES_S = 1.0  # for all connections of a process that is killed to end
_NAP_S = 0.001


class WorkerDiedError(RuntimeError):
    """A worker process ended by itself."""


class WorkerHandle:
    """One worker of a team.

    Attributes:
        pid: its process id.
        outbox: what the caller writes to it.
        known: numbers of the segments that it has.
        inbox: the segments that came from it, by number.
        forgotten: graphs that it is to drop.
        gradients: views of its small gradients, by the number of the tensor; None until the first backward.
    """

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid, self.channel = pid, channel
        self.send_buffer = SendBuffer()
        self.known: set[int] = set()
        self.forgotten: list[int] = []
        self.inbox: dict[int, Segment] = {}
        self.gradients: dict[int, torch.Tensor] | None = None
        self._process: ProcessState | None = None

    def send(
        self, message: Message, segments: Sequence[Segment], process: ProcessState, kept: Sequence[Segment]
    ) -> None:
        """Send a message, with what it speaks of and the worker does not have.

        Args:
            segments: what the message speaks of.
            kept: what the worker is to keep even if the message brings another module.
        """
        spoken_of = (self.send_buffer.segment, *segments)
        if isinstance(message, Forward) and message.update.module is not None:  # what the last one lay in is not needed
            message.gone = list(self.known - {segment.number for segment in (*spoken_of, *kept)})
            self.known.difference_update(message.gone)
        new = [segment for segment in spoken_of if segment.number not in self.known]
        message.forgotten = self.forgotten[:]
        del self.forgotten[: len(message.forgotten)]
        if process != self._process:
            message.process = self._process = process
        message.segments = [(segment.number, segment.num_bytes) for segment in new]
        self.channel.send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), [segment.fd for segment in new])
        self.known.update(segment.number for segment in new)

    def receive(self) -> Reply | Request | Left:
        """Return the next that it says: its answer, or what it comes to the meeting with."""
        body, fds = self.channel.receive()
        reply: Reply | Request | Left = pickle.loads(body)
        if isinstance(reply, Request | Left):
            return reply
        for (number, num_bytes), fd in zip(reply.segments, fds, strict=True):
            self.inbox = {number: Segment(fd, num_bytes, number)}  # the worker writes into its newest only
        return reply

    def tell(self, result: Result | None, failed: bool) -> None:
        """Send what the exchange at which the worker waits came to, and whether a replica has failed."""
        with contextlib.suppress(ChannelClosedError):  # it has died: seen by whoever receives from it
            self.channel.send(packed((result, failed)))


class Steps:
    """The steps of an engine, of which there is one at a time.

    Attributes:
        graph_numbers: what the engine calls the graphs of its steps, each used once.
    """

    def __init__(self) -> None:
        self.graph_numbers = itertools.count()
        self._lock = threading.RLock()
        self._busy = False

    @contextlib.contextmanager
    def begin(self) -> Iterator[bool]:
        """Wait for the turn; yield False where this very thread is in the middle of a step already."""
        with self._lock:
            if self._busy:
                yield False
                return
            self._busy = True
            try:
                yield True
            finally:
                self._busy = False


class WorkerGroup:
    """Workers that run the replicas of one engine.

    Attributes:
        workers: those of replicas 1, 2, ...
        num_told: how many of them know the module as it is.
        devices: of replicas 0, 1, ...
        transport: how parameters reach them, and gradients come back.
        ended: whether it has been ended.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.ended = False
        self.num_told = 0
        self.devices = list(devices)
        self.transport = _transport_for(devices)
        num_workers = len(devices) - 1
        self._awaited: set[int] = set()
        self._lost: set[int] = set()  # those of them whose channel has closed
        self._behind: set[int] = set()  # replicas that have not done their part in what all do together
        self._answers: dict[int, Reply] = {}  # of those that were asked and are not awaited any more
        self._exchange: LocalExchange | None = None
        parts = affinity.divided(num_workers + 1)
        self.workers: list[WorkerHandle] = []  # the last of what `end` needs
        _groups.add(self)
        for i in range(num_workers):
            try:
                pid, channel = fork_server.server.fork(parts[i + 1], (torch.initial_seed() + i + 1) & 0xFFFFFFFF)
            except BaseException:
                if not fork_server.server.is_running:  # Ctrl-C has ended it, and so the workers of all teams
                    for team in list(_groups):
                        team.ended = True
                raise
            self.workers.append(WorkerHandle(pid, channel))

    def forget_graph(self, graph: int) -> None:
        """Let every worker drop a graph with the next message it gets. May be called from a finalizer."""
        for worker in self.workers:
            worker.forgotten.append(graph)

    def ask(self, index: int, message: Message, segments: Sequence[Segment], process: ProcessState, where: str) -> None:
        """Send a worker a message; what it has to know besides is put into it.

        Raises:
            WorkerDiedError: it has died. The team is ended.
        """
        self._awaited.add(index)  # before it is sent: what Ctrl-C breaks off in the middle must end the team
        try:
            self.workers[index].send(message, segments, process, kept=self.transport.segments)
        except ChannelClosedError:
            raise self.died(index, where) from None

    @contextlib.contextmanager
    def whole_or_ended(self) -> Iterator[None]:
        """End the team if the block is left by an exception while a worker still owes an answer, or is out of step."""
        try:
            yield
        except BaseException:
            if self._awaited or self._behind:
                self.end()
            raise
        finally:
            self._answers, self._exchange = {}, None

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Do the caller's part in what all replicas do together: if the block fails, the team cannot go on."""
        self._behind.add(0)
        yield
        self._behind.discard(0)

    def open_exchange(self, num_replicas: int, cross_process: CrossProcess | None = None) -> LocalExchange:
        """Open the meeting of the caller's replica and of the workers that have been asked; return it.

        Workers are served while the caller's replica waits at the meeting, and in `replies`. That is early enough: no
        exchange is complete before every replica that takes part in it has come or left.
        """
        self._exchange = LocalExchange(num_replicas, self._receive, cross_process)
        for index in set(range(num_replicas - 1)) - self._awaited:
            self._exchange.withdraw(index + 1, failed=False)
        return self._exchange

    def replies(self, where: Sequence[str]) -> dict[int, Reply]:
        """Wait for the answers of the workers that were asked; return them by index.

        An answer that is to reach the caller at once is not waited behind: then it is the only one.

        Raises:
            WorkerDiedError: one has died. The team is ended.
            BaseException: what has ended their meeting, at which some of them may be waiting.
        """
        if self._exchange is not None and self._exchange.error is not None:
            raise self._exchange.error
        self._receive(lambda: bool(self._lost) or any(map(_stops, self._answers.values())))
        self._raise_if_died(where)
        replies, self._answers = self._answers, {}
        return dict([item for item in replies.items() if _stops(item[1])][:1]) or replies

    def _receive(self, enough: Callable[[], bool]) -> None:
        """Receive what workers send until all that are awaited have answered, or it is `enough`."""
        if enough():
            return
        index_of = {self.workers[i].channel: i for i in self._awaited - self._lost}
        for channel in ready(index_of, _SPIN_S):
            self._receive_from(index_of[channel])
            if index_of[channel] not in self._awaited - self._lost:
                del index_of[channel]
            if enough():
                return

    def _receive_from(self, index: int) -> None:
        worker, exchange = self.workers[index], self._exchange
        try:
            received = worker.receive()
        except ChannelClosedError:
            self._lost.add(index)
            failed = True
        else:
            if isinstance(received, Left):
                assert exchange is not None
                exchange.withdraw(index + 1, failed=received.failed)
                return
            if isinstance(received, Request):
                assert exchange is not None
                exchange.submit(index + 1, received, lambda result: worker.tell(result, exchange.failed))
                return
            self._awaited.remove(index)
            self._answers[index] = received
            if received.out_of_step:
                self._behind.add(index + 1)
            failed = received.error is not None
        if exchange is not None:
            exchange.withdraw(index + 1, failed=failed)

    def attend(self, where: Sequence[str]) -> None:
        """Receive what workers have sent so far; for a caller who waits for them in another way.

        Raises:
            WorkerDiedError: one has died. The team is ended.
            BaseException: what a worker has raised that others would wait for in vain.
        """
        self._receive_what_is_there()
        self._raise_if_died(where)
        for index, reply in sorted(self._answers.items()):
            if reply.out_of_step and reply.error is not None:
                # It may be no more than what another's end has led to, which is seen a moment later.
                until = time.monotonic() + _ENDING_TAKES_S
                while self._awaited and not self._lost and time.monotonic() < until:
                    time.sleep(_NAP_S)
                    self._receive_what_is_there()
                self._raise_if_died(where)
                raise annotate([(where[index + 1], reply.error.exception())])

    def _receive_what_is_there(self) -> None:
        for index in sorted(self._awaited - self._lost):
            if self.workers[index].channel.is_ready():
                self._receive_from(index)

    def _raise_if_died(self, where: Sequence[str]) -> None:
        if self._lost:
            index = min(self._lost)
            raise self.died(index, where[index + 1])

    def died(self, index: int, where: str) -> WorkerDiedError:
        """End the team, one of whose workers has died; return the error that says how."""
        pid = self.workers[index].pid
        self.workers[index].channel.close()
        how = _how_it_ended(fork_server.server.status(pid))
        self.end()
        return WorkerDiedError(
            f"{where}: its worker process {pid} {how}. This step is lost; the module is as it was, and the next "
            "forward starts other workers."
        )

    def end(self, patient: bool = False) -> None:
        """End every worker: by closing its channel if `patient`, where it has nothing to do; else at once."""
        self.ended = True
        _groups.discard(self)
        for worker in self.workers:
            if not patient:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(worker.pid, signal.SIGKILL)
            worker.channel.close()
        self.workers = []
        self.transport.end()

    def __del__(self) -> None:  # neither the engine nor a graph needs it any more
        if hasattr(self, "workers"):  # Ctrl-C can come before there is anything to end
            self.end(patient=True)

    def forget(self) -> None:
        """Let go of the parent's workers, in the child of a fork."""
        self.transport.forget()
        self.end(patient=True)


always_send = False  # for tests: have parameters and gradients sent where they could be shared, too


def _transport_for(devices: Sequence[torch.device]) -> Transport:
    if always_send or not all(map(_devices.is_cpu, devices)):
        return CollectiveTransport(devices)
    return SharedMemoryTransport()


def _stops(reply: Reply) -> bool:
    """Return whether an answer is to reach the caller at once."""
    return reply.error is not None and reply.error.stops


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "has ended"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    often = " (often the kernel's answer to a machine that is out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{often}"


def _end_all() -> None:
    for team in list(_groups):
        team.end()
    fork_server.server.end()


def _after_fork() -> None:
    for team in list(_groups):
        team.forget()
    fork_server.server.forget()


_groups: "weakref.WeakSet[WorkerGroup]" = weakref.WeakSet()
atexit.register(_end_all)
os.register_at_fork(after_in_child=_after_fork)
