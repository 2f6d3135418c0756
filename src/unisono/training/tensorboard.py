"""`--tensorboard`: the records of a run as TensorBoard shows them, written by torch's `SummaryWriter`.

The tags are the kinds and fields of metrics.jsonl: `step/loss`, `step/learning_rate`, `step/rows_per_second` by step;
`epoch/train_loss`, `epoch/test_accuracy` and so on by epoch. Numbers are float32, which is what TensorBoard keeps. The
options are hyper-parameters of the run, for the tab HPARAMS.

A run that is resumed writes its events anew, from the records up to the checkpoint, and deletes its earlier files.
`purge_step` alone would not do: some events are counted in steps, others in epochs, and a killed process had written
only some of its events.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.training.metrics import Record, StepRecord
from unisono.training.observers import Observer
from unisono.training.run_folder import RunFolder

_SHOWN = ("epoch/train_loss", "epoch/test_loss", "epoch/test_accuracy")  # beside the options, in HPARAMS


class TensorBoard(Observer):
    """Writes an event file in the folder of the run."""

    def __init__(self) -> None:
        import torch.utils.tensorboard  # noqa: F401  here: slow to load, and whether it works is known before the run

    def started(self, folder: Path, config: Mapping[str, Any], earlier: Sequence[Record]) -> None:
        """Write the options and the earlier records."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        run_folder = RunFolder(folder)
        for path in run_folder.events():
            path.unlink()
        # purge_step: a TensorBoard that is open forgets what it has read in the earlier files.
        how: dict[str, Any] = {"purge_step": 0, "filename_suffix": run_folder.EVENTS_SUFFIX}
        self._writer = SummaryWriter(run_folder.tensorboard, **how)
        *begin, self._end = hparams(dict(config["options"]), dict.fromkeys(_SHOWN))  # type: ignore[no-untyped-call]
        for summary in begin:
            self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
        # Records have no date. Earlier ones are dated as if the run had gone on without a pause until now.
        dated = time.time() - sum(map(_seconds, earlier))
        for record in earlier:
            dated += _seconds(record)
            self._add(record, dated)
        self._writer.flush()

    def step(self, record: Record) -> None:
        """Write a step, or an epoch."""
        self._add(record)
        self._writer.flush()  # an error of the thread that writes is raised here

    epoch = step

    def ended(self, error: BaseException | None) -> None:
        """Mark a run that is finished as a success."""
        if error is None:
            self._writer.file_writer.add_summary(self._end)  # type: ignore[attr-defined]
        self._writer.close()

    def _add(self, record: Record, dated: float | None = None) -> None:
        kind = "step" if isinstance(record, StepRecord) else "epoch"
        values = asdict(record)
        number = values[kind]
        if isinstance(record, StepRecord):
            values["rows_per_second"] = record.rows_per_second
        for name in values.keys() - {"epoch", "step", "rows", "seconds"}:
            self._writer.add_scalar(f"{kind}/{name}", values[name], number, dated)


def _seconds(record: Record) -> float:
    return record.seconds if isinstance(record, StepRecord) else record.test_seconds
