"""Processes in which programs run, one after the other: what hangs or crashes is ended, and counts as a difference.

A server is forked from a process that has imported torch, where the system forks. It keeps the process group of ranks
from one program to the next, and ends with the process that has started it.
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

import torch

from fuzz.compare import SAID, Difference, Outcome, run
from fuzz.program import Program
from fuzz.side import ONE_PROCESS, Rank, make_asynchronous_devices
from helpers.forked import context
from unisono.runtime.torch_private import checkpoints

NUM_RANKS = 2
_MOST_TEXT = 6000  # of the stacks of a program that hangs
_END_S = 1.0


class ProgramServer:
    """Runs the programs of one place in a process of their own, or in one for each rank.

    Args:
        place: of the programs.
        limit_s: how long a program may take.
        prepare: called in each process before the first program; a function of a module.
    """

    def __init__(self, place: str, limit_s: float, prepare: Callable[[], None] | None = None) -> None:
        self._place, self._limit_s, self._prepare = place, limit_s, prepare
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
        if "ranks" in self._place and (outcome.raised or outcome.said or outcome.difference is not None):
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
        for number in range(NUM_RANKS if "ranks" in self._place else 1):
            ours, theirs = context.Pipe()
            job = (theirs, number, self._place, self._limit_s, self._folder.name, self._prepare, sys.path)
            process = context.Process(target=_serve, args=job)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _how_it_ended(self) -> Difference:
        for process in self._processes:
            process.join(_END_S)  # the other rank may wait for the next program
        stacks = [path.read_text(errors="replace") for path in sorted(Path(self._folder.name).glob("stacks-*"))]
        text = "\n".join(stacks)[:_MOST_TEXT]
        if "Timeout (" in text:
            return Difference("hangs", f"no end within the limit:\n{text}")
        codes = [process.exitcode for process in self._processes if process.exitcode is not None]
        return Difference("crashes", f"the process ended with exit code {codes[0]}:\n{text}")


def _serve(
    connection: Any,
    number: int,
    place: str,
    limit_s: float,
    folder: str,
    prepare: Callable[[], None] | None,
    path: list[str],
) -> None:
    if hasattr(os, "setpgid"):  # Windows has no process groups
        os.setpgid(0, 0)  # Ctrl-C at the terminal is for the process that has started this one
    os.environ["UNISONO_BIND_CORES"] = "0"  # the second replica of every server would have the same core
    sys.path[:] = path
    torch.set_num_threads(1)
    if "asynchronous" in place:
        make_asynchronous_devices()
    rank: Rank = ONE_PROCESS
    agree: Any = None
    if "ranks" in place:
        rank = Rank(number, NUM_RANKS)
        store = torch.distributed.FileStore(str(Path(folder, "store")), NUM_RANKS)
        timeout = timedelta(seconds=limit_s / 4)
        backend = None if "asynchronous" in place else "gloo"  # None: the devices' own, beside gloo
        torch.distributed.init_process_group(backend, store=store, rank=number, world_size=NUM_RANKS, timeout=timeout)
        # Of its own, with a longer timeout: a rank that has failed waits here for one that waits for it elsewhere.
        agree = partial(_agree, torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=limit_s)))
    if prepare is not None:
        prepare()
    checkpoints.load_checkpoints()  # whose modules leave frames
    gc.collect()
    gc.freeze()  # collections look at what programs make, not at torch
    with open(Path(folder, f"stacks-{number}"), "w") as stacks:
        faulthandler.enable(stacks)
        while True:
            try:
                program = connection.recv()
            except (EOFError, OSError):
                break
            faulthandler.dump_traceback_later(limit_s, exit=True, file=stacks)
            outcome = run(program, limit_s / 2, rank, agree)
            faulthandler.cancel_dump_traceback_later()
            connection.send(outcome)


def _agree(group: Any, difference: Difference | None) -> Difference | None:
    """Return what the ranks' differences come to, in all ranks (`compare.run`)."""
    found = torch.tensor([difference is not None], dtype=torch.int64)
    torch.distributed.all_reduce(found, group=group)
    if not found.item():
        return None
    each: list[Any] = [None] * NUM_RANKS
    torch.distributed.all_gather_object(each, difference, group=group)
    return SAID if SAID in each else next(one for one in each if one is not None)


def repeat(program: Program, limit_s: float = 60) -> None:
    """Run a program and print what differs: in this process, for a debugger, but for that of several ranks."""
    if "ranks" in program.traits:
        server = ProgramServer(program.place, limit_s)
        try:
            outcome = server.run(program)
        finally:
            server.end()
    else:
        if "asynchronous" in program.traits:
            make_asynchronous_devices()
        outcome = run(program, limit_s)
    print(outcome.difference.text if outcome.difference else "no difference")
