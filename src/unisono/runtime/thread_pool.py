"""Worker threads: run one task a replica, all at once, with the caller's thread state.

Guarantees
    - One task, usually the first, runs in the calling thread, each other one on a worker of its own; `run_together`
      returns when every task has ended.
    - Workers are started when first needed and kept, each for one device: torch keeps a GPU's plans of convolutions and
      of attention in the thread that has made them. A call has its workers to itself, so its tasks may wait for each
      other, and calls from several threads at once do not disturb each other.
    - Inside a task, `run_together` runs its tasks one after the other in that thread: no worker waits for itself.
    - An exception that is not an `Exception` (Ctrl-C above all) reaches the caller at once, and so does a
      `ReplicaTimeout`. Workers that are still busy then are abandoned: their result is dropped, they end when their
      task does, and the next call starts fresh ones. They are not interrupted: an exception at any instruction could
      leave locks held for ever, those of Python's imports among them.
    - While tasks run, and only then, some functions of torch and Python have stand-ins (stand_ins.py).
    - On the CPU a worker runs on its own part of the process's cores (affinity.py); the caller's thread is not bound.
    - Python without the global lock frees what a thread has made, and others have dropped, only when that thread runs
      again. `free_in_workers` has idle workers run once; it is called on such builds only.
    - After a fork the child starts workers of its own. At exit workers are stopped and joined, because a daemon thread
      that is inside torch when the interpreter ends aborts the process. Tasks that still run after a while are
      interrupted then. One that sleeps is left alone: it would not notice, and it is not inside torch's kernels.

Assumes that tasks do not touch each other's data.
"""

import atexit
import contextlib
import contextvars
import ctypes
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import not_
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from unisono.runtime import affinity
from unisono.runtime import devices as _devices
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import ReplicaNames, annotate, log
from unisono.runtime.forks import in_forked_child
from unisono.runtime.interrupts import WAKE_S, deliver
from unisono.runtime.stand_ins import while_replicas_run
from unisono.runtime.stuck_threads import ReplicaTimeout, StuckThreads, sleep_state, threads_timed_out
from unisono.runtime.thread_state import ThreadState, modes_that_stay
from unisono.runtime.torch_private import checkpoints, engine, graph_nodes, process_wide

T = TypeVar("T")

_EXIT_PATIENCE_S = 2.0  # how long interpreter exit waits for workers to end by themselves
_EXIT_WAIT_S = 10.0  # and how long in all
_EXIT_ASLEEP_S = 0.5  # a worker that has slept for so long then is asleep
_EXIT_LOOK_S = 0.05  # how often exit looks

# Whether an object belongs to the thread that has made it: in the builds of Python that can run without the global lock
# (PEP 703, "Biased Reference Counting"), with the lock on as well.
OBJECTS_HAVE_THREADS = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
# What `with_backward_context` is given around a backward of replicas' graphs, whose nodes may run forward again: torch
# runs those of accelerators in threads of its own, and one call may run the graphs of all replicas in the caller's.
OF_REPLICAS = "of replicas"


@dataclass(slots=True)
class Outcome(Generic[T]):
    """How a task ended: with a value, or with an error."""

    value: T | None = None
    error: BaseException | None = None


# The context around replica i in its own thread, in one pass over all replicas: the forward, or a backward. It is
# entered before the caller's thread state is applied, and left even if that fails.
ReplicaContext: TypeAlias = Callable[[int], AbstractContextManager[None]]
# The context around the whole pass, in the caller's thread; it yields the replicas' context. It is left with the
# exception if the pass fails.
PassContext: TypeAlias = Callable[[], AbstractContextManager[ReplicaContext]]


class one_pass:  # noqa: N801 - a context manager, as a class because a step enters it each time
    """Enters every context of one pass over all replicas; gives each replica's context in it, the first outermost."""

    def __init__(self, contexts: Sequence[PassContext]) -> None:
        self._contexts = contexts

    def __enter__(self) -> ReplicaContext:
        self._entered: AbstractContextManager[Any] = _NOTHING
        if not self._contexts:
            return nothing_around
        if not self._contexts[1:]:
            self._entered = self._contexts[0]()
            only: ReplicaContext = self._entered.__enter__()
            return only
        with contextlib.ExitStack() as stack:
            of_replicas = [stack.enter_context(context()) for context in self._contexts]
            self._entered = stack.pop_all()
        return partial(_all_of, of_replicas)

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


_NOTHING = nullcontext()


def nothing_around(index: int) -> AbstractContextManager[None]:
    return _NOTHING


@contextmanager
def _all_of(contexts: Sequence[ReplicaContext], index: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context(index))
        yield


class Run:
    """Replicas that run at the same time, in one call of `run_together`.

    Attributes:
        num_tasks, timeout_s, names: as they were given.
        ended: the tasks that have ended, as the keys.
        on_end: called with the index and the outcome of a task that has ended, in its thread.
    """

    num_tasks = 0
    timeout_s: float | None = None
    names: ReplicaNames | None = None
    ended: dict[int, bool]
    on_end: Callable[[int, Outcome[Any]], None] | None = None


def current_run() -> tuple[Run | None, int]:
    """Return the run in which the calling thread has a task, and which; (None, 0) in none.

    A run inside a task goes on in that task's thread: the outermost one is returned.
    """
    return _thread.run


def run_together(
    tasks: Sequence[Callable[[], T]],
    devices: Sequence[torch.device],
    around: ReplicaContext = nothing_around,
    timeout_s: float | None = None,
    names: ReplicaNames | None = None,
    *,
    here: int | None = 0,
    may_have_modes: bool = True,
) -> list[Outcome[T]]:
    """Run all tasks at once, task i for a replica on `devices[i]`; return how each ended, in order.

    >>> [outcome.value for outcome in run_together([lambda: 1, lambda: 2], [torch.device("cpu")] * 2)]
    [1, 2]

    Args:
        tasks, devices: one a replica.
        around: the context of task i in its thread. It is entered before anything else, and left even if the task
            cannot start, so that it can tell tasks that wait for this one.
        timeout_s: for how long the caller, once its own task has ended, waits without another one ending; None: for
            ever.
        names: of the replicas, for messages.
        here: the task that runs in the calling thread; None: all run in workers.
        may_have_modes: whether a mode may be active that cannot follow into other threads: then none are used.

    Raises:
        ReplicaTimeout: that time is over. Workers that are still busy are abandoned.
        BaseException: what a task (or Ctrl-C) raised, where that is not an `Exception`.
    """
    if process_wide.caches_parametrizations() and not inside_replica():
        with process_wide.parametrizations_not_cached():
            return run_together(tasks, devices, around, timeout_s, names, here=here, may_have_modes=may_have_modes)
    if (len(tasks) == 1 and here is not None) or inside_replica():
        return _run_in_this_thread(tasks, devices, around)
    entry = while_replicas_run.enter()
    try:
        if may_have_modes and modes_that_stay():
            return _run_in_this_thread(tasks, devices, around)
        return _run_in_threads(tasks, devices, around, timeout_s, names, here)
    finally:
        while_replicas_run.leave(entry)


def _run_in_threads(
    tasks: Sequence[Callable[[], T]],
    devices: Sequence[torch.device],
    around: ReplicaContext,
    timeout_s: float | None,
    names: ReplicaNames | None,
    here: int | None,
) -> list[Outcome[T]]:
    state = ThreadState.capture()
    on_host = _devices.all_on_host(devices)
    streams = None if on_host else _devices.current_streams(devices)
    num_tasks = len(tasks)
    own_cores = affinity.cores_per_replica(num_tasks) if on_host else [()] * num_tasks
    done: SimpleQueue[tuple[int, Outcome[T]]] = SimpleQueue()
    context = contextvars.copy_context()
    together = Run()
    together.num_tasks, together.timeout_s, together.names = num_tasks, timeout_s, names
    together.ended = {}

    def run(index: int) -> Outcome[T]:
        own_context = context.copy()
        _thread.run = together, index

        def in_context() -> T:
            affinity.bind(own_cores[index])
            with around(index), AsReplica(devices[index], index, threads_each, streams), state.applied():
                return own_context.run(tasks[index])

        outcome = outcome_of(in_context)
        try:
            together.ended[index], _thread.run = True, (None, 0)
            if together.on_end is not None:
                together.on_end(index, outcome)
            return outcome
        finally:
            del outcome  # a traceback refers to this frame: nothing in it may refer to an exception

    def run_in_caller(index: int) -> T:
        _thread.run = together, index
        with around(index), AsReplica(devices[index], index, threads_each, streams):
            return tasks[index]()

    in_workers = [*range(num_tasks)]
    if here is not None:
        in_workers.remove(here)
    # A node that the caller makes next is to come before those of the replicas in a backward that reaches both.
    most_nodes = graph_nodes.sequence_number() if torch.is_grad_enabled() else None
    num_running = len(in_workers)
    workers = pool.borrow([devices[i] for i in in_workers], most_nodes)  # fails where the system gives no more threads
    threads_before, threads_each = thread_counts.begin(devices)
    ended: dict[int, Outcome[T]] = {}
    try:
        for i, worker in zip(in_workers, workers, strict=True):
            worker.inbox.put(Order(i, [run], done, makes_nodes=most_nodes is not None))
        if here is not None:
            ended[here] = outcome_of(partial(run_in_caller, here))
            together.ended[here], _thread.run = True, (None, 0)
            if together.on_end is not None:
                together.on_end(here, ended[here])
            _raise_if_urgent(ended[here])
        progress_at, stuck = time.monotonic(), None
        while num_running:
            try:
                index, ended_now = done.get(timeout=WAKE_S)
            except Empty:
                deliver()
                waited_s, pairs = time.monotonic() - progress_at, zip(in_workers, workers, strict=True)
                running = {i: worker.thread.ident or 0 for i, worker in pairs if i not in ended}
                if timeout_s is not None and waited_s > timeout_s:
                    raise threads_timed_out(running, timeout_s, names) from None
                stuck = stuck or StuckThreads()  # not before: most steps do not come here
                stuck.say(running, names or [f"replica {i}" for i in range(num_tasks)], waited_s)
                continue
            num_running, progress_at = num_running - 1, time.monotonic()
            ended[index] = ended_now
            del ended_now
            _raise_if_urgent(ended[index])
        most_made = max([worker.num_nodes for worker in workers])
        if most_nodes is not None and most_made > most_nodes:
            graph_nodes.number_nodes_from(most_made)
        return [*map(ended.__getitem__, range(num_tasks))]
    finally:
        have_ended = [*map(ended.__contains__, in_workers)]
        pool.give_back([*compress(workers, have_ended)])
        if False in have_ended:
            pool.abandon([*compress(workers, map(not_, have_ended))])
        thread_counts.end(threads_before, threads_each)
        ended.clear()  # a traceback refers to this frame: nothing in it may refer to an exception


def values_or_raise(outcomes: Sequence[Outcome[Any]], where: Sequence[str]) -> list[Any]:
    """Return the outcomes' values; or raise the first error among them, annotated with where each came from."""
    errors = [(place, o.error) for place, o in zip(where, outcomes, strict=True) if o.error is not None]
    try:
        if errors:
            raise annotate(errors)
        return [outcome.value for outcome in outcomes]
    finally:
        del errors, outcomes  # the traceback refers to this frame: nothing in it may refer to the exception


def free_in_workers() -> None:
    """Have idle workers free what they have made and the calling thread has dropped: it calls this at a pass's end.

    It is called only where OBJECTS_HAVE_THREADS, and does not wait for them. What the caller drops later is freed at
    the next pass, or by `gc.collect()`.
    """
    if not inside_replica():
        pool.run_idle(SimpleQueue())


@contextmanager
def as_first_replica(devices: Sequence[torch.device], state: ThreadState) -> Iterator[None]:
    """The context in which the calling thread is the first replica's, with a replica's part of its intra-op threads."""
    before, each = thread_counts.begin(devices)
    try:
        streams: list[torch.Stream] | None = None if _devices.computes_on_host(devices[0]) else []
        with AsReplica(devices[0], 0, each, streams), state.applied():
            yield
    finally:
        thread_counts.end(before, each)


def inside_replica() -> bool:
    """Return whether the calling thread is running a replica's task, or nodes of its graph (`OF_REPLICAS`)."""
    return _thread.replica_device is not None or (engine.sees_anything() and OF_REPLICAS in engine.backward_context())


def replica_device() -> torch.device | None:
    """Return the device of the replica whose task the calling thread is running; None outside of one."""
    return _thread.replica_device


def replica_path() -> tuple[int, ...]:
    """Return which replica's task the calling thread is running: its index in each call, the outermost call first.

    () outside of a replica. Paths in sorted order are the replicas in the order of their rows.
    """
    return _thread.replica_path


def at_end_of_task(function: Callable[[], None] | None) -> None:
    """Have a function called when the calling thread's replica ends; None: nothing."""
    _thread.at_end = function


def outcome_of(task: Callable[[], T]) -> Outcome[T]:
    """Run a task in this thread; return how it ended. Checkpoints through which its error has passed are ended."""
    try:
        return Outcome(value=task())
    except BaseException as error:  # noqa: BLE001 - raised in the caller
        return _failed(error)


def _failed(error: BaseException) -> Outcome[Any]:
    with contextlib.suppress(Exception):  # a class of the user's may do anything; the caller waits
        checkpoints.end_checkpoints(error)
    return Outcome(error=error)


def _run_in_this_thread(
    tasks: Sequence[Callable[[], T]], devices: Sequence[torch.device], around: ReplicaContext
) -> list[Outcome[T]]:
    outcomes: list[Outcome[T]] = []
    try:
        for index, (task, device) in enumerate(zip(tasks, devices, strict=True)):
            try:
                with around(index), AsReplica(device, index, None, None if _devices.computes_on_host(device) else []):
                    outcomes.append(Outcome(value=task()))
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                outcomes.append(_failed(error))
            _raise_if_urgent(outcomes[-1])
        return outcomes
    finally:
        del outcomes  # a traceback refers to this frame: nothing in it may refer to an exception


def _raise_if_urgent(outcome: Outcome[T]) -> None:
    error = outcome.error
    try:
        if error is not None and (
            issubclass(type(error), ReplicaTimeout)
            or not issubclass(type(error), Exception)
            or checkpoints.stops_recomputation(error)
        ):
            raise error
    finally:
        del outcome, error  # as above


def _set_intra_op_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


class _ThreadCounts:
    """Restores torch's number of intra-op threads, and clears its flags of dispatch modes.

    Each thread has its own number, but setting it also sets the initial number of new threads. So a thread that first
    uses torch while a call runs starts with a replica's number. If such a thread calls for the first time, we assume
    that it wants the number that the first of the overlapping calls found.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[int] = []  # the number of each replica, one entry a running call
        self._default = 1
        self._flags = process_wide.dispatch_mode_flags()

    def begin(self, devices: Sequence[torch.device]) -> tuple[int, int]:
        """Return the calling thread's number, and the part of it for each replica."""
        before = torch.get_num_threads()
        with self._lock:
            if not self._running:
                self._default, self._flags = before, process_wide.dispatch_mode_flags()
            elif before in self._running and not hasattr(_thread, "num_threads"):
                before = self._default
            on_host = [*map(_devices.computes_on_host, devices)].count(True)
            each = max(1, before // on_host) if on_host else before
            self._running.append(each)
        return before, each

    def end(self, before: int, each: int) -> None:
        """Restore the state before the call of `begin` that returned these numbers."""
        torch.set_num_threads(before)  # the calling thread's, and the initial one of new threads
        _thread.num_threads = before
        with self._lock:
            self._running.remove(each)
            if not self._running:
                process_wide.clear_dispatch_mode_flags(self._flags)
            wrong_default = not self._running and before != self._default
        if wrong_default:  # an earlier call found another number; a new thread sets it, so that this one keeps its own
            setter = threading.Thread(target=torch.set_num_threads, args=(self._default,))
            setter.start()
            setter.join()


class AsReplica:
    """The context of a replica's task in its thread: the number of intra-op threads, device, streams, and its mark.

    The number is not restored here: `_ThreadCounts` divides the threads, and restores it.

    Args:
        num_threads: None: as many as the thread has.
        streams: those of the caller's thread on the replicas' devices; None on the host, which has none.
    """

    __slots__ = ("_before", "_device", "_index", "_num_threads", "_streams", "_using")

    def __init__(
        self, device: torch.device, index: int, num_threads: int | None, streams: Sequence[torch.Stream] | None
    ) -> None:
        self._device, self._index, self._num_threads, self._streams = device, index, num_threads, streams

    def __enter__(self) -> None:
        if self._num_threads is not None:
            _set_intra_op_threads(self._num_threads)
        self._using = None
        if self._streams is not None:
            self._using = _devices.using(self._device, self._streams)
            self._using.__enter__()
        self._before = _thread.replica_device, _thread.replica_path, _thread.at_end
        _thread.replica_device, _thread.replica_path = self._device, (*self._before[1], self._index)
        _thread.at_end = None

    def __exit__(self, *error: Any) -> None:
        if _thread.at_end is not None:
            _thread.at_end()
        _thread.replica_device, _thread.replica_path, _thread.at_end = self._before
        if self._using is not None:
            self._using.__exit__(*error)


@dataclass(slots=True)
class Order:
    """An order to a worker: call the one job in the list with the index, and put (index, its outcome) into `done`."""

    index: int
    jobs: list[Callable[[int], Outcome[Any]]]
    done: SimpleQueue[tuple[int, Outcome[Any]]]
    makes_nodes: bool = False  # whether it makes nodes of graphs


class Worker:
    """One thread that runs the orders in its inbox, until it finds None there.

    Attributes:
        device: that of all replicas whose tasks it runs.
        num_nodes: how many nodes of graphs the thread has made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_nodes = device, 0
        self.inbox: SimpleQueue[Order | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="unisono-worker", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        with contextlib.suppress(SystemExit):  # what `stop` raises here
            while (order := self.inbox.get()) is not None:
                # Once the caller has the outcome, no reference to the call may be left here: what the caller then drops
                # is to be freed at once. So no variable holds the outcome, and the job is popped.
                outcome = [order.jobs.pop()(order.index)]
                if order.makes_nodes:
                    self.num_nodes = graph_nodes.sequence_number()
                order.done.put((order.index, outcome.pop()))
                del order


class _Pool:
    """The process's workers. A worker that is not idle is busy with a call, or abandoned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: list[Worker] = []

    def borrow(self, devices: list[torch.device], most_nodes: int | None = None) -> list[Worker]:
        """Take a worker for each device, the same ones in the same order whenever they are idle.

        Args:
            most_nodes: how many nodes of graphs their threads may have made before; None: any number.
        """
        with self._lock:
            usable = [w for w in self._idle if most_nodes is None or w.num_nodes <= most_nodes]
            borrowed = usable[: len(devices)]
            if [worker.device for worker in borrowed] != devices:
                borrowed = self._each_for(devices, usable)
            self._idle = [worker for worker in self._idle if worker not in borrowed]
            self._busy = [worker for worker in self._busy if worker.thread.is_alive()] + borrowed
        return borrowed

    def _each_for(self, devices: Sequence[torch.device], usable: Sequence[Worker]) -> list[Worker]:
        """Return a worker for each device: the first usable one, or a new one."""
        found: list[Worker] = []
        for device in devices:
            of_device = [worker for worker in self._idle if worker.device == device and worker not in found]
            worker = next((worker for worker in of_device if worker in usable), None)
            if worker is None:
                worker = Worker(device)
                self._idle.append(worker)  # where it stays if the system has no thread for the next one
                for unusable in of_device[:1]:
                    self._idle.remove(unusable)
                    unusable.inbox.put(None)
            found.append(worker)
        return found

    def give_back(self, workers: Sequence[Worker]) -> None:
        with self._lock:
            self._busy = [worker for worker in self._busy if worker not in workers]
            self._idle[:0] = workers

    def run_idle(self, done: SimpleQueue[tuple[int, Outcome[Any]]]) -> int:
        """Have every idle worker run an empty task; return how many there are. Each puts its outcome into `done`."""
        idle = [*self._idle]  # without the lock: a finalizer may run a pass in the middle of this
        for worker in idle:
            worker.inbox.put(Order(0, [_nothing], done))
        return len(idle)

    def abandon(self, workers: Sequence[Worker]) -> None:
        """Let busy workers end with their current task."""
        for worker in workers:
            worker.inbox.put(None)

    def stop(self) -> None:
        """Stop every worker and join it; interrupt those whose task runs too long, and give up after `_EXIT_WAIT_S`.

        A worker whose task sleeps, in `time.sleep` or for a lock that is never released, is not waited for.
        """
        for stop in list(stops_at_exit):
            stop()
        with self._lock:
            ending = self._idle + self._busy
            self._idle, self._busy = [], []
        for worker in ending:
            worker.inbox.put(None)
        started = time.monotonic()
        have_ended = self._join(ending, until=started + _EXIT_PATIENCE_S)
        while not have_ended and time.monotonic() < started + _EXIT_WAIT_S:
            # More than once: Python drops an exception that comes in a callback of the garbage collector.
            for worker in ending:
                if worker.thread.is_alive():
                    ident = ctypes.c_ulong(worker.thread.ident or 0)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
            have_ended = self._join(ending, until=time.monotonic() + _EXIT_PATIENCE_S)
        if not have_ended:
            log.warning("a replica is still running %g s after the end of the program", _EXIT_WAIT_S)

    def _join(self, workers: Sequence[Worker], until: float) -> bool:
        """Join workers; return False if one still runs, and is not asleep, when the time is over."""
        asleep_since: dict[int, tuple[float, object]] = {}  # with the state that it has had since then
        while True:
            now = time.monotonic()
            running = []
            for worker in workers:
                if worker.thread.is_alive():
                    state = sleep_state(worker.thread.native_id)
                    since, before = asleep_since.get(id(worker), (now, None))
                    asleep_since[id(worker)] = (since if state == before else now), state
                    if state is None or now - asleep_since[id(worker)][0] < _EXIT_ASLEEP_S:
                        running.append(worker)
            if not running:
                return True
            if now >= until:
                return False
            running[0].thread.join(min(_EXIT_LOOK_S, until - now))

    def forget(self) -> None:
        """Start empty, in the child of a fork: the parent's threads do not exist there."""
        self.__init__()  # type: ignore[misc]


_DONE: Outcome[None] = Outcome()  # not the worker's: it would keep it


def _nothing(index: int) -> Outcome[None]:
    return _DONE


def _after_fork() -> None:
    pool.forget()
    stops_at_exit.clear()
    thread_counts.__init__()  # type: ignore[misc]
    _thread.run = None, 0
    _thread.replica_device, _thread.replica_path = None, ()  # a fork inside a task: the child is no replica


class _ThreadLocal(threading.local):
    """Which replica's task the calling thread runs. The defaults are those of a thread that runs none."""

    replica_device: torch.device | None = None
    replica_path: tuple[int, ...] = ()
    run: tuple[Run | None, int] = (None, 0)
    at_end: Callable[[], None] | None = None


_thread = _ThreadLocal()
thread_counts = _ThreadCounts()
pool = _Pool()
# What ends the tasks that go on while the caller does other things (inference/background.py).
stops_at_exit: set[Callable[[], None]] = set()
atexit.register(pool.stop)
in_forked_child(_after_fork)
