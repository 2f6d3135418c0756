"""The steps of a profile: what each lane did in them, and how long each phase of a step lasts."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unisono.runtime import timeline
from unisono.runtime.timeline import WAIT, Span, StepRecording

OUTSIDE = "outside"  # the model: the loss, the optimizer, the data
PHASES = (
    timeline.SCATTER, timeline.REPLICATE, timeline.FORWARD, timeline.GATHER, timeline.BACKWARD, timeline.REDUCE, WAIT,
    OUTSIDE,
)  # fmt: skip


@dataclass(frozen=True)
class ProfiledStep:
    """One step: from the beginning of a forward to that of the next, once its backwards have ended.

    The first lane is "host", what the caller's thread did, where the first replica computes elsewhere. Between two
    spans a lane waits, in a pass, or is outside of the model.

    Attributes:
        began: in seconds of `time.perf_counter`.
        ended: in the same seconds.
        passes: its forwards and backwards, in the caller's thread.
        lanes: by name, what was recorded of each replica.
        rows: by name of a replica, its rows in all batches of the step.
    """

    began: float
    ended: float
    passes: list[Span]
    lanes: dict[str, list[Span]]
    rows: dict[str, int]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began

    def phases(self, lane: str) -> dict[str, float]:
        """Return the seconds of each phase of a lane; together they are those of the step.

        A device may lag behind the host, and compute while the host is outside of the model. So of the time in which a
        lane does nothing, as much counts as outside as the host was outside, and the rest as a wait.
        """
        seconds = _seconds(self.lanes[lane])
        idle = max(0.0, self.seconds - sum(seconds.values()))
        outside = min(idle, max(0.0, self.seconds - sum(_seconds(self.passes).values())))
        seconds[WAIT] = seconds.get(WAIT, 0.0) + idle - outside
        seconds[OUTSIDE] = outside
        return seconds


def steps_of(recorded: Sequence[StepRecording], now: float) -> list[ProfiledStep]:
    """Return the steps of the forwards of one thread, and of their backwards; the last one lasts until `now`."""
    groups = grouped(recorded)
    passes = [_in_order(each for step in group for each in step.passes) for group in groups]
    began = [of_group[0].began for of_group in passes]
    steps = []
    for number, group in enumerate(groups):
        lanes: dict[str, list[Span]] = {}
        rows = Counter[str]()
        for step in group:
            if all(timing.track is not step.caller for timing in step.replicas.values()):
                lanes.setdefault("host", []).extend(step.caller.spans())
            for replica, timing in sorted(step.replicas.items()):
                assert timing.track is not None
                lane = f"replica {replica}, {timing.device}"
                lanes.setdefault(lane, []).extend(timing.track.spans())
                rows[lane] += timing.rows
        ended = began[number + 1] if number + 1 < len(groups) else max(now, *(each.ended for each in passes[number]))
        in_order = {lane: _in_order(spans) for lane, spans in lanes.items()}  # two forwards, then both backwards
        steps.append(ProfiledStep(began[number], ended, passes[number], in_order, dict(rows)))
    return steps


def grouped(recorded: Sequence[StepRecording]) -> list[list[StepRecording]]:
    """Return the forwards of one thread, each with its backwards, as steps.

    A forward that begins before all backwards of those before it have ended is part of the same step: a loss is that of
    two forwards, say.
    """
    found: list[list[StepRecording]] = []
    ended = 0.0
    for step in recorded:
        if not found or step.passes[0].began >= ended:
            found.append([])
        found[-1].append(step)
        ended = max(ended, *(each.ended for each in step.passes))
    return found


def lanes_of(steps: Sequence[ProfiledStep]) -> dict[str, dict[str, float]]:
    """Return the median seconds of a step that each lane spends in each phase."""
    found = {}
    for lane in dict.fromkeys(lane for step in steps for lane in step.lanes):
        of_steps = [step.phases(lane) for step in steps if lane in step.lanes]
        used = [phase for phase in PHASES if any(phase in of_step for of_step in of_steps)]
        found[lane] = {phase: statistics.median(of_step.get(phase, 0.0) for of_step in of_steps) for phase in used}
    return found


def _in_order(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.began)


def _seconds(spans: Sequence[Span]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for phase, began, ended in spans:
        seconds[phase] = seconds.get(phase, 0.0) + ended - began
    return seconds
