import os
import shlex
from pathlib import Path

import pytest

from helpers.commands import assert_misused
from unisono.console.errors import FolderError
from unisono.console.files import replaced
from unisono.training.run_folder import RunFolder


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "model.safetensors", "timeline.json", "timeline.png"])
def test_a_run_is_replaced_only_when_asked_and_alone(tmp_path: Path, name: str) -> None:
    """Its files may be those of someone else, by the same names."""
    for each in (name, "notes.txt"):
        (tmp_path / each).write_text("mine")
    with pytest.raises(FolderError, match=r"already has a run.*--resume.*--overwrite.*--output"):
        RunFolder.for_new_run(tmp_path)
    folder = RunFolder.for_new_run(tmp_path, overwrite=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine", "notes.txt": "mine"}
    folder.make_empty()
    assert {path.name for path in tmp_path.iterdir()} - {".lock"} == {"notes.txt"}


NO_PIPES = pytest.mark.only_on("linux", "macos", because="no pipes of this kind")


@NO_PIPES
@pytest.mark.parametrize("laid", ["link", "pipe"])
def test_links_and_pipes_of_others_are_not_written_into(tmp_path: Path, laid: str) -> None:
    """T10: a link had the file behind it overwritten; a pipe took the checkpoint, and waited for a reader."""
    folder, elsewhere = RunFolder.for_new_run(tmp_path / "run"), tmp_path / "elsewhere"
    folder.path.mkdir()
    elsewhere.write_text("precious")
    path = folder.path / ".checkpoint.safetensors.unfinished"
    path.symlink_to(elsewhere) if laid == "link" else os.mkfifo(path)
    with replaced(folder.checkpoint) as unfinished:
        unfinished.write_text("a run")
    assert folder.checkpoint.read_text() == "a run"
    if laid == "link":
        (folder.path / ".lock").symlink_to(elsewhere)
        with pytest.raises(FolderError, match="cannot use"):
            folder.make_empty()
    assert elsewhere.read_text() == "precious"


IN_USE = r"another run is using {} \(process \d+ on .+\): wait .*--output DIR\)$"


def test_one_run_at_a_time(tmp_path: Path) -> None:
    first = RunFolder.for_new_run(tmp_path)
    first.make_empty()
    first.checkpoint.write_bytes(b"a run")
    with pytest.raises(FolderError, match=IN_USE.format(tmp_path)) as refused:
        RunFolder.for_new_run(tmp_path, overwrite=True).make_empty()
    assert f"(process {os.getpid()} on" in str(refused.value)
    with pytest.raises(FolderError, match=IN_USE.format(tmp_path)):
        RunFolder.reopen(tmp_path).claim()
    assert first.checkpoint.read_bytes() == b"a run"
    first.close()
    RunFolder.reopen(tmp_path).claim()


def test_a_lock_with_commands_for_a_terminal_in_it(own_folder: None, capsys: pytest.CaptureFixture[str]) -> None:
    """T10: whoever may write into the folder could clear the screen, or write a title."""
    folder = RunFolder(Path("out"))
    folder.path.mkdir()
    folder.claim()
    Path("out/.lock").write_text("process 7 on a\x1b[2J\x1b]0;title\x07")
    arguments = ["train", "--model", "mlp", "--devices", "cpu", "--output", "out"]
    assert_misused(arguments, r"(process 7 on a\x1b[2J\x1b]0;title\x07)", capsys)
    folder.close()


@pytest.mark.only_on("linux", "macos", because="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_was_forked_meanwhile_does_not_keep_the_folder(tmp_path: Path) -> None:
    """As an observer may leave one, which shares the lock."""
    folder = RunFolder(tmp_path)
    folder.claim()
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        folder.close()
        RunFolder(tmp_path).claim()
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
        os.close(reading)


def test_a_file_system_without_locks_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lock: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("unisono.training.file_lock._take", refuse)
    for _ in range(2):
        RunFolder.for_new_run(tmp_path).make_empty()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="is not a folder"):
        RunFolder.for_new_run(tmp_path / "file" / "below")
    with pytest.raises(FolderError, match=r"--output .*; give another folder"):
        RunFolder.for_new_run(Path("/proc/no/such")).make_empty()


@pytest.mark.parametrize("pipe", [False, pytest.param(True, marks=NO_PIPES)])
def test_what_cannot_be_resumed_says_why_and_what_to_type(tmp_path: Path, pipe: bool) -> None:
    """T2, T5: weights whose checkpoint is gone, or a pipe, whose writer may never come. Words to copy are quoted."""
    folder = RunFolder(tmp_path / "my run")
    folder.path.mkdir()
    folder.model.write_bytes(b"weights")
    if pipe:
        os.mkfifo(folder.checkpoint)
    with pytest.raises(FolderError, match=r"found no .*checkpoint.safetensors.?; expected the --output") as raised:
        RunFolder.reopen(folder.path)
    assert shlex.split(str(raised.value).split("(")[-1].rstrip(")")) == ["--output", str(folder.path), "--overwrite"]
    assert folder.model.read_bytes() == b"weights"
