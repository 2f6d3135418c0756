"""Programs of their own: scripts that end as Python ends them, warnings being errors; and whether processes have ended.

To import torch takes two seconds of processor time, which every script would pay. So they are forked from a server that
has imported it and does nothing else: `run_script` and `Program` differ from `python -W error -c script` in that alone.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

WAIT_S = 60.0
SCRIPT_S = 100.0

# Each request is a script with its environment and folder, and file descriptors: of its standard output and error, and
# of a pipe for its process id and, once it has ended, its exit status. The child of the server writes both; it is not
# waited for. The script is the last thing that its child does: what comes after is the own end of the interpreter.
_SERVER = """
import gc, json, os, signal, socket, sys, types
import torch
gc.freeze()  # the end of a script collects garbage, three times as quickly if torch's own objects do not count

def next_script(channel):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        length, fds, *_ = socket.recv_fds(channel, 8, 3)
        if not length:
            os._exit(0)
        with channel.makefile("rb") as file:
            request = json.loads(file.read(int.from_bytes(length, "big")))
        if not os.fork():
            break
        for fd in fds:
            os.close(fd)
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdout, stderr, status = fds
    child = os.fork()
    if child:
        os.close(stdout)
        os.close(stderr)
        os.write(status, child.to_bytes(8, "big"))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(status, code.to_bytes(8, "big", signed=True))
        os._exit(0)
    os.close(status)
    for fd, own in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, own)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.modules["__main__"] = types.ModuleType("__main__")
    return compile(request["script"], "<string>", "exec")

exec(next_script(socket.socket(fileno=int(sys.argv.pop()))), sys.modules["__main__"].__dict__)
"""


def _start_server() -> socket.socket:
    """Start the process that programs are forked from; return the channel to it. It ends when that is closed."""
    own, other = socket.socketpair()
    command = [sys.executable, "-W", "error", "-c", _SERVER, str(other.fileno())]
    process = subprocess.Popen(command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL)
    other.close()

    def end(pid: int = os.getpid()) -> None:
        if os.getpid() == pid:
            own.close()
            process.wait()

    atexit.register(end)
    return own


_servers: dict[int, socket.socket] = {}  # by process id: a forked child has to have its own


class _Output(threading.Thread):
    """What is written into a pipe, line by line."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._fd, self.writing = os.pipe()
        self.lines: list[str] = []

    def run(self) -> None:
        with open(self._fd) as file:
            for line in file:
                self.lines.append(line)

    def text(self) -> str:
        self.join(WAIT_S)
        return "".join(self.lines)


class Program:
    """A script that runs in a process of its own; at the end of the `with` block it has ended.

    Args:
        env: variables of its environment, besides those of this process.
    """

    def __init__(self, script: str, env: Mapping[str, str] = {}) -> None:
        server = _servers.get(os.getpid()) or _servers.setdefault(os.getpid(), _start_server())
        self._code: int | None = None
        self._stdout, self._stderr = outputs = _Output(), _Output()
        self._status, status = os.pipe()
        request = {"script": textwrap.dedent(script), "environment": {**os.environ, **env}, "folder": os.getcwd()}
        body, fds = json.dumps(request).encode(), [*(output.writing for output in outputs), status]
        socket.send_fds(server, [len(body).to_bytes(8, "big")], fds)
        server.sendall(body)
        for fd in fds:
            os.close(fd)
        for output in outputs:
            output.start()
        self.pid = self._next_status(SCRIPT_S)

    def _next_status(self, timeout_s: float) -> int:
        if not select.select([self._status], [], [], timeout_s)[0]:
            raise TimeoutError(f"no word of the program for {timeout_s:.0f} s")
        status = os.read(self._status, 8)
        assert status, "the server of programs has ended"
        return int.from_bytes(status, "big", signed=True)

    def lines(self, number: int) -> list[str]:
        """Wait until the program has printed so many lines; return them."""
        printed = self._stdout.lines
        assert until(lambda: len(printed) >= number), f"it has printed {printed}"
        return [line.removesuffix("\n") for line in printed[:number]]

    def end(self, timeout_s: float = SCRIPT_S) -> subprocess.CompletedProcess[str]:
        """Wait until the program has ended; return how, and what it has written. One that is too late is killed."""
        try:
            if self._code is None:
                self._code = self._next_status(timeout_s)
        except TimeoutError:
            self._kill()
            raise
        return subprocess.CompletedProcess(["-c"], self._code, self._stdout.text(), self._stderr.text())

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the test has killed it
            os.kill(self.pid, signal.SIGKILL)
        self._code = self._next_status(WAIT_S)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            self._kill()
        os.close(self._status)


def run_script(script: str, timeout_s: float = SCRIPT_S) -> subprocess.CompletedProcess[str]:
    with Program(script) as program:
        return program.end(timeout_s)


def until(condition: Callable[[], bool]) -> bool:
    """Wait until a condition of other processes holds; return whether it does."""
    limit = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


def have_ended(pids: Iterable[int]) -> bool:
    """Wait until processes have ended; return whether they have. It reads /proc."""
    pids = list(pids)
    return until(lambda: not any(map(_is_running, pids)))


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "pytest_unisono", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=SCRIPT_S)
    return done.returncode, done.stdout + done.stderr
