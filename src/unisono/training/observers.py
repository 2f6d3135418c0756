r"""Observers: what is told of a run while it goes on, such as a tracker of experiments.

An observer is told each step and each epoch with the record that metrics.jsonl has of it. metrics.jsonl and curves.png
are not written by observers: a run needs its records to be resumed, and ends when it cannot write a file of its own. An
observer may fail, and the training goes on.

Guarantees
    - A step is told when its loss is known, so no step waits for an accelerator because it is observed. An epoch is
      told after its checkpoint, weights and picture have been written.
    - Observers are called in the process that writes (rank 0), in its main thread: TensorBoard first, the others in the
      order of the command line.
    - What was recorded before a run is resumed is told first, by `started`: it and the records told later are
      metrics.jsonl, each record once.
    - An observer that raises is reported in one line and called no more. KeyboardInterrupt passes through: Ctrl-C twice
      stops at once.

Assumes that a call returns soon: the next step waits for it.

One that keeps a table for a spreadsheet, with all epochs of a run that is resumed. In trackers.py, it is
`unisono train --observer trackers:Table`:

    from unisono.training.metrics import EpochRecord
    from unisono.training.observers import Observer


    class Table(Observer):
        def started(self, folder, config, earlier):
            self.path = folder / "table.csv"
            self.path.write_text("epoch,test_loss,test_accuracy\n")
            for record in earlier:  # of a run that is resumed
                if isinstance(record, EpochRecord):
                    self.epoch(record)

        def epoch(self, record):
            with self.path.open("a") as file:
                file.write(f"{record.epoch},{record.test_loss},{record.test_accuracy}\n")
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.console.targets import TargetError, explained, find, one_line
from unisono.training.metrics import EpochRecord, Record, StepRecord


class Observer:
    """The base class of observers: override what you need. No method does anything here.

    `unisono train --observer trackers:Printer` takes such a class from trackers.py in the current folder. It calls
    the class without arguments, before anything is loaded or written: what takes time, or leaves a trace, belongs in
    `started`.

    Example:
        >>> from unisono.training.metrics import EpochRecord
        >>> from unisono.training.observers import Observer
        >>> class Printer(Observer):
        ...     def epoch(self, record):
        ...         print(f"after {record.epoch} epochs {record.test_accuracy:.0%} are right")
        >>> observer = Printer()
        >>> observer.epoch(EpochRecord(1, 12, 1.8, 1.2, 0.82, train_seconds=2.0, test_seconds=0.1))
        after 1 epochs 82% are right
    """

    def started(self, folder: Path, config: Mapping[str, Any], earlier: Sequence[Record]) -> None:
        """Called once, before the first step.

        Args:
            folder: of the run, where an observer may write files of its own.
            config: what config.json has, to be read only; `config["options"]` are the options of the command line.
            earlier: the records of a run that is resumed, up to its checkpoint; empty for a new run. Steps after the
                checkpoint are taken, and told, again: drop what was stored of them elsewhere.
        """

    def step(self, record: StepRecord) -> None:
        """Called after each optimizer step. `dataclasses.asdict(record)` makes a dict of it."""

    def epoch(self, record: EpochRecord) -> None:
        """Called after each epoch."""

    def ended(self, error: BaseException | None) -> None:
        """Called once, after everything has been saved; not after a Ctrl-C that stops at once.

        Args:
            error: None if the run is finished; `unisono.console.errors.Interrupted` if a signal has stopped it; else
                what ended it.
        """


class Observers:
    """The observers of a run by name, each until it fails. Entered, they are told what `started`; then, how it ended.

    `say` shows a line.
    """

    def __init__(self, observers: Mapping[str, Observer], say: Callable[[str], None], *started: Any) -> None:
        self._observers, self._say, self._started = dict(observers), say, started

    def __enter__(self) -> None:
        self.tell("started", *self._started)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, KeyboardInterrupt):  # which is to stop the program at once
            self.tell("ended", error)

    def tell(self, what: str, *arguments: Any) -> None:
        """Call this method of each."""
        lines = []
        for name, observer in list(self._observers.items()):
            try:
                getattr(observer, what)(*arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  such as SystemExit: the training must not be lost
                del self._observers[name]
                lines.append(f"{name}: {what}() raised {one_line(error)}; the training goes on without this observer")
        for line in lines:  # last, because this fails where nothing reads the output any more
            self._say(line)


def load(target: str) -> Observer:
    """Import `package.module:Class`, and return an observer of this class; raise TargetError if that fails."""
    expected = f"package.module:Class, a class derived from {__name__}.Observer"
    found = find(target, expected)
    if not (isinstance(found, type) and issubclass(found, Observer)):
        given = "another class" if isinstance(found, type) else f"a value of type {type(found).__name__}"
        raise TargetError(f"{target} is {given}: expected {expected}")
    with explained(target):
        return found()
