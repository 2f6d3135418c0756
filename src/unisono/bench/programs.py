"""The processes of a contender: they start, take steps on request, and sleep otherwise.

As many as there are cores start at a time: each has imported torch and built the model before the next ones begin.
Those of a distributed contender meet when all are there.

    benchmark   (contender, rank, target, folder) ──►            number of steps ──►              ...
    process                                        ◄── Ready             ◄── seconds of each step ...

    or the reply is a ContenderFailedError

Each leads its own process group, so that Ctrl-C in a terminal reaches the benchmark only, which then ends them all. The
benchmark holds one end of a pipe; a process that finds the other end closed kills its group. So none outlives a
benchmark that is killed, whatever it is doing: importing, building, waiting for others.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from unisono.bench.contenders import Contender, step_of, use_part_of_cores
from unisono.bench.machine import num_cores
from unisono.bench.tasks import Task
from unisono.console.targets import TargetError, one_line
from unisono.runtime.malloc import keep_freed_memory

# Before anything is imported: a thread that waits for the end of the benchmark.
_PROGRAM = """\
import os, shutil, signal, threading
def end_with_benchmark():
    os.read({pipe}, 1)
    shutil.rmtree({folder!r}, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_benchmark, daemon=True).start()
from unisono.bench.programs import serve
serve({connection})
"""
_TURN_LIMIT_S = 600.0
_SAMPLE_EVERY_S = 0.02

# What memory is measured as. The proportional set size (PSS), which Linux has, counts a page that several processes
# share once in all; the resident set size (RSS) counts it once for each.
MEMORY_KIND = "PSS" if psutil.LINUX else "RSS"


class ContenderFailedError(Exception):
    """A contender cannot go on: one line that says why."""


class Ready(NamedTuple):
    """The reply after the setup: the rows of its shard, and facts about its model."""

    rows: int
    num_parameters: int
    normalises_shards: bool


class ContenderProcesses:
    """The processes of one contender on one target until `close`. If one fails, the call is a ContenderFailedError."""

    def __init__(self, contender: Contender, target: str) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._contender, self._target = contender, target
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-bench-", ignore_cleanup_errors=True)
        self._watched, self._held = os.pipe()  # see the module's docstring

    def start(self) -> list[Ready]:
        """Start the processes; return the replies when all have built the model."""
        folder, ready = Path(self._folder.name), list[Ready]()
        for rank in range(self._contender.num_programs):
            self._start(folder / f"log-{rank}")
            self._connections[rank].send((self._contender, rank, self._target, folder))
            if (rank + 1) % num_cores() == 0 or rank + 1 == self._contender.num_programs:
                ready += self._replies(self._connections[len(ready) :])
        return ready

    def take(self, num_steps: int) -> list[list[float]]:
        """Let every process take steps at the same time; return the seconds of each, by process."""
        self._request(num_steps)
        return self._replies(self._connections)

    def peak_memory_bytes(self, num_steps: int) -> int:
        """Return the peak memory during some steps, sampled."""
        self._request(num_steps)
        most, is_over = 0.0, False
        while not is_over:
            is_over = bool(wait(self._connections, _SAMPLE_EVERY_S))
            most = max(most, self._sum(_memory_bytes))
        self._replies(self._connections)
        return int(most)

    def cpu_seconds(self) -> float:
        """Return the time that they have computed so far."""
        return self._sum(_cpu_seconds)

    def close(self) -> None:
        """Kill the processes; those that they have started end with them."""
        os.close(self._held)
        os.close(self._watched)
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with the rest of its group
            process.wait()
        self._folder.cleanup()

    def _start(self, log: Path) -> None:
        own, others = socket.socketpair()
        contender, given = self._contender, {"pipe": self._watched, "connection": others.fileno()}
        code = _PROGRAM.format(folder=self._folder.name, **given)
        if not contender.python:
            code = f"import sys; sys.path[:] = {sys.path!r}\n{code}"
        with others, log.open("wb") as output:
            self._connections.append(Connection(own.detach()))
            self._processes.append(
                subprocess.Popen(
                    [contender.python or sys.executable, "-c", code],
                    env=contender.variables,
                    pass_fds=[others.fileno(), self._watched],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )
            )

    def _sum(self, ask: Callable[[psutil.Process], float]) -> float:
        """Sum what the processes and all that descend from them say; one that has ended says nothing."""
        total = 0.0
        for leader in self._processes:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(leader.pid)
                for each in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        total += ask(each)
        return total

    def _request(self, num_steps: int) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the process has ended: reading its reply will say so
                connection.send(num_steps)

    def _replies(self, connections: Sequence[Connection]) -> list[Any]:
        """Wait for the reply of each of these processes; raise the first failure."""
        replies: dict[Any, Any] = {}
        while waiting := [connection for connection in connections if connection not in replies]:
            readable = wait(waiting, _TURN_LIMIT_S)
            if not readable:
                raise ContenderFailedError(f"no reply for {_TURN_LIMIT_S:.0f} seconds")
            for connection in readable:
                replies[connection] = self._reply(connection)
        return [replies[connection] for connection in connections]

    def _reply(self, connection: Any) -> Any:
        try:
            reply = connection.recv()
        except (EOFError, OSError):
            raise ContenderFailedError(self._how_it_ended(self._connections.index(connection))) from None
        if isinstance(reply, ContenderFailedError):
            raise reply
        return reply

    def _how_it_ended(self, rank: int) -> str:
        status = self._processes[rank].wait()
        log = (Path(self._folder.name) / f"log-{rank}").read_text(errors="replace").strip().splitlines()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"its process {how}{f', with the message: {log[-1]}' if log else ''}"


def _memory_bytes(process: psutil.Process) -> float:
    memory = process.memory_full_info()
    return float(getattr(memory, "pss", memory.rss))


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def serve(fd: int) -> None:
    """Set up the program that the first message names; take its steps until the connection closes."""
    connection = Connection(fd)
    try:
        contender, rank, target, folder = connection.recv()
        task, ready = _built(contender, rank, target)
        connection.send(ready)
        step = step_of(contender, rank, task, folder)
        while True:
            connection.send([step().whole_s for _ in range(connection.recv())])
    except (EOFError, ConnectionError):
        return
    except TargetError as error:
        failure = str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the caller's model may raise anything
        failure = one_line(error)
    connection.send(ContenderFailedError(failure))


def _built(contender: Contender, rank: int, target: str) -> tuple[Task, Ready]:
    if contender.keeps_freed_memory:
        keep_freed_memory()
    use_part_of_cores(contender, rank)
    task = Task.of_target(target)
    if contender.num_programs > 1:
        task = task.shard(rank, contender.replicas)
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
    return task, Ready(task.rows, num_parameters, task.normalises_shards())
