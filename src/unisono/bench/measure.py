"""The measurement: contenders take turns, some seconds each, round after round.

All are started, and sleep, except for the one whose turn it is. So a change in the machine's speed affects all of them,
and none uses the cores of another. When it has started, each takes three steps, whose losses show whether it computes
the same as the others. When all have, each warms up for about a turn, and its memory is measured. Every turn begins
with an untimed step, which warms the caches. Meanwhile it is noted how much of the cores other programs take.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from unisono.bench.contenders import MEASURED, STEPS_UNTIL_FROZEN, Contender
from unisono.bench.machine import num_cores, other_programs
from unisono.bench.processes import busy_cores
from unisono.bench.programs import ContenderFailedError, ContenderProcesses, StepsTaken
from unisono.bench.results import Line, Workload
from unisono.bench.turns import in_turn, lower_quartile
from unisono.console.progress import Task

_NUM_CHECKED = 3
_NUM_MEMORY_STEPS = 2
_RELATIVE_TOLERANCE = 1e-3
_LONGEST_WARM_UP = 50
_START_S = 6.0  # of a contender, about: torch is imported, the model is built


def expected_s(contenders: Sequence[Contender], rounds: int, seconds: float) -> float:
    """Return about how long `measure` takes: each contender starts, warms up, and takes its turns."""
    return len(contenders) * (_START_S + (1 + rounds) * seconds)


def measure(
    name: str, target: str, contenders: Sequence[Contender], rounds: int, seconds: float, task: Task
) -> Workload:
    """Return how fast contenders take training steps on a target, a line for each in their order.

    Args:
        name: what the workload is called.
        target: `package.module:build`.
        contenders: all that take part; the line of one that fails has the reason.
        rounds, seconds: the number of turns of each, and their approximate length.
        task: shows how far it is, in the seconds of `expected_s`.
    """
    workload = Workload(name, [Line(contender.name, contender.replicas) for contender in contenders])
    with contextlib.ExitStack() as stack:
        pairs = zip(contenders, workload.lines, strict=True)
        runners = [_Runner(contender, line, target, stack) for contender, line in pairs]
        for runner in runners:
            runner.attempt(runner.start, workload)
            task.advance(f"{name}, {runner.contender}: {runner.line.failure or 'started'}", _START_S)
        for runner in runners:
            runner.attempt(runner.warm_up, seconds)
            task.advance(f"{name}, {runner.contender}: {runner.line.failure or 'warmed up'}", seconds)
        compare_losses(workload)
        for runner in in_turn(runners, rounds):
            runner.attempt(runner.take_turn, seconds)
            task.advance(f"{name}, {runner.contender}: {runner.last_result()}", seconds)
    for line in workload.lines:
        if line.failure:
            line.turns_s = []
    if uses := [use for runner in runners for use in runner.uses]:
        elapsed_s, busy_s, own_s = map(sum, zip(*uses, strict=True))
        workload.disturbance = other_programs(busy_s / elapsed_s, own_s / elapsed_s, num_cores()) or ""
    return workload


class _Runner:
    """A contender, its line, and its processes while they are there.

    Args:
        stack: ends the processes.
    """

    def __init__(self, contender: Contender, line: Line, target: str, stack: contextlib.ExitStack) -> None:
        self.contender, self.line, self._target, self._stack = contender, line, target, stack
        self.uses: list[tuple[float, float, float]] = []  # of each turn: seconds, cores' busy seconds, its own of these
        self._step_s = 0.0  # an estimate

    def attempt(self, action: Callable[..., object], *arguments: Any) -> None:
        """Do it, unless the contender has failed. If it fails now, its line says why, and the others go on."""
        if not self.line.failure:
            try:
                action(*arguments)
            except ContenderFailedError as failure:
                self.line.failure = str(failure)

    def start(self, workload: Workload) -> None:
        """Start the processes, note facts about the workload, and take the steps whose losses are compared."""
        started = ContenderProcesses(self.contender, self._target)
        self._processes = self._stack.enter_context(contextlib.closing(started))
        ready = self._processes.wait_until_ready()
        rows = [each.rows for each in ready]
        workload.rows, workload.num_parameters = sum(rows), ready[0].num_parameters
        workload.normalises_shards = ready[0].normalises_shards
        taken = self._processes.take(_NUM_CHECKED)
        self.line.losses = mean_over_rows([each.losses for each in taken], rows)
        self._step_s = max(each.seconds[-1] for each in taken)

    def warm_up(self, seconds: float) -> None:
        """Note the memory; take steps for about a turn, or until measured shares are frozen, to estimate their time."""
        self.line.memory_bytes = self._processes.peak_memory_bytes(_NUM_MEMORY_STEPS)
        if self.contender.name in MEASURED:
            self._processes.take(STEPS_UNTIL_FROZEN)
        num_steps = min(_LONGEST_WARM_UP, math.ceil(seconds / self._step_s))
        self._step_s = _step_s(self._processes.take(1 + num_steps))

    def take_turn(self, seconds: float) -> None:
        own_s = self._cpu_seconds()
        busy_cores()  # counts from here
        began = time.perf_counter()
        taken = self._processes.take(1 + max(1, round(seconds / self._step_s)))
        elapsed_s = time.perf_counter() - began
        self.uses.append((elapsed_s, elapsed_s * busy_cores(), self._cpu_seconds() - own_s))
        self.line.turns_s.append(_step_s(taken))

    def last_result(self) -> str:
        return self.line.failure or f"{1000 * self.line.turns_s[-1]:.1f} ms a step"

    def _cpu_seconds(self) -> float:
        return self._processes.cpu_seconds() + time.process_time()


def _step_s(taken: Sequence[StepsTaken]) -> float:
    """Return the seconds of a step of a turn, without its first: of its slowest process."""
    return max(lower_quartile(each.seconds[1:]) for each in taken)


def mean_over_rows(losses: Sequence[Sequence[float]], rows: Sequence[int]) -> list[float]:
    """Return the losses of the whole batch, step by step, from those of each program over its own rows."""
    weights = rows if sum(rows) else [1] * len(rows)
    return [
        sum(weight * loss for weight, loss in zip(weights, at, strict=True)) / sum(weights)
        for at in zip(*losses, strict=True)
    ]


def compare_losses(workload: Workload) -> None:
    """Mark the lines whose losses differ from those of the first contender that should compute the same.

    With batch norm per replica, `plain` computes something else. After the first step, each program of `limit` has
    other parameters. DDP takes the mean of the replicas' means, which is not the mean over rows if replicas have
    different numbers of rows.
    """
    for replicas in workload.replica_counts():
        same = [line for line in workload.lines if line.losses and line.replicas == replicas]
        if not workload.normalises_shards:
            same = [line for line in workload.lines if line.losses and line.contender == "plain"] + same
        reference = next((line for line in same if line.contender != "limit"), None)
        if reference is None:
            continue
        for line in same:
            count = 1 if line.contender == "limit" or workload.rows % replicas else _NUM_CHECKED
            for number, (own, expected) in enumerate(zip(line.losses[:count], reference.losses, strict=False), 1):
                if not math.isclose(own, expected, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-6):
                    line.differs = f"loss {own:.6g} in step {number}, where {reference.contender} has {expected:.6g}"
                    break
