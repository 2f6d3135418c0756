"""Runs that are killed with SIGKILL and resumed. The oracle is a run that was never killed.

They kill themselves at a chosen line of the package's training code. A line is a moment that can be chosen again, which
a time is not. Between two lines is at most one write, one fsync or one rename.
"""

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import unisono
from helpers.commands import metrics_of
from helpers.event_files import scalars, scalars_expected
from helpers.forked import forked
from unisono.cli import main
from unisono.training import checkpoint
from unisono.training import run as training_run
from unisono.training.run_folder import RunFolder

pytestmark = pytest.mark.only_on("linux", "macos", because="forks, and SIGKILL")

TRAIN = ["train", "--model", "mlp", "--devices", "cpu*2", "--epochs", "2", "--batch-size", "500"]  # 3 steps an epoch
_PACKAGE = Path(unisono.__file__).parent
ALL = tuple(str(_PACKAGE / name) for name in ("training", "console", "data_parallel.py"))
WRITING = tuple(
    str(_PACKAGE / name)
    for name in ("training/checkpoint.py", "training/run_folder.py", "training/metrics.py", "console/files.py")
)
KILLED = -9  # SIGKILL, which Windows does not name


def run_killed(
    arguments: Sequence[str],
    cwd: Path,
    *,
    kill_at: int | None = None,
    within: Sequence[str] = ALL,
    save_each_step: bool = False,
) -> int:
    """Run `unisono` with these arguments in the folder `cwd`; return the number of lines, 0 if it was killed.

    Args:
        kill_at: the number of the line at which it kills itself, from 1; None: it does not.
        within: the files and folders whose lines count.
        save_each_step: whether there is a checkpoint after each step, as after some minutes in long epochs.
    """
    with forked(_run, list(arguments), kill_at, tuple(within), save_each_step, cwd=cwd) as program:
        status = program.wait()
        assert status == 0 or (status == KILLED and kill_at), program.out + program.err
        return 0 if status else int(program.out.splitlines()[-1])


def _run(arguments: Sequence[str], kill_at: int | None, within: tuple[str, ...], save_each_step: bool) -> int:
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(within) else None

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        if event == "line":
            num_lines += 1
            if num_lines == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    if save_each_step:
        training_run._SAVE_EVERY_S = 0.0
    sys.settrace(trace)
    status = main(arguments)
    sys.settrace(None)
    print(num_lines)
    return status


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run that was never killed, and the number of its lines."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder / "out", run_killed([*TRAIN, "--output", "out"], folder)


def results_of(out: Path) -> dict[str, Any]:
    """Return names of files, the weights' file, the metrics but for times, and each tensor of the checkpoint."""
    saved = checkpoint.read(RunFolder(out))
    tensors = [*saved.model.items(), *saved.momenta.items()]
    return {
        "files": {path.name for path in out.iterdir()} - {"tensorboard"},
        "weights": (out / "model.safetensors").read_bytes(),
        "metrics": metrics_of(out / "metrics.jsonl"),
        "tensors": [(name, tensor.numpy().tobytes()) for name, tensor in tensors],
    }


SLOW = [pytest.param([], seed, marks=pytest.mark.slow) for seed in range(2, 5)]


@pytest.mark.parametrize(("observed", "seed"), [([], 0), (["--tensorboard"], 1), *SLOW])
def test_a_run_that_was_killed_anywhere_ends_in_the_same_numbers(undisturbed, tmp_path, observed, seed):
    """T1, T2, T8: killed four times, at lines drawn from all lines or from those that write files."""
    if observed:
        pytest.importorskip("tensorboard")
    oracle, num_lines = undisturbed
    out, draw = tmp_path / "out", random.Random(seed)
    lines_of = {ALL: num_lines, WRITING: 700}  # so many lines write the files of a run
    begin = [*TRAIN, "--output", "out"]

    def arguments() -> list[str]:
        """Where no run has begun, there is nothing to resume."""
        return [*(["train", "--resume", "out"] if (out / "checkpoint.safetensors").exists() else begin), *observed]

    for within in draw.sample([ALL, WRITING], 2) * 2:
        kill_at, each_step = draw.randint(1, lines_of[within]), draw.random() < 0.5
        run_killed(arguments(), tmp_path, kill_at=kill_at, within=within, save_each_step=each_step)
    run_killed(arguments(), tmp_path)
    assert results_of(out) == results_of(oracle)
    if observed:
        assert scalars(out / "tensorboard") == scalars_expected(out)
        assert len(list((out / "tensorboard").iterdir())) == 1
