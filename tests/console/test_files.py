"""Files that are replaced whole."""

from pathlib import Path

import pytest

from unisono.console.files import replaced


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
