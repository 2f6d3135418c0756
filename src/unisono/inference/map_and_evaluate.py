"""map and evaluate: the outputs of many batches, or what a metric makes of them."""

import importlib.util
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from unisono.console.progress import Progress, for_stderr
from unisono.inference.batch_map import BatchMap, Callee, OutputIterator
from unisono.inference.batches import batches_of
from unisono.inference.metrics import Totals, inputs_and_target
from unisono.inference.out import OutFiller
from unisono.inference.ranks import RankBatches, RankMap, merged
from unisono.primitives import pytree
from unisono.runtime import devices as _devices
from unisono.runtime.errors import add_note
from unisono.runtime.interrupts import critical, interruptibly
from unisono.runtime.tracebacks import without_own_frames

_NO_RICH = "progress=True needs rich: pip install rich, or leave progress out"


def map_batches(callee: Callee, batches: Iterable[Any], batch_size: int | None, out: Any, progress: bool) -> Any:
    """Return an iterator over the outputs of all batches; or `out`, when they are in it."""
    batches = batches_of(batches, batch_size, callee.rules.dim)
    filler = None if out is None else OutFiller(out, callee.rules)
    outputs: OutputIterator
    communicator = callee.communicator
    if communicator is None:
        outputs = BatchMap(batches, callee)
    else:
        own_batches = RankBatches(batches, communicator)
        outputs = RankMap(BatchMap(own_batches, callee), own_batches, communicator, callee.output_device)
    is_first = communicator is None or communicator.rank == 0
    num_batches = _length_of(batches) if is_first else 0
    if progress and is_first:
        outputs = _WithProgress(outputs, "map", num_batches)
    if filler is None:
        outputs.num_batches = num_batches
        return outputs
    _fill(filler, outputs)
    if is_first:
        filler.check_full()
    return out


@critical
def _fill(filler: OutFiller, outputs: OutputIterator) -> None:
    with outputs, torch.no_grad():
        filler.fill(outputs)


def evaluate_batches(
    callee: Callee,
    batches: Iterable[Any],
    metric: Callable[[Any, Any], Any],
    batch_size: int | None,
    reduction: str | Mapping[str, str],
    progress: bool,
) -> float | dict[str, float]:
    """Return what a metric gives over all rows of all batches."""
    if not callable(metric):
        raise TypeError(f"metric={metric!r}: expected a function of an output and a target")
    totals = Totals(reduction)
    batches = batches_of(batches, batch_size, callee.rules.dim)
    communicator = callee.communicator
    if communicator is None:
        _add_all(callee, batches, metric, totals, progress)
        return totals.result()
    own_batches = RankBatches(batches, communicator)
    failure: BaseException | None = None
    try:
        _add_all(callee, own_batches, metric, totals, progress and communicator.rank == 0)
    except Exception as error:  # noqa: BLE001 - raised when all ranks know of it
        failure = error
    except BaseException as error:  # Ctrl-C: the others must not wait for this process
        communicator.failures.abort(error)
        raise
    try:
        return merged(communicator, own_batches, totals, failure).result()
    finally:
        del failure  # a traceback refers to this frame: nothing in it may refer to an exception


@critical
def _add_all(
    callee: Callee, batches: Iterable[Any], metric: Callable[[Any, Any], Any], totals: Totals, progress: bool
) -> None:
    waiting: deque[tuple[Any, int]] = deque()  # the target and the rows of each batch that has been pulled

    def inputs() -> Iterator[Any]:
        for batch in batches:
            (args, kwargs), target = inputs_and_target(batch)
            waiting.append((target, callee.rows(args, kwargs)))
            yield kwargs or args

    device = callee.output_device
    outputs: OutputIterator = BatchMap(inputs(), callee)
    if progress:
        outputs = _WithProgress(outputs, "evaluate", _length_of(batches))
    with outputs, torch.no_grad():
        for number, output in zip(callee.numbers(), outputs, strict=False):  # there are numbers without end
            target, rows = waiting.popleft()
            try:
                target = pytree.map_tensors(lambda tensor: _devices.moved_to(tensor, device), target)
                totals.add(interruptibly(metric, output, target), rows)
            except Exception as error:
                add_note(error, f"while computing the metric of batch {number}")
                raise


def _length_of(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a generator, or a loader over one
        return None


class _WithProgress(OutputIterator):
    """Outputs, with a bar on the terminal while they are iterated over: batches so far, and how many a second.

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
        self._progress: Progress | None = None
        self._num_done = 0
        self._started: float | None = None

    @without_own_frames
    def __next__(self) -> Any:
        if self._progress is None:
            self._progress = for_stderr()
            self._progress.begin(self._task, self._total)
        self._started = time.monotonic() if self._started is None else self._started
        try:
            output = next(self._outputs)
        except BaseException as error:
            self._num_done += not issubclass(type(error), StopIteration)
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
