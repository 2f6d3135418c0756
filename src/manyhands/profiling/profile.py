"""A profile: the steps of one wrapper, where their time goes, and the files for people who want to see it."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from manyhands.console.files import replaced
from manyhands.profiling import chrome_trace
from manyhands.profiling.steps import PHASES, ProfiledStep, filled, lanes_of
from manyhands.runtime import timeline
from manyhands.runtime.devices import DeviceClock
from manyhands.runtime.thread_pool import inside_replica
from manyhands.runtime.timeline import Span, Step

_MOST_STEPS = 1000  # the last ones are kept
_NOTHING = "nothing was profiled: the model was not called, or only inside torch.compile"


class Profile:
    """What `DataParallel.profile` gives: the steps of its block, the last 1000 of them.

    It can be read in the block and after it. What a replica does is one of these phases:

    | phase | what is done |
    |---|---|
    | scatter | the batch is split and sent; in backward, the gradient of the output |
    | replicate | the replicas are made, or updated |
    | forward, backward | the module computes |
    | gather | the outputs are joined |
    | reduce | gradients are summed, over replicas and over processes |
    | wait | the replica waits for other replicas, or for the caller's thread |
    | outside | neither forward nor backward runs: the loss, the optimizer, the data |

    Attributes:
        model: the name of the module's class.
        rank: of the process, among those that a launcher has started.
    """

    def __init__(self, model: str, device: torch.device, rank: int = 0) -> None:
        self.model, self.rank = model, rank
        self._device = device
        self._clock_of = cache(DeviceClock)
        self._steps: deque[Step] = deque(maxlen=_MOST_STEPS)
        self._ended: float | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the block runs."""
        with timeline.while_recording():
            yield
        self._ended = time.perf_counter()

    def new_step(self) -> Step | None:
        """Return the step that begins with a forward; None if the forward is part of another one, or is compiled."""
        if inside_replica() or timeline.is_in_forward() or torch.compiler.is_compiling():
            return None
        step = Step(self._clock_of)
        self._steps.append(step)
        return step

    def steps(self) -> list[ProfiledStep]:
        """Return the steps, in order; waits until devices have done them.

            >>> model = manyhands.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> with model.profile() as profile:
            ...     model(torch.zeros(8, 5)).sum().backward()
            >>> [step.rows for step in profile.steps()]
            [{'replica 0, cpu': 4, 'replica 1, cpu': 4}]

        A step whose forward has failed is left out.
        """
        steps = [step for step in self._steps if step.passes]
        now = self._ended if self._ended is not None else time.perf_counter()
        ends = {}
        for thread in {step.thread for step in steps}:
            of_thread = [step for step in steps if step.thread == thread]
            ends.update({id(a): b.passes[0].began for a, b in pairwise(of_thread)})
        return [self._profiled(step, max(ends.get(id(step), now), step.passes[-1].ended)) for step in steps]

    def lanes(self) -> dict[str, dict[str, float]]:
        """Return the seconds of a step that each replica spends in each phase: the medians of the steps.

        >>> model = manyhands.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
        >>> with model.profile() as profile:
        ...     model(torch.zeros(8, 5)).sum().backward()
        >>> sorted(profile.lanes()["replica 1, cpu"])
        ['backward', 'forward', 'outside', 'wait']
        """
        return lanes_of(self.steps())

    def save(self, path: str | Path) -> None:
        """Write the steps as a Chrome trace, which chrome://tracing and https://ui.perfetto.dev open.

            >>> model = manyhands.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
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

            >>> model = manyhands.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
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
            from manyhands.profiling import picture
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
        columns = [["", *lanes]]
        for phase in used:
            columns.append([phase, *(f"{1000 * of_lane.get(phase, 0.0):.2f}" for of_lane in lanes.values())])
        widths = [max(map(len, column)) for column in columns]
        lines = [f"{self.summary(steps)}; milliseconds:"]
        for name, *figures in zip(*columns, strict=True):
            cells = (figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *cells]))
        return "\n".join(lines)

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

    def _profiled(self, step: Step, ended: float) -> ProfiledStep:
        tracks = {f"replica {number}, {r.device}": (r.track, r.rows) for number, r in sorted(step.replicas.items())}
        began = step.passes[0].began
        lanes: dict[str, list[Span]] = {}
        if not tracks:
            lanes[str(self._device)] = filled(step.passes, step.passes, began, ended)
        elif all(track is not step.caller for track, _ in tracks.values()):
            lanes["host"] = filled(step.caller.spans(), step.passes, began, ended)
        for name, (track, _) in tracks.items():
            assert track is not None
            lanes[name] = filled(track.spans(), step.passes, began, ended)
        return ProfiledStep(began, ended, lanes, {name: rows for name, (_, rows) in tracks.items() if rows})

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a wrapper is not profiled
