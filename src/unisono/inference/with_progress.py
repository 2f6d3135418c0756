"""A progress bar over outputs: batches so far, and how many a second."""

import importlib.util
import time
from typing import Any

from unisono.console import progress
from unisono.inference.batch_map import OutputIterator
from unisono.runtime.tracebacks import without_own_frames

_NO_RICH = "progress=True shows a bar with rich, which is not installed: pip install rich, or leave progress out"


class WithProgress(OutputIterator):
    """Outputs, with a bar on the terminal while they are iterated over.

    Args:
        outputs: the outputs.
        task: what the bar is called.
        total: how many there will be; None: it is not known.

    Raises:
        ModuleNotFoundError: rich is missing.
    """

    def __init__(self, outputs: OutputIterator, task: str, total: int | None) -> None:
        if importlib.util.find_spec("rich") is None:
            raise ModuleNotFoundError(_NO_RICH)
        self._outputs, self._task, self._total = outputs, task, total
        self._progress: progress.Progress | None = None
        self._num_done = 0
        self._started: float | None = None

    @without_own_frames
    def __next__(self) -> Any:
        if self._progress is None:
            self._progress = progress.for_stderr()
            self._progress.begin(self._task, self._total)
        self._started = time.monotonic() if self._started is None else self._started
        try:
            output = next(self._outputs)
        except BaseException as error:
            self._num_done += not isinstance(error, StopIteration)
            self._hide()
            raise
        self._num_done += 1
        rate = self._num_done / max(time.monotonic() - self._started, 1e-9)
        of_total = "" if self._total is None else f"/{self._total}"
        self._progress.update(
            self._task, self._num_done, self._total, f"{self._num_done}{of_total} batches, {rate:.1f}/s"
        )
        return output

    def _hide(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def close(self) -> None:
        self._hide()
        self._outputs.close()

    def __del__(self) -> None:
        if hasattr(self, "_started"):
            self._hide()
