"""Files that are replaced whole, and read with care."""

import os
from pathlib import Path

import pytest

from unisono.console.files import contents, replaced


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.parametrize("name", ["config.json", "checkpoint.safetensors", "metrics.jsonl"])
def test_a_pipe_or_a_device_is_not_read(tmp_path: Path, name: str) -> None:
    """T5: reading a pipe waits for its writer, and a device may never end."""
    os.mkfifo(tmp_path / name)
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / name, tmp_path / "zero"):
        with pytest.raises(OSError, match="not an ordinary file"):
            contents(path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replaced(path) as unfinished:  # noqa: PT012  the block is what fails
        unfinished.write_text("ne")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    with replaced(path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
