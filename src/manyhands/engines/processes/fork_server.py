"""The fork server: the process that workers are forked from, seen from both sides; how workers start and end.

The first forward starts it: a fresh interpreter that has imported torch and does nothing else, so that it may be forked
at any time. Each worker (worker.py) is a fork of it, and gets one end of a channel. `ForkServer` is the caller's side,
`serve_forks` runs in the server's process.

Guarantees
    - A worker ends when the caller's end of its channel closes. In the middle of a computation it does not notice; then
      it ends with the fork server, which ends as soon as the caller does (Linux; elsewhere the worker ends its step
      first).
    - Only the caller handles Ctrl-C and SIGTERM: workers ignore them. A scheduler sends SIGTERM to all processes of a
      job.
"""

import contextlib
import ctypes
import gc
import io
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence

from manyhands.engines.processes.channel import Channel, ChannelClosedError
from manyhands.engines.processes.worker import Worker
from manyhands.runtime import affinity
from manyhands.runtime.malloc import keep_freed_memory

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class ForkServer:
    """This process's fork server, started when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._channel is not None

    def fork(self, own_cores: Sequence[int], seed: int) -> tuple[int, Channel]:
        """Start a worker; return its process id and the channel to it."""
        own, other = Channel.pair()
        fd = other.detach()
        try:
            environment = {name: value for name, value in os.environ.items() if not _is_launcher_variable(name)}
            request = ("fork", environment, list(own_cores), seed)
            pid = self._request(request, [fd, _descriptor(sys.__stdout__, 1), _descriptor(sys.__stderr__, 2)])
        except BaseException:
            own.close()
            raise
        finally:
            os.close(fd)
        assert isinstance(pid, int)
        return pid, own

    def status(self, pid: int) -> int | None:
        """Return a worker's exit status, as `os.waitpid` has it; None if it is not known."""
        try:
            status = self._request(("status", pid), [], start=False)
        except ChannelClosedError:
            return None
        return status if isinstance(status, int) else None

    def _request(self, request: object, fds: Sequence[int], start: bool = True) -> object:
        with self._lock:
            for last_try in (False, True):
                if self._channel is None:
                    if not start:
                        raise ChannelClosedError
                    self._start()
                assert self._channel is not None
                try:
                    self._channel.send(pickle.dumps(request), fds)
                    body, _ = self._channel.receive()
                    return pickle.loads(body)
                except ChannelClosedError:
                    self._end()
                    if last_try or not start:
                        raise
                except BaseException:
                    self._end()  # half a reply may be in the channel
                    raise
            raise AssertionError("unreachable")

    def _start(self) -> None:
        own, other = Channel.pair()
        fd = other.detach()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from manyhands.engines.processes.fork_server import serve_forks; "
            f"serve_forks({fd})"
        )
        try:
            # A process group of its own, so that Ctrl-C in a terminal reaches the caller only.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[fd], stdin=subprocess.DEVNULL, process_group=0
            )
        finally:
            os.close(fd)
        self._channel = own

    def _end(self) -> None:
        channel, process = self._channel, self._process
        self._channel = self._process = None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()  # it has no state, and while it imports torch it does not notice the closed channel
            process.wait()

    def end(self) -> None:
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """Close what belongs to the parent process, in the child of a fork."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.returncode = 0  # not this process's child: not waited for, no warning
        self.__init__()  # type: ignore[misc]


server = ForkServer()  # this process's


def _is_launcher_variable(variable: str) -> bool:
    """Return whether an environment variable gives a process its rank in a launcher's job: workers have none."""
    return variable in _LAUNCHER_VARIABLES or variable.startswith("TORCHELASTIC_")


_LAUNCHER_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}


def _descriptor(stream: object, otherwise: int) -> int:
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return otherwise


# ---- in the fork server's process ------------------------------------------------------------


def serve_forks(fd: int) -> None:
    """Fork workers and report how they ended, until the caller ends: the fork server's whole life.

    Requests, each of which gets a reply:

        ("fork", environment, cores, seed), with the file descriptors of the worker's end of a channel, its standard
            output and its standard error -> its process id
        ("status", process id) -> its exit status, as `os.waitpid` has it
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    gc.collect()
    gc.freeze()  # workers share these objects' pages until one writes to them
    statuses: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _reap(statuses))
    try:
        while True:
            _handle(channel, fd, statuses)
    except ChannelClosedError:  # the caller ended, perhaps without reading its reply: Ctrl-C
        os._exit(0)


def _handle(channel: Channel, fd: int, statuses: dict[int, int]) -> None:
    body, fds = channel.receive()
    request, *arguments = pickle.loads(body)
    if request == "fork":
        pid = os.fork()
        if not pid:
            os.close(fd)
            _run_worker(fds, *arguments)
        for received in fds:
            os.close(received)
        channel.send(pickle.dumps(pid))
    else:
        (pid,) = arguments
        if pid not in statuses:
            with contextlib.suppress(ChildProcessError):
                statuses[pid] = os.waitpid(pid, 0)[1]
        channel.send(pickle.dumps(statuses.pop(pid, None)))


def _reap(statuses: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            statuses[pid] = status


def _run_worker(fds: Sequence[int], environment: dict[str, str], own_cores: Sequence[int], seed: int) -> None:
    """Serve the channel until it closes. Does not return."""
    status = 1
    try:
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, stdout, stderr = fds
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        # Line-buffered, so that each printed line is one write.
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        random.seed(seed)
        affinity.bind(own_cores)
        keep_freed_memory()
        Worker(Channel(socket.socket(fileno=connection))).serve()
    except ChannelClosedError:
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the process ends here
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the fork server ends, also in the middle of a step (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent or parent == 1:
            os._exit(0)
