import hashlib
import random
from pathlib import Path

import pytest

from unisono.console.errors import FolderError
from unisono.training.metrics import EpochRecord, Metrics, Record, StepRecord, Written


def step(number: int, epoch: int) -> StepRecord:
    return StepRecord(number, epoch, loss=0.1 + 0.2, learning_rate=0.1, rows=10, seconds=0.5)


def epoch(number: int, after_step: int) -> EpochRecord:
    return EpochRecord(number, after_step, 1.0, 2.0, 0.5, 1.0, 0.1)


RECORDS = [step(1, 1), step(2, 1), epoch(1, 2), step(3, 2), step(4, 2), epoch(2, 4)]
AT_THE_CHECKPOINT = {"steps": 4, "epochs": 2}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the records."""
    path = tmp_path / "metrics.jsonl"
    Metrics(path, RECORDS).close()
    return path


def written(records: list[Record]) -> Written:
    """Return what a checkpoint after these records notes of the file."""
    return Metrics(None, records).written()


@pytest.mark.parametrize(
    ("steps", "epochs", "kept"),
    [(4, 2, 6), (4, 1, 5), (3, 1, 4), (2, 1, 3), (2, 0, 2), (0, 0, 0)],
    ids=["all", "before the evaluation", "mid-epoch", "after an epoch", "before its evaluation", "nothing"],
)
def test_the_records_after_the_checkpoint_are_cut_off(path: Path, steps: int, epochs: int, kept: int) -> None:
    """T1: and half a line at the end."""
    lines = path.read_text().splitlines()
    path.write_text(path.read_text() + '{"kind": "step", "step": 3, "ep')
    records = Metrics.read(path, steps=steps, epochs=epochs, written=written(RECORDS[:kept]))
    metrics = Metrics(path, records)
    metrics.close()
    assert path.read_text().splitlines() == lines[:kept]
    assert metrics.steps == [record for record in RECORDS[:kept] if isinstance(record, StepRecord)]
    assert metrics.epochs == [record for record in RECORDS[:kept] if isinstance(record, EpochRecord)]
    assert metrics.written() == written(RECORDS[:kept])


def assert_refused(path: Path, of_run: Written) -> None:
    with pytest.raises(FolderError, match=r"metrics.jsonl cannot be used .* put the file back, or start") as caught:
        Metrics.read(path, **AT_THE_CHECKPOINT, written=of_run)
    assert "\n" not in str(caught.value)


def test_a_run_does_not_go_on_without_its_history(path: Path) -> None:
    """T4"""
    path.write_text("\n".join(path.read_text().splitlines()[1:]))
    assert_refused(path, written(RECORDS))
    path.unlink()
    assert_refused(path, written(RECORDS))


def test_a_history_with_any_bit_or_line_changed_is_refused(path: Path) -> None:
    """T4: also where it is still JSON, as when a digit of a loss becomes another. It went on with that loss."""
    content, draw = path.read_bytes(), random.Random(0)
    for at in range(len(content)):
        path.write_bytes(content[:at])
        assert_refused(path, written(RECORDS))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
        assert_refused(path, written(RECORDS))


FORGED_LINES = {
    "deep": b"[" * 100_000,
    "long": b"[1" + b", 1" * 1_000_000 + b"]",
    "no object": b"3",
    "unknown kind": b'{"kind": ["step"]}',
    "no fields": b'{"kind": "step"}',
    "more fields": b'{"kind": "step", "epoch": 2, "step": 4, "loss": 1.0, "learning_rate": 0.1, "rows": 1, "seconds": '
    b'0.1, "more": 1}',
    "text": b'{"kind": "step", "epoch": 2, "step": 4, "loss": "1", "learning_rate": 0.1, "rows": 1, "seconds": 0.1}',
    "huge": b'{"kind": "step", "epoch": 2, "step": 4, "loss": 1.0, "learning_rate": 0.1, "rows": 1%b, "seconds": 0.1}'
    % (b"0" * 400),
    "huger": b'{"kind": "step", "epoch": 2, "step": 4, "loss": 1.0, "learning_rate": 0.1, "rows": 1%b, "seconds": 0.1}'
    % (b"0" * 5_000),
    "infinite": b'{"kind": "step", "epoch": 2, "step": 4, "loss": 1e999, "learning_rate": 0.1, "rows": 1, "seconds": '
    b"0.1}",
    "no number": b'{"kind": "step", "epoch": 2, "step": 4, "loss": NaN, "learning_rate": 0.1, "rows": 1, "seconds": '
    b"0.1}",
    "true": b'{"kind": "step", "epoch": true, "step": 4, "loss": 1.0, "learning_rate": 0.1, "rows": 1, "seconds": 0.1}',
}


@pytest.mark.parametrize("name", FORGED_LINES)
def test_a_line_that_was_written_on_purpose_is_an_error(path: Path, name: str) -> None:
    """T5: with a digest that someone has made to match. Deep nesting was a RecursionError; a text, an error later."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = FORGED_LINES[name] + b"\n"
    assert_forged(path, b"".join(lines))


@pytest.mark.parametrize(
    "records",
    [
        [*RECORDS[:4], step(3, 2), RECORDS[5]],
        [*RECORDS[:4], step(5, 2), RECORDS[5]],
        [*RECORDS[:5], epoch(1, 4)],
        RECORDS[::-1],
        [],
    ],
    ids=["twice", "another", "an epoch twice", "backwards", "none"],
)
def test_records_that_do_not_follow_each_other_are_an_error(path: Path, records: list[Record]) -> None:
    """T5: there was a count of them only."""
    Metrics(path, records).close()
    assert_forged(path, path.read_bytes())


def assert_forged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert_refused(path, written_as(content))


def written_as(content: bytes) -> Written:

    return Written(len(content), hashlib.sha256(content).hexdigest())
