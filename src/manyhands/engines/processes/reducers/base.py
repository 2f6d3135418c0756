"""The transport: how parameters reach the workers, and how their gradients become the caller's. One a team of workers.

There are two. On the CPU parameters lie in memory that all processes map, and the processes sum large gradients there
(reducers/shared_memory.py). Elsewhere each worker has parameters of its own, on its own device, and torch.distributed
takes both
from process to process (collectives.py). What each replica does in one walk of the graphs is a `Reducer`, on both
sides."""

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from manyhands.engines.processes.shared_memory import Segment

_SPIN_S = 0.0002
_NAP_S = (0.0001, 0.001)  # the first nap, and the longest

# What whoever waits for the others calls now and then; it raises what ends the wait.
OnWait: TypeAlias = Callable[[], None]


class Reducer(abc.ABC):
    """One replica's part in what is done with the gradients of one walk."""

    @property
    @abc.abstractmethod
    def numbers(self) -> Sequence[int]:
        """The numbers of the tensors whose gradients are taken."""

    @abc.abstractmethod
    def add(self, number: int, gradient: torch.Tensor) -> bool:
        """Take a tensor's gradient; return whether it was taken: the first one, and of the kind that was expected."""

    @abc.abstractmethod
    def end(self, watch: OnWait = lambda: None) -> float:
        """Do what is still to do; return for how many seconds others were waited for."""

    @abc.abstractmethod
    def fail(self, watch: OnWait = lambda: None) -> None:
        """See to it that nobody waits for this replica, which has failed; there will be no results."""

    @contextlib.contextmanager
    def hooked(self, leaves: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Take leaves' gradients, by number, as soon as they are there, for as long as the context lasts."""
        found = [(number, leaf) for number in self.numbers if (leaf := leaves.get(number)) is not None]
        handles = [
            leaf.register_post_accumulate_grad_hook(partial(self._take, number))  # type: ignore[no-untyped-call]
            for number, leaf in found
            if leaf.is_leaf and leaf.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _take(self, number: int, leaf: torch.Tensor) -> None:
        if leaf.grad is not None and self.add(number, leaf.grad):
            leaf.grad = None


class Transport(abc.ABC):
    """The caller's side.

    Attributes:
        shares_parameters: whether workers have the live parameters' own memory; else they are sent.
        segments: what the workers have to have.
    """

    shares_parameters: bool
    segments: list[Segment]

    @abc.abstractmethod
    def begin_backward(self, leaves: Mapping[int, torch.Tensor], replicas: tuple[int, ...]) -> bool:
        """Begin a walk; return whether there is anything to do with gradients. If not, nothing of the rest is called.

        Args:
            leaves: something of the size of each tensor that has a leaf, by number.
            replicas: who takes part, in replica order.
        """

    @abc.abstractmethod
    def config_for(self, replica: int) -> Any:
        """Return what a worker has to be told about the walk that has begun; take it as told."""

    @abc.abstractmethod
    def part(self, watch: OnWait) -> Reducer:
        """Return the first replica's part in the walk, when all workers have been told."""

    @abc.abstractmethod
    def results(self) -> dict[int, torch.Tensor]:
        """Return the sums of the gradients, by number of the tensor, after a walk in which no replica has failed."""

    @abc.abstractmethod
    def rendezvous(self, replica: int) -> Any:
        """Return where a worker finds the others, from whom parameters come that are sent; None if they are shared."""

    @abc.abstractmethod
    def begin_sending(self, flats: Sequence[torch.Tensor], replicas: tuple[int, ...], watch: OnWait) -> None:
        """Begin to send parameters, when all workers have been told.

        Args:
            flats: buckets of them.
            replicas: who takes part.
        """

    @abc.abstractmethod
    def end_sending(self, watch: OnWait) -> None:
        """Wait until everything is sent."""

    @abc.abstractmethod
    def end(self) -> None:
        """Let go of what connects this process with the workers, which have ended or are about to."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Let go of the parent's, in the child of a fork."""


def wait_until(is_so: Callable[[], bool], watch: OnWait) -> None:
    """Wait until something is so; spin at first, then sleep, and call `watch` before each nap."""
    started = time.perf_counter()
    nap_s, longest_s = _NAP_S
    while not is_so():
        if time.perf_counter() - started < _SPIN_S:
            time.sleep(0)
            continue
        watch()
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, longest_s)
