import json
from pathlib import Path

from unisono.training.metrics import EpochRecord, Metrics, StepRecord

RECORDS = [
    StepRecord(1, 1, loss=0.1 + 0.2, learning_rate=0.1, rows=10, seconds=0.5),
    EpochRecord(1, 1, 1.0, 2.0, 0.5, 1.0, 0.1),
    StepRecord(2, 2, loss=0.1, learning_rate=0.1, rows=10, seconds=0.5),
]


def test_the_lines_of_a_checkpoint_make_the_file_anew(tmp_path: Path) -> None:
    """T1, T4: whatever has become of the file since: lines of later steps, half a line, other bytes, nothing."""
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    metrics = Metrics()
    metrics.keep_in(path)
    for number, record in enumerate(RECORDS, start=1):
        metrics.add(record)
        assert path.read_bytes() == metrics.lines
        assert [json.loads(line)["kind"] for line in metrics.lines.splitlines()].count("step") == metrics.num_steps
        for damage in (b'{"kind": "step", "step": 9, "ep', b"\xff\xfe\n", b""):
            other.write_bytes(path.read_bytes()[1:] + damage)
            resumed = Metrics(bytes(metrics.lines))
            resumed.keep_in(other)
            resumed.close()
            assert other.read_bytes() == metrics.lines
            assert resumed.records == metrics.records == RECORDS[:number]
    metrics.close()
