"""TensorBoard's event files, read by its own reader. The oracle is metrics.jsonl."""

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

_OF_EPOCHS = ("train_loss", "test_loss", "test_accuracy", "train_seconds", "test_seconds")


def read(folder: Path) -> "EventAccumulator":
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # not on all Pythons

    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return for each tag in a folder's event files the steps or epochs and the values."""
    events = read(folder)
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def scalars_expected(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the same of a run's metrics.jsonl; values are float32."""
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] == "step":
            values = {"loss": line["loss"], "learning_rate": line["learning_rate"]}
            values["rows_per_second"] = line["rows"] / line["seconds"]
        else:
            values = {name: line[name] for name in _OF_EPOCHS}
        for name, value in values.items():
            (rounded,) = struct.unpack("f", struct.pack("f", value))
            expected.setdefault(f"{line['kind']}/{name}", []).append((line[line["kind"]], rounded))
    return expected
