from pathlib import Path

import pytest

from manyhands.console.errors import FolderError
from manyhands.training.metrics import EpochRecord, Metrics, StepRecord


def step(number: int, epoch: int) -> StepRecord:
    return StepRecord(number, epoch, loss=0.1 + 0.2, learning_rate=0.1, rows=10, seconds=0.5)


def epoch(number: int, after_step: int) -> EpochRecord:
    return EpochRecord(number, after_step, 1.0, 2.0, 0.5, 1.0, 0.1)


RECORDS = [step(1, 1), step(2, 1), epoch(1, 2), step(3, 2), step(4, 2), epoch(2, 4)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the records."""
    path = tmp_path / "metrics.jsonl"
    Metrics(path, RECORDS).close()
    return path


@pytest.mark.parametrize(
    ("steps", "epochs", "kept"),
    [(4, 2, 6), (4, 1, 5), (3, 1, 4), (2, 1, 3), (2, 0, 2), (0, 0, 0)],
    ids=["all", "before the evaluation", "mid-epoch", "after an epoch", "before its evaluation", "nothing"],
)
def test_the_records_after_the_checkpoint_are_cut_off(path: Path, steps: int, epochs: int, kept: int) -> None:
    """And half a line at the end."""
    lines = path.read_text().splitlines()
    path.write_text(path.read_text() + '{"kind": "step", "step": 3, "ep')
    metrics = Metrics(path, Metrics.read(path, steps=steps, epochs=epochs))
    metrics.close()
    assert path.read_text().splitlines() == lines[:kept]
    assert metrics.steps == [record for record in RECORDS[:kept] if isinstance(record, StepRecord)]
    assert metrics.epochs == [record for record in RECORDS[:kept] if isinstance(record, EpochRecord)]


def test_a_run_does_not_go_on_without_its_history(path: Path) -> None:
    path.write_text("\n".join(path.read_text().splitlines()[1:]))
    with pytest.raises(FolderError, match="has 5 records of the 4 steps and 2 epochs"):
        Metrics.read(path, steps=4, epochs=2)
    path.unlink()
    with pytest.raises(FolderError, match="has 0 records"):
        Metrics.read(path, steps=4, epochs=2)
