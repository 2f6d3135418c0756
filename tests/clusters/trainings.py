"""Runs of `unisono train` that a launcher starts, interrupts and starts again, and how they are compared."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from clusters.site import CheckError, Site

BEGUN = 30  # records of a run that is interrupted: it is then in its third epoch
NUM_EPOCHS = 12
OPTIONS = f"--model mlp --epochs {NUM_EPOCHS} --devices 1"  # a perceptron: 12 steps an epoch, in half a second
_TRAIN_ROWS = 1437


def write_data(folder: Path) -> None:
    """Write handwritten digits as IDX files, as `--data` of the page expects them."""
    folder.mkdir(parents=True)
    images, labels = (np.asarray(array, dtype=np.uint8) for array in load_digits(return_X_y=True))
    images = (images * 15).reshape(-1, 8, 8)
    for name, part in (("train", slice(_TRAIN_ROWS)), ("t10k", slice(_TRAIN_ROWS, None))):
        for kind, array in (("images-idx3", images[part]), ("labels-idx1", labels[part])):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / f"{name}-{kind}-ubyte").write_bytes(header + array.tobytes())


def run_alone(site: Site, data: Path, output: Path) -> None:
    """Train in one process, which is the oracle."""
    site.expect("python", "-m", "unisono", "train", *OPTIONS.split(), "--data", str(data), "--output", str(output))


def records_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run so far, without times."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [{key: value for key, value in record.items() if "seconds" not in key} for record in records]


def pid_of_first_rank(folder: Path) -> int:
    """Return the process that holds the lock of a run's folder, which is rank 0."""
    return int((folder / ".lock").read_text().split()[1])


def loss_difference(run: Path, other: Path) -> float:
    """Return the largest relative difference of the losses of two runs, which must have the same steps."""
    one, two = ([record["loss"] for record in records_of(each) if record["kind"] == "step"] for each in (run, other))
    if len(one) != len(two) or not one:
        raise CheckError(f"{len(one)} steps, expected {len(two)}")
    return max(abs(a - b) / abs(b) for a, b in zip(one, two, strict=True))


def expect_same_bytes(run: Path, undisturbed: Path) -> None:
    """Check that the weights of two runs are the same bytes, and their records the same."""
    one, other = ((folder / "model.safetensors").read_bytes() for folder in (run, undisturbed))
    if one != other or records_of(run) != records_of(undisturbed):
        difference = loss_difference(run, undisturbed)
        raise CheckError(f"not the bytes of an undisturbed run; losses differ by {difference:.1e}")
