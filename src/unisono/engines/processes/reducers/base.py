"""The transport: how parameters reach the workers, and how their gradients become the caller's. One a worker group.

On the CPU parameters are in memory that all processes map, and the processes sum large gradients there
(shared_memory.py). On other devices each worker has its own parameters, and torch.distributed sends parameters and
reduces gradients (collectives.py). In each backward every replica has a `Reducer`, in the caller as in the workers.
"""

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from unisono.autograd.reducer import Reducer
from unisono.engines.processes.shared_memory import Segment
from unisono.runtime import timeline
from unisono.runtime.interrupts import deliver

_SPIN_S = 0.0002
_SLEEP_S = (0.0001, 0.001)  # the first sleep, and the longest

# A waiting replica calls this now and then, with the seconds that it has waited so far; it raises to end the wait.
OnWait: TypeAlias = Callable[[float], None]


def wait_on(_: float) -> None:
    """The `OnWait` of one that waits without limit."""


class WorkerReducer(Reducer):
    """One replica's part, in a process of its own or the caller's."""

    @abc.abstractmethod
    def end(self, on_wait: OnWait = wait_on) -> float:
        """Finish this replica's part; return for how many seconds it waited for other replicas."""

    @abc.abstractmethod
    def fail(self, on_wait: OnWait = wait_on) -> None:
        """Let the other replicas go on without this one, which has failed; there will be no results."""


class Transport(abc.ABC):
    """The caller's side.

    Attributes:
        shares_parameters: whether workers map the live parameters' memory; else parameters are sent.
        segments: those that the workers need.
    """

    shares_parameters: bool
    segments: list[Segment]

    @abc.abstractmethod
    def begin_backward(self, leaves: Mapping[int, torch.Tensor], replicas: tuple[int, ...]) -> bool:
        """Begin a backward; return whether any gradient is to be reduced. If not, no other method is called for it.

        Args:
            leaves: by number, a tensor of the form of each tensor that has a leaf; the same object as long as they
                are the same tensors of the same forms.
            replicas: those that take part, in replica order.
        """

    @abc.abstractmethod
    def config_for(self, replica: int) -> Any:
        """Return the configuration of a worker's reducer for this backward, and take it as sent."""

    @abc.abstractmethod
    def reducer(self, on_wait: OnWait) -> WorkerReducer:
        """Return the first replica's reducer, after all workers have been sent theirs."""

    @abc.abstractmethod
    def results(self) -> dict[int, torch.Tensor]:
        """Return the summed gradients, by number of the tensor, after a backward in which no replica failed."""

    # What follows is for parameters that are sent.

    def rendezvous(self, replica: int) -> Any:
        """Return the rendezvous over which a worker gets parameters; None if they are shared."""
        return None

    def begin_sending(  # noqa: B027
        self, flats: Sequence[torch.Tensor], replicas: tuple[int, ...], on_wait: OnWait
    ) -> None:
        """Begin to send flat buckets of parameters to some replicas, after all workers have been sent their message."""

    def end_sending(self, on_wait: OnWait) -> None:  # noqa: B027
        """Wait until everything is sent."""

    def succeed(self, previous: "Transport") -> None:  # noqa: B027
        """Take over what an earlier worker group's transport has learned, so that sums keep their order."""

    def end(self) -> None:  # noqa: B027
        """Close the connections to the workers, which have ended or are about to."""

    def abandon(self) -> None:  # noqa: B027
        """Drop the parent's connections, in the child of a fork."""


def wait_until(condition: Callable[[], bool], on_wait: OnWait) -> None:
    """Wait until the condition holds: spin at first, then sleep, with a call of `on_wait` before each sleep."""
    started = time.perf_counter()
    sleep_s, longest_s = _SLEEP_S
    with timeline.during(timeline.WAIT):
        while not condition():
            if time.perf_counter() - started < _SPIN_S:
                time.sleep(0)
                continue
            on_wait(time.perf_counter() - started)
            time.sleep(sleep_s)
            deliver()
            sleep_s = min(2 * sleep_s, longest_s)
