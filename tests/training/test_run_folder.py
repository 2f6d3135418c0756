import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.console.errors import FolderError
from manyhands.training.run_folder import RunFolder, replaced


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


def test_a_run_that_failed_before_anything_was_saved_is_nothing_to_lose(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"manyhands": "0.1.0"}')
    (tmp_path / "metrics.jsonl").write_text("")
    RunFolder.for_new_run(tmp_path).make_empty()
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "curves.png"])
def test_files_of_others_by_the_same_names_are_not_deleted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(FolderError, match="holds a run already"):
        RunFolder.for_new_run(tmp_path)
    assert (tmp_path / name).read_text() == '{"mine": 1}'
    assert [path.name for path in tmp_path.iterdir()] == [name], "something of ours was left there"


def test_a_default_folder_that_another_run_has_just_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    first, second = RunFolder.for_new_run(None), RunFolder.for_new_run(None)
    first.make_empty()
    with pytest.raises(FolderError, match="exists"):
        second.make_empty()


IN_USE = r"another run is using {} \(process \d+ on .+\): wait .*--output DIR\)$"


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind")
def test_one_run_at_a_time(tmp_path: Path) -> None:
    first = RunFolder.for_new_run(tmp_path)
    first.make_empty()
    first.checkpoint.write_bytes(b"a run")
    with pytest.raises(FolderError, match=IN_USE.format(tmp_path)) as refused:
        RunFolder.for_new_run(tmp_path)
    assert f"(process {os.getpid()} on" in str(refused.value)
    with pytest.raises(FolderError, match=IN_USE.format(tmp_path)):
        RunFolder.for_new_run(tmp_path, overwrite=True).make_empty()
    with pytest.raises(FolderError, match=IN_USE.format(tmp_path)):
        RunFolder.reopen(tmp_path).claim()
    assert first.checkpoint.read_bytes() == b"a run"
    first.release()
    RunFolder.reopen(tmp_path).claim()


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind")
def test_a_run_that_was_killed_leaves_its_folder_to_others(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from manyhands.training.run_folder import RunFolder
folder = RunFolder.for_new_run(Path({str(tmp_path)!r}))
folder.make_empty()
print("begun", flush=True)
input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:  # type: ignore[call-overload]
        try:
            assert other.stdout.readline() == "begun\n"
            with pytest.raises(FolderError, match=rf"\(process {other.pid} on .+\)"):
                RunFolder.for_new_run(tmp_path).make_empty()
        finally:
            other.kill()
    RunFolder.for_new_run(tmp_path).make_empty()


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind")
def test_a_run_that_could_not_begin_leaves_its_folder_to_others(tmp_path: Path) -> None:
    folder = RunFolder.for_new_run(tmp_path)
    folder.make_empty()
    del folder
    gc.collect()
    RunFolder.for_new_run(tmp_path).make_empty()


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


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"options": 3}'])
def test_resuming_needs_a_whole_config(tmp_path: Path, content: str | None) -> None:
    folder = RunFolder(tmp_path)
    if content is not None:
        folder.config.write_text(content)
    with pytest.raises(FolderError, match=r"config.json cannot be used"):
        folder.saved_options()


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
