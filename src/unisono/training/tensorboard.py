"""`--tensorboard`: the records of a run as TensorBoard shows them.

The tags are the kinds and fields of metrics.jsonl: `step/loss`, `step/learning_rate`, `step/rows_per_second` by step;
`epoch/train_loss`, `epoch/test_accuracy` and so on by epoch. Numbers are float32, which is what TensorBoard keeps. The
options are hyper-parameters of the run, for the tab HPARAMS.

Each record is one event, which is in the file when the call returns. torch's `SummaryWriter` writes in a thread
instead: an error, such as a full disk, would be a traceback from that thread, and be raised some steps later.

A run that is resumed writes its events anew, from the records up to the checkpoint, and deletes the earlier files. To
purge the earlier events from a step on, as `SummaryWriter` can, would not do: some events are counted in steps, others
in epochs; a killed process had written only some of its events; and only TensorBoard heeds a purge.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.training.metrics import EpochRecord, Record, StepRecord
from unisono.training.observers import Observer
from unisono.training.run_folder import RunFolder


class TensorBoard(Observer):
    """Writes an event file in the folder of the run.

    Raises:
        ImportError: TensorBoard is not installed, or does not work here.
    """

    def __init__(self) -> None:
        import torch.utils.tensorboard  # noqa: F401  here: whether it is installed is checked first; it is slow to load

    def started(self, folder: Path, config: Mapping[str, Any], earlier: Sequence[Record]) -> None:
        """Write the options and the earlier records."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from torch.utils.tensorboard.summary import hparams

        run_folder = RunFolder(folder)
        run_folder.tensorboard.mkdir(exist_ok=True)
        for path in run_folder.events():
            path.unlink()
        self._path = run_folder.new_events()
        self._path.touch(exist_ok=False)

        shown = ("epoch/train_loss", "epoch/test_loss", "epoch/test_accuracy")
        *begin, self._end = hparams(dict(config["options"]), dict.fromkeys(shown))  # type: ignore[no-untyped-call]
        events = [
            _event(file_version="brain.Event:2"),
            # A TensorBoard that has read the earlier files forgets what it knows from step 0 on, which is this event's.
            _event(session_log=SessionLog(status=SessionLog.START)),
            *(_event(summary=summary) for summary in begin),
        ]
        # Records have no date. Earlier ones are dated as if the run had gone on without a pause until now.
        dated = time.time() - sum(map(_seconds, earlier))
        for record in earlier:
            dated += _seconds(record)
            events.append(_event_of(record, wall_time=dated))
        self._write(events)

    def step(self, record: StepRecord) -> None:
        """Write a step."""
        self._write([_event_of(record)])

    def epoch(self, record: EpochRecord) -> None:
        """Write an epoch."""
        self._write([_event_of(record)])

    def ended(self, error: BaseException | None) -> None:
        """Mark a run that is finished as a success."""
        if error is None:
            self._write([_event(summary=self._end)])

    def _write(self, events: Sequence[Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self._path.open("rb+") as file:  # not "ab", which would make the file anew where someone has deleted it
            file.seek(0, os.SEEK_END)
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())


def _event_of(record: Record, **dated: float) -> Any:
    """Return the event that has the numbers of a record."""
    from tensorboard.compat.proto.summary_pb2 import Summary

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
    scalars = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items()]
    return _event(summary=Summary(value=scalars), step=number, **dated)


def _event(**fields: Any) -> Any:
    """Return an event of now, unless its `wall_time` is given."""
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(**{"wall_time": time.time(), **fields})


def _seconds(record: Record) -> float:
    return record.seconds if isinstance(record, StepRecord) else record.test_seconds
