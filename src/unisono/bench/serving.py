"""One program of a contender, in its own process: it takes steps on request, and sleeps otherwise.

It ends when the connection to the benchmark closes, which also happens when the benchmark is killed.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from unisono.bench.contenders import Contender, Task, step_of, use_part_of_cores
from unisono.console.targets import TargetError, one_line
from unisono.runtime.malloc import keep_freed_memory


@dataclass(frozen=True)
class Program:
    """The first message to a process: which program of which contender, on which target."""

    contender: Contender
    rank: int
    target: str
    folder: Path


@dataclass(frozen=True)
class Ready:
    """The reply after the setup: the rows of its shard, and facts about its model."""

    rows: int
    num_parameters: int
    normalises_shards: bool


@dataclass(frozen=True)
class Turn:
    """The request to take steps; the first ones are not timed."""

    num_untimed: int
    num_timed: int


@dataclass(frozen=True)
class StepTimes:
    """The reply to a turn: the seconds of all timed steps together, and the loss of every step."""

    seconds: float
    losses: list[float]


@dataclass(frozen=True)
class Failure:
    """The reply after an error, in one line."""

    reason: str


def serve(fd: int) -> None:
    """Set up the program that the first message names; take its steps until the connection closes."""
    connection = Connection(fd)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            program: Program = connection.recv()
            keep_freed_memory()
            use_part_of_cores(program.contender, program.rank)
            task = Task.of_target(program.target)
            if program.contender.num_programs > 1:
                task = task.shard(program.rank, program.contender.replicas)
            ready = Ready(
                task.rows,
                sum(parameter.numel() for parameter in task.model.parameters()),
                task.normalises_shards(),
            )
            step = step_of(program.contender, program.rank, task, program.folder)
            connection.send(ready)
            while True:
                connection.send(_take(step, connection.recv()))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except TargetError as error:
            connection.send(Failure(str(error)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  the caller's model may raise anything
            connection.send(Failure(one_line(error)))


def _take(step: Callable[[], Tensor], turn: Turn) -> StepTimes:
    losses = [step() for _ in range(turn.num_untimed)]
    began = time.perf_counter()
    losses += [step() for _ in range(turn.num_timed)]
    seconds = time.perf_counter() - began
    return StepTimes(seconds, torch.stack(losses).tolist())
