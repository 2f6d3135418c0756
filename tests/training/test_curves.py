"""curves.png: all epochs are in the picture."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from unisono.training import curves
from unisono.training.metrics import EpochRecord


def test_a_run_that_is_resumed_for_fewer_epochs_than_it_has_had(tmp_path: Path) -> None:
    """Points outside of the axes left no room for the axes, of which matplotlib warned."""
    epochs = [EpochRecord(n, n, 1 / n, 1 / n, 1 - 0.5 / n, train_seconds=1.0, test_seconds=1.0) for n in range(1, 51)]
    curves.draw(tmp_path / "fewer.png", epochs, title="", last_epoch=3)
    curves.draw(tmp_path / "as many.png", epochs, title="", last_epoch=50)
    assert (tmp_path / "fewer.png").read_bytes() == (tmp_path / "as many.png").read_bytes()
