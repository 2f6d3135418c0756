"""The measurement: contenders take turns, some seconds each, round after round.

All are started, and sleep, except for the one whose turn it is. So a change in the machine's speed affects all of them,
and none uses the cores of another. When all have taken their first steps, each warms up for about a turn, and its
memory is measured. Every turn begins with an untimed step, which warms the caches. Meanwhile it is noted how much of
the cores other programs take. Whether all compute the same numbers is what `unisono verify` says.

`measure_here` is the same for one step, in this process: what `unisono plan` measures.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import psutil

from unisono.bench.contenders import MEASURED, STEPS_UNTIL_FROZEN, Contender
from unisono.bench.machine import num_cores, other_programs, usable_cores
from unisono.bench.programs import ContenderFailedError, ContenderProcesses
from unisono.bench.results import Line, Workload, in_turn
from unisono.bench.tasks import Step
from unisono.bench.tasks import Task as Built
from unisono.console.progress import Task
from unisono.primitives.measured_shares import lower_quartile
from unisono.runtime.contexts import contextmanager

_FIRST_STEPS = 3
_FIRST_STEP_BYTES = 70 * 2**20  # of what torch imports with the first backward and the first optimizer, about
_NUM_MEMORY_STEPS = 2
_LONGEST_WARM_UP = 50
_START_S = 6.0  # of as many processes as there are cores, about: torch is imported, the model is built
_FEWEST_STEPS, _MOST_STEPS = 5, 100  # of `measure_here`


def expected_s(contenders: Sequence[Contender], rounds: int, seconds: float) -> float:
    """Return about how long `measure` takes: each contender starts, warms up, and takes its turns."""
    return sum(map(_start_s, contenders)) + len(contenders) * (1 + rounds) * seconds


def _start_s(contender: Contender) -> float:
    return math.ceil(contender.num_programs / num_cores()) * _START_S


def expected_bytes(contenders: Sequence[Contender], built: Built) -> int:
    """Return about how much memory the processes of contenders take, without what a step's own tensors need.

    That of this process, which has imported torch and built the model, and each one's gradients and momentum.
    """
    gradients = momentum = sum(parameter.nbytes for parameter in built.model.parameters())
    own: int = psutil.Process().memory_full_info().uss
    num_programs = sum(contender.num_programs for contender in contenders)
    return num_programs * (own + _FIRST_STEP_BYTES + gradients + momentum)


def measure(
    name: str,
    target: str,
    contenders: Sequence[Contender],
    rounds: int,
    seconds: float,
    task: Task,
    workloads: list[Workload] | None = None,
) -> Workload:
    """Return how fast contenders take training steps on a target, in turns of about so many seconds.

    Each has a line, in their order; that of one that fails has the reason. `task` shows the seconds of `expected_s`,
    and says the figure of each turn that is done: so a run that is killed leaves them.
    The workload is added to `workloads` at once: after Ctrl-C it has the turns so far.
    """
    workload = Workload(name, [Line(contender.name, contender.replicas) for contender in contenders])
    if workloads is not None:
        workloads.append(workload)
    with contextlib.ExitStack() as stack:
        pairs = zip(contenders, workload.lines, strict=True)
        runners = [_Runner(contender, line, target, stack) for contender, line in pairs]
        for runner in runners:
            runner.attempt(runner.start, workload)
            task.advance(f"{name}, {runner.contender}: {runner.line.failure or 'started'}", _start_s(runner.contender))
        for runner in runners:
            runner.attempt(runner.warm_up, seconds)
            task.advance(f"{name}, {runner.contender}: {runner.line.failure or 'warmed up'}", seconds)
        for runner in in_turn(runners, rounds):
            if not runner.line.failure:
                runner.attempt(runner.take_turn, seconds)
                task.say(f"{name}, {runner.contender}: {runner.last_result(rounds)}")
            task.advance(name, seconds)
    for line in workload.lines:
        if line.failure:
            line.turns_s = []
    workload.disturbance = _disturbance([use for runner in runners for use in runner.uses])
    return workload


def measure_here(step: Callable[[], Step], seconds: float) -> tuple[list[Step], str]:
    """Take steps in this process in one turn of about so many seconds, after the first ones.

    Return the steps, and in words the other programs that kept cores busy meanwhile; "" if there were none.
    """
    estimate_s = min(step().whole_s for _ in range(_FIRST_STEPS))
    num_steps = max(_FEWEST_STEPS, min(round(seconds / estimate_s), _MOST_STEPS))
    uses: list[_Use] = []
    with _noting(uses, time.process_time):
        steps = [step() for _ in range(1 + num_steps)]
    return steps[1:], _disturbance(uses)


_Use: TypeAlias = tuple[float, float, float]  # of a turn: seconds, the cores' busy seconds, and its own of these


@contextmanager
def _noting(uses: list[_Use], cpu_seconds: Callable[[], float]) -> Iterator[None]:
    """Note how the cores are used in the block; `cpu_seconds` is the time that its own programs have computed."""
    own_s = cpu_seconds()
    busy_cores()  # counts from here
    began = time.perf_counter()
    yield
    elapsed_s = time.perf_counter() - began
    uses.append((elapsed_s, elapsed_s * busy_cores(), cpu_seconds() - own_s))


def _disturbance(uses: Sequence[_Use]) -> str:
    """Return in words the other programs that kept cores busy during turns; "" if there were none."""
    if not uses:
        return ""
    elapsed_s, busy_s, own_s = map(sum, zip(*uses, strict=True))
    return other_programs(busy_s / elapsed_s, own_s / elapsed_s, num_cores()) or ""


class _Runner:
    """A contender, its line, and its processes, which the stack ends."""

    def __init__(self, contender: Contender, line: Line, target: str, stack: contextlib.ExitStack) -> None:
        self.contender, self.line, self._target, self._stack = contender, line, target, stack
        self.uses: list[_Use] = []  # of each turn
        self._step_s = 0.0  # an estimate

    def attempt(self, action: Callable[..., object], *arguments: Any) -> None:
        """Do it, unless the contender has failed. If it fails now, its line says why, and the others go on."""
        if not self.line.failure:
            try:
                action(*arguments)
            except ContenderFailedError as failure:
                self.line.failure = str(failure)

    def start(self, workload: Workload) -> None:
        """Start the processes, note facts about the workload, and take the first steps."""
        started = ContenderProcesses(self.contender, self._target)
        self._processes = self._stack.enter_context(contextlib.closing(started))
        ready = self._processes.start()
        workload.rows, workload.num_parameters = sum(each.rows for each in ready), ready[0].num_parameters
        workload.normalises_shards = ready[0].normalises_shards
        self._step_s = max(seconds[-1] for seconds in self._processes.take(_FIRST_STEPS))

    def warm_up(self, seconds: float) -> None:
        """Note the memory; take steps for about a turn, or until measured shares are frozen, to estimate their time."""
        self.line.memory_bytes = self._processes.peak_memory_bytes(_NUM_MEMORY_STEPS)
        if self.contender.name == MEASURED:
            self._processes.take(STEPS_UNTIL_FROZEN)
        num_steps = min(_LONGEST_WARM_UP, math.ceil(seconds / self._step_s))
        self._step_s = _step_s(self._processes.take(1 + num_steps))

    def take_turn(self, seconds: float) -> None:
        with _noting(self.uses, self._cpu_seconds):
            taken = self._processes.take(1 + max(1, round(seconds / self._step_s)))
        self.line.turns_s.append(_step_s(taken))

    def last_result(self, rounds: int) -> str:
        turns_s = self.line.turns_s
        return self.line.failure or f"turn {len(turns_s)} of {rounds}, {1000 * turns_s[-1]:.1f} ms a step"

    def _cpu_seconds(self) -> float:
        return self._processes.cpu_seconds() + time.process_time()


def busy_cores() -> float:
    """Return how many of the cores that this process may use were busy since the call before, on average."""
    percent = psutil.cpu_percent(percpu=True)
    return float(sum(percent[core] for core in usable_cores() if core < len(percent)) / 100)


def _step_s(taken: Sequence[Sequence[float]]) -> float:
    """Return the seconds of a step of a turn, without its first: of its slowest process."""
    return max(lower_quartile(seconds[1:]) for seconds in taken)
