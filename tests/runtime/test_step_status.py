"""What wrappers publish: how often, to whom, and what becomes of files that are damaged, old, or someone else's."""

import copy
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.programs import run_script
from unisono import DataParallel, data_parallel
from unisono.runtime import step_status
from unisono.runtime.step_status import Published, read_all

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="nothing is published on this system")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own; the one for temporary files is, too."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is chosen once
    return tmp_path / "runtime" / "unisono"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test moves."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("unisono.runtime.step_status.monotonic", lambda: clock.now)
    monkeypatch.setattr("unisono.ways.monotonic", lambda: clock.now)
    return clock


def step(model: torch.nn.Module) -> None:
    model(torch.ones(6, 3)).sum().backward()


def publish(model: torch.nn.Module, clock: SimpleNamespace) -> None:
    """Take two steps, half a second each, then begin another one."""
    for _ in range(3):
        step(model)
        clock.now += 0.5


def own() -> list[Published]:
    return [each for each in read_all()[0] if each.pid == os.getpid()]


def wrapper(replicas: int = 2) -> DataParallel:
    return DataParallel(torch.nn.Linear(3, 2), ["cpu"] * replicas, shares=[2.0, *[1.0] * (replicas - 1)])


def test_each_replica_is_published_and_the_file_goes_with_the_wrapper(folder: Path, clock: SimpleNamespace) -> None:
    """M5: steps, seconds a step, rows and times of each replica; only the user can read it."""
    model = wrapper()
    publish(model, clock)
    (found,) = own()
    assert (found.module, found.engine, found.steps, found.step_s) == ("Linear", "Threads", 2, 0.5)
    assert [(each.number, each.device, each.rows, each.on_host) for each in found.replicas] == [
        (0, "cpu", 4, True),
        (1, "cpu", 2, True),
    ]
    assert all(each.forward_s > 0 and each.backward_s > 0 for each in found.replicas)
    (file,) = folder.iterdir()
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    del model
    assert list(folder.iterdir()) == []


def test_one_device_publishes_its_steps(folder: Path, clock: SimpleNamespace) -> None:
    """M5: the module is called directly, so rows and times are not known."""
    model = wrapper(1)
    publish(model, clock)
    (found,) = own()
    assert (found.steps, found.step_s) == (2, 0.5)
    assert [(each.device, each.rows, each.forward_s) for each in found.replicas] == [("cpu", 0, 0.0)]


def test_a_step_writes_once_a_second_at_most(
    folder: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: a hundred steps in two seconds, and two writes."""
    written: list[int] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *args: written.append(1) or replace(*args))
    model = wrapper()
    for _ in range(100):
        clock.now += 0.02
        step(model)
    assert len(written) == 1
    clock.now += 1
    step(model)
    assert len(written) == 2
    (found,) = own()
    assert found.steps == 100


def test_short_programs_and_single_calls_leave_no_file(folder: Path, clock: SimpleNamespace) -> None:
    """M6: nothing is made before the second second."""
    model = wrapper()
    step(model)
    step(model)
    data_parallel(torch.nn.Linear(3, 2), torch.ones(6, 3), ["cpu", "cpu"])
    assert not folder.exists()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_publishes_for_itself(folder: Path, clock: SimpleNamespace, duplicate) -> None:
    """M5, A14: it has a file of its own."""
    model = wrapper()
    publish(model, clock)
    other = duplicate(model)
    publish(other, clock)
    assert len({each.name for each in own()}) == 2


def test_a_wrapper_inside_a_replica_publishes_nothing(folder: Path, clock: SimpleNamespace) -> None:
    """M5, A10: the outer one does."""
    model = DataParallel(torch.nn.Sequential(wrapper()), ["cpu", "cpu"])
    publish(model, clock)
    assert [each.module for each in own()] == ["Sequential"]


def full_disk(*_: object) -> int:
    raise OSError(28, "No space left on device")


TROUBLES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "switched off": lambda folder, patch: patch.setenv("UNISONO_PUBLISH", "0"),
    "full disk": lambda folder, patch: patch.setattr(os, "replace", full_disk),
    "folder for all": lambda folder, patch: folder.mkdir() or folder.chmod(0o777),
    "file in its place": lambda folder, patch: folder.touch(),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_nothing_that_goes_wrong_reaches_the_training(
    folder: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """M6: a disk that is full, a folder that others may enter: the steps go on, and are not published."""
    TROUBLES[trouble](folder, monkeypatch)
    model = wrapper()
    for _ in range(2):
        publish(model, clock)
    assert own() == []
    notes = read_all()[1]
    assert len(notes) == (trouble in ("folder for all", "file in its place"))
    assert all("is no private folder of this user" in note for note in notes)


def test_without_a_runtime_folder_it_is_the_one_for_temporary_files(
    folder: Path, clock: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: and a reader that has a runtime folder looks there, too."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    model = wrapper()
    publish(model, clock)
    if not Path(f"/run/user/{os.getuid()}").is_dir():
        assert step_status.folders() == [tmp_path / "temporary" / f"unisono-{os.getuid()}"]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder.parent))
    assert step_status.folders()[0] == folder
    assert len(own()) == 1


def test_a_file_that_is_damaged_is_not_read(folder: Path, clock: SimpleNamespace) -> None:
    """M7: cut anywhere, or of another release; the next publication is read again."""
    model = wrapper()
    publish(model, clock)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert own() == []
    for other in (b"{}", b"[]", b"\xff", whole.replace(b'"steps"', b'"forwards"')):
        file.write_bytes(other)
        assert own() == []
    publish(model, clock)
    assert len(own()) == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_files_of_others_are_left_alone_or_removed(folder: Path, clock: SimpleNamespace, tmp_path: Path) -> None:
    """M7: removed, and told once, are those of processes that have ended, also where the number has a process again."""
    model = wrapper()
    publish(model, clock)
    (file,) = folder.iterdir()
    pid, start, namespace, number = file.stem.split("-")
    kept = {
        file.name,
        f"{pid}-{start}-{int(namespace) + 1}-{number}.status",  # of a container
        "notes.txt",
        f"{pid}-{start}-{namespace}-7.status",  # a link
        f"{pid}-{start}-{namespace}-8.status",  # a pipe, which nothing writes to
    }
    ended = {f"{pid}-{int(start) + 1}-{namespace}-{number}.status", f"999999999-{start}-{namespace}-0.status"}
    ended.add(f"999999999-{start}-{namespace}-0.unfinished")
    ended.add(f"999999999-{start}-{namespace}-8.status")  # a pipe
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(file.read_bytes())
    for name in (kept | ended) - {file.name}:
        if name.endswith("-7.status"):
            (folder / name).symlink_to(elsewhere)
        elif name.endswith("-8.status"):
            os.mkfifo(folder / name)
        else:
            (folder / name).write_bytes(file.read_bytes())
    found, notes = read_all()
    assert [each.name for each in found] == [file.name]
    assert {path.name for path in folder.iterdir()} == kept
    for number, note in zip(sorted([pid, "999999999"]), sorted(notes), strict=True):
        assert note.startswith(
            f"process {number} has ended without Python's usual exit, as a killed one does: Linear, 2 steps, the last "
        )
    assert read_all() == (found, [])


def test_a_reader_sees_whole_publications_only(
    folder: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M7: the one before, until the next one is complete."""
    model = wrapper()
    publish(model, clock)
    before, replace, seen = own(), os.replace, []
    monkeypatch.setattr(os, "replace", lambda *names: seen.append(own()) or replace(*names))
    publish(model, clock)
    assert seen[0] == before
    assert all(len(each) == 1 for each in (before, *seen, own()))
    assert own()[0].steps > before[0].steps


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_leaves_its_parents_file_alone(folder: Path) -> None:
    """M7: it writes into one of its own, and removes that one only; that of the program goes at its end."""
    done = run_script("""
        import os
        import torch
        from unisono import DataParallel
        from unisono.runtime import step_status

        step_status._SECONDS_BETWEEN = 0.0
        model = DataParallel(torch.nn.Linear(3, 2), ["cpu"])

        def steps_by_process():
            return {each.pid: each.steps for each in step_status.read_all()[0]}

        for _ in range(3):
            model(torch.ones(6, 3))
        child = os.fork()
        if not child:
            for _ in range(3):
                model(torch.ones(6, 3))
            assert steps_by_process() == {os.getppid(): 2, os.getpid(): 5}
            model._status = None
            os._exit(len(steps_by_process()) - 1)
        assert os.waitpid(child, 0)[1] == 0
        assert steps_by_process() == {os.getpid(): 2}
    """)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == []
