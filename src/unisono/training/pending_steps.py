"""Steps whose losses have not been read yet.

Reading a loss waits for the device. So on an accelerator a step's loss is read, and the step recorded, when the next
step has been queued: the device always has work, and the numbers are the same. On the CPU nothing is queued, and a
step is recorded at once.

Guarantees
    - Steps are recorded in order, each when its loss is known to be finite.
    - All steps are recorded before a checkpoint is saved: a checkpoint is finite, and is the state after the step that
      it names.
    - All processes record the same steps at the same moments, so that their exchanges stay in order.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.training.display import Share, StepReport
from unisono.training.metrics import StepRecord
from unisono.training.run import Run

_SAVE_EVERY_S = 300.0  # within an epoch; each epoch ends with a checkpoint anyway


@dataclass(frozen=True)
class PendingStep:
    """A step that has been queued."""

    number: int  # from 0, as the epoch
    epoch: int
    learning_rate: float
    rows: int  # of all processes
    loss: Callable[[], float]  # waits for this process's part of the loss
    shares: Sequence[Share]  # of the replicas of this process


class PendingSteps:
    """The steps of a run that have been queued and not recorded.

    Attributes:
        should_save: whether the last checkpoint is some minutes old.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps: deque[PendingStep] = deque()
        self.start_clock()

    def start_clock(self) -> None:
        """Start the clock of the next step, after evaluating or saving."""
        self._recorded_at = self._saved_at = time.perf_counter()
        self.should_save = False

    def add(self, step: PendingStep) -> None:
        """Add a step, and record the one before it (on the CPU, this one)."""
        self._steps.append(step)
        self.record(all_but=self._run.steps_ahead)

    def record(self, all_but: int = 0) -> None:
        """Wait for the steps but the last ones, and record them.

        Raises:
            DivergedError: a loss is infinite or not a number.
        """
        while len(self._steps) > all_but:
            self._record(self._steps.popleft())

    def _record(self, step: PendingStep) -> None:
        run = self._run
        loss = step.loss()  # waits for the accelerator; the sum waits for the other processes
        time_to_save = run.ranks.is_first and time.perf_counter() - self._saved_at > _SAVE_EVERY_S
        mean_loss, save = run.ranks.sum(loss, time_to_save)
        self.should_save = self.should_save or bool(save)
        if not math.isfinite(mean_loss):
            what = f"the training loss is {mean_loss} in step {step.number + 1} (epoch {step.epoch + 1})"
            raise run.diverged(what, step.learning_rate)

        now = time.perf_counter()
        seconds, self._recorded_at = now - self._recorded_at, now
        record = StepRecord(step.number + 1, step.epoch + 1, mean_loss, step.learning_rate, step.rows, seconds)
        run.metrics.add(record)
        run.observers.step(record)
        run.display.step(StepReport(record, run.options.epochs, run.steps_per_epoch, step.shares))
