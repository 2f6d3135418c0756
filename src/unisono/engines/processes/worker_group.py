"""The workers of one engine, as the caller sees them: started, asked and ended together.

A `WorkerGroup` grows when a forward has more replicas than any before, and is never repaired. If a worker dies, or the
caller leaves in the middle of a step (Ctrl-C), all workers of the group are ended, the graphs that they kept are lost,
and the next forward starts another group. The live parameters are not lost: they are the caller's. To start a group
takes a few forks of the fork server, which all groups of the process share.
"""

import atexit
import contextlib
import itertools
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import torch

from unisono.engines.processes import fork_server
from unisono.engines.processes.channel import Channel, ChannelClosedError, ready
from unisono.engines.processes.messages import Forward, Message, Reply
from unisono.engines.processes.post_mortem import StackFile, how_it_ended, is_stopped, oom_kills
from unisono.engines.processes.reducers.base import Transport
from unisono.engines.processes.reducers.collectives import CollectiveTransport
from unisono.engines.processes.reducers.shared_memory import SharedMemoryTransport
from unisono.engines.processes.remote_exchange import Withdrawal, packed
from unisono.engines.processes.shared_memory import Segment, SendBuffer
from unisono.runtime import affinity
from unisono.runtime import devices as _devices
from unisono.runtime.errors import ReplicaDied, ReplicaNames, ReplicaTimeout, annotate
from unisono.runtime.exchange import CrossProcess, LocalExchange, Request, Response
from unisono.runtime.forks import in_forked_child
from unisono.runtime.interrupts import WAKE_S, at_deletion, deliver
from unisono.runtime.thread_state import ProcessState

_SPIN_S = 0.0005
_END_TIMEOUT_S = 1.0  # within which all connections of a killed process close
_SLEEP_S = 0.001
_ENDED = "has ended; how, is not known"
_STEP_IS_LOST = "This step is lost; the module is as it was, and the next forward starts other workers."
_WAITS_FOR_OTHERS = ("in wait_until", "in submit_and_wait")  # in the stack of a worker


class WorkerHandle:
    """One worker of a group.

    Attributes:
        pid: its process id.
        send_buffer: the tensors of the caller's messages to it.
        known_segments: numbers of the segments that it has mapped.
        received_segments: the segments that came from it, by number.
        released_graphs: graphs that it is to drop.
        cores: those that it runs on; None if it has been told.
        stack_file: where it writes its Python stacks.
        placed: the places of its small gradients, by leaf; in the segment `placed_in`, for the leaves `placed_for`.
    """

    def __init__(
        self, pid: int, server_pid: int, channel: Channel, stack_file: StackFile, kills_before: Mapping[str, int]
    ) -> None:
        """Take a worker that the fork server `server_pid` has just forked; `oom_kills` was `kills_before` then."""
        self.pid, self.channel, self.stack_file = pid, channel, stack_file
        self._server_pid, self._kills_before = server_pid, kills_before
        self.send_buffer = SendBuffer()
        self.known_segments: set[int] = set()
        self.released_graphs: list[int] = []
        self.cores: tuple[int, ...] | None = None
        self.received_segments: dict[int, Segment] = {}
        self.placed: dict[int, torch.Tensor] = {}
        self.placed_in = Segment.create(0)
        self.placed_for: object = None
        self._process: ProcessState | None = None

    def send(self, message: Message, segments: Sequence[Segment], kept: Sequence[Segment] = ()) -> None:
        """Send a message, with the tensors in the send buffer and the segments that the worker does not have yet.

        Args:
            segments: those that the message refers to.
            kept: those that the worker keeps even if the message brings another module.
        """
        message.specs = self.send_buffer.flush()
        needed = (self.send_buffer.segment, *segments)
        if isinstance(message, Forward) and message.update.module is not None:  # frees the last one's segments
            message.freed = list(self.known_segments - {segment.number for segment in (*needed, *kept)})
            self.known_segments.difference_update(message.freed)
        known = self.known_segments
        new = {segment.number: segment for segment in needed if segment.number not in known}
        message.released_graphs = self.released_graphs[:]
        del self.released_graphs[: len(message.released_graphs)]
        message.cores, self.cores = self.cores, None
        if message.process == self._process:
            message.process = None
        else:
            self._process = message.process
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

    def death(self, name: str, replica: int, device: torch.device, lost: str) -> ReplicaDied:
        """Close the channel of a worker that has died; return the error that says what is known about its death.

        `lost` says in words what is lost with it.
        """
        self.channel.close()
        status, server_code = fork_server.server.status(self.pid, self._server_pid)
        code = None if status is None else os.waitstatus_to_exitcode(status)
        died = f"worker process {self.pid} {_ENDED if code is None else how_it_ended(code, self._kills_before)}"
        if server_code is not None:
            died = (
                f"worker process {self.pid} ended with the fork server that all workers of this process come from: "
                f"process {self._server_pid} {how_it_ended(server_code, self._kills_before)}"
            )
            code = -signal.SIGKILL if sys.platform == "linux" else None  # what the kernel sends then
        stack = self.stack_file.read()
        cause = f"{name}: its {died}."
        message = f"{cause} {lost}" + (f"\nThe worker's Python stack:\n{stack}" if stack else "")
        return ReplicaDied(message, replica=replica, device=device, pid=self.pid, code=code, stack=stack, cause=cause)

    def end(self, graceful: bool = False) -> None:
        """End the worker: if `graceful`, by closing its channel (for an idle one); else by SIGKILL."""
        if not graceful:
            self.kill()
        self.channel.shut_down()

    def kill(self) -> None:
        """End the worker at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)

    def send_response(self, response: Response, failed: bool) -> None:
        """Send the response of the exchange for which the worker waits, and whether a replica has failed."""
        # One that has died, or is stuck: the next receive from it notices.
        with contextlib.suppress(ChannelClosedError, TimeoutError):
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
        while not self._lock.acquire(timeout=WAKE_S):
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
        """In the child of a fork: free the lock if a thread of the parent was in a step."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self.__init__()  # type: ignore[misc]

    def _wait_for_batches(self) -> None:
        if self._pid != os.getpid():  # in the child of a fork there are no lanes
            return
        with self._sharing:
            while self._num_sharing:
                self._sharing.wait(WAKE_S)
                deliver()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()


class WorkerGroup:
    """Workers that run the replicas of one engine.

    Attributes:
        workers: those of replicas 1, 2, ...
        num_in_sync: how many of them have the module as it is.
        devices: of replicas 0, 1, ...
        transport: how parameters reach them, and gradients come back.
        timeout_s: for how long the caller waits without a message; None: for ever. See `set_timeout`.
        graph_numbers: yields the numbers of their graphs.
        ended: whether it has been ended.
    """

    def __init__(
        self, devices: Sequence[torch.device], share_memory: bool = True, timeout_s: float | None = None
    ) -> None:
        self.ended = False
        self.timeout_s = timeout_s
        self._progress_at = 0.0  # when this wait began, or the last message came
        self._names = ReplicaNames()  # of the last step's replicas
        self._timed_out: ReplicaTimeout | None = None
        self.num_in_sync = 0
        self.devices: list[torch.device] = []
        self.graph_numbers = itertools.count()
        self._backend = _backend_for(devices, share_memory)
        self.transport: Transport = (
            SharedMemoryTransport() if self._backend is None else CollectiveTransport(devices[0], self._backend)
        )
        self._awaited: set[int] = set()  # workers that owe a reply
        self._dead: set[int] = set()  # those of them that have died
        self._has_urgent = False  # whether one of them has died, or has replied with an urgent error
        self._out_of_step: set[int] = set()  # replicas that cannot go on, or have not done their part in a collective
        self._replies: dict[int, Reply] = {}  # of workers that are no longer awaited
        self._exchange: LocalExchange | None = None
        self.workers: list[WorkerHandle] = []  # last of the attributes that `end` needs
        _groups.add(self)
        self.grow(devices)

    def can_grow(self, devices: Sequence[torch.device], share_memory: bool) -> bool:
        """Return whether its workers, and some more, can run replicas on these devices."""
        begin_alike = [*devices[: len(self.devices)]] == self.devices
        return not self.ended and begin_alike and _backend_for(devices, share_memory) == self._backend

    def grow(self, devices: Sequence[torch.device]) -> None:
        """Start workers until there is one for each replica but the first; if one cannot be started, start none.

        Workers that are there already keep their graphs. `devices` are those of all replicas.
        """
        kills_before, num_before = oom_kills(), len(self.workers)
        try:
            for replica in range(num_before + 1, len(devices)):
                self.workers.append(self._started(replica, devices[replica], kills_before))
        except BaseException:
            for worker in self.workers[num_before:]:
                worker.end()
            del self.workers[num_before:]
            raise
        self.devices = [*devices]
        for worker, cores in zip(self.workers, affinity.cores_per_replica(len(devices))[1:], strict=True):
            worker.cores = cores

    def _started(self, replica: int, device: torch.device, kills_before: Mapping[str, int]) -> WorkerHandle:
        stack_file = StackFile()
        seed = (torch.initial_seed() + replica) & 0xFFFFFFFF
        try:
            pid, server_pid, channel = fork_server.server.fork(seed, stack_file.fd, self.timeout_s)
        except fork_server.ForkServerDiedError as died:
            self.end()
            message = _not_started(replica, device, died.pid, how_it_ended(died.code, kills_before))
            raise ReplicaDied(message, replica=replica, device=device) from None
        except BaseException as error:
            if not fork_server.server.is_running:  # it was ended here, and so were the workers of all groups
                for group in list(_groups):
                    group.ended = True
            if isinstance(error, fork_server.ForkServerStuckError):
                self.end()
                how = "was stopped" if error.stopped else "did not reply"
                waited = f"for {self.timeout_s:g} s (timeout={self.timeout_s:g}), and has been ended"
                message = _not_started(replica, device, error.pid, f"{how} {waited}")
                raise ReplicaTimeout(message, replica=replica, device=device, timeout=self.timeout_s or 0.0) from None
            raise
        try:
            channel.set_timeout(self.timeout_s)
            return WorkerHandle(pid, server_pid, channel, stack_file, kills_before)
        except BaseException:
            channel.shut_down()  # which ends the worker
            raise

    def set_timeout(self, timeout_s: float | None) -> None:
        """Let waits end in `ReplicaTimeout` after so many seconds without a message; None: let them go on for ever."""
        self.timeout_s = timeout_s
        for worker in self.workers:
            worker.channel.set_timeout(timeout_s)

    def keep_graph(self, graph: int) -> at_deletion:
        """Return what keeps a graph in every worker: when it is deleted, each drops the graph with its next message."""
        return at_deletion(*[map(worker.released_graphs.append, [graph]) for worker in self.workers])

    def step(self, names: ReplicaNames) -> "WorkerGroup":
        """Return this group as the context of a step over replicas with these names.

        If that raises while a worker owes a reply, or a process has missed its part in a collective, the group ends.
        """
        self._names = names
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and (self._awaited or self._out_of_step):
            self.end()
        self._replies, self._exchange, self._has_urgent = {}, None, False

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Enter the context of the caller's part in a collective: if that raises, the group cannot go on."""
        self._out_of_step.add(0)
        yield
        self._out_of_step.discard(0)

    def send(self, index: int, message: Message, segments: Sequence[Segment]) -> None:
        """Send a worker a message.

        Raises:
            ReplicaDied: it has died. The group is ended.
        """
        self._awaited.add(index)  # before it is sent: if Ctrl-C interrupts the send, the group must end
        try:
            self.workers[index].send(message, segments, kept=self.transport.segments)
        except ChannelClosedError:
            raise self._end_with_error(index) from None
        except TimeoutError:
            self._give_up([index])

    def open_exchange(self, num_replicas: int, cross_process: CrossProcess | None = None) -> LocalExchange:
        """Open the exchange of the caller's replica and of the workers that were sent a message; return it.

        Workers' requests are received while the caller's replica waits in the exchange, and in `replies`. That is early
        enough: an exchange responds only when every replica has submitted or withdrawn.
        """
        self._exchange = LocalExchange(num_replicas, self._receive, cross_process)
        for index in set(range(num_replicas - 1)) - self._awaited:
            self._exchange.withdraw(index + 1, failed=False)
        return self._exchange

    def replies(self) -> dict[int, Reply]:
        """Wait for the replies of the workers that were sent a message; return them by index, in order.

        An urgent one is returned at once, and alone.

        Raises:
            ReplicaDied: a worker has died. The group is ended.
            BaseException: the error that ended their exchange, in which some of them may be waiting.
        """
        if self._timed_out is not None:
            raise self._timed_out
        if self._exchange is not None and self._exchange.error is not None:
            raise self._exchange.error
        self._receive(lambda: self._has_urgent)
        self._raise_if_died()
        replies, self._replies = dict(sorted(self._replies.items())), {}
        if self._has_urgent:
            self._has_urgent = False
            return dict([item for item in replies.items() if _is_urgent(item[1])][:1])
        return replies

    def _receive(self, enough: Callable[[], bool]) -> None:
        """Receive workers' messages until all have replied, or `enough` returns True."""
        if enough():
            return
        self._progress_at = time.monotonic()
        index_of = {self.workers[i].channel: i for i in self._awaited - self._dead}
        for channel in ready(index_of, _SPIN_S, None if self.timeout_s is None else self._check_progress):
            self._receive_from(index_of[channel])
            if index_of[channel] not in self._awaited - self._dead:
                del index_of[channel]
            if enough():
                return

    def _receive_from(self, index: int) -> None:
        worker, exchange = self.workers[index], self._exchange
        self._progress_at = time.monotonic()
        try:
            received = worker.receive()
        except TimeoutError:  # in the middle of a message
            self._give_up([index])
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
            if received.missed_update:
                self.num_in_sync = min(self.num_in_sync, index)
            if received.out_of_step:
                self._out_of_step.add(index + 1)
            failed = received.error is not None
        if exchange is not None:
            exchange.withdraw(index + 1, failed=failed)

    def poll(self, waited_s: float) -> None:
        """Receive what workers have sent so far; for a caller that has waited for them elsewhere, for `waited_s`.

        Raises:
            ReplicaTimeout: that, and the time since the last message, is longer than the timeout.
            ReplicaDied: a worker has died. The group is ended.
            BaseException: the error of a worker that cannot go on.
        """
        self._receive_ready()
        self._raise_if_died()
        if self.timeout_s is not None and waited_s > self.timeout_s:
            self._check_progress()
        for index, reply in sorted(self._replies.items()):
            if reply.out_of_step and reply.error is not None:
                # Another worker's death may be the cause. It shows a moment later, and is the error to raise then.
                until = time.monotonic() + _END_TIMEOUT_S
                while self._awaited and not self._dead and time.monotonic() < until:
                    time.sleep(_SLEEP_S)
                    self._receive_ready()
                self._raise_if_died()
                raise annotate([(self._names[index + 1], reply.error.exception())])

    def _check_progress(self) -> None:
        if self.timeout_s is not None and time.monotonic() - self._progress_at > self.timeout_s:
            at_exchange = self._exchange.waiting() if self._exchange is not None else set()
            awaited = self._awaited - self._dead
            self._give_up(sorted(awaited - {replica - 1 for replica in at_exchange}) or sorted(awaited))

    def _give_up(self, indices: Sequence[int]) -> NoReturn:
        """End the group because none of these workers makes progress; raise the error that says where they are."""
        stuck = {index + 1: self.workers[index] for index in indices}
        self._timed_out = workers_timed_out(stuck, self.timeout_s or 0.0, self._names, _STEP_IS_LOST)
        self.end()
        raise self._timed_out

    def _receive_ready(self) -> None:
        for index in sorted(self._awaited - self._dead):
            if self.workers[index].channel.wait(0):
                self._receive_from(index)

    def _raise_if_died(self) -> None:
        if self._dead:
            raise self._end_with_error(min(self._dead))

    def _end_with_error(self, index: int) -> ReplicaDied:
        """End the group after a worker's death; return the error that describes it."""
        names, i = self._names, index + 1
        died = self.workers[index].death(names[i], names.numbers[i], names.devices[i], _STEP_IS_LOST)
        self.end()
        return died

    def end(self, graceful: bool = False) -> None:
        """End every worker: if `graceful`, by closing its channel (for idle workers); else by SIGKILL."""
        self.ended = True
        _groups.discard(self)
        for worker in self.workers:
            worker.end(graceful)
        self.workers = []
        self.transport.end()

    def __del__(self) -> None:  # no engine and no graph refers to it
        # Ctrl-C may interrupt `__init__`; and when Python ends, its modules' names go before the last objects do.
        if hasattr(self, "workers") and _groups is not None:
            self.end(graceful=True)

    def abandon(self) -> None:
        """Drop the parent's workers, in the child of a fork."""
        self.transport.abandon()
        for worker in self.workers:
            worker.channel.close()  # this process's copy only
        self.end(graceful=True)


def _backend_for(devices: Sequence[torch.device], share_memory: bool) -> str | None:
    """Return the backend of torch.distributed that replicas on these devices need; None: they share memory."""
    if share_memory and all(map(_devices.is_cpu, devices)):
        return None
    return _devices.collective_backend(devices)


def _is_urgent(reply: Reply) -> bool:
    """Return whether a reply is raised at once, before the other workers have replied."""
    return reply.error is not None and reply.error.is_urgent


def _not_started(replica: int, device: torch.device, server_pid: int, how: str) -> str:
    """Return the message for a worker that could not be started."""
    return (
        f"replica {replica} on {device}: its worker process could not be started: the fork server that all workers of "
        f"this process come from, process {server_pid}, {how}. {_STEP_IS_LOST}"
    )


def workers_timed_out(
    workers: Mapping[int, WorkerHandle], timeout_s: float, names: ReplicaNames, lost: str
) -> ReplicaTimeout:
    """Return the error for workers that make no progress, with their Python stacks. They are to be ended then.

    Args:
        workers: by the index of their replica; at least one. Some of them may only wait for another one.
        names: of all replicas.
        lost: what is lost, in words.
    """
    stopped = {i for i, worker in workers.items() if is_stopped(worker.pid)}
    stacks = {i: worker.stack_file.ask(worker.pid) for i, worker in workers.items()}
    stuck = min(workers, key=lambda i: (i not in stopped, any(place in stacks[i] for place in _WAITS_FOR_OTHERS), i))
    pid = workers[stuck].pid
    is_in = "was stopped (SIGSTOP, or a debugger)" if stuck in stopped else "does not answer"
    texts = [
        f"{names[i]}, in process {workers[i].pid}, is here:\n{stack or 'its Python stack could not be read'}"
        for i, stack in stacks.items()
    ]
    cause = (
        f"{names[stuck]}: no progress for {timeout_s:g} s (timeout={timeout_s:g}): its worker process {pid} {is_in}."
    )
    return ReplicaTimeout(
        f"{cause} {lost} " + "\n".join(texts),
        cause=cause,
        replica=names.numbers[stuck],
        device=names.devices[stuck],
        pid=pid,
        timeout=timeout_s,
        stack=stacks[stuck],
    )


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
in_forked_child(_after_fork)
