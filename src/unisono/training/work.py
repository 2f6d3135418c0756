"""The work of each replica in a step: its share of the rows, and how long they took."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from unisono.data_parallel import DataParallel
from unisono.training.metrics import StepRecord


@dataclass(frozen=True)
class Share:
    """The rows of one replica, and the seconds of their forward and backward pass.

    On an accelerator these are the seconds until the work was queued: waiting for it would leave the device idle.
    """

    device: torch.device
    rows: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.device} {self.rows} rows {1000 * self.seconds:.0f} ms"


class Work:
    """The shares of one step, which may consist of several micro-batches."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.shares = [Share(device, 0, 0.0) for device in devices]

    @contextlib.contextmanager
    def measured(self, model: DataParallel, num_rows: int) -> Iterator[None]:
        """Add the work of the block, which runs `num_rows` rows through `model`, forward and backward."""
        began = time.perf_counter()
        yield
        if len(self.shares) == 1:
            self._add(0, num_rows, time.perf_counter() - began)
            return
        # Replicas without rows are left out; as shares are even, these are the last ones.
        for index, timing in enumerate(model.replica_timings):
            self._add(index, timing.rows, timing.forward_s + timing.backward_s)

    def _add(self, index: int, rows: int, seconds: float) -> None:
        before = self.shares[index]
        self.shares[index] = Share(before.device, before.rows + rows, before.seconds + seconds)


@dataclass(frozen=True)
class StepReport:
    """A finished step, its place in the run, and the work of each replica."""

    record: StepRecord
    epochs: int
    step_in_epoch: int
    steps_per_epoch: int
    shares: Sequence[Share]

    @property
    def replicas(self) -> str:
        """Each replica's share and time."""
        return ", ".join(map(str, self.shares))
