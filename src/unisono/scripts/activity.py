"""What the wrappers of a script did: rows, forwards, and seconds by phase.

The clock is the host's. It runs from the first forward to the report, and a forward reads it twice. What the replicas
did is taken from `replica_timings`; backward fills them in later, so those of the last forwards are kept until then.
Nothing waits for a device: on an accelerator the phases are those of queueing the work.

Assumes that a forward inside another one, in the same thread or in a replica, is part of it.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from unisono.primitives import pytree
from unisono.runtime.contexts import contextmanager
from unisono.runtime.thread_pool import inside_replica
from unisono.runtime.timeline import ReplicaTiming

_MOST_PENDING = 64  # forwards whose backward may still come


@dataclass
class ActivityReport:
    """What a script has done so far.

    Attributes:
        devices: those of each wrapper, in the order in which they were made.
        functions: the calls of data_parallel and of the primitives, by name.
        forwards: of wrappers and of data_parallel, those without gradients too.
        rows: of these forwards.
        seconds: since the first forward began.
        forward_s: what all forwards took, in the caller's thread.
        backward_s: what all backwards took, each in the slowest replica; of one device it is not known.
    """

    devices: tuple[tuple[torch.device, ...], ...] = ()
    functions: Counter[str] = field(default_factory=Counter)
    forwards: int = 0
    rows: int = 0
    seconds: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0


class Activity:
    """Counts what wrappers and functions do, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._so_far = ActivityReport()
        self._started: float | None = None
        self._pending: deque[list[ReplicaTiming]] = deque()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing that the calling thread does meanwhile."""
        before, self._thread.busy = self._is_busy(), True
        try:
            yield
        finally:
            self._thread.busy = before

    def _is_busy(self) -> bool:
        return bool(getattr(self._thread, "busy", False))

    def add_wrapper(self, devices: list[torch.device]) -> None:
        if self._is_busy():
            return
        with self._lock:
            self._so_far.devices += (tuple(devices),)

    def add_call(self, function: str) -> None:
        with self._lock:
            self._so_far.functions[function] += 1

    def measure(
        self,
        call: Callable[..., Any],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        dim: int = 0,
        timings: Callable[[], list[ReplicaTiming]] = list,
    ) -> Any:
        """Return `call(*inputs, **kwargs)`, and count its rows and its seconds; a call that fails has no rows.

        The rows are those of the last forward's timings; without any, those on the axis `dim`.
        """
        if inside_replica() or self._is_busy():
            return call(*inputs, **kwargs)
        before, began = timings(), time.perf_counter()
        try:
            with self.uncounted():  # a forward inside this one is part of it
                output = call(*inputs, **kwargs)
        except BaseException:
            self._count(began, 0, 0, [])
            raise
        of_replicas = timings()
        if of_replicas is before:  # nothing was timed: one device, or overridden verbs
            of_replicas = []
        self._count(began, 1, sum(t.rows for t in of_replicas) or _rows(inputs, kwargs, dim), of_replicas)
        return output

    def _count(self, began: float, forwards: int, rows: int, timings: list[ReplicaTiming]) -> None:
        with self._lock:
            self._started = began if self._started is None else min(began, self._started)
            so_far = self._so_far
            so_far.forwards += forwards
            so_far.rows += rows
            so_far.forward_s += time.perf_counter() - began
            if timings:
                self._pending.append(timings)
            if len(self._pending) > _MOST_PENDING:
                so_far.backward_s += _slowest_backward(self._pending.popleft())

    def report(self) -> ActivityReport:
        now = time.perf_counter()
        with self._lock:
            return replace(
                self._so_far,
                functions=Counter(self._so_far.functions),
                seconds=now - self._started if self._started is not None else 0.0,
                backward_s=self._so_far.backward_s + sum(map(_slowest_backward, self._pending)),
            )


def _slowest_backward(timings: list[ReplicaTiming]) -> float:
    return max(timing.backward_s for timing in timings)


def _rows(inputs: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> int:
    """Return the rows of the first tensor that has the axis; 0 if there is none."""
    for _, tensor in pytree.tensors([list(inputs), kwargs]):
        if -tensor.dim() <= dim < tensor.dim():
            return int(tensor.shape[dim])
    return 0
