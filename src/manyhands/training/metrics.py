"""metrics.jsonl: the measurements of a run, one JSON object a line.

    {"kind": "step", "step": 1, "epoch": 1, "loss": 2.31, "learning_rate": 0.008, "rows": 120, "seconds": 0.31}
    {"kind": "epoch", "epoch": 1, "step": 12, "train_loss": 1.2, "test_loss": 0.6, "test_accuracy": 0.82, ...}

Steps and epochs are counted from 1: a line's `step` is how many steps the run had finished. The records are the only
history that a run has: an epoch's loss and seconds are sums over its steps, even if the run was interrupted between.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from manyhands.console.errors import FolderError
from manyhands.training.run_folder import replaced


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; `loss` is the mean over its `rows`."""

    step: int
    epoch: int
    loss: float
    learning_rate: float
    rows: int
    seconds: float


@dataclass(frozen=True)
class EpochRecord:
    """One epoch; `train_loss` is the mean over its rows at their steps, `train_seconds` does not include testing."""

    epoch: int
    step: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    train_seconds: float
    test_seconds: float


Record: TypeAlias = StepRecord | EpochRecord


class Metrics:
    """The records of a run, in memory and in metrics.jsonl.

    Each record is a line in the file at once; `sync` waits until the lines are on the disk.

    Args:
        path: the file; None in a process that does not write.
        records: the earlier ones of a resumed run. The file begins with them.
    """

    def __init__(self, path: Path | None, records: Iterable[Record] = ()) -> None:
        self.steps: list[StepRecord] = []
        self.epochs: list[EpochRecord] = []
        lines = [self._remember(record) for record in records]
        self._file: TextIO | None = None
        if path is not None:
            with replaced(path) as unfinished:
                unfinished.write_text("".join(lines))
            self._file = path.open("a")

    @staticmethod
    def read(path: Path, *, steps: int, epochs: int) -> list[Record]:
        """Return the records in a file up to a checkpoint, which is after so many steps and epochs.

        Raises:
            FolderError: lines before the checkpoint are missing.
        """
        kept: list[Record] = []
        for line in path.read_bytes().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError, TypeError):  # the last line may be half a line
                record = _record(json.loads(line))
                if record.step <= steps and (isinstance(record, StepRecord) or record.epoch <= epochs):
                    kept.append(record)
        if len(kept) != steps + epochs:
            raise FolderError(
                f"{path} has {len(kept)} records of the {steps} steps and {epochs} epochs up to the checkpoint; "
                "the run cannot go on without its history: put the file back, or start again"
            )
        return kept

    def add(self, record: Record) -> None:
        """Add a record."""
        line = self._remember(record)
        if self._file is not None:
            self._file.write(line)
            self._file.flush()

    def train_loss(self, epoch: int) -> float:
        """Return the mean loss over the rows of an epoch so far."""
        steps = [record for record in self.steps if record.epoch == epoch]
        return sum(record.loss * record.rows for record in steps) / max(1, sum(record.rows for record in steps))

    def train_seconds(self, epoch: int) -> float:
        """Return the seconds that the steps of an epoch have taken so far."""
        return sum(record.seconds for record in self.steps if record.epoch == epoch)

    def sync(self) -> None:
        """Return when all lines are on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _remember(self, record: Record) -> str:
        """Keep a record in memory, and return its line."""
        if isinstance(record, StepRecord):
            self.steps.append(record)
            kind = "step"
        else:
            self.epochs.append(record)
            kind = "epoch"
        return json.dumps({"kind": kind, **asdict(record)}) + "\n"


def _record(line: dict[str, Any]) -> Record:
    """Return the record in a line. Raises ValueError or TypeError if there is none."""
    if not isinstance(line, dict):
        raise TypeError(f"expected an object, got {line!r}")
    kind = line.pop("kind", None)
    if kind == "step":
        return StepRecord(**line)
    if kind == "epoch":
        return EpochRecord(**line)
    raise ValueError(f"unknown kind {kind!r}")
