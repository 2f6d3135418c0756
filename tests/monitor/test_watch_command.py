"""`unisono watch`: the table on a terminal, a log, JSON; GPUs, cores and the processes that use them."""

import contextlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from helpers.commands import assert_misused
from helpers.fake_gpus import GIB, install, nvml
from unisono.cli import main
from unisono.monitor.display import shown
from unisono.monitor.nvml import GpuReader
from unisono.monitor.sample import Sampler
from unisono.runtime import devices

pytestmark = pytest.mark.only_on("linux", because="uses terminals and /proc")

GPUS = [
    {"bus": 4, "load": 40, "pids": (11, 99)},
    {"bus": 5, "load": 100, "used": 3, "power": None, "pids": (11,)},
]


class FakeProcess:
    """What psutil says of a process that uses so much of a core; it may end, or belong to someone else."""

    def __init__(self, pid: int, percent: float, *words: str, user: str | None = "me", has_ended: bool = False) -> None:
        self.pid, self._percent, self._words, self._user, self._has_ended = pid, percent, [*words], user, has_ended

    def cpu_percent(self) -> float:
        if self._has_ended:
            raise psutil.NoSuchProcess(self.pid)
        return self._percent

    def as_dict(self, names: list[str]) -> dict[str, Any]:
        memory = SimpleNamespace(rss=2 * GIB) if self._user else None
        return {"username": self._user, "memory_info": memory, "cmdline": self._words, "name": "swapper"}


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """The processes of this machine; the test may add some."""
    found = [
        FakeProcess(7, 4),
        FakeProcess(8, 50, user=None),
        FakeProcess(9, 100, has_ended=True),
        FakeProcess(10, 170, "/usr/bin/python", "train.py"),
        FakeProcess(11, 0, "python", "infer.py"),
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(found))
    return found


def watched(width: int = 1000) -> list[str]:
    """Return the lines of a sample on a terminal of so many columns."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as text:
        console.print(shown(Sampler(GpuReader()).take()))
    return [line.strip() for line in text.get().splitlines()]


def test_gpus_and_the_processes_on_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """M4, M9: those on GPUs first, also one that the system does not know ("-"); the same in JSON, in a line."""
    install(monkeypatch, nvml(GPUS))
    lines = watched()
    assert lines[:3] == [
        "GPU  load    memory  temp      power  name",
        "0   40%  0/16 GiB  60 C  250/300 W  Fake GPU",
        "1  100%  3/16 GiB  60 C          -  Fake GPU",
    ]
    assert lines[-5:] == [
        "process  user  cores   memory  GPU  GPU memory  command",
        "11    me    0.0  2.0 GiB  0,1     2.0 GiB  python infer.py",
        "99     -      -        -    0     1.0 GiB  -",
        "10    me    1.7  2.0 GiB    -           -  python train.py",
        "8     -    0.5        -    -           -  swapper",
    ]

    assert main(["watch", "--once", "--json", "--every", "0.1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert [(gpu["number"], gpu["load"], gpu["power_w"]) for gpu in found["gpus"]] == [(0, 0.4, 250), (1, 1.0, None)]
    assert found["gpus"][1]["processes"] == [{"pid": 11, "memory_bytes": GIB}]
    assert [(each["pid"], each["cores"]) for each in found["processes"]] == [(11, 0), (99, None), (10, 1.7), (8, 0.5)]
    assert len(found["core_loads"]) == os.cpu_count()


def test_without_a_gpu(processes: list[FakeProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """M4, M9: cores, and what uses them; 20 processes, and how many more. No text commands the terminal."""
    install(monkeypatch, None)
    monkeypatch.setattr(devices, "accelerators", list)
    processes[:] = [FakeProcess(pid, 20, "N\x1b[2J[b]et\u00e9", "x" * 60) for pid in range(23)]
    lines = watched()
    assert lines[0].startswith("CPU: ")
    assert f" of {os.cpu_count()} cores busy, memory " in lines[0]
    assert lines[1].startswith("each core, in tenths: ")
    assert lines[3] == "process  user  cores   memory  command"
    assert lines[4] == f"0    me    0.2  2.0 GiB  N?[2J[b]et? {'x' * 60}"
    assert lines[-1] == "and 3 more"


def test_gpus_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """M9: it says why, and what helps."""
    install(monkeypatch, None)
    monkeypatch.setattr(devices, "accelerators", lambda: [torch.device("cuda:0")])
    assert watched()[0].startswith("GPUs are not shown: nvidia-ml-py not installed: pip install nvidia-ml-py")


def test_lines_wrap_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """M4: cells of the tables, and the lines around them."""
    install(monkeypatch, nvml(GPUS))
    lines = watched(40)
    assert max(map(len, lines)) <= 40
    assert [line.split()[0] for line in lines if line.startswith(("0", "1", "8"))] == ["0", "1", "11", "10", "8"]


def watch(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "unisono", "watch", *arguments]


def environment(**others: str) -> dict[str, str]:
    """A bare environment: no HOME, an ASCII locale."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return kept | {"LC_ALL": "C"} | others


@contextlib.contextmanager
def busy() -> Iterator[int]:
    """Run a process that keeps a core busy; yield its number."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_table_stays_in_place_on_a_terminal(number: int) -> None:
    """M4, M9: a process that computes is in the table; at the end the terminal is as it was before."""
    import fcntl
    import termios

    terminal, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 100, 0, 0))
    streams = {"stdin": inside, "stdout": inside, "stderr": inside}
    with subprocess.Popen(watch("--every", "0.2"), **streams, env=environment(TERM="xterm")) as process:
        os.close(inside)
        text = ""
        try:
            while "\x1b[?1049h" not in text:  # an OSError if the command ends before
                text += os.read(terminal, 1 << 16).decode()
            with busy() as pid:  # only now: it would take the processor from the command that starts
                while f" {pid} " not in text:
                    text += os.read(terminal, 1 << 16).decode()
            process.send_signal(number)
            with contextlib.suppress(OSError):  # Linux's way to say that nothing has the terminal open any more
                while read := os.read(terminal, 1 << 16):
                    text += read.decode()
        finally:
            process.kill()
            os.close(terminal)
    assert process.returncode == 0
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1  # the second screen
    assert "\x1b[1m" in text  # bold
    assert "Traceback" not in text


def test_a_reader_that_ends() -> None:
    """M4: as in `unisono watch | head -1`, in a bare environment; lines without colour before."""
    with subprocess.Popen(
        watch("--every", "0.1"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert first.startswith((b"CPU: ", b"  GPU "))  # where there are GPUs, the driver's library shows them first
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--every", "0"], "argument --every: expected a number from 0.1 to 3600; got '0'"),
        (["--every", "nan"], "expected a number from 0.1 to 3600; got 'nan'"),
        (["--every", "soon"], "expected a number from 0.1 to 3600; got 'soon'"),
        (["--twice"], "there is no option --twice"),
        (["5"], "unexpected argument 5"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """M4: and nothing is shown."""
    assert assert_misused(["watch", *arguments], error, capsys) == ""
