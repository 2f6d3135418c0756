"""Batch norm over the rows of all processes: the all-gathers of one process's replicas, extended to all processes.

When all replicas of a process have submitted their values for a batch norm, the values are combined, and the processes
all-gather the results: statistics in forward, sums of gradients in backward. So every process normalises by the same
numbers, to the bit, and each sends one message a batch norm.

Loss weights. Rank r has gradient g_r and loss weight w_r. Everything on rank s is later scaled by w_s, so rank s
receives sum(w_r / w_s * g_r). The adjoint of this is a plain sum, and vice versa: higher orders alternate.

Assumes that the replicas of every process call the same batch norms in the same order. The processes also all-gather
what each call is, so that a difference becomes an error that names it.

No waiting on accelerators. On gloo the host waits for each exchange anyway: it also reads counts and weights, and
compares what each process does at once. On an accelerator's own backend the values stay on the device, with their
counts and weights, and the host goes on. What the processes do is compared when the next exchange begins: by then it
has arrived. Where they differ, the collective that cannot end is aborted with the process group. Devices without
the kernels of kernels.py need the counts on the host.
"""

import itertools
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple, Never

import torch

from unisono.distributed.process_group import AllGatherWork, Communicator, RankDevices, digest_of
from unisono.runtime import devices as _devices
from unisono.runtime.errors import log_once
from unisono.runtime.streams import current_stream
from unisono.sync_batch_norm.kernels import KernelStatistics
from unisono.sync_batch_norm.over_replicas import (
    ReplicaStatistics,
    StatisticsGradients,
    combine_statistics,
    sum_gradients,
)
from unisono.sync_batch_norm.statistics import Statistics

_UNEQUAL = (
    "second derivative through batch norm over processes with different numbers of rows: it is exact only if "
    "the inner derivative is of a mean over rows too, or with loss='sum' if both derivatives are of sums."
)
_DOING = "a batch norm over all processes"
_IN_EVAL_MODE = (
    "the batch norm of {name} needs the statistics of its batch, with sync_batch_norm=True those of all processes; but "
    "the model is in eval mode, in which no process waits for the others. To train, call model.train(), or give batch "
    "norm running statistics (track_running_stats=True, and eval() for each such layer). To evaluate, call it under "
    "torch.no_grad(): each process then normalises its own rows."
)


class _Step(NamedTuple):
    """What a process does in an exchange, as numbers. From `number` on it is the same in all processes."""

    weight: float
    num_values: float
    rows: float
    number: float
    is_forward: float
    is_weighted: float
    num_channels: float
    name: float

    def __str__(self) -> str:
        direction = "forward" if self.is_forward else "backward"
        return f"batch norm {self.number + 1:.0f} of its {direction}, with {self.num_channels:.0f} channels"


class InEvalMode:
    """In the place of a `CrossProcessAllGather` for gradients of a model in eval mode: an exchange is an error."""

    one_kind_of_device = True

    def __call__(self, name: str, values: Mapping[int, Any], /) -> Never:
        """Raise RuntimeError, with the name of the batch norm."""
        raise RuntimeError(_IN_EVAL_MODE.format(name=name))


class CrossProcessAllGather:
    """All-gathers the combined values of this process's replicas over the processes, in one pass.

    Attributes:
        one_kind_of_device: whether all processes compute on devices of one kind, and so have the same statistics.

    Args:
        communicator: the processes.
        devices: on which the values are, one for each process.
        weight: the loss weight of this process. If it is 0, its own values are never read.
    """

    def __init__(self, communicator: Communicator, devices: RankDevices, weight: float) -> None:
        self._communicator, self._weight, self._devices = communicator, weight, devices
        self.one_kind_of_device = devices.are_of_one_kind
        self._numbers = itertools.count()
        self._has_kernels = self.one_kind_of_device and _devices.has_batch_norm_kernels(devices.own)
        self._unchecked: list[tuple[str, _Step, AllGatherWork]] = []  # at most one
        self._steps: list[_Step] = []  # of all processes in the last exchange that was compared

    @cached_property
    def _group(self) -> Any:
        """The process group. Its first use is a collective: in an exchange all processes are there."""
        return self._communicator.group_for(self._devices, "batch norm")

    @cached_property
    def _host_waits(self) -> bool:
        return self._communicator.waits_on_host(self._group) or not self._has_kernels

    def __call__(self, name: str, values: Mapping[int, Any], /) -> dict[int, Any]:
        """Return each process's combined values, by rank, from the values of this process's replicas.

        Args:
            name: of the batch norm. It is compared between the processes.
        """
        first = next(iter(values.values()))
        stream = current_stream(self._devices.own)
        if isinstance(first, ReplicaStatistics):
            rows = sum(part.rows for part in values.values())
            return dict(enumerate(self._forward(name, values, rows, stream)))
        parts = self._backward(name, sum_gradients(values))
        return {rank: StatisticsGradients(part, first.weighted, stream) for rank, part in enumerate(parts)}

    def end_forward(self) -> list[float]:
        """Return the weights of all processes after a forward that no backward follows; none if it had no exchange."""
        self._check_last()
        return [step.weight for step in self._steps]

    def _forward(
        self, name: str, values: Mapping[int, ReplicaStatistics], rows: int, stream: torch.Stream | None
    ) -> list[ReplicaStatistics]:
        first = next(iter(values.values())).statistics
        if isinstance(first, KernelStatistics):
            total = combine_statistics(values, first.packed.device)
            assert isinstance(total, KernelStatistics)
            mine = total if self._weight else KernelStatistics.without_rows(total.packed, total.eps)
            num_channels = len(mine.packed) // 2
            steps, tensors = self._all_gather(name, mine.packed, num_channels, count=mine.count or 0, rows=rows)
            counts = [None if step is None else int(step.num_values) for step in steps]
            found: list[Any] = [
                KernelStatistics(tensor, mine.eps, count) for tensor, count in zip(tensors, counts, strict=True)
            ]
        else:
            sent = combine_statistics(values, first.mean.device)
            assert isinstance(sent, Statistics)
            packed = torch.stack([sent.mean, sent.var])
            count = sent.count if self._weight else 0
            steps, tensors = self._all_gather(
                name, packed if self._weight else torch.zeros_like(packed), packed.size(1), count=count, rows=rows
            )
            found = [
                Statistics(0 if step is None else int(step.num_values), *tensor)
                for step, tensor in zip(steps, tensors, strict=True)
            ]
        rows_of = [0 if step is None else int(step.rows) for step in steps]
        return [ReplicaStatistics(each, rows, stream) for each, rows in zip(found, rows_of, strict=True)]

    def _backward(self, name: str, of: StatisticsGradients) -> list[torch.Tensor]:
        """Return every process's gradients, scaled for this process if `of`, this process's, are weighted."""
        mine = of.tensor if self._weight else torch.zeros_like(of.tensor)
        # As long as what is sent in forward: gloo ends a process that is sent more than it expects, when all that is
        # wrong is that another process is in forward.
        sent = torch.cat([mine.flatten(), mine.new_full((1,), self._weight)]) if self._has_kernels else mine
        steps, tensors = self._all_gather(name, sent, mine.size(-1), is_forward=False, is_weighted=of.weighted)
        weights: list[Any] = [0.0 if step is None else step.weight for step in steps]
        if self._has_kernels:
            weights = [tensor[-1] for tensor in tensors]
            tensors = [tensor[:-1].view_as(mine) for tensor in tensors]
        if not of.weighted or not self._weight:
            return tensors
        return [tensor * (weight / self._weight) for tensor, weight in zip(tensors, weights, strict=True)]

    def _all_gather(
        self,
        name: str,
        mine: torch.Tensor,
        num_channels: int,
        *,
        count: int = 0,
        rows: int = 0,
        is_forward: bool = True,
        is_weighted: bool = False,
    ) -> tuple[list[_Step | None], list[torch.Tensor]]:
        """Return the step and the tensor of every process, in rank order; of steps None where the host did not wait."""
        self._check_last()
        group = self._group  # made before this exchange begins, if it is the first
        rows = rows if self._weight else 0
        step = _Step(
            self._weight, count, rows, next(self._numbers), is_forward, is_weighted, num_channels, digest_of(name)
        )
        work = self._communicator.all_gather(step, _DOING)
        tensors, data_work = self._communicator.start_all_gather(mine.contiguous(), group)
        self._unchecked.append((name, step, work))
        steps: list[_Step] = self._check_last() if self._host_waits else []
        self._communicator.wait(data_work, _DOING, group)
        return list(steps) or [None] * self._communicator.world_size, tensors

    def _check_last(self) -> list[_Step]:
        """Return the steps of all processes in the last exchange that was not compared; none if there is none.

        Raises:
            RuntimeError: they have done different things.
        """
        if not self._unchecked:
            return []
        name, mine, work = self._unchecked.pop()
        steps = [_Step(*step) for step in work.wait()]
        same = [step[_Step._fields.index("number") :] for step in steps]
        other = next((rank for rank, each in enumerate(same) if each != same[0]), None)
        if other is not None:
            error = RuntimeError(
                f"the processes are at different batch norms: rank {self._communicator.rank} at {name!r}, "
                f"{mine}; rank 0 at {steps[0]}, rank {other} at {steps[other]}. Every process must call the "
                "same layers of the module in the same order."
            )
            self._communicator.failures.abort(error)
            raise error
        if not mine.is_forward and not mine.is_weighted and len({step.weight for step in steps}) > 1:
            log_once(_UNEQUAL)
        self._steps = steps
        return steps
