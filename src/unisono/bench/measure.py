"""The measurement: contenders take turns, some seconds each, round after round.

First every contender runs alone. It takes three steps, whose losses show whether it computes the same as the others,
and then some more, during which its memory is measured (alone, because the PSS of torch's shared pages falls with the
number of processes). Then all are started and sleep, except for the one whose turn it is. So a change in the machine's
speed affects all of them, and none uses the cores of another. Every turn begins with an untimed step, which warms the
caches. The results are ratios within a round.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unisono.bench import memory
from unisono.bench.contender_processes import ContenderFailedError, ContenderProcesses, close_all
from unisono.bench.contenders import MEASURED, STEPS_UNTIL_FROZEN, Contender
from unisono.bench.results import Line, Workload, mean_over_rows
from unisono.bench.serving import StepTimes
from unisono.console.progress import Progress, Task

_NUM_CHECKED = 3
_NUM_MEMORY_STEPS = 2
_RELATIVE_TOLERANCE = 1e-3
_LONGEST_WARM_UP = 50


def measure(
    name: str, target: str, contenders: Sequence[Contender], rounds: int, seconds: float, progress: Progress
) -> Workload:
    """Measure how fast the contenders take training steps on a target.

    Args:
        name: what the workload is called.
        target: `package.module:build`.
        contenders: all that take part.
        rounds, seconds: the number of turns of each, and their approximate length.
        progress: shows it.

    Returns:
        A line for each contender, in their order; a failed one has the reason.
    """
    workload = Workload(name, [Line(contender.name, contender.replicas) for contender in contenders])
    runners = each_alone(workload, target, contenders, progress)
    task = Task(progress, f"{name}: speed", rounds * len(runners))
    patient = False
    try:
        for runner in runners:
            with _failing_alone(runner.line):
                runner.start(target)
        for runner in runners:
            with _failing_alone(runner.line):
                runner.warm_up(seconds)
        for number in range(rounds):
            for runner in runners if number % 2 == 0 else reversed(runners):
                with _failing_alone(runner.line):
                    runner.take_turn(seconds)
                task.advance(f"round {number + 1}, {runner.contender}: {runner.last_result()}")
        patient = True
    finally:
        close_all([runner.processes for runner in runners if runner.processes is not None], patient)
    for line in workload.lines:
        if line.failure:
            line.turns_s = []
    return workload


@dataclass
class Runner:
    """A contender that takes turns, unless it has failed."""

    contender: Contender
    line: Line
    step_s: float  # an estimate
    processes: ContenderProcesses | None = None

    def start(self, target: str) -> None:
        self.processes = ContenderProcesses(self.contender, target)

    def warm_up(self, seconds: float) -> None:
        """Take steps for about one turn, or until measured shares are frozen, and estimate the time of a step."""
        if self.processes is not None:
            self.processes.wait_until_ready()
            num_steps = min(_LONGEST_WARM_UP, math.ceil(seconds / self.step_s))
            if self.contender.name in MEASURED:
                self.processes.take(1, STEPS_UNTIL_FROZEN)
            self.step_s = _slowest(self.processes.take(1, num_steps)) / num_steps

    def take_turn(self, seconds: float) -> None:
        if self.processes is not None and not self.line.failure:
            num_steps = max(1, round(seconds / self.step_s))
            self.line.turns_s.append(_slowest(self.processes.take(1, num_steps)) / num_steps)

    def last_result(self) -> str:
        return self.line.failure or f"{1000 * self.line.turns_s[-1]:.1f} ms a step"


@contextlib.contextmanager
def _failing_alone(line: Line) -> Iterator[None]:
    """Record in its line that a contender failed; the others go on."""
    try:
        yield
    except ContenderFailedError as failure:
        line.failure = str(failure)


def each_alone(workload: Workload, target: str, contenders: Sequence[Contender], progress: Progress) -> list[Runner]:
    """Run every contender alone; return those that did not fail.

    The workload gets the losses and whether they agree, the memory, and facts about the model and its batch.
    """
    task = Task(progress, f"{workload.name}: losses and memory", len(contenders))
    runners = []
    for contender, line in zip(contenders, workload.lines, strict=True):
        with _failing_alone(line):
            runners.append(Runner(contender, line, _alone(contender, target, line, workload)))
        task.advance(f"{contender}: {line.failure or f'loss {line.losses[-1]:.4f}'}")
    _compare_losses(workload)
    return runners


def _alone(contender: Contender, target: str, line: Line, workload: Workload) -> float:
    """Take the first steps of a contender and measure its memory; return an estimate of the seconds of a step."""
    with ContenderProcesses(contender, target) as processes:
        processes.wait_until_ready()
        first = processes.ready[0]
        rows = [ready.rows for ready in processes.ready]
        workload.rows, workload.num_parameters = sum(rows), first.num_parameters
        workload.normalises_shards = first.normalises_shards
        taken = processes.take(_NUM_CHECKED - 1, 1)
        line.losses = mean_over_rows([one.losses for one in taken], rows)
        line.memory_bytes = memory.peak(processes, _NUM_MEMORY_STEPS)
        return _slowest(taken)


def _slowest(taken: Sequence[StepTimes]) -> float:
    return max(one.seconds for one in taken)


def _compare_losses(workload: Workload) -> None:
    """Mark the lines whose losses differ from those of the first contender that should compute the same.

    With batch norm per replica, `plain` computes something else. After the first step, each program of `limit` has
    other parameters. DDP takes the mean of the replicas' means, which is not the mean over rows if replicas have
    different numbers of rows.
    """
    for replicas in workload.replica_counts() or [1]:
        same = [
            line for line in workload.lines if line.losses and line.replicas == replicas and line.contender != "plain"
        ]
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
