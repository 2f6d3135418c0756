import os
import random
import shlex
import sys
from pathlib import Path

import pytest

from unisono.console.errors import FolderError
from unisono.training.run_folder import RunFolder, replaced


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_a_run_is_replaced_only_when_asked_and_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FolderError, match=r"holds a run already.*--resume.*--overwrite.*--output"):
        RunFolder.for_new_run(tmp_path)
    folder = RunFolder.for_new_run(tmp_path, overwrite=True)
    assert folder.model.exists(), "nothing is deleted until the new run is ready to begin"
    folder.make_empty()
    assert names_in(tmp_path) == {"notes.txt"}


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "curves.png"])
def test_files_of_others_by_the_same_names_are_not_deleted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(FolderError, match="holds a run already"):
        RunFolder.for_new_run(tmp_path)
    assert (tmp_path / name).read_text() == '{"mine": 1}'
    assert [path.name for path in tmp_path.iterdir()] == [name], "something of ours was left there"


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes of this kind")
@pytest.mark.parametrize("laid", ["link", "pipe"])
@pytest.mark.parametrize("name", [".lock", ".config.json.unfinished"])
def test_links_and_pipes_of_others_are_not_used(tmp_path: Path, name: str, laid: str) -> None:
    """T10: a link had the file behind it overwritten; a pipe took the checkpoint, and waited for a reader."""
    path, elsewhere = tmp_path / "run" / name, tmp_path / "elsewhere"
    path.parent.mkdir()
    elsewhere.write_text("precious")
    path.symlink_to(elsewhere) if laid == "link" else os.mkfifo(path)
    folder = RunFolder.for_new_run(path.parent)
    with pytest.raises((FolderError, OSError), match="a link, a pipe or a device"):  # noqa: PT012  either
        folder.make_empty()
        folder.write_config(CONFIG)
    folder.close()
    assert elsewhere.read_text() == "precious"
    assert path.is_symlink() == (laid == "link")


IN_USE = r"another run is using {} \(process \d+ on .+\): wait .*--output DIR\)$"


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind")
def test_one_run_at_a_time(tmp_path: Path) -> None:
    first = RunFolder.for_new_run(tmp_path)
    first.make_empty()
    first.write_config({"unisono": "0.1.0"})
    first.checkpoint.write_bytes(b"a run")
    with pytest.raises(FolderError, match=IN_USE.format(tmp_path)) as refused:
        RunFolder.for_new_run(tmp_path, overwrite=True).make_empty()
    assert f"(process {os.getpid()} on" in str(refused.value)
    with pytest.raises(FolderError, match=IN_USE.format(tmp_path)):
        RunFolder.reopen(tmp_path).claim()
    assert first.checkpoint.read_bytes() == b"a run"
    first.close()
    RunFolder.reopen(tmp_path).claim()


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind")
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
    fcntl = pytest.importorskip("fcntl")

    def refuse(lock: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = RunFolder.for_new_run(tmp_path), RunFolder.for_new_run(tmp_path)
    first.make_empty()
    second.make_empty()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="is not a folder"):
        RunFolder.for_new_run(tmp_path / "file" / "below")
    with pytest.raises(FolderError, match=r"--output .*; name another folder"):
        RunFolder.for_new_run(Path("/proc/no/such")).make_empty()


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    """T2: a folder in which no run has begun, and weights whose checkpoint is gone, which are not begun again."""
    folder = RunFolder(tmp_path)
    with pytest.raises(FolderError, match=r"no config.json in it, so no run has begun there.*\(--output "):
        RunFolder.reopen(tmp_path)
    folder.write_config(CONFIG)
    assert RunFolder.reopen(tmp_path).saved_config() == CONFIG
    folder.model.write_bytes(b"weights")
    with pytest.raises(FolderError, match=r"no checkpoint.safetensors in it, though there are weights: put it back"):
        RunFolder.reopen(tmp_path)


CONFIG = {"unisono": "0.1.0", "options": {"lr": 0.05, "epochs": 8}}


def assert_unusable(folder: RunFolder) -> None:
    with pytest.raises(FolderError, match=r"config.json cannot be used .*: put it back as it was, or start") as caught:
        folder.saved_config()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}", b"\xff", b'{"options": {}}'])
def test_resuming_needs_a_whole_config(tmp_path: Path, content: bytes | None) -> None:
    """T4"""
    folder = RunFolder(tmp_path)
    if content is not None:
        folder.config.write_bytes(content)
    assert_unusable(folder)


def test_a_config_with_any_bit_changed_is_refused(tmp_path: Path) -> None:
    """T4: also where it is still JSON. The run went on at another learning rate."""
    folder, draw = RunFolder(tmp_path), random.Random(0)
    folder.write_config(CONFIG)
    content = folder.config.read_bytes()
    for at in range(len(content)):
        folder.config.write_bytes(content[:at])
        if at < len(content) - 1:  # the end of the last line
            assert_unusable(folder)
        folder.config.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
        if not content[at : at + 1].isspace():
            assert_unusable(folder)


def test_commands_to_copy_have_quotes_where_a_shell_needs_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "my run")
    folder.path.mkdir()
    with pytest.raises(FolderError) as raised:
        RunFolder.reopen(folder.path)
    assert shlex.split(str(raised.value).split("(")[-1].rstrip(")")) == ["--output", str(folder.path), "--overwrite"]
    folder.checkpoint.touch()
    with pytest.raises(OSError, match=f"unisono train --resume {folder} goes on"), replaced(folder.config):
        raise OSError
    assert shlex.split(str(folder)) == [str(folder.path)]
