"""Steps that have been taken, and whose losses have not been read yet.

Reading a loss waits for the device. So on an accelerator a step's loss is read, and the step recorded, when the next
step has been queued: the device always has work, and the numbers are the same. On the host nothing is queued, and a
step is recorded at once.

Guarantees
    - Steps are recorded in order, each when its loss is known to be finite; `run.progress` is the last recorded one.
    - Whoever saves records all steps first, so what is saved is finite, and the state after the step that it names.
    - Of several processes all record the same steps at the same moments, so that what they exchange stays in order.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manyhands.training.checkpoint import Progress
from manyhands.training.display import Display
from manyhands.training.metrics import StepRecord
from manyhands.training.run import Run
from manyhands.training.work import Share, StepReport

_SAVE_EVERY_S = 300.0  # within an epoch; each epoch ends with a checkpoint anyway


@dataclass(frozen=True)
class PendingStep:
    """A step that has been taken, as far as this process goes.

    Args:
        number, epoch: both counted from 0.
        rate: the learning rate.
        rows: of all processes.
        loss: waits for this process's part of the loss, and returns it.
        shares: what each replica did.
    """

    number: int
    epoch: int
    rate: float
    rows: int
    loss: Callable[[], float]
    shares: Sequence[Share]


class UnderWay:
    """The steps of a run that have been taken and not been recorded.

    Attributes:
        long_unsaved: whether what has been recorded should be saved, the last checkpoint being some minutes old.
    """

    def __init__(self, run: Run, display: Display) -> None:
        self._run, self._display = run, display
        self._steps: deque[PendingStep] = deque()
        self.start_clock()

    def start_clock(self) -> None:
        """Begin to count the seconds of training, after something that is not training."""
        self._recorded_at = self._saved_at = time.perf_counter()
        self.long_unsaved = False

    def add(self, step: PendingStep) -> None:
        """Add a step, and record those that should have arrived.

        Raises:
            DivergedError: a loss is no number.
        """
        self._steps.append(step)
        self._record_all_but(self._run.steps_ahead)

    def record(self) -> None:
        """Wait for all steps, and record them.

        Raises:
            DivergedError: a loss is no number.
        """
        self._record_all_but(0)

    def _record_all_but(self, num_steps: int) -> None:
        while len(self._steps) > num_steps:
            self._record(self._steps.popleft())

    def _record(self, step: PendingStep) -> None:
        run = self._run
        loss = step.loss()  # waits for the accelerators, and the sum for the other processes
        first_says_save = run.ranks.is_first and time.perf_counter() - self._saved_at > _SAVE_EVERY_S
        mean_loss, save = run.ranks.sum(loss, first_says_save)
        self.long_unsaved = self.long_unsaved or bool(save)
        if not math.isfinite(mean_loss):
            what = f"the training loss is {mean_loss} in step {step.number + 1} (epoch {step.epoch + 1})"
            raise run.diverged(what, step.rate)

        now = time.perf_counter()
        seconds, self._recorded_at = now - self._recorded_at, now
        record = StepRecord(step.number + 1, step.epoch + 1, mean_loss, step.rate, step.rows, seconds)
        run.progress = Progress(steps=step.number + 1, epochs=step.epoch)
        run.metrics.add(record)
        step_in_epoch = step.number + 1 - step.epoch * run.steps_per_epoch
        self._display.step(StepReport(record, run.options.epochs, step_in_epoch, run.steps_per_epoch, step.shares))
