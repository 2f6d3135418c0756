"""The workers of one engine, as the caller sees them: started, asked and ended together.

A `WorkerGroup` is never repaired. If a worker dies, or the caller leaves in the middle of a step (Ctrl-C), all workers
of the group are ended, the graphs that they kept are lost, and the next forward starts another group. The live
parameters are not lost: they are the caller's. To start a group takes a few forks of the fork server, which all groups
of the process share.
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
from manyhands.engines.processes.remote_exchange import Withdrawal, packed
from manyhands.engines.processes.shared_memory import Segment, SendBuffer
from manyhands.runtime import affinity
from manyhands.runtime import devices as _devices
from manyhands.runtime.errors import annotate
from manyhands.runtime.exchange import CrossProcess, LocalExchange, Request, Response
from manyhands.runtime.interrupts import at_deletion, deliver
from manyhands.runtime.thread_state import ProcessState

_SPIN_S = 0.0005
_END_TIMEOUT_S = 1.0  # within which all connections of a killed process close
_SLEEP_S = 0.001
_WAKE_S = 0.1  # a waiting caller looks this often for Ctrl-C


class WorkerDiedError(RuntimeError):
    """A worker process ended by itself."""


class WorkerHandle:
    """One worker of a group.

    Attributes:
        pid: its process id.
        send_buffer: the tensors of the caller's messages to it.
        known_segments: numbers of the segments that it has mapped.
        received_segments: the segments that came from it, by number.
        released_graphs: graphs that it is to drop.
        placed: the places of its small gradients, by leaf; in the segment `placed_in`, for the leaves `placed_for`.
    """

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid, self.channel = pid, channel
        self.send_buffer = SendBuffer()
        self.known_segments: set[int] = set()
        self.released_graphs: list[int] = []
        self.received_segments: dict[int, Segment] = {}
        self.placed: dict[int, torch.Tensor] = {}
        self.placed_in = Segment.create(0)
        self.placed_for: object = None
        self._process: ProcessState | None = None

    def send(
        self, message: Message, segments: Sequence[Segment], process: ProcessState, kept: Sequence[Segment]
    ) -> None:
        """Send a message, with the segments that the worker does not have yet.

        Args:
            segments: those that the message refers to.
            kept: those that the worker keeps even if the message brings another module.
        """
        needed = (self.send_buffer.segment, *segments)
        if isinstance(message, Forward) and message.update.module is not None:  # frees the last one's segments
            message.freed = list(self.known_segments - {segment.number for segment in (*needed, *kept)})
            self.known_segments.difference_update(message.freed)
        known = self.known_segments
        new = {segment.number: segment for segment in needed if segment.number not in known}
        message.released_graphs = self.released_graphs[:]
        del self.released_graphs[: len(message.released_graphs)]
        if process != self._process:
            message.process = self._process = process
        if new:
            message.segments = [(segment.number, segment.num_bytes) for segment in new.values()]
        fds = [segment.fd for segment in new.values()]
        self.channel.send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), fds)
        known.update(new)

    def receive(self) -> Reply | Request | Withdrawal:
        """Return the worker's next message: its reply, or a request or withdrawal of a batch norm's exchange."""
        body, fds = self.channel.receive()
        reply: Reply | Request | Withdrawal = pickle.loads(body)
        if isinstance(reply, Request | Withdrawal):
            return reply
        for (number, num_bytes), fd in zip(reply.segments, fds, strict=True):
            self.received_segments = {number: Segment(fd, num_bytes, number)}  # the worker uses only its newest
        return reply

    def how_it_died(self) -> str:
        """Close the channel of a worker that has died; return what is known about its death."""
        self.channel.close()
        return f"worker process {self.pid} {_describe_status(fork_server.server.status(self.pid))}"

    def send_response(self, response: Response, failed: bool) -> None:
        """Send the response of the exchange for which the worker waits, and whether a replica has failed."""
        with contextlib.suppress(ChannelClosedError):  # it has died: the next receive from it notices
            self.channel.send(packed((response, failed)))


class StepLock:
    """A context that waits until no other thread is in a step; it gives False if this thread is in one.

    Batches of lanes, each on a worker of its own, share it: they run at the same time, and steps wait for their end.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # of the steps of the thread that has the lock
        self._pid = os.getpid()
        self._sharing = threading.Condition()
        self._num_sharing = 0
        _step_locks.add(self)

    @contextlib.contextmanager
    def share(self) -> Iterator[None]:
        """Enter the context of one batch: it waits until no other thread is in a step, and steps wait for its end."""
        with self._lock, self._sharing:
            self._num_sharing += 1
        try:
            yield
        finally:
            with self._sharing:
                self._num_sharing -= 1
                self._sharing.notify_all()

    def __enter__(self) -> bool:
        while not self._lock.acquire(timeout=_WAKE_S):
            deliver()
        self._depth += 1
        if self._depth == 1 and self._num_sharing:
            try:
                self._wait_for_batches()
            except BaseException:
                self.__exit__()
                raise
        return self._depth == 1

    def after_fork(self) -> None:
        """In the child of a fork: let nobody wait for a thread that is in a step of the parent."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self.__init__()  # type: ignore[misc]

    def _wait_for_batches(self) -> None:
        if self._pid != os.getpid():  # in the child of a fork there are no lanes
            return
        with self._sharing:
            while self._num_sharing:
                self._sharing.wait(_WAKE_S)
                deliver()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()


class WorkerGroup:
    """Workers that run the replicas of one engine.

    It is the context of a step: if that raises while a worker owes a reply, or has missed a collective, the group ends.

    Attributes:
        workers: those of replicas 1, 2, ...
        num_in_sync: how many of them have the module as it is.
        devices: of replicas 0, 1, ...
        transport: how parameters reach them, and gradients come back.
        collective: the context of the caller's part in a collective: if that raises, the group cannot go on.
        graph_numbers: yields the numbers of their graphs.
        ended: whether it has been ended.
    """

    def __init__(self, devices: Sequence[torch.device], share_memory: bool = True) -> None:
        self.ended = False
        self.num_in_sync = 0
        self.devices = list(devices)
        self.graph_numbers = itertools.count()
        self.transport = _transport_for(devices, share_memory)
        num_workers = len(devices) - 1
        self._awaited: set[int] = set()  # workers that owe a reply
        self._dead: set[int] = set()  # those of them that have died
        self._has_urgent = False  # whether one of them has died, or has replied with an urgent error
        self._missed_collective: set[int] = set()  # replicas that have not done their part in a collective
        self.collective = _Collective(self._missed_collective)
        self._replies: dict[int, Reply] = {}  # of workers that are no longer awaited
        self._exchange: LocalExchange | None = None
        parts = affinity.cores_per_replica(num_workers + 1)
        self.workers: list[WorkerHandle] = []  # last of the attributes that `end` needs
        _groups.add(self)
        for i in range(num_workers):
            try:
                pid, channel = fork_server.server.fork(parts[i + 1], (torch.initial_seed() + i + 1) & 0xFFFFFFFF)
            except BaseException:
                if not fork_server.server.is_running:  # Ctrl-C has ended it, and so the workers of all groups
                    for group in list(_groups):
                        group.ended = True
                raise
            self.workers.append(WorkerHandle(pid, channel))

    def keep_graph(self, graph: int) -> at_deletion:
        """Return what keeps a graph in every worker: when it is deleted, each drops the graph with its next message."""
        return at_deletion(*[map(worker.released_graphs.append, [graph]) for worker in self.workers])

    def send(
        self, index: int, message: Message, segments: Sequence[Segment], process: ProcessState, where: str
    ) -> None:
        """Send a worker a message.

        Raises:
            WorkerDiedError: it has died. The group is ended.
        """
        self._awaited.add(index)  # before it is sent: if Ctrl-C interrupts the send, the group must end
        try:
            self.workers[index].send(message, segments, process, kept=self.transport.segments)
        except ChannelClosedError:
            raise self._end_with_error(index, where) from None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and (self._awaited or self._missed_collective):
            self.end()
        self._replies, self._exchange, self._has_urgent = {}, None, False

    def open_exchange(self, num_replicas: int, cross_process: CrossProcess | None = None) -> LocalExchange:
        """Open the exchange of the caller's replica and of the workers that were sent a message; return it.

        Workers' requests are received while the caller's replica waits in the exchange, and in `replies`. That is early
        enough: an exchange responds only when every replica has submitted or withdrawn.
        """
        self._exchange = LocalExchange(num_replicas, self._receive, cross_process)
        for index in set(range(num_replicas - 1)) - self._awaited:
            self._exchange.withdraw(index + 1, failed=False)
        return self._exchange

    def replies(self, where: Sequence[str]) -> dict[int, Reply]:
        """Wait for the replies of the workers that were sent a message; return them by index, in order.

        An urgent one is returned at once, and alone.

        Raises:
            WorkerDiedError: a worker has died. The group is ended.
            BaseException: the error that ended their exchange, in which some of them may be waiting.
        """
        if self._exchange is not None and self._exchange.error is not None:
            raise self._exchange.error
        self._receive(lambda: self._has_urgent)
        self._raise_if_died(where)
        replies, self._replies = dict(sorted(self._replies.items())), {}
        if self._has_urgent:
            self._has_urgent = False
            return dict([item for item in replies.items() if _is_urgent(item[1])][:1])
        return replies

    def _receive(self, enough: Callable[[], bool]) -> None:
        """Receive workers' messages until all have replied, or `enough` returns True."""
        if enough():
            return
        index_of = {self.workers[i].channel: i for i in self._awaited - self._dead}
        for channel in ready(index_of, _SPIN_S):
            self._receive_from(index_of[channel])
            if index_of[channel] not in self._awaited - self._dead:
                del index_of[channel]
            if enough():
                return

    def _receive_from(self, index: int) -> None:
        worker, exchange = self.workers[index], self._exchange
        try:
            received = worker.receive()
        except ChannelClosedError:
            self._dead.add(index)
            self._has_urgent = failed = True
        else:
            if isinstance(received, Withdrawal):
                assert exchange is not None
                exchange.withdraw(index + 1, failed=received.failed)
                return
            if isinstance(received, Request):
                assert exchange is not None
                exchange.submit(index + 1, received, lambda response: worker.send_response(response, exchange.failed))
                return
            self._awaited.remove(index)
            self._replies[index] = received
            self._has_urgent = self._has_urgent or _is_urgent(received)
            if received.missed_collective:
                self._missed_collective.add(index + 1)
            failed = received.error is not None
        if exchange is not None:
            exchange.withdraw(index + 1, failed=failed)

    def poll(self, where: Sequence[str]) -> None:
        """Receive what workers have sent so far; for a caller that waits for them elsewhere.

        Raises:
            WorkerDiedError: a worker has died. The group is ended.
            BaseException: the error of a worker that has missed a collective.
        """
        self._receive_ready()
        self._raise_if_died(where)
        for index, reply in sorted(self._replies.items()):
            if reply.missed_collective and reply.error is not None:
                # Another worker's death may be the cause. It shows a moment later, and is the error to raise then.
                until = time.monotonic() + _END_TIMEOUT_S
                while self._awaited and not self._dead and time.monotonic() < until:
                    time.sleep(_SLEEP_S)
                    self._receive_ready()
                self._raise_if_died(where)
                raise annotate([(where[index + 1], reply.error.exception())])

    def _receive_ready(self) -> None:
        for index in sorted(self._awaited - self._dead):
            if self.workers[index].channel.is_ready():
                self._receive_from(index)

    def _raise_if_died(self, where: Sequence[str]) -> None:
        if self._dead:
            index = min(self._dead)
            raise self._end_with_error(index, where[index + 1])

    def _end_with_error(self, index: int, where: str) -> WorkerDiedError:
        """End the group after a worker's death; return the error that describes it."""
        died = self.workers[index].how_it_died()
        self.end()
        return WorkerDiedError(
            f"{where}: its {died}. This step is lost; the module is as it was, and the next forward starts other "
            "workers."
        )

    def end(self, graceful: bool = False) -> None:
        """End every worker: if `graceful`, by closing its channel (for idle workers); else by SIGKILL."""
        self.ended = True
        _groups.discard(self)
        for worker in self.workers:
            if not graceful:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(worker.pid, signal.SIGKILL)
            worker.channel.close()
        self.workers = []
        self.transport.end()

    def __del__(self) -> None:  # no engine and no graph refers to it
        if hasattr(self, "workers"):  # Ctrl-C may interrupt `__init__`
            self.end(graceful=True)

    def abandon(self) -> None:
        """Drop the parent's workers, in the child of a fork."""
        self.transport.abandon()
        self.end(graceful=True)


class _Collective:
    def __init__(self, missed: set[int]) -> None:
        self._missed = missed

    def __enter__(self) -> None:
        self._missed.add(0)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._missed.discard(0)


def _transport_for(devices: Sequence[torch.device], share_memory: bool) -> Transport:
    if share_memory and all(map(_devices.is_cpu, devices)):
        return SharedMemoryTransport()
    return CollectiveTransport(devices)


def _is_urgent(reply: Reply) -> bool:
    """Return whether a reply is raised at once, before the other workers have replied."""
    return reply.error is not None and reply.error.is_urgent


def _describe_status(status: int | None) -> str:
    if status is None:
        return "has ended"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    cause = " (often sent by the kernel when memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{cause}"


def _end_all() -> None:
    for group in list(_groups):
        group.end()
    fork_server.server.end()


def _after_fork() -> None:
    for group in list(_groups):
        group.abandon()
    fork_server.server.abandon()
    for lock in list(_step_locks):
        lock.after_fork()


_groups: "weakref.WeakSet[WorkerGroup]" = weakref.WeakSet()
_step_locks: "weakref.WeakSet[StepLock]" = weakref.WeakSet()
atexit.register(_end_all)
os.register_at_fork(after_in_child=_after_fork)
