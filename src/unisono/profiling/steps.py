"""The steps of a profile: who did what when, without gaps, and how long each phase of a step lasts."""

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
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

    Attributes:
        began, ended: in seconds of `time.perf_counter`.
        lanes: by name, what each replica did from `began` to `ended`, without gaps; first "host", what the caller's
            thread did, where the first replica computes elsewhere.
        rows: by name of a replica, its share of the batch; of all batches, where a step has several forwards.
        thread: the number of its thread, in the order of their first steps.
    """

    began: float
    ended: float
    lanes: dict[str, list[Span]]
    rows: dict[str, int]
    thread: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


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


def filled(spans: Sequence[Span], passes: Sequence[Span], began: float, ended: float) -> list[Span]:
    """Return spans with the gaps between them: a lane waits in a pass, and is outside between passes.

    >>> [tuple(span) for span in filled([Span("forward", 1, 3)], [Span("forward", 0, 3)], 0, 5)]
    [('wait', 0, 1), ('forward', 1, 3), ('outside', 3, 5)]
    """
    gaps = [Span(OUTSIDE, began, ended)]  # what the lane does where nothing is recorded of it
    for _, start, end in sorted(passes, key=lambda each: each.began):
        _, free, _ = gaps.pop()
        gaps += [Span(OUTSIDE, free, max(free, start)), Span(WAIT, max(free, start), max(free, end))]
        gaps.append(Span(OUTSIDE, gaps[-1].ended, ended))
    starts = [gap.began for gap in gaps]
    found: list[Span] = []
    now = began
    for phase, start, end in [*sorted(spans, key=lambda span: span.began), Span(OUTSIDE, ended, ended)]:
        if start > now:
            for gap in gaps[bisect_right(starts, now) - 1 : bisect_left(starts, start)]:
                found.append(Span(gap.phase, max(gap.began, now), min(gap.ended, start)))
        found.append(Span(phase, max(now, start), end))
        now = max(now, start, end)
    return [span for span in found if span.ended > span.began]


def divided(spans: Sequence[Span], edges: Sequence[float]) -> list[list[Span]]:
    """Return spans without gaps divided at the inner edges: what is between the first two edges, the next two, and on.

    >>> [[tuple(span) for span in part] for part in divided([Span("forward", 0, 5)], [0, 2, 5])]
    [[('forward', 0, 2)], [('forward', 2, 5)]]
    """
    parts: list[list[Span]] = [[] for _ in edges[1:]]
    number = 0
    for phase, start, end in spans:
        while end > edges[number + 1]:
            if start < edges[number + 1]:
                parts[number].append(Span(phase, start, edges[number + 1]))
                start = edges[number + 1]
            number += 1
        parts[number].append(Span(phase, start, end))
    return parts


def lanes_of(steps: Sequence[ProfiledStep]) -> dict[str, dict[str, float]]:
    """Return the median seconds of a step that each lane spends in each phase."""
    found = {}
    for name in dict.fromkeys(name for step in steps for name in step.lanes):
        of_steps = [_seconds(step.lanes[name]) for step in steps if name in step.lanes]
        used = [phase for phase in PHASES if any(phase in of_step for of_step in of_steps)]
        found[name] = {phase: statistics.median(of_step[phase] for of_step in of_steps) for phase in used}
    return found


def _seconds(spans: Sequence[Span]) -> Counter[str]:
    """Return how long each phase lasted."""
    seconds: Counter[str] = Counter()
    for phase, began, ended in spans:
        seconds[phase] += ended - began  # type: ignore[assignment]
    return seconds
