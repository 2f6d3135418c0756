"""Batches that go, whole, to whichever device is free; their outputs come back in order.

        the caller's thread                                    lane i's thread
    (1) pull batches, two a lane ahead ──► todo ─────────────► next batch ──► replica i ──► output
    (2) wait for the oldest output ◄─────── done ◄───────────────────────────────────────────┘
    (3) yield it; the lanes go on while the caller uses it

Where it is faster, only the first lane gets batches (lane_choice.py).

Guarantees
    - Outputs are yielded in the order of the batches, one a batch. At most two batches a lane have been pulled and not
      been yielded, whatever the speeds of lanes and caller.
    - An error of a batch is raised in that batch's turn; the next call of `next` goes on with the batch after it. An
      error of the loader is raised after all outputs before it, and ends the iteration. Ctrl-C is raised at once: while
      the caller waits for an output, the iteration can go on; while it pulls a batch, that ends the iteration.
    - When the iterator is exhausted or closed, no lane computes any more, and nothing of it is left. An iterator that
      is only dropped does not wait: its lanes finish their batch and end.
    - The threads do not refer to the iterator, so it can be deleted while they run.

Assumes that nothing else uses the loader, and that a batch is not written into before its output is there.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch

from unisono.engines.base import Lane, LaneEndedError, LaneOutput, Lanes
from unisono.inference.batches import hint_for, inputs_of
from unisono.inference.lane_choice import LaneChoice
from unisono.runtime import torch_private
from unisono.runtime.errors import annotate, threads_timed_out
from unisono.runtime.interrupts import WAKE_S, critical, deliver, interruptibly
from unisono.runtime.rng import BatchStreams
from unisono.runtime.thread_pool import Background, Outcome, inside_replica
from unisono.runtime.thread_state import ThreadState, modes_that_stay
from unisono.runtime.tracebacks import without_own_frames

_Batch: TypeAlias = tuple[int, tuple[Any, ...], dict[str, Any], int | None]  # number, inputs, seed
_AHEAD = 2  # batches a lane that have been pulled and not been yielded
_FORKED = (
    "this is a process forked while the outputs of a map were iterated over: the threads that compute them are in its "
    "parent. Call map in the process that iterates."
)
_NO_LANE_LEFT = "no lane is left that could compute the remaining batches: each of them has ended. Call map again."


class OutputIterator(Iterator[Any]):
    """The outputs of some batches, in order.

    It is an iterator, which ends early with `close()`, at the end of a `with` block, or when it is deleted. Its `len()`
    is the number of all batches, where their iterable has one.
    """

    num_batches: int | None = None  # None: it is not known

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("the number of outputs is not known: the iterable of batches has no len()")
        return self.num_batches

    def __repr__(self) -> str:
        return f"<outputs of {'some' if self.num_batches is None else self.num_batches} batches>"

    def close(self) -> None:
        """End the iteration; wait for the batches that are being computed, and drop their outputs."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class BatchMap(OutputIterator):
    """The outputs of one process's batches. See the module's docstring.

    Args:
        batches: any iterable; pulled from in the thread that iterates.
        open_lanes: opens lanes on some devices.
        devices: one a lane.
        numbers: of the batches, rising. From them follow a batch's random numbers, and what its errors call it.
        choice_for: from the inputs of the first batch, the number of lanes and that of batches ahead to the choice of
            lanes; None: batches go to all.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        open_lanes: Callable[[Sequence[torch.device]], Lanes],
        devices: list[torch.device],
        numbers: Iterator[int],
        choice_for: Callable[[object, int, int], LaneChoice] | None,
    ) -> None:
        self._state = replace(ThreadState.capture(), grad_enabled=False)
        self._batches: Iterator[Any] | None = None
        self._source: Iterable[Any] = batches
        self._open_lanes: Callable[[Sequence[torch.device]], Lanes] | None = open_lanes  # None when it has ended
        self._devices = devices
        self._numbers, self._choice_for = numbers, choice_for
        self._has_more = True
        self._pulled: deque[tuple[int, str | None]] = deque()  # batches that have not been yielded, with their hints
        self._ready: dict[int, Outcome[LaneOutput]] = {}
        self._work: _Work | None = None
        self._stopped_at_deletion: _StoppedAtDeletion | None = None
        self._pid = os.getpid()

    @without_own_frames
    @critical
    def __next__(self) -> Any:
        deliver()  # several calls may follow each other in one section, such as an evaluation
        if self._work is not None and os.getpid() != self._pid:
            raise RuntimeError(_FORKED)
        try:
            self._pull()
        except BaseException:  # Ctrl-C, or no lanes: a batch may have been pulled, and must not be left out unnoticed
            self._stop()
            raise
        if not self._pulled:
            self.close()
            raise StopIteration
        number, hint = self._pulled[0]
        if number not in self._ready:
            assert self._work is not None
            self._work.wait_for(number)
        if self._work is not None:
            self._work.note_output(number)
        self._pulled.popleft()
        outcome = self._ready.pop(number)
        try:
            if outcome.error is not None:
                raise _as_raised(outcome.error, hint)
            assert outcome.value is not None
            outcome.value.wait()
            if outcome.value.drew and self._work is not None:
                self._work.streams.move_on()
            return outcome.value.value
        finally:
            del outcome  # a traceback refers to this frame: nothing in it may refer to an exception

    def _pull(self) -> None:
        """Pull batches until the lanes have enough of them."""
        while self._has_more and len(self._pulled) < self._num_ahead:
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
            number = next(self._numbers)
            self._pulled.append((number, hint_for(batch)))
            self._work.submit(number, args, kwargs)

    def _add_error(self, where: str, error: BaseException) -> None:
        number = next(self._numbers)
        self._ready[number] = Outcome(error=annotate([(f"{where} {number}", error)]))
        self._pulled.append((number, None))

    @property
    def _num_ahead(self) -> int:
        return 1 if self._work is not None and self._work.is_alone else _AHEAD * len(self._devices)

    def _begin(self, inputs: object) -> "_Work":
        # A mode that other threads cannot join; a wrapper inside a replica; a cache of weights, one for all replicas.
        is_alone = inside_replica() or modes_that_stay() or torch_private.caches_parametrizations()
        choice = None
        if self._choice_for is not None and len(self._devices) > 1 and not is_alone:
            choice = self._choice_for(inputs, len(self._devices), self._num_ahead)
            choice.begin_map()
        is_one = is_alone or (choice is not None and choice.is_made and not choice.uses_all)
        assert self._open_lanes is not None
        with self._state.applied():
            lanes = self._open_lanes(self._devices[:1] if is_one else self._devices)
        work = _Work(lanes, self._ready, choice)
        self._stopped_at_deletion = _StoppedAtDeletion(work)
        if not is_alone:
            work.start(self._devices, self._state)
        return work

    @critical
    def close(self) -> None:
        self._stop()
        work, self._work = self._work, None
        if work is not None and os.getpid() == self._pid:
            work.wait()
            self._ready.clear()  # of what was computed meanwhile

    def _stop(self) -> None:
        self._has_more = False
        self._pulled.clear()
        self._ready.clear()
        self._source, self._batches, self._open_lanes = (), None, None
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
        choice: which lanes get batches; None: all of them.

    Attributes:
        is_alone: whether there is one lane only, which computes in the caller's thread.
        streams: the batches' random numbers.
    """

    def __init__(self, lanes: Lanes, ready: dict[int, Outcome[LaneOutput]], choice: LaneChoice | None) -> None:
        self._lanes, self._ready, self._choice = lanes, ready, choice
        self._todo = _Todo()
        self._of_first: set[int] = set()  # batches that only the first lane could get
        self._output_at: float | None = None  # when the last output was there
        self._num_lanes = len(lanes.each)
        self._has_new = threading.Event()
        self._computing: dict[int, tuple[int, int]] = {}  # by batch: its lane and that lane's thread
        self._abandoned: set[int] = set()  # batches whose lanes are stuck
        self._background: Background | None = None
        self.is_alone = True
        self.streams = BatchStreams()

    def start(self, devices: Sequence[torch.device], state: ThreadState) -> None:
        """Start the lanes' threads.

        Args:
            devices: those among which intra-op threads are divided; there may be fewer lanes.
        """
        tasks = [partial(self._compute, i) for i in range(self._num_lanes)]
        self.is_alone = False
        self._background = Background(tasks, devices, state, self.stop, self._close)

    def _close(self) -> None:
        self._background = None  # it refers to this object
        self._lanes.close()

    def submit(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_alone:
            with torch.no_grad():
                self._ready[number] = self._outcome(self._lanes.each[0], [(number, args, kwargs, None)])
        else:
            for_all = self._choice is None or self._choice.uses_all
            if not for_all:
                self._of_first.add(number)
            self._todo.put((number, args, kwargs, self.streams.seed(number)), for_all=for_all)

    def note_output(self, number: int) -> None:
        """Take note that an output is about to be yielded."""
        now = time.monotonic()
        if self._choice is not None and self._output_at is not None:
            self._choice.record(now - self._output_at, used_all=number not in self._of_first)
        self._output_at = now
        self._of_first.discard(number)

    def wait_for(self, number: int) -> None:
        """Wait until a batch has been computed, or has been given up: no batch was finished for `timeout_s`.

        Raises:
            RuntimeError: nothing is left that could compute it.
        """
        timeout_s, progress_at = self._lanes.timeout_s, time.monotonic()
        while True:
            background = self._background
            has_ended = background is None or background.has_ended
            self._has_new.clear()
            if number in self._ready:
                return
            if has_ended:
                raise RuntimeError(_NO_LANE_LEFT)
            if self._has_new.wait(WAKE_S):
                progress_at = time.monotonic()
                continue
            deliver()
            if timeout_s is not None and time.monotonic() - progress_at > timeout_s:
                self._give_up(number, timeout_s)

    def _give_up(self, number: int, timeout_s: float) -> None:
        """Take a batch from a lane that is stuck, with an error in its place; the lane's thread is left alone."""
        index, ident = self._computing.get(number, (None, 0))
        if index is None or self._lanes.each[index].has_own_timeout or number in self._abandoned:
            return
        lane = self._lanes.each[index]
        error = threads_timed_out({0: ident}, timeout_s, lane.names(), "Its batch is lost")
        lane.has_ended = True
        self._abandoned.add(number)
        self._ready[number] = Outcome(error=annotate([(f"batch {number}, by {lane.name}", error)]))
        if self._background is not None:
            self._background.abandon(index)

    def _compute(self, index: int) -> None:
        """Compute batches, in the thread of a lane, until there will be no more."""
        lane = self._lanes.each[index]
        while (batch := self._todo.get(index)) is not None:
            number, batches = batch[0], [batch]
            del batch
            self._computing[number] = index, threading.get_ident()
            try:
                # Once the caller has the outcome, no reference to it or to the batch may be left here: what the caller
                # then drops is to be freed at once. So no variable holds either.
                self._put(number, self._outcome(lane, batches))
            except LaneEndedError:
                return
            finally:
                del self._computing[number]
            self._has_new.set()
            if lane.has_ended:
                return

    def _put(self, number: int, outcome: Outcome[LaneOutput]) -> None:
        if number not in self._abandoned:
            self._ready[number] = outcome

    def _outcome(self, lane: Lane, batches: "list[_Batch]") -> Outcome[LaneOutput]:
        """Compute the one batch in a list, which is emptied.

        Raises:
            LaneEndedError: the lane can compute no more. Another one will take the batch.
        """
        number, args, kwargs, seed = batches.pop()
        try:
            return Outcome(value=lane.run(args, kwargs, seed))
        except LaneEndedError:
            self._todo.put((number, args, kwargs, seed), for_all=True)
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the thread that iterates
            torch_private.end_checkpoints(error)
            return Outcome(error=annotate([(f"batch {number}, by {lane.name}", error)]))

    def stop(self) -> None:
        """Let each lane end after its current batch. May be called from a finalizer, and several times."""
        self._todo.clear()
        self._lanes.stop()
        self._todo.end(self._num_lanes)

    def wait(self) -> None:
        background = self._background
        if background is not None:
            background.wait()
        elif self.is_alone:
            self._lanes.close()


class _Todo:
    """The batches that no lane has taken yet. `clear` and `end` may be called from a finalizer, in any thread."""

    def __init__(self) -> None:
        self._for_all: SimpleQueue[_Batch | None] = SimpleQueue()  # None: the lane ends
        self._for_first: SimpleQueue[_Batch | None] = SimpleQueue()  # None: there may be one in the other queue

    def put(self, batch: _Batch, *, for_all: bool) -> None:
        """Add a batch: for any lane, or for the first only."""
        (self._for_all if for_all else self._for_first).put(batch)
        if for_all:
            self._for_first.put(None)

    def get(self, lane: int) -> _Batch | None:
        """Wait for a lane's next batch; None: there will be none."""
        if lane > 0:
            return self._for_all.get()
        while (batch := self._for_first.get()) is None:
            with contextlib.suppress(Empty):  # another lane has taken it
                return self._for_all.get_nowait()
        return batch

    def clear(self) -> None:
        for queue in (self._for_all, self._for_first):
            with contextlib.suppress(Empty):
                while True:
                    queue.get_nowait()

    def end(self, num_lanes: int) -> None:
        """Let the lanes end."""
        for _ in range(num_lanes):
            self._for_all.put(None)
        self._for_first.put(None)


def _as_raised(error: BaseException, hint: str | None) -> BaseException:
    """Return the error to raise for a batch's."""
    if isinstance(error, TypeError) and hint is not None and hint not in getattr(error, "__notes__", ()):
        error.add_note(hint)
    if isinstance(error, StopIteration):  # it would end the iteration
        replacement = RuntimeError("the module raised StopIteration")
        replacement.__cause__ = error
        return replacement
    return error
