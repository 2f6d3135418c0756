"""What each thread of a step does when: recorded while a profile is open, else nothing is.

    StepRecording   one forward of a wrapper and its backwards: its passes, and a track for each replica
    Track           what one replica, or the caller's thread, does: spans, each with one phase, which never overlap

The caller's thread is recorded from the beginning of a pass to its end (`StepRecording.recorded`); `mark` says what it
goes on with. Where a replica's part of the pass begins, and ends, is known from the context that goes around it
(`contexts`). A phase inside another one interrupts it: a replica that waits for others in its forward does not compute
meanwhile.

On an accelerator a replica's spans are those of the work that it queues, by events on its stream: nothing waits.

Guarantees
    - While nothing is recorded, a place that would record pays for one comparison: `if timeline.recording`.
    - A track is written by one thread at a time. What is written is numbers: it keeps no tensor and no graph.
    - However a pass ends, its thread is left as it was before.

"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

import torch

from unisono.runtime import devices as _devices
from unisono.runtime.contexts import contextmanager
from unisono.runtime.devices import DeviceClock, Moment

SCATTER, REPLICATE, FORWARD, GATHER = "scatter", "replicate", "forward", "gather"
BACKWARD, REDUCE, WAIT = "backward", "reduce", "wait"

T = TypeVar("T")

recording: set[object] = set()  # what is open in this process that records

_HOST = DeviceClock(torch.device("cpu"))

# `step`: the one whose pass this thread runs, unless it is in a replica; `track`: where this thread is recorded;
# `backward`: refers to the `RecordedBackward` that runs.
_thread = threading.local()


class Span(NamedTuple):
    """A stretch of time with one phase.

    Attributes:
        phase: such as "forward"; `Profile` lists them.
        began: in seconds of `time.perf_counter`.
        ended: in the same seconds.
    """

    phase: str
    began: float
    ended: float


class Track:
    """The spans of one replica, or of the caller's thread.

    Args:
        clock: of the device that does the work.

    Attributes:
        since: when the phase that is open began, or the last one ended.
    """

    def __init__(self, clock: DeviceClock = _HOST) -> None:
        self._clock = clock
        self._spans: list[tuple[str, Moment, Moment]] = []
        self._phases: list[str] = []  # those that are open, the innermost last
        self.since: Moment = 0.0

    def enter(self, phase: str) -> None:
        """Begin a phase, which interrupts the one that is open."""
        self._close_span()
        self._phases.append(phase)

    def leave(self, then: str | None = None) -> None:
        """End the innermost phase; the one that it has interrupted goes on, as another one if that is given."""
        self._close_span()
        self._phases.pop()
        if self._phases and then is not None:
            self._phases[-1] = then

    def mark(self, phase: str) -> None:
        """Let the innermost phase be another one from now on."""
        self._close_span()
        self._phases[-1] = phase

    @property
    def is_of_host(self) -> bool:
        """Whether its clock is the host's."""
        return self._clock is _HOST

    def end(self) -> None:
        """End all phases."""
        self._close_span()
        self._phases.clear()

    def spans(self) -> list[Span]:
        """Return what has been recorded, in order; waits until a device has done it."""
        seconds = self._clock.seconds
        found = [Span(phase, seconds(began), seconds(ended)) for phase, began, ended in self._spans]
        return sorted(found, key=lambda span: span.began)

    def _close_span(self) -> None:
        now = self._clock.now()
        if self._phases:
            self._spans.append((self._phases[-1], self.since, now))
        self.since = now


@dataclass
class ReplicaTiming:
    """What one replica did in the last step.

        >>> def pace(timing: unisono.ReplicaTiming) -> float:
        ...     return timing.rows / timing.forward_s
        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
        >>> output = model(torch.zeros(8, 5))
        >>> [pace(timing) > 0 for timing in model.replica_timings]
        [True, True]

    Attributes:
        device: its device.
        rows: its share of the batch.
        forward_s: seconds that its forward took; on an accelerator, to queue the work. 0 until it has ended.
        backward_s: the same of its backward.
    """

    device: torch.device
    rows: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    track: Track | None = field(default=None, repr=False, compare=False)  # what records it; None while nothing does


class StepRecording:
    """One forward of a wrapper, and the backwards that belong to it.

    Args:
        clock_of: returns the clock of a device that does not compute on the host.

    Attributes:
        thread: the caller's.
        caller: what it did.
        replicas: by number. The first one's track is the caller's, if it computes on the host. There is none
            with one device or overridden verbs.
        passes: the forward, and each backward, that has ended.
        phase: which of the two the last one is.
        is_open: whether its backwards are recorded.
    """

    def __init__(self, clock_of: Callable[[torch.device], DeviceClock]) -> None:
        self._clock_of = clock_of
        self.thread = threading.get_ident()
        self.caller = Track()
        self.replicas: dict[int, ReplicaTiming] = {}
        self.passes: list[Span] = []
        self.phase = FORWARD
        self.is_open = True
        self._is_free = threading.Lock()

    @contextmanager
    def recorded(self, phase: str, first: str) -> Iterator[None]:
        """Record the block as a forward or backward, in which the calling thread does `first` at first.

        If it fails, it is not one of the passes; nor is a backward while another thread runs one of the same step.
        """
        if not self._is_free.acquire(blocking=False):
            with _in_thread(None, None):
                yield
            return
        try:
            with _in_thread(self, self.caller):
                self.phase = phase
                self.caller.enter(first)
                began = cast(float, self.caller.since)
                try:
                    yield
                finally:
                    self.caller.end()
                self.passes.append(Span(phase, began, cast(float, self.caller.since)))
        finally:
            self._is_free.release()

    def record_on_tracks(self, numbers: Sequence[int], timings: Sequence[ReplicaTiming]) -> None:
        """Give each replica a track; the one that it has, if its step is run again."""
        for number, timing in zip(numbers, timings, strict=True):
            before = self.replicas.get(number)
            if before is not None:
                timing.track = before.track
            elif not _devices.computes_on_host(timing.device):
                timing.track = Track(self._clock_of(timing.device))
            else:
                timing.track = Track() if self.replicas else self.caller
            self.replicas[number] = timing


# ---- what a step calls ----


def current_step() -> StepRecording | None:
    """Return the step whose pass the calling thread runs; None in a replica, and while nothing is recorded."""
    step: StepRecording | None = getattr(_thread, "step", None)
    return step


@contextmanager
def in_no_step() -> Iterator[None]:
    """Keep what the block does out of the calling thread's step: it runs another wrapper, inside the module."""
    with _in_thread(None, getattr(_thread, "track", None)):
        yield


def contexts(numbers: Sequence[int], timings: Sequence[ReplicaTiming]) -> list["RecordedPasses"]:
    """Return the contexts that record replicas in each pass of the calling thread's step: one, or none.

    Args:
        numbers, timings: the replicas'.
    """
    step = current_step()
    if step is None:
        return []
    step.record_on_tracks(numbers, timings)
    return [RecordedPasses(step, timings)]


class RecordedPasses:
    """Makes the context of each pass over the replicas, in which each of them is recorded, in its own thread."""

    def __init__(self, step: StepRecording, timings: Sequence[ReplicaTiming]) -> None:
        self._step, self._timings = step, timings

    def __call__(self) -> AbstractContextManager[Callable[[int], AbstractContextManager[None]]]:
        if current_step() is not self._step:  # this pass is not recorded
            return contextlib.nullcontext(lambda index: contextlib.nullcontext())
        return contextlib.nullcontext(self.replica)

    @contextmanager
    def replica(self, index: int) -> Iterator[None]:
        """Record the block as a replica's part. In it there is no step: a wrapper inside the module is part of it."""
        track = self._timings[index].track
        assert track is not None
        caller: Track | None = getattr(_thread, "track", None)
        tracks = [track] if caller in (None, track) else [track, caller]
        with _in_thread(None, track if track.is_of_host else None):
            for each in tracks:
                each.enter(self._step.phase)
            try:
                yield
            finally:
                for each in tracks:
                    each.leave(WAIT)  # the caller's thread, for the other replicas


@contextmanager
def one_backward_of(timings: Sequence[ReplicaTiming]) -> Iterator[None]:
    """Record the block, one call that runs the backward of several replicas, on the track of each."""
    step = current_step()
    if step is None:
        yield
        return
    step.caller.mark(BACKWARD)
    own = [timing.track for timing in timings if timing.track not in (None, step.caller)]
    for track in own:
        track.enter(BACKWARD)
    try:
        yield
    finally:
        for track in own:
            track.leave()


class RecordedBackward:
    """Records the calling thread as in the backward of a step, from now on until `end`.

    Where one backward reaches several steps, each is recorded until the next one begins. One that is dropped without
    `end` has failed: it is not one of the passes.
    """

    def __init__(self, step: StepRecording) -> None:
        if (before := _running_backward()) is not None:
            before.end()
        self._recorded = step.recorded(BACKWARD, BACKWARD)
        self._recorded.__enter__()
        _thread.backward = weakref.ref(self)

    def end(self) -> None:
        """Note that the backward has ended, unless the next one has begun."""
        if _running_backward() is self:
            del _thread.backward
            self._recorded.__exit__(None, None, None)


def _running_backward() -> RecordedBackward | None:
    before: weakref.ref[RecordedBackward] | None = getattr(_thread, "backward", None)
    return None if before is None else before()


def mark(phase: str) -> None:
    """Take note of what the caller of the step goes on with; does nothing in a replica."""
    step = current_step()
    if step is not None:
        step.caller.mark(phase)


@contextmanager
def during(phase: str) -> Iterator[None]:
    """Record the block as a phase that interrupts the calling thread's, if that is recorded."""
    track: Track | None = getattr(_thread, "track", None) if recording else None
    if track is None:
        yield
        return
    track.enter(phase)
    try:
        yield
    finally:
        track.leave()


@contextmanager
def while_recording() -> Iterator[None]:
    """Around everything that may be recorded."""
    key = object()
    recording.add(key)
    try:
        yield
    finally:
        recording.discard(key)


@contextmanager
def _in_thread(step: StepRecording | None, track: Track | None) -> Iterator[None]:
    """Let the calling thread run a pass of a step, and be recorded on a track, until the block ends."""
    before = getattr(_thread, "step", None), getattr(_thread, "track", None)
    _thread.step, _thread.track = step, track
    try:
        yield
    finally:
        _thread.step, _thread.track = before
