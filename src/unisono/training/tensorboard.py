"""`--tensorboard`: the records of a run as TensorBoard shows them, written by torch's `SummaryWriter`.

The tags are the kinds and fields of metrics.jsonl: `step/loss`, `step/learning_rate`, `step/rows_per_second` by step;
`epoch/train_loss`, `epoch/test_accuracy` and so on by epoch. Numbers are float32, which is what TensorBoard keeps. The
options of the run are a text.

A run that is resumed writes its events anew, from the records up to the checkpoint, and deletes its earlier files.
`purge_step` alone would not do: some events are counted in steps, others in epochs, and a killed process had written
only some of its events.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.training.metrics import Record, StepRecord
from unisono.training.observers import Observer
from unisono.training.run_folder import RunFolder


class TensorBoard(Observer):
    """Writes an event file in the folder of the run."""

    def started(self, folder: Path, config: Mapping[str, Any], earlier: Sequence[Record]) -> None:
        """Write the options and the earlier records."""
        from torch.utils.tensorboard import SummaryWriter  # here: slow to load

        run_folder = RunFolder(folder)
        for path in run_folder.events():
            path.unlink()
        # purge_step: a TensorBoard that is open forgets what it has read in the earlier files.
        how: dict[str, Any] = {"purge_step": 0, "filename_suffix": run_folder.EVENTS_SUFFIX}
        self._writer = SummaryWriter(run_folder.tensorboard, **how)
        self._writer.add_text("options", json.dumps(config["options"], indent=4))
        for record in earlier:
            self._add(record)
        self._writer.flush()

    def step(self, record: Record) -> None:
        """Write a step, or an epoch."""
        self._add(record)
        self._writer.flush()  # an error of the thread that writes is raised here

    epoch = step

    def ended(self, error: BaseException | None) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, record: Record) -> None:
        values = asdict(record)
        number = values[record.kind]
        if isinstance(record, StepRecord):
            values["rows_per_second"] = record.rows_per_second
        for name in values.keys() - {"epoch", "step", "rows", "seconds"}:
            self._writer.add_scalar(f"{record.kind}/{name}", values[name], number)
