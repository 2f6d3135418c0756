"""Folders that can be written into, and files that are replaced whole."""

from pathlib import Path

import pytest

from helpers.commands import assert_misused
from unisono.console.errors import FolderError
from unisono.console.files import expect_writable, replaced


@pytest.mark.parametrize("command", [["train"], ["train", "--resume"], ["bench", "tiny"], ["plan"]])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("x" * 300, "expected a shorter name than this one of 300 letters, xxxxxxxxxxxxxxxxxxxx..."),
        ("/".join(["x" * 200] * 30), "expected a shorter name than this one of 6029 letters"),
        ("two\nlines", r"expected a name without line breaks and control characters, got 'two\nlines'"),
        ("clears\x1b[2J", r"expected a name without line breaks and control characters, got 'clears\x1b[2J'"),
    ],
)
@pytest.mark.only_on("linux", "macos", because="a limit of the length that is known")
def test_a_name_that_no_folder_should_have(
    command: list[str],
    name: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    option = [] if command[-1] == "--resume" else ["--output"]
    assert assert_misused([*command, *option, name], error, capsys) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.only_on("linux", "macos", because="symbolic links need no permission")
def test_a_link_that_leads_nowhere_is_no_folder(tmp_path: Path) -> None:
    """It was found when the results were to be written."""
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FolderError, match="link is not a folder; give another one"):
        expect_writable(tmp_path / "link")


@pytest.mark.only_on("linux", "macos", because="a limit of the length that is known")
def test_of_a_folder_that_can_or_cannot_be_made_nothing_is_left(tmp_path: Path) -> None:
    """The folders around one with too long a name stayed; the name is refused only where it is."""
    around = tmp_path.joinpath(*["a"] * 300)
    expect_writable(around)
    with pytest.raises(FolderError, match="give another folder"):
        expect_writable(around / ("b" * 300))
    assert list(tmp_path.iterdir()) == []


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
