"""What tests of the commands share: calls and their errors, IDX files, the records of a run."""

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.cli import main
from unisono.scripts import command

NAMES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


def idx_bytes(array: torch.Tensor) -> bytes:
    """Return the content of an IDX file of unsigned bytes."""
    header = bytes([0, 0, 8, array.dim()]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + bytes(array.flatten().tolist())


def write_idx(folder: Path, arrays: Sequence[torch.Tensor]) -> None:
    """Write training pictures, training labels, test pictures and test labels."""
    for name, array in zip(NAMES, arrays, strict=True):
        (folder / name).write_bytes(idx_bytes(array))


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of metrics.jsonl without the times, which differ from run to run."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


def steps_of(path: Path) -> list[dict[str, Any]]:
    """Return the records of the steps."""
    return [line for line in metrics_of(path) if line["kind"] == "step"]


def assert_same_metrics(path: Path, other: Path, rel: float = 1e-5) -> None:
    """Check two metrics.jsonl of trainings on digits, whose rows may have been summed in different orders."""
    for line, oracle in zip(metrics_of(path), metrics_of(other), strict=True):
        assert line.pop("kind") == oracle.pop("kind")
        # Of 360 test rows: where two answers of a row are equal within rounding, either may win.
        accuracies = [each.pop("test_accuracy", 0.0) for each in (line, oracle)]
        assert accuracies[0] == pytest.approx(accuracies[1], abs=1.01 / 360)
        assert line == pytest.approx(oracle, rel=rel)


def run_captured(rank: int, folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run `unisono` in this process, perhaps a rank, in a folder; return its status and what it has written."""
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def status_of(*arguments: str) -> int:
    """Run `unisono` with these arguments in this process; return its exit status."""
    try:
        return main(arguments)
    except SystemExit as stopped:  # argparse ends --help this way
        return int(str(stopped.code))


def run_to_the_end(*arguments: str) -> Any:
    """Run `unisono run` in this process, and what it leaves for the exit; return the status, or that of `sys.exit`."""
    at_exit: list[Callable[[], None]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "atexit", SimpleNamespace(register=at_exit.append, unregister=at_exit.remove))
        try:
            status: Any = main(["run", *arguments])
        except SystemExit as end:
            status = end.code
    for handler in at_exit:
        handler()
    return status


def assert_misused(arguments: Sequence[str], error: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Check that the command prints this error in one line; return its other output."""
    assert status_of(*arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"unisono {arguments[0]}: error: ")
    assert error in line
    return captured.out
