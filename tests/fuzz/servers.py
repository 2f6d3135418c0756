"""Processes in which programs run, one after the other: what hangs or crashes is ended, and counts as a difference.

A server is forked from a process that has imported torch, and keeps what is slow to make from one program to the next:
worker processes, and the process group of ranks. It ends with the process that has started it.
"""

import contextlib
import faulthandler
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from helpers.kept_workers import KeptWorkers

from fuzz.compare import Difference, EngineFor, Outcome, run
from fuzz.program import Program
from fuzz.side import ONE_PROCESS, Rank
from helpers.forked import context
from unisono.engines.threads import Threads

NUM_RANKS = 2
_MOST_TEXT = 6000  # of the stacks of a program that hangs
_FIRST = 3  # how many times the limit the first program may take, which starts workers
_END_S = 1.0


def engine_maker(engine: str, workers: KeptWorkers) -> EngineFor:
    """Return what makes the engine of a wrapper."""
    makers: dict[str, EngineFor] = {
        "threads": lambda _: Threads(),
        "separate memory": lambda _: Threads(separate_memory=True),
        "processes": workers.engine,
        "gloo": lambda devices: workers.engine(devices, share_memory=False),
        "ranks": lambda _: Threads(),
    }
    return makers[engine]


class ProgramServer:
    """Runs the programs of one engine in a process of their own, or in one for each rank.

    Args:
        engine: one of ENGINES.
        limit_s: how long a program may take.
        prepare: called in each process before the first program.
    """

    def __init__(self, engine: str, limit_s: float, prepare: Callable[[], None] | None = None) -> None:
        self._engine, self._limit_s, self._prepare = engine, limit_s, cloudpickle.dumps(prepare)
        self._folder: Any = None
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    @property
    def connection(self) -> Any:
        """What becomes ready when a program that was begun has ended."""
        return self._connections[0]

    def begin(self, program: Program) -> None:
        """Begin to run a program."""
        if not self._processes:
            self._start()
        with contextlib.suppress(BrokenPipeError):  # `outcome` finds out why
            for connection in self._connections:
                connection.send(program)

    def outcome(self) -> Outcome:
        """Wait for the program's end."""
        try:
            outcome: Outcome
            outcome, *_ = [
                connection.recv() for connection in self._connections
            ]  # of all: a pipe that nobody reads fills
        except (EOFError, ConnectionResetError):
            outcome = Outcome(self._how_it_ended())
            self.end()
        if self._engine == "ranks" and (outcome.raised or outcome.difference is not None):
            self.end()  # the ranks no longer agree on what comes next
        return outcome

    def run(self, program: Program) -> Outcome:
        """Run a program to its end."""
        self.begin(program)
        return self.outcome()

    def end(self) -> None:
        """End the processes, whatever they do."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_END_S)
            process.kill()
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._connections, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for number in range(NUM_RANKS if self._engine == "ranks" else 1):
            ours, theirs = context.Pipe()
            job = (theirs, number, self._engine, self._limit_s, self._folder.name, self._prepare, sys.path)
            process = context.Process(target=_serve, args=job)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _how_it_ended(self) -> Difference:
        self._processes[0].join()
        stacks = [path.read_text(errors="replace") for path in sorted(Path(self._folder.name).glob("stacks-*"))]
        text = "\n".join(stacks)[:_MOST_TEXT]
        if "Timeout (" in text:
            return Difference("hangs", f"no end within the limit:\n{text}")
        return Difference("crashes", f"the process ended with exit code {self._processes[0].exitcode}:\n{text}")


def _serve(
    connection: Any, number: int, engine: str, limit_s: float, folder: str, prepare: bytes, path: list[str]
) -> None:
    os.setpgid(0, 0)  # Ctrl-C at the terminal is for the process that has started this one
    os.environ["UNISONO_BIND_CORES"] = "0"  # the second replica of every server would have the same core
    # The first checkpoint in a process imports this, which takes seconds: so the fork server of workers does.
    Path(folder, "sitecustomize.py").write_text("import torch._dynamo\n")
    os.environ["PYTHONPATH"] = folder
    sys.path[:] = path
    torch.set_num_threads(1)
    rank: Rank = ONE_PROCESS
    agree: Any = None
    if engine == "ranks":
        rank = Rank(number, NUM_RANKS)
        store = torch.distributed.FileStore(str(Path(folder, "store")), NUM_RANKS)
        timeout = timedelta(seconds=limit_s / 4)
        torch.distributed.init_process_group("gloo", store=store, rank=number, world_size=NUM_RANKS, timeout=timeout)
        # Of its own, with a longer timeout: a rank that has failed waits here for one that waits for it elsewhere.
        agree = partial(_agree, torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=limit_s)))
    workers = KeptWorkers()
    engine_for = engine_maker(engine, workers)
    if (function := cloudpickle.loads(prepare)) is not None:
        function()
    gc.freeze()  # collections look at what programs make, not at torch
    with open(Path(folder, f"stacks-{number}"), "w") as stacks:
        faulthandler.enable(stacks)
        factor = _FIRST
        while True:
            try:
                program = connection.recv()
            except (EOFError, OSError):
                break
            faulthandler.dump_traceback_later(limit_s * factor, exit=True, file=stacks)
            factor = 1
            outcome = run(program, engine_for, limit_s / 2, rank, agree)
            faulthandler.cancel_dump_traceback_later()
            workers.take_back()
            connection.send(outcome)
    workers.end()


def _agree(group: Any, difference: Difference | None) -> Difference | None:
    """Return the difference of the lowest rank that has one, in all ranks."""
    found = torch.tensor([difference is not None], dtype=torch.int64)
    torch.distributed.all_reduce(found, group=group)
    if not found.item():
        return None
    each: list[Any] = [None] * NUM_RANKS
    torch.distributed.all_gather_object(each, difference, group=group)
    return next(one for one in each if one is not None)


def repeat(program: Program, limit_s: float = 60) -> None:
    """Run a program and print what differs: in this process, for a debugger, but for that of several ranks."""
    if program.engine == "ranks":
        server = ProgramServer(program.engine, limit_s)
        try:
            outcome = server.run(program)
        finally:
            server.end()
    else:
        workers = KeptWorkers()
        outcome = run(program, engine_maker(program.engine, workers), limit_s)
        workers.take_back()
        workers.end()
    print(outcome.difference.text if outcome.difference else "no difference")
