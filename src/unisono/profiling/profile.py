"""A profile: the steps of one wrapper, where their time goes, and the files for people who want to see it."""

import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from unisono.console.files import replaced
from unisono.console.tables import table
from unisono.profiling.steps import PHASES, ProfiledStep, lanes_of, steps_of
from unisono.runtime import timeline
from unisono.runtime.contexts import contextmanager
from unisono.runtime.devices import DeviceClock
from unisono.runtime.timeline import StepRecording

_MOST_STEPS = 1000  # the last ones are kept
_NOTHING = (
    "nothing was profiled: this thread did not call the model on several devices, or did so inside "
    "torch.compile. For one device or a compiled step use torch.profiler"
)


class Profile:
    """What `DataParallel.profile` gives: the steps of its block, in its thread, of the last 1000 forwards.

        >>> def num_steps(profile: unisono.Profile) -> int:
        ...     return len(profile.steps())
        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
        >>> with model.profile() as profile:
        ...     output = model(torch.zeros(8, 5))
        >>> num_steps(profile)
        1

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

    Steps on one device, or with primitives that a subclass overrides, are left out.

    Attributes:
        model (str): the name of the module's class.
        rank (int): of the process, among those that a launcher has started.
    """

    def __init__(self, model: str, rank: int = 0) -> None:
        self.model, self.rank = model, rank
        self._clock_of = cache(DeviceClock)
        self._steps: deque[StepRecording] = deque(maxlen=_MOST_STEPS)
        self._ended: float | None = None
        self._thread = threading.get_ident()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs."""
        try:
            with timeline.while_recording():
                yield
        finally:
            self._ended = time.perf_counter()
            for step in self._steps.copy():
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
        recorded = self._steps.copy()  # at once, also without the lock: other threads may add to it
        own = [step for step in recorded if step.passes and step.replicas and step.thread == self._thread]
        return steps_of(own, self._ended if self._ended is not None else time.perf_counter())

    def lanes(self) -> dict[str, dict[str, float]]:
        """Return the seconds of a step that each replica spends in each phase: the medians of the steps.

        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
        >>> with model.profile() as profile:
        ...     model(torch.zeros(8, 5)).sum().backward()
        >>> {"forward", "backward"} <= profile.lanes()["replica 1, cpu"].keys()
        True
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
            unfinished.write_text(_chrome_trace(self.steps(), self.model, self.rank), encoding="utf-8")

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
        try:
            from unisono.profiling import picture
        except ModuleNotFoundError as error:
            raise ImportError("a picture of a profile needs matplotlib: pip install matplotlib") from error
        steps = self.steps()
        with replaced(Path(path)) as unfinished:
            picture.draw(unfinished, steps, self.summary(steps))

    def __str__(self) -> str:
        """Return where a step goes, as a table: rows and milliseconds, medians of the steps."""
        steps = self.steps()
        if not steps:
            return _NOTHING
        lanes = lanes_of(steps)
        used = [phase for phase in PHASES if any(phase in of_lane for of_lane in lanes.values())]
        lines = []
        for lane, seconds in lanes.items():
            rows = [step.rows[lane] for step in steps if lane in step.rows]  # the host has none
            milliseconds = [f"{1000 * seconds.get(phase, 0.0):.2f}" for phase in used]
            lines.append([lane, f"{statistics.median(rows):g}" if rows else "", *milliseconds])
        return f"{self.summary(steps)}; milliseconds:\n\n{table(['', 'rows', *used], lines)}"

    def __repr__(self) -> str:
        return f"<profile of {self.summary(self.steps())}>"

    def _repr_markdown_(self) -> str:
        """Return the table as a notebook shows it."""
        return str(self)

    def summary(self, steps: Sequence[ProfiledStep]) -> str:
        """Return in words how many steps there are, and how long one takes."""
        if not steps:
            return _NOTHING
        seconds = statistics.median(step.seconds for step in steps)
        return f"{self.model}: {len(steps)} step{'s' * (len(steps) > 1)}, {1000 * seconds:.3g} ms a step"

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a wrapper is not profiled


def _chrome_trace(steps: Sequence[ProfiledStep], model: str, rank: int) -> str:
    """Return a Chrome trace: what each lane did in each step, and the names of the lanes.

    One process, whose number is the rank; one thread a lane. Its events are complete ones ("ph": "X") in microseconds
    from the first step on, as the Trace Event Format of Chromium defines them.
    """
    lanes = list(dict.fromkeys(lane for step in steps for lane in step.lanes))
    found = [_name("process_name", rank, 0, f"{model}, rank {rank}")]
    found += [_name("thread_name", rank, number, lane) for number, lane in enumerate(lanes)]
    for number, step in enumerate(steps):
        for lane, spans in step.lanes.items():
            args = {"step": number} | ({"rows": step.rows[lane]} if lane in step.rows else {})
            place = {"ph": "X", "pid": rank, "tid": lanes.index(lane), "args": args}
            found += [
                {"name": phase, "ts": 1e6 * (began - steps[0].began), "dur": 1e6 * (ended - began), **place}
                for phase, began, ended in spans
            ]
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"})


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
