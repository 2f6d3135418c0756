"""The steps of a profile: who did what when, without gaps, and how long each phase of a step lasts."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.runtime import timeline
from manyhands.runtime.timeline import WAIT, Span

OUTSIDE = "outside"  # the model: the loss, the optimizer, the data
PHASES = (
    timeline.SCATTER, timeline.REPLICATE, timeline.FORWARD, timeline.GATHER, timeline.BACKWARD, timeline.REDUCE, WAIT,
    OUTSIDE,
)  # fmt: skip


@dataclass(frozen=True)
class ProfiledStep:
    """One step: from the beginning of a forward to that of the next one in the same thread.

    Attributes:
        began, ended: in seconds of `time.perf_counter`.
        lanes: by name, what each replica did from `began` to `ended`, without gaps. Where replicas compute on
            accelerators, "host" is what the caller's thread did; a replica's lane is later, as its device works through
            what is queued, and goes from its first work for this step to that for the next one.
        rows: by name of a replica, its share of the batch.
    """

    began: float
    ended: float
    lanes: dict[str, list[Span]]
    rows: dict[str, int]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


def filled(spans: Sequence[Span], passes: Sequence[Span], began: float, ended: float) -> list[Span]:
    """Return spans with the gaps between them: a lane waits in a pass, and is outside between passes.

    >>> [tuple(span) for span in filled([Span("forward", 1, 3)], [Span("forward", 0, 3)], 0, 5)]
    [('wait', 0, 1), ('forward', 1, 3), ('outside', 3, 5)]
    """
    edges = sorted({began, ended, *(edge for span in passes for edge in span[1:])})
    found: list[Span] = []
    now = began
    for span in [*spans, Span(OUTSIDE, ended, ended)]:
        for edge in [*(edge for edge in edges if now < edge < span.began), span.began]:
            if edge > now:
                is_inside = any(each.began <= now < each.ended for each in passes)
                found.append(Span(WAIT if is_inside else OUTSIDE, now, edge))
                now = edge
        if span.ended > span.began:
            found.append(span)
            now = max(now, span.ended)
    return found


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
