"""The processes of a contender: they start, take steps on request, and sleep otherwise.

Each leads its own process group, so that Ctrl-C in a terminal reaches the benchmark only, which then ends them all. A
process ends when its connection to the benchmark closes, which also happens when the benchmark is killed.

    benchmark   (contender, rank, target, folder) ──►            number of steps ──►              ...
    process                                        ◄── Ready             ◄── seconds of each step ...

    or the reply is a ContenderFailedError
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from unisono.bench.contenders import Contender, step_of, use_part_of_cores
from unisono.bench.tasks import Step, Task
from unisono.console.targets import TargetError, one_line
from unisono.runtime.malloc import keep_freed_memory

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
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-bench-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        try:
            for rank in range(contender.num_programs):
                self._start(contender, folder / f"log-{rank}")
                self._connections[rank].send((contender, rank, target, folder))
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> list[Ready]:
        """Return the replies when all processes are set up."""
        return self._replies()

    def take(self, num_steps: int) -> list[list[float]]:
        """Let every process take steps at the same time; return the seconds of each, by process."""
        self._request(num_steps)
        return self._replies()

    def peak_memory_bytes(self, num_steps: int) -> int:
        """Return the peak memory during some steps, sampled."""
        self._request(num_steps)
        most, is_over = 0.0, False
        while not is_over:
            is_over = bool(wait(self._connections, _SAMPLE_EVERY_S))
            most = max(most, self._sum(_memory_bytes))
        self._replies()
        return int(most)

    def cpu_seconds(self) -> float:
        """Return the time that they have computed so far."""
        return self._sum(_cpu_seconds)

    def close(self) -> None:
        """Kill the processes; those that they have started end with them."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with the rest of its group
            process.wait()
        self._folder.cleanup()

    def _start(self, contender: Contender, log: Path) -> None:
        own, others = socket.socketpair()
        code = "from unisono.bench.programs import serve; serve({})"
        if not contender.python:
            code = f"import sys; sys.path[:] = {sys.path!r}; {code}"
        with others, log.open("wb") as output:
            self._connections.append(Connection(own.detach()))
            self._processes.append(
                subprocess.Popen(
                    [contender.python or sys.executable, "-c", code.format(others.fileno())],
                    env=contender.variables,
                    pass_fds=[others.fileno()],
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

    def _replies(self) -> list[Any]:
        """Wait for the reply of every process; raise the first failure."""
        replies: dict[Any, Any] = {}
        while waiting := [connection for connection in self._connections if connection not in replies]:
            readable = wait(waiting, _TURN_LIMIT_S)
            if not readable:
                raise ContenderFailedError(f"no reply for {_TURN_LIMIT_S:.0f} seconds")
            for connection in readable:
                replies[connection] = self._reply(connection)
        return [replies[connection] for connection in self._connections]

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
        step, ready = _set_up(*connection.recv())
        connection.send(ready)
        while True:
            connection.send([step().whole_s for _ in range(connection.recv())])
    except (EOFError, ConnectionError):
        return
    except TargetError as error:
        failure = str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the caller's model may raise anything
        failure = one_line(error)
    connection.send(ContenderFailedError(failure))


def _set_up(contender: Contender, rank: int, target: str, folder: Path) -> tuple[Callable[[], Step], Ready]:
    if contender.keeps_freed_memory:
        keep_freed_memory()
    use_part_of_cores(contender, rank)
    task = Task.of_target(target)
    if contender.num_programs > 1:
        task = task.shard(rank, contender.replicas)
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
    ready = Ready(task.rows, num_parameters, task.normalises_shards())
    return step_of(contender, rank, task, folder), ready
