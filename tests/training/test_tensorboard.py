"""`--tensorboard`: the event files. A run that is killed is in test_killed.py."""

import importlib.machinery
import importlib.util
import json
import shutil
import threading
from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="event files are read by TensorBoard")

from helpers.commands import assert_misused
from helpers.event_files import read, scalars, scalars_expected
from unisono.cli import main
from unisono.training.metrics import StepRecord
from unisono.training.tensorboard import TensorBoard

TRAIN = ["train", "--model", "mlp", "--devices", "cpu*2", "--output", "out"]  # 12 steps an epoch


pytestmark = pytest.mark.usefixtures("own_folder")


def event_files(out: Path) -> list[Path]:
    return list((out / "tensorboard").iterdir())


def test_the_events_are_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    """T8: and the options are there as a text."""
    out = Path("out")
    assert main([*TRAIN, "--epochs", "2", "--tensorboard"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "to see it: tensorboard --logdir out/tensorboard"
    told = scalars(out / "tensorboard")
    assert told == scalars_expected(out)
    assert [step for step, _ in told["step/loss"]] == list(range(1, 25))

    (text,) = read(out / "tensorboard").Tensors("options/text_summary")
    options = json.loads((out / "config.json").read_text())["options"]
    assert json.loads(text.tensor_proto.string_val[0]) == options


def test_a_run_that_is_resumed_has_its_whole_history_once(tmp_path: Path) -> None:
    """T8: also one that began without TensorBoard, and for a TensorBoard that has read the earlier files.

    Event files of other programs stay.
    """
    out, seen_by_an_open_one = Path("out"), tmp_path / "seen"
    other = out / "tensorboard" / "events.out.tfevents.1.host.2.0"
    other.parent.mkdir(parents=True)
    other.touch()
    seen_by_an_open_one.mkdir()
    assert main([*TRAIN, "--epochs", "1"]) == 0
    for epochs in ("2", "3"):
        assert main(["train", "--resume", "out", "--epochs", epochs, "--tensorboard"]) == 0
        assert scalars(out / "tensorboard") == scalars_expected(out)
        (path,) = {*event_files(out)} - {other}
        shutil.copy(path, seen_by_an_open_one / f"events.out.tfevents.{epochs}")
    assert scalars(seen_by_an_open_one) == scalars_expected(out)

    assert main([*TRAIN, "--epochs", "1", "--overwrite"]) == 0
    assert event_files(out) == [other]


def test_what_cannot_be_written_costs_the_events_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """T7, T8: where the event files cannot be written."""
    Path("out").mkdir()
    Path("out/tensorboard").touch()
    assert main([*TRAIN, "--epochs", "1", "--tensorboard"]) == 0
    captured = capsys.readouterr()
    (line,) = [line for line in captured.out.splitlines() if "observer" in line]
    assert line.startswith("--tensorboard: started() raised FileExistsError: ")
    assert captured.err == ""
    assert Path("out/model.safetensors").exists()


@pytest.mark.only_on("linux", "macos", because="has no such limit")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_full_disk_is_known_at_once(tmp_path: Path) -> None:
    """T8: the call that cannot write a record raises."""
    import resource

    before = {*threading.enumerate()}
    board, record = TensorBoard(), StepRecord(1, 1, loss=2.0, learning_rate=0.1, rows=120, seconds=0.1)
    board.started(tmp_path, {"options": {}}, ())
    (path,) = event_files(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            board.step(record)
        for thread in {*threading.enumerate()} - before:  # TensorBoard's, which ends with the same error
            thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_missing_tensorboard_is_named_with_the_remedy(monkeypatch, capsys):
    """T8: before anything is loaded or written; a folder of that name, such as a run's own, is no package."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "tensorboard" else find_spec(name))
    found = None
    error = "tensorboard not installed: pip install tensorboard"
    assert assert_misused([*TRAIN, "--tensorboard"], error, capsys) == ""
    found = importlib.machinery.ModuleSpec("tensorboard", None, is_package=True)
    assert assert_misused([*TRAIN, "--tensorboard"], error, capsys) == ""
    assert list(Path().iterdir()) == []
