"""`torchrun -m manyhands train`, as it is typed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.commands import assert_same_metrics, metrics_of, steps_of
from manyhands.cli import main

LIMIT_S = 240
EPOCHS = 8
TRAIN = ["--model", "mlp", "--epochs", str(EPOCHS), "--devices", "1"]


@contextlib.contextmanager
def torchrun(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start torchrun with two processes; what is still running at the end of the block is killed."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


def wait_for_steps(folder: Path, number: int, process: subprocess.Popen[str]) -> Path:
    """Return the run's folder once it has so many records."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        for run in (folder / "runs").glob("*"):
            if len(metrics_of(run / "metrics.jsonl")) >= number:
                return run
        time.sleep(0.01)
    pytest.fail((folder / "log").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how"),
    [(0, ["--standalone"]), (1, ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"])],
)
def test_a_killed_process_and_the_numbers_of_an_undisturbed_run(tmp_path: Path, rank: int, how: list[str]) -> None:
    """No folder is named, nor, the second time, the launch: the processes that are started anew find their run."""
    with torchrun(tmp_path, *how, "--max-restarts", "2", "-m", "manyhands", "train", *TRAIN) as process:
        run = wait_for_steps(tmp_path, 30, process)  # two epochs and some steps
        children = psutil.Process(process.pid).children()
        next(child for child in children if child.environ().get("RANK") == str(rank)).kill()
        assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert log.count("going on after step") == 1
    assert list((tmp_path / "runs").iterdir()) == [run]

    assert main(["train", *TRAIN, "--output", str(tmp_path / "alone")]) == 0
    assert len(metrics_of(run / "metrics.jsonl")) == 13 * EPOCHS
    assert_same_metrics(run / "metrics.jsonl", tmp_path / "alone" / "metrics.jsonl", rel=1e-4)


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path) -> None:
    """tests/training/test_ranks.py has a signal to one of several processes, without torchrun."""
    with torchrun(tmp_path, "--standalone", "-m", "manyhands", "train", *TRAIN, "--epochs", "1000") as process:
        run = wait_for_steps(tmp_path, 3, process)
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
    log = (tmp_path / "log").read_text()
    assert f"stopped after step {len(steps_of(run / 'metrics.jsonl'))}; to go on:" in log
    assert (run / "checkpoint.safetensors").exists()
