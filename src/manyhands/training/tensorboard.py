"""`--tensorboard`: the records of a run as TensorBoard shows them.

The tags are the kinds and fields of metrics.jsonl: `step/loss`, `step/learning_rate`, `step/rows_per_second` by step;
`epoch/train_loss`, `epoch/test_accuracy` and so on by epoch. Numbers are float32, which is what TensorBoard keeps. The
options are hyper-parameters of the run, for the tab HPARAMS.

A run that is resumed writes its events anew, from the records up to the checkpoint, and deletes the earlier files. To
purge the earlier events from a step on, as `SummaryWriter` can, would not do: some events are counted in steps, others
in epochs; a killed process had written only some of its events; and only TensorBoard heeds a purge.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manyhands.training.metrics import EpochRecord, Record, StepRecord
from manyhands.training.observers import Observer
from manyhands.training.run_folder import RunFolder

_FLUSH_S = 5  # how late TensorBoard may show a step


class TensorBoard(Observer):
    """Writes event files in the folder of the run.

    Raises:
        ImportError: TensorBoard is not installed, or does not work here.
    """

    def __init__(self) -> None:
        import torch.utils.tensorboard  # noqa: F401  here: whether it is installed is checked first; it is slow to load

    def started(self, folder: Path, config: Mapping[str, Any], earlier: Sequence[Record]) -> None:
        """Write the options and the earlier records."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        run_folder = RunFolder(folder)
        for path in run_folder.events():
            path.unlink()
        # A TensorBoard that has read the earlier files forgets what it knows from step 0 on.
        self._writer = SummaryWriter(run_folder.tensorboard, purge_step=0, flush_secs=_FLUSH_S)
        shown = ("epoch/train_loss", "epoch/test_loss", "epoch/test_accuracy")
        *begin, self._end = hparams(dict(config["options"]), dict.fromkeys(shown))  # type: ignore[no-untyped-call]
        for summary in begin:
            self._add(summary)
        # Records have no date. Earlier ones are dated as if the run had gone on without a pause until now.
        dated = time.time() - sum(map(_seconds, earlier))
        for record in earlier:
            dated += _seconds(record)
            self._write(record, dated)
        self._writer.flush()

    def step(self, record: StepRecord) -> None:
        """Write a step."""
        self._write(record)

    def epoch(self, record: EpochRecord) -> None:
        """Write an epoch."""
        self._write(record)
        self._writer.flush()

    def ended(self, error: BaseException | None) -> None:
        """Close the file; a run that is finished is marked as a success."""
        if error is None:
            self._add(self._end)
        self._writer.close()

    def _write(self, record: Record, dated: float | None = None) -> None:
        if isinstance(record, StepRecord):
            kind, number = "step", record.step
            values = {
                "loss": record.loss,
                "learning_rate": record.learning_rate,
                "rows_per_second": record.rows_per_second,
            }
        else:
            kind, number = "epoch", record.epoch
            values = {name: value for name, value in asdict(record).items() if name not in ("epoch", "step")}
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, number, dated)

    def _add(self, summary: Any) -> None:
        assert self._writer.file_writer is not None
        self._writer.file_writer.add_summary(summary)


def _seconds(record: Record) -> float:
    return record.seconds if isinstance(record, StepRecord) else record.test_seconds
