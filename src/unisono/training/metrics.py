"""metrics.jsonl: the measurements of a run, one JSON object a line.

    {"kind": "step", "step": 1, "epoch": 1, "loss": 2.31, "learning_rate": 0.008, "rows": 120, "seconds": 0.31}
    {"kind": "epoch", "epoch": 1, "step": 12, "train_loss": 1.2, "test_loss": 0.6, "test_accuracy": 0.82, ...}

Steps and epochs are counted from 1: a line's `step` is how many steps the run had finished. The records are the only
history that a run has: an epoch's loss and seconds are sums over its steps, even if the run was interrupted between.

A checkpoint notes how long the file was, and its digest (`Written`). A resumed run drops what comes later, half a line
too, and refuses a history that is not the one that it wrote.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, TypeAlias

from unisono.console import files
from unisono.console.errors import FolderError
from unisono.training.run_folder import RunFolder, replaced

_MAX_LINE_BYTES = 10_000
_MAX_NUMBER = 1e30  # sums of such numbers are finite, and curves can be drawn of them


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; `loss` is the mean over its `rows`."""

    step: int
    epoch: int
    loss: float
    learning_rate: float
    rows: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        """Rows trained on in a second, over all replicas."""
        return self.rows / self.seconds


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

_KINDS: dict[str, type[StepRecord] | type[EpochRecord]] = {"step": StepRecord, "epoch": EpochRecord}


@dataclass(frozen=True)
class Written:
    """How much of metrics.jsonl there is at some moment, and the SHA-256 of it, in hexadecimal digits."""

    num_bytes: int
    sha256: str


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
        self._num_bytes, self._digest = 0, hashlib.sha256()
        lines = [self._remember(record) for record in records]
        self._file: BinaryIO | None = None
        if path is not None:
            with replaced(path) as unfinished:
                unfinished.write_bytes(b"".join(lines))
            self._file = path.open("ab")

    @staticmethod
    def read(path: Path, *, steps: int, epochs: int, written: Written) -> list[Record]:
        """Return the records in a file up to a checkpoint.

        Args:
            path: of metrics.jsonl.
            steps, epochs: how many were finished at the checkpoint.
            written: how much of the file there was.

        Raises:
            FolderError: the file does not begin with these records.
        """
        try:
            content = files.contents(path)[: written.num_bytes]
            if hashlib.sha256(content).hexdigest() != written.sha256:
                raise ValueError(f"its first {written.num_bytes} bytes are not those that were there at the checkpoint")
            records = [_record(line) for line in content.split(b"\n")[:-1]]
            for kind, number in ((StepRecord, steps), (EpochRecord, epochs)):
                numbers = [_number_of(record) for record in records if isinstance(record, kind)]
                if numbers != list(range(1, len(numbers) + 1)) or len(numbers) != number:
                    raise ValueError(f"it does not have the {steps} steps and {epochs} epochs up to the checkpoint")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise FolderError(
                f"{path} cannot be used ({reason}); the run cannot go on without its history: put the file back, or "
                f"start again (--output {RunFolder(path.parent)} --overwrite)"
            ) from error
        return records

    def add(self, record: Record) -> None:
        """Add a record."""
        line = self._remember(record)
        if self._file is not None:
            self._file.write(line)
            self._file.flush()

    def written(self) -> Written:
        """Return how much has been written."""
        return Written(self._num_bytes, self._digest.hexdigest())

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

    def _remember(self, record: Record) -> bytes:
        """Keep a record in memory, and return its line."""
        if isinstance(record, StepRecord):
            self.steps.append(record)
            kind = "step"
        else:
            self.epochs.append(record)
            kind = "epoch"
        line = json.dumps({"kind": kind, **asdict(record)}).encode() + b"\n"
        self._num_bytes += len(line)
        self._digest.update(line)
        return line


def _record(line: bytes) -> Record:
    """Return the record in a line. Raises ValueError or TypeError if there is none."""
    values = json.loads(line) if len(line) <= _MAX_LINE_BYTES else None
    if not isinstance(values, dict) or values.get("kind") not in tuple(_KINDS):
        raise ValueError("a line in it is no record of a step or an epoch")
    record = _KINDS[values.pop("kind")](**values)
    for field in fields(record):
        value = getattr(record, field.name)
        if type(value) is not field.type or not -_MAX_NUMBER <= value <= _MAX_NUMBER:
            raise ValueError(f"a line in it has {field.name} {value!r:.40}")
    return record


def _number_of(record: Record) -> int:
    return record.step if isinstance(record, StepRecord) else record.epoch
