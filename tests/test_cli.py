import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import manyhands
from manyhands import cli
from manyhands.cli import main

SMALL = ["train", "--model", "mlp", "--devices", "cpu*2", "--epochs", "1"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Undo what the command sets for its process, and let default folders land in a place of their own."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"))
    monkeypatch.chdir(tmp_path)


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run the command in a process of its own, which does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "manyhands", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_run_tells_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--output", "out"]) == 0
    first, about, step, epoch, summary, files = capsys.readouterr().out.splitlines()
    assert first == f"manyhands {manyhands.__version__}: mlp on digits; results in out"
    assert about == "85,002 parameters on 2 replicas (2 x cpu); 1,437 pictures to train on, 360 to test on"
    assert step.startswith("  epoch 1/1, step 1/12: loss 2.")
    assert epoch.startswith("epoch 1/1: train loss ")
    record = json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])
    assert summary == (
        f"test accuracy {record['test_accuracy']:.4f}, {record['train_seconds']:.1f} seconds of training an epoch, on "
        "2 replicas (2 x cpu)"
    )
    assert files == "see out/curves.png; the weights are out/model.safetensors"


def test_by_default_a_run_has_a_folder_of_its_own() -> None:
    assert main(SMALL) == 0
    (folder,) = Path("runs").iterdir()
    assert (folder / "model.safetensors").exists()


def test_a_run_is_overwritten_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--output", "out"]) == 0
    assert main([*SMALL, "--output", "out"]) == 2
    assert "out holds a run already" in capsys.readouterr().err
    assert main([*SMALL, "--output", "out", "--overwrite", "--seed", "3"]) == 0
    assert json.loads(Path("out/config.json").read_text())["options"]["seed"] == 3


def test_a_run_goes_on_with_its_own_options() -> None:
    assert main([*SMALL, "--output", "out", "--lr", "0.02"]) == 0
    assert main(["train", "--resume", "out", "--epochs", "2", "--lr", "0.02"]) == 0
    records = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 25))
    assert json.loads(Path("out/config.json").read_text())["options"]["lr"] == 0.02


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--batch-size", "0"], "--batch-size 0: expected a whole number from 1 up"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (["--devices", "gpu"], "--devices gpu: gpu is no device; expected auto, a count, or"),
        (["--devices", "0"], "--devices 0: expected auto, a count, or"),
        (["--model", "vgg"], "--model vgg: expected one of resnet18, mlp"),
        (["--init", "zero"], "--init zero: expected one of default, seeds"),
        (["--data", "nowhere"], "--data nowhere does not exist"),
        (["--mirror", "http://localhost/"], "--mirror http://localhost/ goes with --data fashion-mnist only"),
        (["--schedule", "linear"], "argument --schedule: invalid choice: 'linear'"),
        (["--output", "file"], "is not a folder; name another one (--output DIR)"),
        (["--resume", "absent"], "--resume absent: there is no such folder"),
        (["--resume", "empty"], "--resume empty: no checkpoint.pt in it"),
        (["--resume", "empty", "--output", "x"], "--resume empty goes on in the same folder: leave out --output"),
        (["--batchsize", "3"], "there is no option --batchsize"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    Path("empty").mkdir()
    try:
        status = main(["train", *arguments])
    except SystemExit as stopped:  # argparse leaves this way
        status = stopped.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manyhands train: error: ")
    assert error in line
    assert sorted(path.name for path in Path().iterdir()) == ["empty", "file"]


def test_resuming_with_another_recipe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--output", "out"]) == 0
    assert main(["train", "--resume", "out", "--lr", "0.9"]) == 2
    assert "--lr 0.9: the run to resume has --lr 0.05; leave it out" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_a_failure_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--lr", "1e20", "--output", "out"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manyhands train: error: the t")
    assert "or a lower rate (--lr 5e+19)" in line


def test_what_is_not_installed_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name in ("rich", "matplotlib") else find_spec(name)
    )
    assert main(SMALL) == 2
    assert capsys.readouterr().err == (
        "manyhands train: error: matplotlib, rich not installed: pip install 'manyhands[train]'\n"
    )


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", full)
    assert main([*SMALL, "--output", "out"]) == 1
    assert capsys.readouterr().err == "manyhands train: error: [Errno 28] No space left on device\n"


def test_the_device_order_is_set_for_cuda() -> None:
    assert main([*SMALL, "--device-order", "FASTEST_FIRST"]) == 0
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_and_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    if arguments == ["--version"]:
        assert out == f"manyhands {manyhands.__version__}\n"
    else:
        assert "examples:\n  manyhands train" in out


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "train an image classifier on every device" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_saves_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals, status: int) -> None:
    arguments = ["train", "--model", "mlp", "--devices", "cpu*2", "--epochs", "10000", "--output", "out"]
    with started(*arguments, cwd=tmp_path) as process:
        assert process.stdout is not None
        while "step 1/" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err == "\nfinishing the step in flight, then stopping (again: at once, without saving)\n"
    last = out.splitlines()[-1]
    assert last.startswith("stopped after step ")
    assert last.endswith("; to go on: manyhands train --resume out")

    steps = int(last.split()[3].rstrip(";"))
    assert main(["train", "--resume", "out", "--epochs", str(steps // 12 + 1)]) == 0
    records = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, 12 * (steps // 12 + 1) + 1))


def test_a_reader_who_has_gone_is_no_traceback(tmp_path: Path) -> None:
    with started(*SMALL, "--output", "out", cwd=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == ""
