"""`torchrun -m unisono train`, as it is typed."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.commands import metrics_of, run_captured
from helpers.ranks import run_ranks

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


def assert_same_bytes(run: Path, undisturbed: Path) -> None:
    one, other = ((folder / "model.safetensors").read_bytes() for folder in (run, undisturbed))
    assert one == other
    assert metrics_of(run / "metrics.jsonl") == metrics_of(undisturbed / "metrics.jsonl")


@pytest.mark.slow
def test_killed_processes_and_the_numbers_of_an_undisturbed_run(tmp_path: Path) -> None:
    """T1: no folder is named, nor, when they are started again, the launch: the new processes find their run."""
    how = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "2"]
    with torchrun(tmp_path, *how, "-m", "unisono", "train", *TRAIN) as process:
        for rank, records in (("0", 30), ("1", 60)):  # two epochs and some steps; then four
            run = wait_for_steps(tmp_path, records, process)
            children = psutil.Process(process.pid).children()
            next(child for child in children if child.environ().get("RANK") == rank).kill()
        assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert log.count("resuming after step") == 2
    assert list((tmp_path / "runs").iterdir()) == [run]

    ended = run_ranks(2, run_captured, tmp_path, "train", *TRAIN, "--output", "undisturbed")
    assert [status for status, _, _ in ended] == [0, 0]
    assert_same_bytes(run, tmp_path / "undisturbed")
    assert len(metrics_of(run / "metrics.jsonl")) == 13 * EPOCHS
