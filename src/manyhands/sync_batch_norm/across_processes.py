"""Batch norm over the rows of all processes: what an exchange among this process's replicas becomes beyond it.

When all replicas of a process have come to a batch norm, what they have is put together, and the processes exchange
that: count, mean and variance in forward, sums of gradients in backward. So every process normalises by the same
numbers, to the bit, and one message a process and batch norm is enough.

Each process has the gradients g_r of a loss of its own, and weighs w_r among them; the one loss has the gradients
w_r g_r. So what process s gets is the sum of (w_r / w_s) g_r: in the measure of its own loss, in which everything there
is until the sum over the processes, where it counts w_s. In that measure the adjoint of this is the plain sum, whose
adjoint is this again; so derivatives of higher order take turns.

Assumes that the replicas of every process come to the same batch norms in the same order. What each is about to
exchange is told beforehand, so that a difference becomes an error that names it.
"""

import itertools
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from manyhands.distributed.process_group import Communicator, digest_of, distributed
from manyhands.runtime.errors import log_once
from manyhands.sync_batch_norm.function_mode import Gradients, ReplicaStatistics, combine_statistics, sum_gradients
from manyhands.sync_batch_norm.statistics import Statistics

_UNEQUAL = (
    "a derivative of a derivative through batch norm over all processes, which have different numbers of rows: it is "
    "that of one device if the inner one is of a mean over rows too, or if the wrapper has loss='sum' and both are of "
    "sums."
)
_DOING = "a batch norm over all processes"


class CrossProcessAllGather:
    """Exchanges what one pass over the replicas of this process comes to with the other processes.

    Args:
        communicator: the processes.
        device: on which the values are.
        weight: what the loss of this process weighs. If it is 0, its values are never read: it gets the others'.
    """

    def __init__(self, communicator: Communicator, device: torch.device, weight: float) -> None:
        self._communicator, self._weight, self._device = communicator, weight, device
        self._group = communicator.group_for(device, "batch norm")
        self._numbers = itertools.count()

    def __call__(self, name: Hashable, values: Mapping[int, Any]) -> dict[int, Any]:
        """Return what each process has, by rank, from the values of this process's replicas.

        Args:
            name: what the exchange is called, if that is the same everywhere: a string.
        """
        first = next(iter(values.values()))
        if isinstance(first, ReplicaStatistics):
            whole = combine_statistics(values, first.statistics.mean.device)
            rows = sum(part.rows for part in values.values())
            steps, tensors = self._exchange(name, "forward", torch.stack([whole.mean, whole.var]), whole.count, rows)
            return {
                rank: ReplicaStatistics(Statistics(int(count), *tensor), int(rows))
                for rank, ((_, count, rows, *_), tensor) in enumerate(zip(steps, tensors, strict=True))
            }
        steps, tensors = self._exchange(name, "backward", sum_gradients(values, first.tensor.device))
        if not first.weighted and len({step[0] for step in steps}) > 1:
            log_once(_UNEQUAL)
        if first.weighted and self._weight:
            tensors = [tensor * (step[0] / self._weight) for step, tensor in zip(steps, tensors, strict=True)]
        return {rank: Gradients(tensor, first.weighted) for rank, tensor in enumerate(tensors)}

    def _exchange(
        self, name: Hashable, way: str, mine: torch.Tensor, count: int = 0, rows: int = 0
    ) -> tuple[list[list[float]], list[torch.Tensor]]:
        """Return the (weight, count, rows, ...) and the tensor of every process, in rank order."""
        if not self._weight:
            count, rows, mine = 0, 0, torch.zeros_like(mine)
        mine = mine.contiguous()
        number = next(self._numbers)
        digest = digest_of(name) if isinstance(name, str) else 0
        step = [self._weight, count, rows, number, way == "forward", mine.size(-1), digest]
        told = self._communicator.all_gather(step, _DOING)
        tensors = [torch.empty_like(mine) for _ in range(self._communicator.world_size)]
        work = self._communicator.start(lambda: distributed.all_gather(tensors, mine, group=self._group, async_op=True))
        steps = told.wait()
        other = next((rank for rank, step in enumerate(steps) if step[3:] != steps[0][3:]), None)
        if other is not None:
            error = RuntimeError(
                f"the processes came to different batch norms: rank {self._communicator.rank} to {name!r}, "
                f"{_place(number)} of its {way} pass, with {mine.size(-1)} channels; rank 0 to {_in_words(steps[0])}, "
                f"rank {other} to {_in_words(steps[other])}. Every process has to take the same way through the module."
            )
            self._communicator.abort(error)
            raise error
        self._communicator.wait(work, _DOING, self._group)
        return steps, tensors


def _in_words(step: list[float]) -> str:
    _, _, _, number, is_forward, num_channels, _ = step
    way = "forward" if is_forward else "backward"
    return f"{_place(int(number))} of its {way} pass, with {num_channels:.0f} channels"


def _place(number: int) -> str:
    return f"batch norm {number + 1}"
