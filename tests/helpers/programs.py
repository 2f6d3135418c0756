"""Scripts that run in processes of their own and end as Python ends them; warnings are errors.

To import torch takes two seconds of processor time, which every script would pay. So they are forked from a server that
has imported it and does nothing else: `run_script` differs from `python -W error -c script` in that alone. Where the
system does not fork, it is `python -W error -c script`.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WAIT_S = 60.0
SCRIPT_S = 100.0

# Each line is a request. A child of the server forks the program, waits for it, and writes its exit status. The script
# is the last thing that the program does: what comes after is the own end of the interpreter.
_SERVER = """
import gc, json, os, signal, sys, types
import torch
gc.freeze()  # the end of a script collects garbage, three times as quickly if torch's own objects do not count

def next_script():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if not os.fork():
            break
    else:
        os._exit(0)
    request = json.loads(line)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        write(request, "pid", child)
        write(request, "status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    for name, own in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        fd = os.open(os.path.join(request["files"], name) if own else os.devnull, os.O_RDWR | os.O_CREAT)
        os.dup2(fd, own)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.modules["__main__"] = types.ModuleType("__main__")
    return compile(request["script"], "<string>", "exec")

def write(request, name, number):
    path = os.path.join(request["files"], name)
    with open(path + ".unfinished", "w") as file:
        file.write(str(number))
    os.rename(path + ".unfinished", path)

exec(next_script(), sys.modules["__main__"].__dict__)
"""


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """Start the process that programs are forked from. It ends when its standard input is closed."""
    server = subprocess.Popen([sys.executable, "-W", "error", "-c", _SERVER], stdin=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def run_script(script: str, timeout_s: float = SCRIPT_S) -> subprocess.CompletedProcess[str]:
    """Run a script; return how it has ended, and what it has written. One that is too late is killed: TimeoutError."""
    return run_scripts([(script, {})], timeout_s)[0]


def run_scripts(
    scripts: Sequence[tuple[str, Mapping[str, str]]], timeout_s: float = SCRIPT_S
) -> list[subprocess.CompletedProcess[str]]:
    """Run scripts at the same time, each with variables of its environment besides those of this process."""
    if not hasattr(os, "fork"):
        return _run_each_anew(scripts, timeout_s)
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(number)) for number in range(len(scripts))]
        for folder, (script, env) in zip(folders, scripts, strict=True):
            folder.mkdir()
            request = {"script": textwrap.dedent(script), "environment": {**os.environ, **env}}
            request |= {"folder": os.getcwd(), "files": str(folder)}
            print(json.dumps(request), file=_server().stdin, flush=True)
        late = not until(lambda: all((folder / "status").exists() for folder in folders), timeout_s)
        for folder in folders if late else ():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        written = [[(folder / name).read_text() for name in ("stdout", "stderr")] for folder in folders]
        if late:
            raise TimeoutError(f"a script has not ended after {timeout_s:.0f} s: {written}")
        codes = [int((folder / "status").read_text()) for folder in folders]
        return [subprocess.CompletedProcess(["-c"], code, *each) for code, each in zip(codes, written, strict=True)]


def _run_each_anew(
    scripts: Sequence[tuple[str, Mapping[str, str]]], timeout_s: float
) -> list[subprocess.CompletedProcess[str]]:
    """The same, each in a Python that starts for it."""

    def run(script: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
        return subprocess.run(
            command, check=False, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip

    with ThreadPoolExecutor(len(scripts)) as pool:
        try:
            done = list(pool.map(run, *zip(*scripts, strict=True)))
        except subprocess.TimeoutExpired as late:
            raise TimeoutError(f"a script has not ended after {timeout_s:.0f} s: {late.output, late.stderr}") from None
    return [subprocess.CompletedProcess(["-c"], each.returncode, each.stdout, each.stderr) for each in done]


def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Wait until a condition of other processes or threads holds; return whether it does."""
    limit = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "pytest_unisono", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=SCRIPT_S)
    return done.returncode, done.stdout + done.stderr
