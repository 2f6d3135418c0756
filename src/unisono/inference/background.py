"""How do tasks run in workers while the caller goes on? A map's lanes do.

Guarantees
    - Each task ends, or is abandoned: `at_end` is called once, when the last one has.
    - Until then torch and Python have the stand-ins of replicas that run (stand_ins.py), and the tasks' workers are not
      lent to other calls.
    - When the program ends, the tasks are told to stop, and their workers are joined (thread_pool.py).
"""

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from unisono.runtime import affinity
from unisono.runtime import devices as _devices
from unisono.runtime.interrupts import WAKE_S, deliver
from unisono.runtime.stand_ins import while_replicas_run
from unisono.runtime.thread_pool import (
    AsReplica,
    Order,
    Outcome,
    Worker,
    outcome_of,
    pool,
    stops_at_exit,
    thread_counts,
)
from unisono.runtime.thread_state import ThreadState
from unisono.runtime.torch_private import graph_nodes, process_wide


class Background:
    """Tasks that run in workers until they end, task i for a replica on `devices[i]`; the caller goes on.

    A task sees the thread state that it is given, and the caller's context variables. It has its part of the caller's
    intra-op threads and cores; the caller's own thread keeps all of its own.

    Args:
        tasks, devices: one a replica. A task handles its own exceptions, and ends soon after `stop` is called.
        state: of the tasks' threads.
        stop: makes the tasks end. It is called when the program ends, too.
        at_end: called in the thread of the task that ends last.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], None]],
        devices: Sequence[torch.device],
        state: ThreadState,
        stop: Callable[[], None],
        at_end: Callable[[], None],
    ) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._running = set(range(len(tasks)))
        self._at_end = at_end
        self._ended = threading.Event()
        on_host = _devices.all_on_host(devices)
        streams = None if on_host else _devices.current_streams(devices)
        own_cores = affinity.cores_per_replica(len(tasks)) if on_host else [()] * len(tasks)
        context = contextvars.copy_context()
        started: SimpleQueue[None] = SimpleQueue()
        threads_before, threads_each = thread_counts.begin(devices)

        def run(index: int) -> Outcome[None]:
            def in_context() -> None:
                affinity.bind(own_cores[index])
                with AsReplica(devices[index], index, threads_each, streams), state.applied():
                    started.put(None)
                    context.copy().run(tasks[index])

            try:
                return outcome_of(in_context)
            finally:
                started.put(None)  # also if it could not start
                self._workers[index].num_nodes = graph_nodes.sequence_number()
                self._leave(index, pool.give_back)

        self._flags = process_wide.dispatch_mode_flags()
        stops_at_exit.add(stop)
        self._entry = while_replicas_run.enter()
        self._workers: list[Worker] = []
        num_started = 0
        try:
            self._workers = pool.borrow([*devices])
            for i, worker in enumerate(self._workers):
                worker.inbox.put(Order(i, [run], SimpleQueue()))
                num_started += 1
            for _ in tasks:
                started.get()  # soon: nothing of the user's is called before
        except BaseException:
            stop()
            for i in range(num_started, len(tasks)):
                self.abandon(i)  # not to run, or not there
            raise
        finally:
            # Each task's thread has set its own number by now, and with it that of new threads.
            thread_counts.end(threads_before, threads_each)

    def _leave(self, index: int, part_with: Callable[[Sequence[Worker]], None]) -> None:
        """Count a task as ended, and part with its worker, unless that has been done."""
        with self._lock:
            if index not in self._running:
                return
            self._running.remove(index)
            part_with(self._workers[index : index + 1])  # in the lock: a wait that has ended finds no worker left
            is_last = not self._running
        if is_last:
            try:
                self._at_end()
            finally:
                stops_at_exit.discard(self._stop)
                while_replicas_run.leave(self._entry)
                process_wide.clear_dispatch_mode_flags(self._flags)  # modes of the tasks' threads may have overlapped
                self._ended.set()

    def abandon(self, index: int) -> None:
        """Count a task as ended although it is not: it is stuck. It ends when it can, or when the program does."""
        self._leave(index, pool.abandon)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all tasks have ended; those that have not after `timeout_s` are abandoned."""
        began = time.monotonic()
        while not self._ended.wait(WAKE_S):
            deliver()
            if timeout_s is not None and time.monotonic() - began > timeout_s:
                for index in [*self._running]:
                    self.abandon(index)
