"""metrics.jsonl: the measurements of a run, one JSON object a line.

    {"kind": "step", "step": 1, "epoch": 1, "loss": 2.31, "learning_rate": 0.008, "rows": 120, "seconds": 0.31}
    {"kind": "epoch", "epoch": 1, "step": 12, "train_loss": 1.2, "test_loss": 0.6, "test_accuracy": 0.82, ...}

Steps and epochs are counted from 1: a line's `step` is how many steps the run had finished.

The records are the only history that a run has: how far it is, and an epoch's loss and seconds, are read off them. A
checkpoint has the lines up to its step, and a resumed run writes the file anew from these, whatever has become of it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, TypeAlias

from unisono.console.files import replaced


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; `loss` is the mean over its `rows`."""

    kind: ClassVar = "step"
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

    kind: ClassVar = "epoch"
    epoch: int
    step: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    train_seconds: float
    test_seconds: float


Record: TypeAlias = StepRecord | EpochRecord


class Metrics:
    """The records of a run, after the lines of an `earlier` part; also in a file, from `keep_in` on."""

    def __init__(self, earlier: bytes = b"") -> None:
        self.lines = bytearray(earlier)
        self.records: list[Record] = []
        for line in earlier.splitlines():
            values = json.loads(line)
            kind = StepRecord if values.pop("kind") == "step" else EpochRecord
            self.records.append(kind(**values))
        self._file: BinaryIO | None = None

    def keep_in(self, path: Path) -> None:
        """Write the records into a file, whatever it has now, and those that come."""
        with replaced(path) as unfinished:
            unfinished.write_bytes(self.lines)
        self._file = path.open("ab")

    @property
    def num_steps(self) -> int:
        """How many steps the run has finished."""
        return self.records[-1].step if self.records else 0

    @property
    def epochs(self) -> list[EpochRecord]:
        """The records of the epochs that the run has finished."""
        return [record for record in self.records if isinstance(record, EpochRecord)]

    def add(self, record: Record) -> None:
        """Add a record; on return, its line is in the file."""
        self.records.append(record)
        line = json.dumps({"kind": record.kind, **asdict(record)}).encode() + b"\n"
        self.lines += line
        if self._file is not None:
            self._file.write(line)
            self._file.flush()

    def totals(self, epoch: int) -> tuple[float, float]:
        """Return the mean loss over the rows of an epoch so far, and the seconds that its steps have taken."""
        steps = [record for record in self.records if isinstance(record, StepRecord) and record.epoch == epoch]
        loss = sum(record.loss * record.rows for record in steps) / max(1, sum(record.rows for record in steps))
        return loss, sum(record.seconds for record in steps)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
