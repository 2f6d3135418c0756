import json
from pathlib import Path

import pytest

from manyhands.console.errors import FolderError
from manyhands.training.metrics import EpochRecord, Metrics, StepRecord


def step(number: int, epoch: int, loss: float = 1.0, rows: int = 10) -> StepRecord:
    return StepRecord(number, epoch, loss, learning_rate=0.1, rows=rows, seconds=0.5)


def epoch(number: int, after_step: int) -> EpochRecord:
    return EpochRecord(number, after_step, 1.0, 2.0, 0.5, 1.0, 0.1)


def write(path: Path) -> list[StepRecord | EpochRecord]:
    records = [step(1, 1), step(2, 1), epoch(1, 2), step(3, 2), step(4, 2), epoch(2, 4)]
    metrics = Metrics(path)
    for record in records:
        metrics.add(record)
    metrics.close()
    return records


def test_a_record_is_a_line_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.add(step(1, 1, loss=0.1 + 0.2))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "kind": "step",
        "step": 1,
        "epoch": 1,
        "loss": 0.1 + 0.2,
        "learning_rate": 0.1,
        "rows": 10,
        "seconds": 0.5,
    }
    metrics.close()


@pytest.mark.parametrize(
    ("steps", "epochs", "kept"),
    [(4, 2, 6), (4, 1, 5), (3, 1, 4), (2, 1, 3), (2, 0, 2), (0, 0, 0)],
    ids=["all", "before the evaluation", "mid-epoch", "after an epoch", "before its evaluation", "nothing"],
)
def test_the_records_after_the_checkpoint_are_cut_off(tmp_path: Path, steps: int, epochs: int, kept: int) -> None:
    """And half a line at the end."""
    path = tmp_path / "metrics.jsonl"
    records = write(path)
    lines = path.read_text().splitlines()
    path.write_text(path.read_text() + '{"kind": "step", "step": 3, "ep')
    metrics = Metrics(path, Metrics.read(path, steps=steps, epochs=epochs))
    metrics.close()
    assert path.read_text().splitlines() == lines[:kept]
    assert metrics.steps == [record for record in records[:kept] if isinstance(record, StepRecord)]
    assert metrics.epochs == [record for record in records[:kept] if isinstance(record, EpochRecord)]


def test_a_run_does_not_go_on_without_its_history(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(FolderError, match="has 0 records of the 4 steps and 2 epochs"):
        Metrics.read(path, steps=4, epochs=2)
    write(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[1:]))
    with pytest.raises(FolderError, match="has 5 records"):
        Metrics.read(path, steps=4, epochs=2)


def test_an_epoch_s_loss_is_the_mean_over_its_rows(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for record in (step(1, 1, loss=9.0), step(2, 2, loss=1.0, rows=30), step(3, 2, loss=3.0, rows=10)):
        metrics.add(record)
    metrics.close()
    assert metrics.train_loss(2) == pytest.approx(1.5)
    assert metrics.train_seconds(2) == pytest.approx(1.0)
