import struct
from pathlib import Path

import pytest

from manyhands.training.curves import draw
from manyhands.training.metrics import EpochRecord


def records(num_epochs: int) -> list[EpochRecord]:
    return [
        EpochRecord(n, 12 * n, 1 / n, test_loss=100 / n**2, test_accuracy=1 - 0.5 / n, train_seconds=1, test_seconds=1)
        for n in range(1, num_epochs + 1)
    ]


@pytest.mark.parametrize(("so_far", "last_epoch"), [(1, 1), (1, 8), (5, 8), (8, 8), (60, 60)])
def test_the_picture_is_a_png_and_replaces_the_one_before(tmp_path: Path, so_far: int, last_epoch: int) -> None:
    path = tmp_path / "curves.png"
    path.write_bytes(b"the one before")
    draw(path, records(so_far), title="mlp on digits, cpu", last_epoch=last_epoch)
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:]) == (1500, 630)
    assert list(tmp_path.iterdir()) == [path]
