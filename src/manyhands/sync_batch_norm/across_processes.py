"""Batch norm over the rows of all processes: the all-gathers of one process's replicas, extended to all processes.

When all replicas of a process have submitted their values for a batch norm, the values are combined, and the processes
all-gather the results: count, mean and variance in forward, sums of gradients in backward. So every process normalises
by the same numbers, to the bit, and each sends one message a batch norm.

Loss weights. Rank r has gradient g_r and loss weight w_r. Everything on rank s is later scaled by w_s, so rank s
receives sum(w_r / w_s * g_r). The adjoint of this is a plain sum, and vice versa: higher orders alternate.

Assumes that the replicas of every process call the same batch norms in the same order. The processes also all-gather
what each call is, so that a difference becomes an error that names it.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from manyhands.distributed.process_group import Communicator, digest_of, distributed
from manyhands.runtime.errors import log_once
from manyhands.sync_batch_norm.function_mode import Gradients, ReplicaStatistics, combine_statistics, sum_gradients
from manyhands.sync_batch_norm.statistics import Statistics

_UNEQUAL = (
    "a derivative of a derivative through batch norm over all processes, which have different numbers of rows: it is "
    "that of one device if the inner derivative is of a mean over rows too, or if the wrapper has loss='sum' and both "
    "derivatives are of sums."
)
_DOING = "a batch norm over all processes"


class CrossProcessAllGather:
    """All-gathers the combined values of this process's replicas over the processes, in one pass.

    Args:
        communicator: the processes.
        device: on which the values are.
        weight: the loss weight of this process. If it is 0, its own values are never read.
    """

    def __init__(self, communicator: Communicator, device: torch.device, weight: float) -> None:
        self._communicator, self._weight, self._device = communicator, weight, device
        self._group = communicator.group_for(device, "batch norm")
        self._numbers = itertools.count()

    def __call__(self, name: str, values: Mapping[int, Any]) -> dict[int, Any]:
        """Return each process's combined values, by rank, from the values of this process's replicas.

        Args:
            name: of the batch norm. It is compared between the processes.
        """
        first = next(iter(values.values()))
        if isinstance(first, ReplicaStatistics):
            total = combine_statistics(values, first.statistics.mean.device)
            rows = sum(part.rows for part in values.values())
            steps, tensors = self._all_gather(name, "forward", torch.stack([total.mean, total.var]), total.count, rows)
            return {
                rank: ReplicaStatistics(Statistics(int(count), *tensor), int(rows))
                for rank, ((_, count, rows, *_), tensor) in enumerate(zip(steps, tensors, strict=True))
            }
        steps, tensors = self._all_gather(name, "backward", sum_gradients(values, first.tensor.device))
        if not first.weighted and len({step[0] for step in steps}) > 1:
            log_once(_UNEQUAL)
        if first.weighted and self._weight:
            tensors = [tensor * (step[0] / self._weight) for step, tensor in zip(steps, tensors, strict=True)]
        return {rank: Gradients(tensor, first.weighted) for rank, tensor in enumerate(tensors)}

    def _all_gather(
        self, name: str, direction: str, mine: torch.Tensor, count: int = 0, rows: int = 0
    ) -> tuple[list[list[float]], list[torch.Tensor]]:
        """Return the (weight, count, rows, ...) and the tensor of every process, in rank order."""
        if not self._weight:
            count, rows, mine = 0, 0, torch.zeros_like(mine)
        mine = mine.contiguous()
        number = next(self._numbers)
        step = [self._weight, count, rows, number, direction == "forward", mine.size(-1), digest_of(name)]
        step_work = self._communicator.all_gather(step, _DOING)
        tensors = [torch.empty_like(mine) for _ in range(self._communicator.world_size)]
        work = self._communicator.start(lambda: distributed.all_gather(tensors, mine, group=self._group, async_op=True))
        steps = step_work.wait()
        other = next((rank for rank, step in enumerate(steps) if step[3:] != steps[0][3:]), None)
        if other is not None:
            error = RuntimeError(
                f"the processes are at different batch norms: rank {self._communicator.rank} at {name!r}, "
                f"{_place(number)} of its {direction}, with {mine.size(-1)} channels; rank 0 at {_in_words(steps[0])}, "
                f"rank {other} at {_in_words(steps[other])}. Every process has to take the same way through the module."
            )
            self._communicator.abort(error)
            raise error
        self._communicator.wait(work, _DOING, self._group)
        return steps, tensors


def _in_words(step: list[float]) -> str:
    _, _, _, number, is_forward, num_channels, _ = step
    direction = "forward" if is_forward else "backward"
    return f"{_place(int(number))} of its {direction}, with {num_channels:.0f} channels"


def _place(number: int) -> str:
    return f"batch norm {number + 1}"
