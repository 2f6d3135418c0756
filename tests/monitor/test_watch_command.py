"""`unisono watch`: one sample, a log, the table on a terminal; a training whose straggler it finds."""

import contextlib
import io
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from helpers.commands import assert_misused
from helpers.fake_gpus import install, nvml
from unisono.cli import main
from unisono.monitor import sample
from unisono.monitor.display import shown
from unisono.monitor.nvml import GpuReader
from unisono.monitor.sample import Sample, Sampler
from unisono.runtime.step_status import Published, ReplicaStatus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses terminals and /proc")

TRAINING = """
    import os, time
    import torch
    from unisono import DataParallel
    from unisono.runtime.step_status import read_all

    class Slow(torch.nn.Linear):
        def forward(self, x):
            time.sleep(0.05 * len(x))  # what a row takes
            return super().forward(x)

    model = DataParallel(Slow(3, 2), ["cpu", "cpu"], shares=[3, 1])
    has_said = False
    while True:
        model(torch.ones(8, 3)).sum().backward()
        if not has_said and os.getpid() in [each.pid for each in read_all()[0]]:
            print("published", flush=True)
            has_said = True
"""
WHY = "the others wait for replica 0: it has 6 of 8 rows: change shares"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtime")
    folder.chmod(0o700)
    return folder


def environment(runtime: Path, **others: str) -> dict[str, str]:
    """A bare environment: no HOME, an ASCII locale."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    own = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime), "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    return kept | own | others


@contextlib.contextmanager
def train(runtime: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A training that has published: replica 0 has three quarters of the rows, and each row takes 50 ms."""
    program = [sys.executable, "-c", textwrap.dedent(TRAINING)]
    with subprocess.Popen(program, env=environment(runtime), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"published\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def training(runtime: Path) -> Iterator[int]:
    with train(runtime) as process:
        yield process.pid


def watch(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "unisono", "watch", *arguments]


@pytest.fixture
def here(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process look where the training publishes, and nowhere else."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))


def test_one_sample_finds_the_straggler_and_says_why(
    here: None, training: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """M4, M8: as text, and with the same figures as a line of JSON."""
    assert main(["watch", "--once", "--every", "0.2"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    lines = [line.strip() for line in out.splitlines()]
    assert any(line.startswith(f"process {training}: Slow, Threads; ") for line in lines)
    marked = next(line for line in lines if line.endswith("<- slowest"))
    assert marked.split()[:4] == ["0", "cpu", "6", "75%"]
    assert any(line.startswith(WHY) for line in lines)  # other programs may be a cause, too

    assert main(["watch", "--once", "--json", "--every", "0.2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    wrapper = next(each for each in json.loads(line)["wrappers"] if each["pid"] == training)
    assert wrapper["straggler"]["replica"] == 0
    assert wrapper["straggler"]["cause"].startswith("it has 6 of 8 rows: change shares")
    slow, fast = wrapper["replicas"]
    assert [slow["share"], fast["share"]] == [0.75, 0.25]
    assert slow["forward_s"] >= 0.3  # the least that its sleeps take
    assert fast["wait_s"] > slow["wait_s"]


def test_a_training_that_is_killed(
    here: None, runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M5, M7: the watch of it says so and ends; it went on without a word, as if nothing had ever trained."""
    with train(runtime) as process:
        naps = itertools.count()
        monkeypatch.setattr(time, "sleep", lambda seconds: process.kill() if next(naps) else None)
        assert main(["watch", "--pid", str(process.pid)]) == 0
    captured = capsys.readouterr()
    assert f"process {process.pid}: Slow, Threads; " in captured.out
    said = f"process {process.pid} has ended without Python's usual exit, as a killed one does: Slow, "
    assert captured.err.startswith(said)
    assert captured.err.endswith(f"\nprocess {process.pid} has ended\n")
    assert said in captured.out


def test_lines_wrap_on_a_narrow_terminal(here: None, training: int) -> None:
    """M4: cells of the table, and the lines around it."""
    lines = lines_of(Sampler(GpuReader()).take(), 40)
    assert max(map(len, lines)) <= 40
    assert WHY in " ".join(lines)


class Screen:
    """A command on a terminal of so many columns.

    Attributes:
        text: what it has written so far.
    """

    def __init__(self, command: list[str], env: dict[str, str], columns: int) -> None:
        import fcntl
        import termios

        self._terminal, inside = os.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
        self.process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=env)
        os.close(inside)
        self.text = ""

    def read_until(self, text: str) -> None:
        """Read until this text has come; fails if the command ends before."""
        while text not in self.text:
            self.text += os.read(self._terminal, 1 << 16).decode()

    def end(self, number: int) -> int:
        """Send a signal; return the exit status when all has been read."""
        self.process.send_signal(number)
        with contextlib.suppress(OSError):  # Linux's way to say that nothing has the terminal open any more
            while read := os.read(self._terminal, 1 << 16):
                self.text += read.decode()
        os.close(self._terminal)
        return self.process.wait(timeout=60)


def test_the_table_stays_in_place_on_a_terminal(runtime: Path, training: int) -> None:
    """M4: at the end, also with SIGTERM, the terminal is as it was before."""
    screen = Screen(watch("--every", "0.2"), environment(runtime, TERM="xterm"), 100)
    try:
        screen.read_until(WHY)
        assert screen.end(signal.SIGTERM) == 0
    finally:
        screen.process.kill()
    assert screen.text.count("\x1b[?1049h") == screen.text.count("\x1b[?1049l") == 1  # the second screen
    assert "\x1b[31m" in screen.text  # the straggler's line is red
    assert "Traceback" not in screen.text


def test_a_reader_that_ends(runtime: Path) -> None:
    """M4: as in `unisono watch | head -1`, in a bare environment; lines without colour before."""
    with subprocess.Popen(
        watch("--every", "0.1"), env=environment(runtime), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert first.startswith(b"CPU: ")
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--every", "0"], "argument --every: expected a number from 0.1 to 3600; got '0'"),
        (["--every", "nan"], "expected a number from 0.1 to 3600; got 'nan'"),
        (["--every", "soon"], "expected a number from 0.1 to 3600; got 'soon'"),
        (["--twice"], "there is no option --twice"),
        (["5"], "there is no option 5"),
        *(
            (["--pid", pid], f"--pid {pid}: there is no such process; expected the number of one that trains, as")
            for pid in ("soon", "-1", "999999999", "9" * 30)
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """M4: and nothing is shown."""
    assert assert_misused(["watch", *arguments], error, capsys) == ""


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Published]:
    """What wrappers have published; the test fills it."""
    found: list[Published] = []
    monkeypatch.setattr(sample, "read_all", lambda: (found, ["a folder is not private"]))
    return found


def on_gpu(steps: int, *rows: int, module: str = "Net", age_s: float = 0.0) -> Published:
    replicas = [
        ReplicaStatus(i, count, 1e-4, 2e-4, False, f"cuda:{i}", f"0000:0{5 + i}:00") for i, count in enumerate(rows)
    ]
    return Published("a", os.getpid(), steps, time.time() - age_s, 0.5, module, "Threads", tuple(replicas))


def lines_of(taken: Sample, width: int = 1000) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as text:
        console.print(shown(taken))
    return [line.strip() for line in text.get().splitlines()]


def test_gpus_and_the_replicas_on_them(monkeypatch: pytest.MonkeyPatch, published: list[Published]) -> None:
    """M4, M8: cuda:0 is nvidia-smi's GPU 1 there; waits follow from the load; a hot GPU is the straggler."""
    gpus = [{"bus": 4}, {"bus": 5, "load": 40}, {"bus": 6, "load": 100, "reasons": 0x20, "used": 3, "power": None}]
    install(monkeypatch, nvml(gpus))
    published.append(on_gpu(7, 8, 8))
    taken = Sampler(GpuReader()).take()
    (wrapper,) = taken.wrappers
    assert [replica.gpu for replica in wrapper.replicas] == [1, 2]
    assert [replica.forward_s for replica in wrapper.replicas] == [None, None]
    assert [replica.wait_s for replica in wrapper.replicas] == pytest.approx([0.3, 0])
    lines = lines_of(taken)
    assert "GPU  load    memory  temp      power      name" in lines
    assert "1   40%  0/16 GiB  60 C  250/300 W  Fake GPU" in lines
    assert "2  100%  3/16 GiB  60 C          -  Fake GPU" in lines
    assert "the others wait for replica 1: GPU 2 runs at a low clock: it is too hot" in lines
    assert "a folder is not private" in lines
    assert any(line.endswith("; 7 steps, 500 ms each") for line in lines)


def test_a_wrapper_that_has_stopped_is_one_line_at_the_end(
    monkeypatch: pytest.MonkeyPatch, published: list[Published]
) -> None:
    """M8: none of its replicas waits for another one now, so it has no straggler. What trains is shown first."""
    install(monkeypatch, nvml([{"bus": 5, "load": 40}, {"bus": 6, "load": 100}]))
    published += [on_gpu(7, 8, 8, age_s=3600), replace(on_gpu(9, 8, module="Live"), name="b")]
    taken = Sampler(GpuReader()).take()
    live, stopped = taken.wrappers
    assert (live.has_stopped, stopped.has_stopped, stopped.straggler) == (False, True, None)
    lines = lines_of(taken)
    assert f"no steps now, and for how long: process {os.getpid()}, Net (3600 s)" in lines
    assert any("Live, Threads; 9 steps" in line for line in lines)
    assert not any("slowest" in line or "the others wait" in line for line in lines)


@pytest.mark.parametrize(("pid", "modules"), [(None, ["Net", "Other"]), (1, ["Other"]), (2, [])])
def test_only_one_process(pid: int | None, modules: list[str], published: list[Published]) -> None:
    """M5: `--pid` leaves out what the others have published."""
    published += [on_gpu(7, 8), replace(on_gpu(9, 8, module="Other"), name="b", pid=1)]
    taken = Sampler(GpuReader(), pid).take()
    assert [wrapper.module for wrapper in taken.wrappers] == modules
    assert ("no wrapper of process 2 has taken a step yet" in lines_of(taken)) == (not modules)


def test_means_are_of_steps_with_the_same_rows(published: list[Published]) -> None:
    """M5: a short last batch is not mixed with the others; a wrapper that has gone is forgotten."""
    taken = Sampler(GpuReader())
    for forward_s, rows in ((0.1, 8), (0.9, 3), (0.3, 8)):
        replicas = tuple(ReplicaStatus(i, rows, forward_s, 0.0, True, "cpu", "") for i in range(2))
        published[:] = [Published("a", os.getpid(), int(10 * forward_s), 0.0, forward_s, "Net", "Engine", replicas)]
        (wrapper,) = taken.take().wrappers
    assert wrapper.replicas[0].forward_s == pytest.approx(0.2)
    assert wrapper.step_s == pytest.approx(0.3)
    published.clear()
    assert taken.take().wrappers == ()
    assert "no wrapper of this user has taken a step yet" in lines_of(taken.take())


def test_text_of_other_programs_cannot_command_the_terminal(published: list[Published]) -> None:
    """M4: escape sequences and letters that a terminal may lack are question marks."""
    published.append(on_gpu(1, 8, module="N\x1b[2Jet\u00e9"))
    assert any("N?[2Jet?, Threads" in line for line in lines_of(Sampler(GpuReader()).take(), 20 * 5))


def test_what_is_left_out_is_said(published: list[Published], monkeypatch: pytest.MonkeyPatch) -> None:
    """M4: a long command ends with dots."""
    monkeypatch.setattr(sample, "_process", lambda pid: ("python train.py " + "x" * 50, [pid], 0.0))
    published.append(on_gpu(1, 8))
    assert "python train.py " + "x" * 41 + "..." in lines_of(Sampler(GpuReader()).take())


def test_ctrl_c_is_the_usual_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """M4: exit status 0."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("unisono.monitor.watch_command.time.sleep", interrupted)
    assert main(["watch"]) == 0
    assert capsys.readouterr().err == ""
