"""Worker threads: run one task a replica, all at once, with the caller's thread state.

Guarantees
    - Task 0 runs in the calling thread, task i on worker i; `run_together` returns when every task has ended.
    - Workers are started when first needed and kept. A call borrows as many as it needs and shares them with nobody,
      so its tasks may wait for each other, and calls from several threads at once do not disturb each other.
    - Inside a task, `run_together` runs its tasks one after the other in that thread: no worker waits for itself.
    - An exception that is not an `Exception` (Ctrl-C above all) reaches the caller at once. Workers that are still
      busy then are abandoned: an exception is raised in them at their next Python instruction, nobody reads their
      result, they are never used again, and the next call starts fresh ones.
    - After a fork the child starts workers of its own. At exit workers are told to end and are waited for, because a
      daemon thread that is inside torch when the interpreter goes away aborts the process.

Assumes that tasks do not touch each other's data.
"""

import atexit
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from manyhands import devices as _devices
from manyhands.errors import log
from manyhands.thread_state import ThreadState, modes_that_stay

T = TypeVar("T")

_EXIT_WAIT_S = 10.0  # how long interpreter exit waits for a worker that is inside a long operation


@dataclass(slots=True)
class Outcome(Generic[T]):
    """How a task ended: with a value, or with an error."""

    value: T | None = None
    error: BaseException | None = None


def run_together(tasks: Sequence[Callable[[], T]], devices: Sequence[torch.device]) -> list[Outcome[T]]:
    """Run all tasks at once, task i for a replica on `devices[i]`; return how each ended, in order.

    >>> [outcome.value for outcome in run_together([lambda: 1, lambda: 2], [torch.device("cpu")] * 2)]
    [1, 2]

    Raises:
        BaseException: what a task (or Ctrl-C) raised, where that is not an `Exception`.
    """
    if len(tasks) == 1 or inside_replica() or modes_that_stay():
        return [_run_here(task, device) for task, device in zip(tasks, devices, strict=True)]

    state = ThreadState.capture()
    streams = _devices.current_streams(devices)
    threads_before = torch.get_num_threads()
    threads_each = _threads_each(devices, threads_before)
    done: SimpleQueue[tuple[int, Outcome[T]]] = SimpleQueue()

    def job(index: int) -> Callable[[], None]:
        context = state.context.copy()

        def run() -> None:
            with _intra_op_threads(threads_each), state.applied(), _devices.using(devices[index], streams):
                done.put((index, context.run(_outcome, tasks[index])))

        return run

    workers = _pool.borrow(len(tasks) - 1)
    ended: dict[int, Outcome[T]] = {}
    try:
        for i, worker in enumerate(workers, 1):
            worker.inbox.put(job(i))
        with _intra_op_threads(threads_each), _marked_as_replica(), _devices.using(devices[0], streams):
            ended[0] = _outcome(tasks[0])
        _raise_if_urgent(ended[0])
        while len(ended) < len(tasks):
            index, ended_now = done.get()
            ended[index] = ended_now
        for i in range(len(tasks)):
            _raise_if_urgent(ended[i])
        return [ended[i] for i in range(len(tasks))]
    finally:
        _pool.give_back([worker for i, worker in enumerate(workers, 1) if i in ended])
        _pool.abandon([worker for i, worker in enumerate(workers, 1) if i not in ended])
        torch.set_num_threads(threads_before)  # this also restores the default of new threads, which workers have set
        ended.clear()  # a traceback refers to this frame: nothing in it may refer to an exception


def inside_replica() -> bool:
    """Return whether the calling thread is running a replica's task."""
    return bool(getattr(_thread, "is_replica", False))


def _outcome(task: Callable[[], T]) -> Outcome[T]:
    try:
        return Outcome(value=task())
    except BaseException as error:  # noqa: BLE001 - it is handed on, to be raised in the caller
        return Outcome(error=error)


def _run_here(task: Callable[[], T], device: torch.device) -> Outcome[T]:
    with _marked_as_replica(), _devices.using(device, []):
        outcome = _outcome(task)
    _raise_if_urgent(outcome)
    return outcome


def _raise_if_urgent(outcome: Outcome[T]) -> None:
    if outcome.error is not None and not isinstance(outcome.error, Exception):
        raise outcome.error


def _threads_each(devices: Sequence[torch.device], threads: int) -> int:
    on_host = sum(_devices.computes_on_host(device) for device in devices)
    return max(1, threads // on_host) if on_host else threads


@contextlib.contextmanager
def _intra_op_threads(count: int) -> Iterator[None]:
    # The number is per thread, but setting it also sets the default of threads to come: `run_together` puts that back.
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    yield


@contextlib.contextmanager
def _marked_as_replica() -> Iterator[None]:
    before = inside_replica()
    _thread.is_replica = True
    try:
        yield
    finally:
        _thread.is_replica = before


class _Abandoned(SystemExit):
    """Raised in a worker whose result nobody waits for; a SystemExit, so that a dying thread prints nothing."""


class _Worker:
    """One thread that runs what is put into its inbox, until it finds None there."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="manyhands-worker", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        _thread.is_replica = True
        while (job := self.inbox.get()) is not None:
            job()
            del job  # an idle worker keeps nothing alive


class _Pool:
    """The process's workers: idle ones to borrow, and abandoned ones to wait for at exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._abandoned: list[_Worker] = []

    def borrow(self, count: int) -> list[_Worker]:
        """Take `count` workers, the same ones in the same order whenever they are idle."""
        with self._lock:
            borrowed, self._idle = self._idle[:count], self._idle[count:]
        return borrowed + [_Worker() for _ in range(count - len(borrowed))]

    def give_back(self, workers: Sequence[_Worker]) -> None:
        with self._lock:
            self._idle[:0] = workers

    def abandon(self, workers: Sequence[_Worker]) -> None:
        """Interrupt workers that are still busy; each ends when its operation does."""
        with self._lock:
            self._abandoned = [worker for worker in self._abandoned if worker.thread.is_alive()] + list(workers)
        for worker in workers:
            worker.inbox.put(None)
            ident = ctypes.c_ulong(worker.thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Abandoned))

    def stop(self) -> None:
        """Tell every worker to end, and wait until it has."""
        with self._lock:
            ending = self._idle + self._abandoned
            self._idle, self._abandoned = [], []
        for worker in ending:
            worker.inbox.put(None)
        for worker in ending:
            worker.thread.join(_EXIT_WAIT_S)
            if worker.thread.is_alive():
                log.warning("a replica is still running %g s after the program ended", _EXIT_WAIT_S)

    def forget(self) -> None:
        """Start from nothing, in the child of a fork: the parent's threads do not exist there."""
        self.__init__()  # type: ignore[misc]


_thread = threading.local()
_pool = _Pool()
atexit.register(_pool.stop)
os.register_at_fork(after_in_child=_pool.forget)
