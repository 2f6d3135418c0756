"""A profile: the steps of one wrapper, where their time goes, and the files for people who want to see it."""

import contextlib
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from unisono.console.files import replaced
from unisono.console.tables import table
from unisono.profiling import chrome_trace
from unisono.profiling.steps import PHASES, ProfiledStep, divided, filled, grouped, lanes_of
from unisono.runtime import timeline
from unisono.runtime.devices import DeviceClock
from unisono.runtime.timeline import Span, StepRecording

_MOST_STEPS = 1000  # the last ones are kept
_NOTHING = (
    "nothing was profiled: the model was not called, or only on one device or inside torch.compile, where "
    "torch.profiler shows what it does"
)


class Profile:
    """What `DataParallel.profile` gives: the steps of its block, of the last 1000 forwards.

    It can be read in the block and after it. What a replica does is one of these phases:

    | phase | what is done |
    |---|---|
    | scatter | the batch is split and sent; in backward, the gradient of the output |
    | replicate | the replicas are made, or updated |
    | forward, backward | the module computes |
    | gather | the outputs are joined |
    | reduce | gradients are summed, over replicas and over processes; with the wait for slower processes |
    | wait | the replica waits for other replicas, or for the caller's thread |
    | outside | neither forward nor backward runs: the loss, the optimizer, the data |

    Steps that no engine has run are left out: those on one device, or through verbs of a subclass's own.

    Attributes:
        model: the name of the module's class.
        rank: of the process, among those that a launcher has started.
    """

    def __init__(self, model: str, rank: int = 0) -> None:
        self.model, self.rank = model, rank
        self._clock_of = cache(DeviceClock)
        self._steps: deque[StepRecording] = deque(maxlen=_MOST_STEPS)
        self._ended: float | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs."""
        try:
            with timeline.while_recording():
                yield
        finally:
            self._ended = time.perf_counter()
            for step in list(self._steps):
                step.is_open = False

    def new_step(self) -> StepRecording:
        """Return the step that begins with a forward."""
        step = StepRecording(self._clock_of)
        self._steps.append(step)
        return step

    def steps(self) -> list[ProfiledStep]:
        """Return the steps, in order; waits until devices have done them.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> with model.profile() as profile:
            ...     model(torch.zeros(8, 5)).sum().backward()
            >>> [step.rows for step in profile.steps()]
            [{'replica 0, cpu': 4, 'replica 1, cpu': 4}]

        A forward that has failed is left out.
        """
        recorded = list(self._steps)  # a copy: other threads may add to it
        steps = [step for step in recorded if step.passes and step.replicas]
        now = self._ended if self._ended is not None else time.perf_counter()
        found: list[ProfiledStep] = []
        for number, thread in enumerate(dict.fromkeys(step.thread for step in steps)):
            found += self._of_thread([step for step in steps if step.thread == thread], number, now)
        return sorted(found, key=lambda step: step.began)

    def lanes(self) -> dict[str, dict[str, float]]:
        """Return the seconds of a step that each replica spends in each phase: the medians of the steps.

        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
        >>> with model.profile() as profile:
        ...     model(torch.zeros(8, 5)).sum().backward()
        >>> sorted(profile.lanes()["replica 1, cpu"])
        ['backward', 'forward', 'outside', 'wait']
        """
        return lanes_of(self.steps())

    def save(self, path: str | Path) -> None:
        """Write the steps as a Chrome trace, which chrome://tracing and https://ui.perfetto.dev open.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> with model.profile() as profile:
            ...     model(torch.zeros(8, 5)).sum().backward()
            >>> profile.save("step.json")

        Raises:
            OSError: the file cannot be written.
        """
        with replaced(Path(path)) as unfinished:
            self.write_trace(unfinished)

    def draw(self, path: str | Path) -> None:
        """Draw some steps, one lane a replica, and what share of a step each phase takes, as a PNG; needs matplotlib.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> with model.profile() as profile:
            ...     model(torch.zeros(8, 5)).sum().backward()
            >>> profile.draw("step.png")

        Raises:
            OSError: the file cannot be written.
            ImportError: matplotlib is not installed.
        """
        with replaced(Path(path)) as unfinished:
            self.write_picture(unfinished)

    def write_trace(self, path: Path) -> None:
        """Write what `save` does, without a temporary file."""
        chrome_trace.write(path, self.steps(), self.model, self.rank)

    def write_picture(self, path: Path) -> None:
        """Write what `draw` does, without a temporary file."""
        try:
            from unisono.profiling import picture
        except ModuleNotFoundError as error:
            raise ImportError("a profile is drawn with matplotlib: pip install matplotlib") from error
        steps = self.steps()
        picture.draw(path, steps, self.summary(steps))

    def __str__(self) -> str:
        """Return where a step goes, as a table: milliseconds, medians of the steps."""
        steps = self.steps()
        if not steps:
            return _NOTHING
        lanes = lanes_of(steps)
        used = [phase for phase in PHASES if any(phase in of_lane for of_lane in lanes.values())]
        rows = [[lane, *(f"{1000 * of.get(phase, 0.0):.2f}" for phase in used)] for lane, of in lanes.items()]
        return f"{self.summary(steps)}; milliseconds:\n\n{table(['', *used], rows)}"

    def __repr__(self) -> str:
        return f"<profile of {self.summary(self.steps())}>"

    def _repr_markdown_(self) -> str:
        """Return the table as a notebook shows it."""
        return str(self)

    def in_words(self) -> list[str]:
        """Return where a step goes, in shares: a line for all, then one for each replica, the largest share first."""
        steps = self.steps()
        lines = [self.summary(steps)]
        for lane, of_lane in lanes_of(steps).items():
            total = sum(of_lane.values())
            shares = sorted(((seconds / total, phase) for phase, seconds in of_lane.items()), reverse=True)
            lines.append(f"{lane}: " + ", ".join(f"{phase} {share:.0%}" for share, phase in shares if share >= 0.005))
        return lines

    def summary(self, steps: Sequence[ProfiledStep]) -> str:
        """Return in words how many steps there are, and how long one takes."""
        if not steps:
            return _NOTHING
        seconds = statistics.median(step.seconds for step in steps)
        return f"{self.model}: {len(steps)} step{'s' * (len(steps) > 1)}, {1000 * seconds:.3g} ms a step"

    def _of_thread(self, recorded: Sequence[StepRecording], thread: int, now: float) -> list[ProfiledStep]:
        """Return the steps of one thread, which its forwards and their backwards divide among them."""
        groups = grouped(recorded)
        passes = [each for step in recorded for each in step.passes]
        spans: dict[str, list[Span]] = {}
        rows = [Counter[str]() for _ in groups]
        of_groups: list[dict[str, None]] = [{} for _ in groups]  # the lanes of each, in order
        for number, group in enumerate(groups):
            for step in group:
                for lane, (of_lane, num_rows) in self._lanes(step).items():
                    spans.setdefault(lane, []).extend(of_lane)
                    of_groups[number][lane] = None
                    rows[number][lane] += num_rows
        began = [group[0].passes[0].began for group in groups]
        last = max(now, *(span.ended for some in (passes, *spans.values()) for span in some))
        edges = [*began, last]
        lanes = {lane: divided(filled(of_lane, passes, began[0], last), edges) for lane, of_lane in spans.items()}
        return [
            ProfiledStep(
                edges[number],
                edges[number + 1],
                {lane: lanes[lane][number] for lane in of_groups[number]},
                {lane: count for lane, count in rows[number].items() if count},
                thread,
            )
            for number in range(len(groups))
        ]

    def _lanes(self, step: StepRecording) -> dict[str, tuple[list[Span], int]]:
        """Return what was recorded of a forward and its backwards by lane, and the lane's rows."""
        replicas = sorted(step.replicas.items())
        found = {}
        if all(timing.track is not step.caller for _, timing in replicas):
            found["host"] = (step.caller.spans(), 0)
        for number, timing in replicas:
            assert timing.track is not None
            found[f"replica {number}, {timing.device}"] = (timing.track.spans(), timing.rows)
        return found

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a wrapper is not profiled
