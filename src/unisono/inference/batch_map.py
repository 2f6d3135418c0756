"""Batches that go, whole, to whichever device is free; their outputs come back in order.

        the caller's thread                                    lane i's thread
    (1) pull batches, two a lane ahead ──► todo ─────────────► next batch ──► replica i ──► output
    (2) wait for the oldest output ◄─────── done ◄───────────────────────────────────────────┘
    (3) yield it; the lanes go on while the caller uses it

Where that is faster (lane_choice.py), the caller's thread computes the batches, on the first lane: a row of short ones,
and then it yields their outputs.

Guarantees
    - Outputs are yielded in the order of the batches, one a batch. At most two batches a lane, or one row, have been
      pulled and not been yielded, whatever the speeds of lanes and caller.
    - An error of a batch is raised in that batch's turn; the next call of `next` goes on with the batch after it. An
      error of the loader, or a stuck lane, is raised after all outputs before it, and ends the iteration. Ctrl-C is
      raised at once: while the caller waits for an output, or computes it, the iteration can go on; while it pulls a
      batch, that ends it.
    - When the iterator is exhausted or closed, no lane computes any more, and nothing of it is left. An iterator that
      is only dropped does not wait: its lanes finish their batch and end.
    - The threads do not refer to the iterator, so it can be deleted while they run.

Assumes that nothing else uses the loader, and that a batch is not written into before its output is there.
"""

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch

from unisono.distributed.process_group import Communicator
from unisono.inference.background import Background
from unisono.inference.batches import hint_for, inputs_of
from unisono.inference.lane_choice import LaneChoice
from unisono.inference.lanes import Lane, LaneOutput, RunBatch
from unisono.primitives import pytree
from unisono.primitives.dims import OutputRules
from unisono.primitives.scatter import Arguments
from unisono.runtime import devices as _devices
from unisono.runtime.errors import add_note, annotate, note_thread_local
from unisono.runtime.interrupts import WAKE_S, critical, deliver, interruptibly
from unisono.runtime.rng import BatchStreams
from unisono.runtime.streams import current_streams_of, wait_for_makers
from unisono.runtime.stuck_threads import ReplicaTimeout, StuckThreads, threads_timed_out
from unisono.runtime.thread_pool import (
    OBJECTS_HAVE_THREADS,
    Outcome,
    as_first_replica,
    free_in_workers,
    inside_replica,
)
from unisono.runtime.thread_state import ThreadState, modes_that_stay
from unisono.runtime.torch_private import checkpoints, process_wide
from unisono.runtime.tracebacks import without_own_frames

# Number, inputs, seed, and those streams on which the inputs have been made that are not the lanes'.
_Batch: TypeAlias = tuple[int, tuple[Any, ...], dict[str, Any], int | None, list[torch.Stream]]
_AHEAD = 2  # batches a lane that have been pulled and not been yielded
_MOST_IN_A_ROW = 32
_ROW_S = 0.01
_FORKED = (
    "this process was forked while a map was running, and the threads that compute its outputs are in the "
    "parent. Call map in the process that iterates."
)


class OutputIterator(Iterator[Any]):
    """The outputs of some batches, in order.

    It is an iterator, which ends early with `close()`, at the end of a `with` block, or when it is deleted. Its `len()`
    is the number of all batches, where their iterable has one.
    """

    num_batches: int | None = None  # None: it is not known

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("the number of outputs is unknown: the iterable of batches has no len()")
        return self.num_batches

    def __repr__(self) -> str:
        return f"<outputs of {'some' if self.num_batches is None else self.num_batches} batches>"

    def close(self) -> None:
        """End the iteration; wait for batches that are being computed (`timeout` at most), and drop their outputs."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class Callee:
    """What is called for each batch."""

    open_lanes: Callable[[Sequence[torch.device]], list[Lane]]  # opens lanes on some devices
    devices: list[torch.device]  # those of this process, one a lane
    output_device: torch.device  # where outputs are
    function: Callable[..., Any]  # the method whose inputs the batches are
    in_dims: Any  # which axis of inputs has the rows
    rules: OutputRules  # the same for outputs
    communicator: Communicator | None  # the processes that compute the batches together; None: this one alone
    # From the inputs of the first batch, the number of lanes and that of batches ahead to the choice of lanes; None:
    # batches go to all.
    choice_for: Callable[[object, int, int], LaneChoice] | None
    timeout_s: float | None  # for how long the caller waits for a batch without progress; None: for ever

    def numbers(self) -> Iterator[int]:
        """Yield the numbers that this process's batches have among those of all processes, rising.

        From them follow a batch's random numbers, and what its errors call it.
        """
        together = self.communicator
        return itertools.count() if together is None else itertools.count(together.rank, together.world_size)

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of rows of a batch.

        Raises:
            ValueError: it has none, or different ones.
        """
        rows = Arguments(args, kwargs, self.rules.dim).find_rows(self.in_dims, self.function).rows
        if rows is None:
            raise ValueError(
                "cannot count the rows (samples) of a batch without tensors, but evaluate weights batches by "
                "their rows. Give tensors, or register the class of the batches with "
                "unisono.register_batch_type"
            )
        return rows


class BatchMap(OutputIterator):
    """The outputs of one process's batches. See the module's docstring.

    Args:
        batches: any iterable; pulled from in the thread that iterates.
        callee: what is called for each.
    """

    def __init__(self, batches: Iterable[Any], callee: Callee) -> None:
        self._state = replace(ThreadState.capture(), grad_enabled=False)
        self._batches: Iterator[Any] | None = None
        self._source: Iterable[Any] = batches
        self._callee: Callee | None = callee  # None when it has ended
        self._devices, self._numbers = callee.devices, callee.numbers()
        self._choice: LaneChoice | None = None
        self._stays = False  # in this thread and its state, batch after batch
        self._has_more = True
        self._pulled: deque[tuple[int, str | None]] = deque()  # batches that have not been yielded, with their hints
        self._ready: dict[int, Outcome[LaneOutput]] = {}
        self._row: list[_Batch] = []  # that this thread computes next
        self._row_length = 1
        self._outputs: deque[LaneOutput] = deque()  # of the last row
        self._streams: list[torch.Stream] = []  # on which the lanes compute; none on the host
        self._has_accelerators = bool(_devices.accelerators())
        self._asked: tuple[float, int, bool] | None = None  # when outputs were asked for, how many; if from all lanes
        self._work: _Work | None = None
        self._stopped_at_deletion: _StoppedAtDeletion | None = None
        self._pid = os.getpid()

    @without_own_frames
    def __next__(self) -> Any:
        output = self._outputs.popleft() if self._outputs else self._next()
        return output.given()  # the caller may have another stream current for each

    @critical
    def _next(self) -> LaneOutput:
        deliver()  # several calls may follow each other in one section, such as an evaluation
        if self._work is not None and os.getpid() != self._pid:
            raise RuntimeError(_FORKED)
        now = time.monotonic()
        if self._choice is not None and self._asked is not None:
            before, num_outputs, used_all = self._asked
            self._choice.record(now - before, num_outputs, used_all=used_all)
        try:
            self._pull()
        except BaseException:  # Ctrl-C, or no lanes: a batch may have been pulled, and must not be left out unnoticed
            self._stop()
            raise
        if not self._pulled:
            self.close()
            raise StopIteration
        number, used_all = self._pulled[0][0], True
        if self._row and self._row[0][0] == number:
            self._compute_row()
            used_all = False
        elif number not in self._ready:
            assert self._work is not None
            try:
                self._work.wait_for(number)
            except ReplicaTimeout:
                self._stop()
                raise
        self._asked = now, max(1, len(self._outputs)), used_all
        return self._outputs.popleft() if self._outputs else self._output()

    def _output(self) -> LaneOutput:
        """Return the output of the oldest batch, which has been computed; or raise its error."""
        number, hint = self._pulled.popleft()
        outcome = self._ready.pop(number)
        try:
            if outcome.error is not None:
                raise _as_raised(outcome.error, hint)
            assert outcome.value is not None
            if outcome.value.drew and self._work is not None:
                self._work.streams.move_on()
            return outcome.value
        finally:
            del outcome  # a traceback refers to this frame: nothing in it may refer to an exception

    def _compute_row(self) -> None:
        """Compute the row, up to an error, in this thread."""
        assert self._work is not None
        began = time.monotonic()
        around = torch.no_grad() if self._stays else as_first_replica(self._devices, self._state)
        with around, _devices.using(self._devices[0], self._streams):
            computed, is_unchanged = self._work.compute_row(self._row)
        each_s = (time.monotonic() - began) / len(computed)
        self._row_length = min(_MOST_IN_A_ROW, 1 + int(_ROW_S / each_s)) if is_unchanged else 1
        self._ready.update(computed)
        del self._row[: len(computed)]
        while self._pulled and (outcome := self._ready.get(self._pulled[0][0])) is not None and outcome.error is None:
            self._outputs.append(self._output())

    def _pull(self) -> None:
        """Pull batches until the lanes, or a row, have enough of them."""
        if self._row:  # Ctrl-C or an error has ended it early
            return
        is_row = self._work is not None and self._computes_rows
        while self._has_more and len(self._pulled) < self._num_ahead(is_row):
            try:
                # Before the lanes' threads start: a loader may fork processes here.
                self._batches = interruptibly(iter, self._source) if self._batches is None else self._batches
                batch = interruptibly(next, self._batches)
            except StopIteration:
                self._has_more = False
                return
            except Exception as error:  # noqa: BLE001 - raised in its turn
                self._has_more = False
                self._add_error("the iterable of batches, at batch", error)
                return
            try:
                args, kwargs = inputs_of(batch)
            except (TypeError, ValueError) as error:
                self._add_error("batch", error)
                continue
            if self._work is None:
                self._work = self._begin((args, kwargs))
                is_row = self._computes_rows
            number = next(self._numbers)
            self._pulled.append((number, hint_for(batch)))
            seed = None if self._stays else self._work.streams.seed(number)
            made_on: list[torch.Stream] = []
            if self._has_accelerators:
                made_on = [s for s in current_streams_of(pytree.all_tensors((args, kwargs))) if s not in self._streams]
            if is_row:
                self._row.append((number, args, kwargs, seed, made_on))
            else:
                self._work.submit((number, args, kwargs, seed, made_on))

    def _add_error(self, where: str, error: BaseException) -> None:
        number = next(self._numbers)
        self._ready[number] = Outcome(error=annotate([(f"{where} {number}", error)]))
        self._pulled.append((number, None))

    @property
    def _computes_rows(self) -> bool:
        assert self._work is not None
        return not self._work.has_threads or (self._choice is not None and not self._choice.uses_all)

    def _num_ahead(self, is_row: bool) -> int:
        if not is_row:
            return _AHEAD * len(self._devices)
        return self._row_length if len(self._row) == len(self._pulled) else 0  # the lanes end theirs first

    def _begin(self, inputs: object) -> "_Work":
        # A mode that other threads cannot join; a wrapper inside a replica; a cache of weights, one for all replicas.
        self._stays = inside_replica() or modes_that_stay() or process_wide.caches_parametrizations()
        callee = self._callee
        assert callee is not None
        if callee.choice_for is not None and not self._stays:
            self._choice = callee.choice_for(inputs, len(self._devices), _AHEAD * len(self._devices))
            self._choice.begin_map()
        is_one = self._stays or (self._choice is not None and self._choice.is_made and not self._choice.uses_all)
        self._streams = _devices.current_streams(self._devices)
        with self._state.applied():
            lanes = callee.open_lanes(self._devices[:1] if is_one else self._devices)
        work = _Work(lanes, self._ready, callee.timeout_s)
        self._stopped_at_deletion = _StoppedAtDeletion(work)
        if not is_one:
            work.start(self._devices, self._state)
        return work

    @critical
    def close(self) -> None:
        self._stop()
        work, self._work = self._work, None
        if work is not None and os.getpid() == self._pid:
            work.wait()
            if OBJECTS_HAVE_THREADS:
                free_in_workers()

    def _stop(self) -> None:
        self._has_more = False
        self._pulled.clear()
        self._ready.clear()
        self._row.clear()
        self._outputs.clear()
        self._source, self._batches, self._callee = (), None, None
        self._stopped_at_deletion = None


class _StoppedAtDeletion:
    """Stops the lanes when it is deleted: of an iterator that has ended, in a critical section, as Ctrl-C needs."""

    def __init__(self, work: "_Work") -> None:
        self._work, self._pid = work, os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            self._work.stop()


class _Work:
    """What the iterator shares with the lanes' threads.

    Args:
        ready: the outcomes of batches that have been computed. A lane writes into it, and then wakes the caller: what
            Ctrl-C interrupts in the caller cannot lose an outcome.
        timeout_s: as in `Callee`.
    """

    def __init__(self, lanes: list[Lane], ready: dict[int, Outcome[LaneOutput]], timeout_s: float | None) -> None:
        self._lanes, self._ready, self._timeout_s = lanes, ready, timeout_s
        self._todo: SimpleQueue[_Batch | None] = SimpleQueue()  # None: a lane ends
        self._has_new = threading.Event()
        self._computing: dict[int, tuple[int, int]] = {}  # by batch: its lane and that lane's thread
        self._arriving: dict[int, Outcome[LaneOutput]] = {}  # of batches whose outputs are on their way to the host
        self._background: Background | None = None
        self._is_stopped = False
        self.has_threads = False  # whether lanes compute in threads; else in the caller's
        self.streams = BatchStreams()  # the batches' random numbers

    def start(self, devices: Sequence[torch.device], state: ThreadState) -> None:
        """Start the lanes' threads.

        Args:
            devices: those among which intra-op threads are divided.
        """
        tasks = [partial(self._compute, i) for i in range(len(self._lanes))]
        self.has_threads = True
        self._background = Background(tasks, devices, state, self.stop, self._close)

    def _close(self) -> None:
        self._background = None  # it refers to this object
        self._lanes.clear()

    def submit(self, batch: _Batch) -> None:
        """Add a batch for whichever lane is free."""
        self._todo.put(batch)

    def compute_row(self, batches: Sequence[_Batch]) -> tuple[dict[int, Outcome[LaneOutput]], bool]:
        """Compute batches in the calling thread, on the first lane; whose own thread, if any, has nothing to do.

        Of several, the module is looked at once: if one changes it, those after it find what it has left, as in a plain
        loop.

        Returns:
            Their outcomes by number, up to the first error; whether the module was as it was all the time.
        """
        lane = self._lanes[0]
        outcomes: dict[int, Outcome[LaneOutput]] = {}
        with contextlib.nullcontext(lane.run) if len(batches) == 1 else lane.in_a_row() as run:
            for batch in batches:
                outcomes[batch[0]] = self._outcome(lane, run, [batch])
                if outcomes[batch[0]].error is not None:
                    break
        return self._arrived(lane, outcomes), lane.left_unchanged

    def wait_for(self, number: int) -> None:
        """Wait until a batch has been computed.

        Raises:
            ReplicaTimeout: its lane is stuck: no batch was finished for `timeout_s`.
        """
        timeout_s, progress_at, stuck = self._timeout_s, time.monotonic(), StuckThreads()
        while True:
            self._has_new.clear()
            if number in self._ready:
                return
            if self._has_new.wait(WAKE_S):
                progress_at = time.monotonic()
                continue
            deliver()
            waited_s = time.monotonic() - progress_at
            if timeout_s is not None and waited_s > timeout_s:
                self._raise_if_stuck(number, timeout_s)
            threads = dict([*self._computing.values()])
            stuck.say(threads, [lane.name for lane in self._lanes], waited_s)

    def _raise_if_stuck(self, number: int, timeout_s: float) -> None:
        """Raise `ReplicaTimeout` for a batch in which a lane is stuck."""
        index, ident = self._computing.get(number, (None, 0))
        if index is None:
            return
        lane = self._lanes[index]
        if self._has_arrived(number):  # the lane is stuck in the batch after it
            self._arrive(lane, number)
            return
        error = threads_timed_out({0: ident}, timeout_s, lane.names(), "Its batch is lost")
        raise annotate([(f"batch {number}, by {lane.name}", error)])

    def _compute(self, index: int) -> None:
        """Compute batches, in the thread of a lane, until there will be no more.

        If an output is on its way to the host, the lane begins the batch after it, if there is one, and then waits.
        """
        lane, arriving = self._lanes[index], deque[int]()
        while True:
            try:
                batch = self._todo.get_nowait() if arriving else self._todo.get()
            except Empty:
                self._arrive(lane, arriving.popleft())
                continue
            if batch is None:
                return
            number, batches = batch[0], [batch]
            del batch
            self._computing[number] = index, threading.get_ident()
            # Once the caller has the outcome, no reference to it or to the batch may be left here: what the caller then
            # drops is to be freed at once. So no variable holds either.
            self._arriving[number] = self._outcome(lane, lane.run, batches)
            arriving.append(number)
            while arriving and (len(arriving) > 1 or self._has_arrived(arriving[0])):
                self._arrive(lane, arriving.popleft())

    def _has_arrived(self, number: int) -> bool:
        """Return whether a batch's outcome is known, and its output is not in flight."""
        outcome = self._arriving.get(number)
        if outcome is None or outcome.value is None or outcome.value.to_host is None:
            return outcome is not None
        return outcome.value.to_host.have_ended(wait=False)

    def _arrive(self, lane: Lane, number: int) -> None:
        """Give the caller a batch's outcome, with its output on the host."""
        if (outcome := self._arriving.pop(number, None)) is not None:  # the caller has not got it meanwhile
            arrived = self._arrived(lane, {number: outcome})
            del outcome
            self._ready[number] = arrived.pop(number)  # no reference to it is left here
            del arrived
        if self._is_stopped:
            self._ready.clear()  # nobody takes it, and the traceback of an error refers to this object
            self._arriving.clear()
        self._computing.pop(number, None)
        self._has_new.set()

    def _arrived(self, lane: Lane, outcomes: dict[int, Outcome[LaneOutput]]) -> dict[int, Outcome[LaneOutput]]:
        """Return outcomes, when their outputs are on the host."""
        for number, outcome in outcomes.items():
            try:
                outcome.value = outcome.value and outcome.value.arrived()
            except BaseException as error:  # noqa: BLE001 - raised in the turn of its batch
                outcomes[number] = self._failure(lane, number, error)
        return outcomes

    def _outcome(self, lane: Lane, run: RunBatch, batches: list[_Batch]) -> Outcome[LaneOutput]:
        """Compute the one batch in a list, which is emptied.

        Raises:
            KeyboardInterrupt: in the main thread. The batch is as it was.
        """
        number, args, kwargs, seed, made_on = batches.pop()
        try:
            if made_on:
                wait_for_makers(made_on, pytree.all_tensors((args, kwargs)))
            return Outcome(value=run(args, kwargs, seed))
        except BaseException as error:  # noqa: BLE001 - as above
            return self._failure(lane, number, error)

    def _failure(self, lane: Lane, number: int, error: BaseException) -> Outcome[LaneOutput]:
        if issubclass(type(error), KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise error
        checkpoints.end_checkpoints(error)
        return Outcome(error=annotate([(f"batch {number}, by {lane.name}", error)]))

    def stop(self) -> None:
        """Let each lane end after its current batch. May be called from a finalizer, and several times."""
        with contextlib.suppress(Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._lanes:
            self._todo.put(None)
        self._is_stopped = True
        self._ready.clear()
        self._arriving.clear()

    def wait(self) -> None:
        background = self._background
        if background is not None:
            background.wait(self._timeout_s)
        elif not self.has_threads:
            self._lanes.clear()


def _as_raised(error: BaseException, hint: str | None) -> BaseException:
    """Return the error to raise for a batch's."""
    if issubclass(type(error), TypeError) and hint is not None:
        add_note(error, hint)
    if issubclass(type(error), StopIteration):  # it would end the iteration
        replacement = RuntimeError("the module raised StopIteration")
        replacement.__cause__ = error
        return replacement
    return note_thread_local(error)
