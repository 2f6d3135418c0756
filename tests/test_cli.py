import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from helpers.commands import assert_misused, metrics_of, status_of, write_idx
from helpers.forked import forked
from unisono.cli import main

SMALL = ["train", "--model", "mlp", "--devices", "cpu*2", "--epochs", "1"]


pytestmark = pytest.mark.usefixtures("own_folder")


def records(kind: str) -> list[dict[str, Any]]:
    return [line for line in metrics_of(Path("out/metrics.jsonl")) if line["kind"] == kind]


def saved_options() -> dict[str, Any]:
    return json.loads(Path("out/config.json").read_text())["options"]


def run_program(command: list[str], cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_run_tells_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--output", "out"]) == 0
    first, about, step, epoch, summary, files = capsys.readouterr().out.splitlines()
    assert first == f"unisono {unisono.__version__}: mlp on digits; results in out"
    assert about == "85,002 parameters on 2 replicas (2 x cpu); 1,437 pictures to train on, 360 to test on"
    assert step.startswith("  epoch 1/1, step 1/12: loss 2.")
    assert epoch.startswith("epoch 1/1: train loss ")
    (record,) = records("epoch")
    assert summary.startswith(f"test accuracy {record['test_accuracy']:.4f}, ")
    assert summary.endswith(" seconds of training an epoch, on 2 replicas (2 x cpu)")
    assert files == "see out/curves.png; the weights are out/model.safetensors"


def test_by_default_a_run_has_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Devices are numbered as nvidia-smi does it; the first line says how it is computed."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert main([*SMALL, "--precision", "tf32"]) == 0
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    (folder,) = Path("runs").iterdir()
    assert (folder / "model.safetensors").exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"unisono {unisono.__version__}: mlp on digits, in tf32; results in ")
    assert lines[2] == "cpu has no TF32: float32 stays exact, as with --precision fp32"


def test_a_run_is_resumed_with_its_own_options_or_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--output", "out", "--lr", "0.02", "--no-sync-batch-norm"]) == 0
    assert not saved_options()["sync_batch_norm"]
    assert main([*SMALL, "--output", "out"]) == 2
    assert "out already has a run" in capsys.readouterr().err
    assert main(["train", "--resume", "out", "--lr", "0.9"]) == 2
    assert "--lr 0.9: the run to resume has --lr 0.02; leave this option out" in capsys.readouterr().err
    assert main(["train", "--resume", "out", "--epochs", "2", "--lr", "0.02"]) == 0
    assert [record["step"] for record in records("step")] == list(range(1, 25))
    assert saved_options()["lr"] == 0.02
    assert main([*SMALL, "--output", "out", "--overwrite", "--seed", "3"]) == 0
    assert (saved_options()["lr"], saved_options()["seed"], saved_options()["sync_batch_norm"]) == (0.05, 3, True)


def test_one_command_begins_a_run_or_goes_on_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """T2: a launcher that starts a job again with the same command, and has no name for a launch, as Ray has none."""
    command = [*SMALL, "--output", "out", "--resume"]
    assert main(command) == 0
    began = Path("out/model.safetensors").read_bytes()
    assert "resuming" not in capsys.readouterr().out
    assert main(command) == 0
    assert "nothing left to do: 1 epochs are finished" in capsys.readouterr().out
    assert Path("out/model.safetensors").read_bytes() == began
    assert main([*command, "--epochs", "2"]) == 0
    assert "resuming after step 12, epochs finished: 1" in capsys.readouterr().out
    assert main([*command, "--lr", "0.9"]) == 2
    assert "--lr 0.9: the run to resume has --lr 0.05" in capsys.readouterr().err
    Path("out/checkpoint.safetensors").unlink()
    assert main(command) == 2, "weights whose checkpoint is gone are not overwritten"
    assert "out already has a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--batch-size", "0"], "--batch-size 0: expected a whole number, 1 or more"),
        (["--lr", "1e308"], "--lr 1e+308: expected a number above 0, of at most 3.4e+38"),
        (["--batch-size", "many"], "argument --batch-size: expected a whole number; got 'many'"),
        (["--model", "vgg"], "argument --model: invalid choice: 'vgg'"),
        (["--data", "nowhere"], "--data nowhere is not a folder; expected digits, fashion-mnist, or a folder of IDX"),
        (["--output", "file"], "is not a folder; give another one (--output DIR)"),
        pytest.param(
            *(["--output", "/proc/out"], "--output /proc/out: cannot write to /proc"),
            marks=pytest.mark.only_on("linux", because="no such folder elsewhere"),
        ),
        (["--output", ""], "argument --output: expected the name of a folder, got ''"),
        (
            ["--resume", "empty"],
            "--resume empty: found no empty/checkpoint.safetensors; expected the --output of an earlier run",
        ),
        (["--resume", "empty", "--output", "x"], "--resume empty writes to the same folder: leave out --output"),
        (
            ["--resume"],
            "--resume without DIR needs the folder of the run: give --output",
        ),
        (["--resume", "--output", "x", "--overwrite"], "give --output DIR, and leave out --overwrite"),
        (["--batchsize", "3"], "there is no option --batchsize"),
        (["--compile", "--devices", "cpu*2"], "pass --no-sync-batch-norm or --devices 1, or --no-compile"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    Path("empty").mkdir()
    out = assert_misused(["train", *arguments], error, capsys)
    assert out == "" or arguments[0] == "--compile"  # which the model decides
    assert sorted(path.name for path in Path().iterdir()) == ["empty", "file"]


def test_a_loss_that_is_no_number_is_a_failure_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The advice is a rate that works: half of this one would not."""
    assert main([*SMALL, "--lr", "1e30", "--output", "out"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("unisono train: error: the t")
    assert "start again with a lower rate (--lr 0.05, with --overwrite or another --output)" in line
    assert main([*SMALL, "--lr", "0.05", "--output", "out", "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("runn", "there is no command runn; did you mean run?"),
        ("start", "there is no command start; the commands are run, "),
    ],
)
def test_an_unknown_command_names_the_nearest(command: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "train.py"]) == 2
    assert capsys.readouterr().err.startswith(f"unisono: error: {error}")


@pytest.mark.parametrize(
    ("command", "package", "installed_as"),
    [
        (SMALL, "matplotlib", "matplotlib"),
        (SMALL, "sklearn", "scikit-learn"),
        ([*SMALL, "--data", "fashion-mnist"], "pooch", "pooch"),
        (["bench"], "psutil", "psutil"),
        (["watch", "--once"], "rich", "rich"),
    ],
)
def test_missing_packages_are_named_with_the_remedy(
    command: list[str], package: str, installed_as: str, without_package: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their own names, which any index has."""
    without_package(package)
    assert_misused(command, f"{installed_as} not installed: pip install {installed_as}", capsys)


@pytest.mark.only_on("linux", "macos", because="a shell's way to close them")
@pytest.mark.parametrize("closed", ["<&- >&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed(closed: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "unisono", *SMALL, "--output", "out"]
    done = run_program(["sh", "-c", f'exec "$0" "$@" {closed}', *command], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "checkpoint.safetensors").exists()


def run_with_small_files() -> int:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2)
    return main([*SMALL, "--output", "out"])


@pytest.mark.only_on("linux", "macos", because="no limit on the size of files there")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A limit on the size of files, which the checkpoint is the first to reach."""
    with forked(run_with_small_files, cwd=tmp_path) as program:
        assert program.wait() == 1
        assert program.err.startswith("unisono train: error: cannot write out/checkpoint.safetensors (File too large)")
        assert program.err.endswith("; nothing was saved yet in out\n")
        assert program.err.count("\n") == 1
    assert not (tmp_path / "out" / "checkpoint.safetensors").exists()


@pytest.mark.only_on("linux", because="there is no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [[], ["--help"], ["--version"], ["verify", "--help"], ["train", "--help"], ["devices"], ["watch", "--json"]],
    ids=str,
)
def test_output_that_cannot_be_written_is_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M4: it names what is full. The status of help was 0: argparse passes over it."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments) == 1
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert capsys.readouterr().err.endswith("error: cannot write to standard output (No space left on device)\n")


@pytest.mark.slow
def test_a_missing_compiler_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unisono", "train", "--model", "mlp", "--devices", "1", "--compile"]
    cache = str(tmp_path / "cache")
    done = run_program(command, tmp_path, CXX=str(tmp_path / "g++"), TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.returncode == 2
    assert done.stdout.splitlines()[1] == "checking that the compiler works ..."
    assert "--compile: torch.compile does not work for cpu here (InvalidCxxCompiler: No working C++" in done.stderr
    assert done.stderr.endswith("repair it, or pass --no-compile\n")
    assert done.stderr.count("\n") == 1


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps would be other rows, or none; the name of the folder has what matplotlib takes for mathematics."""
    folder = tmp_path / "a$x_{$b"
    folder.mkdir()
    write_rows(folder, 60)
    command = ["train", "--model", "mlp", "--devices", "cpu*2", "--batch-size", "20", "--data", str(folder)]
    assert main([*command, "--epochs", "1", "--output", "out"]) == 0
    write_rows(folder, 30)
    capsys.readouterr()
    assert main(["train", "--resume", "out", "--epochs", "2"]) == 2
    assert " changed since the run in out began: restore it" in capsys.readouterr().err
    write_rows(folder, 60)
    assert main(["train", "--resume", "out", "--epochs", "2"]) == 0


def write_rows(folder: Path, num_rows: int) -> None:
    pictures, labels = torch.arange(num_rows * 16).view(num_rows, 4, 4) % 256, torch.arange(num_rows) % 10
    write_idx(folder, [pictures, labels, pictures[:20], labels[:20]])


@pytest.mark.parametrize("command", ["", "train", "run", "verify", "bench", "plan", "devices", "watch"])
def test_the_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*command.split(), "--help") == 0
    assert f"examples:\n  unisono {command or 'run'}" in capsys.readouterr().out


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    assert "train an image classifier on all devices" in out
    assert "compare your model on one device and on several" in out
    assert main(["--quiet"]) == 2
    error = "unisono: error: there is no option --quiet (unisono --help lists the options)\n"
    assert capsys.readouterr().err == error
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"unisono {unisono.__version__}\n"


@pytest.mark.only_on("linux", "macos", because="signals that another process sends")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_saves_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """T3: SIGTERM is a scheduler's."""
    arguments = ["train", "--model", "mlp", "--devices", "cpu*2", "--epochs", "10000", "--output", "out"]
    with forked(main, arguments, cwd=tmp_path) as program:
        program.wait_for("step 1/")
        os.kill(program.pid, number)
        assert program.wait() == status
        out, err = program.out, program.err
    again = " again" if number == signal.SIGINT else ""
    assert err == f"\nfinishing the step in flight, then stopping (Ctrl-C{again}: at once, without saving)\n"
    last = out.splitlines()[-1]
    assert last.startswith("stopped after step ")
    assert last.endswith("; to resume: unisono train --resume out")

    steps = int(last.split()[3].rstrip(";"))
    assert main(["train", "--resume", "out", "--epochs", str(steps // 12 + 1)]) == 0
    assert [record["step"] for record in records("step")] == list(range(1, 12 * (steps // 12 + 1) + 1))


SCRIPT_OF_COMMAND = "import sys\nfrom unisono.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


@pytest.mark.only_on("linux", "macos", because="signals that another process sends")
@pytest.mark.parametrize("words", [["-m", "unisono", "train"], ["unisono", "devices"]], ids=["-m unisono", "unisono"])
def test_ctrl_c_while_torch_is_imported(words: list[str], tmp_path: Path) -> None:
    """It takes seconds, before any line of a command runs; there was a traceback through torch."""
    Path("unisono").write_text(SCRIPT_OF_COMMAND)
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(100)\n")
    path = os.pathsep.join([str(tmp_path / "before"), *sys.path])
    with subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "importing\n"
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (130, "unisono: error: stopped at once\n")


@pytest.mark.only_on("linux", "macos", because="signals that another process sends")
def test_ctrl_c_twice_stops_at_once(tmp_path: Path) -> None:
    """T3: in the middle of a step, whose replicas wait for each other at every batch norm."""
    arguments = ["train", "--devices", "cpu*2", "--batch-size", "32", "--output", "out"]
    with forked(main, arguments, cwd=tmp_path) as program:
        program.wait_for("step 1/")
        os.kill(program.pid, signal.SIGINT)
        program.wait_for("finishing the step")
        os.kill(program.pid, signal.SIGINT)
        assert program.wait() == 130


def test_a_reader_who_has_gone_stops_the_training_with_a_word(tmp_path: Path) -> None:
    """As in `unisono train | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-W", "error", "-m", "unisono", *SMALL, "--output", "out"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("unisono train: error: the training has stopped, because its output is no longer read: ")
    assert "nothing was saved yet in out" in line
