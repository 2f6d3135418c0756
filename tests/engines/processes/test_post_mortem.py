"""What is known about a worker that has died: how it ended, and why."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.deaths import workers_of
from helpers.modules import Calls
from helpers.programs import Program, have_ended, until
from unisono import DataParallel, ReplicaDied
from unisono.engines.processes import fork_server, post_mortem
from unisono.engines.processes.post_mortem import StackFile, how_it_ended, is_stopped, oom_kills

ROWS = torch.arange(4.0).view(4, 1)


def in_worker(end, caller: int = os.getpid()) -> nn.Module:
    """Return a module that calls `end` in worker processes, and is the identity in this one."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != caller:
            end()
        return x

    return Calls(forward)


def death_of(model: DataParallel) -> ReplicaDied:
    with pytest.raises(ReplicaDied) as raised:
        model(ROWS)
    return raised.value


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("end", "exit_status", "number", "words"),
    [
        (lambda: os._exit(3), 3, None, "exited with status 3 (something in it called os._exit"),
        (lambda: ctypes.CDLL(None).exit(4), 4, None, "exited with status 4"),
        (lambda: ctypes.string_at(0), None, signal.SIGSEGV, "SIGSEGV (an invalid memory access"),
        (os.abort, None, signal.SIGABRT, "SIGABRT (C or C++ code that gave up"),
        (lambda: send(signal.SIGUSR1), None, signal.SIGUSR1, "SIGUSR1 (another process sent it)"),
    ],
    ids=["_exit", "C exit", "segmentation fault", "abort", "SIGUSR1"],
)
def test_a_death_says_which_replica_and_how(wrap, end, exit_status, number, words):
    """F4: for people and for programs; with the worker's Python stack where it crashed."""
    model = wrap(in_worker(end), engine="processes")
    died = death_of(model)
    assert str(died).startswith("replica 1 on cpu, rows 2 to 3 of 4: its worker process ")
    assert words in str(died)
    assert (died.replica, died.device) == (1, torch.device("cpu"))
    assert (died.exit_status, died.signal) == (exit_status, number)
    crashed = number in (signal.SIGSEGV, signal.SIGABRT)
    assert ("in forward" in died.stack) is crashed
    assert (died.stack in str(died)) is True
    assert have_ended([died.pid])
    model.module.function = lambda module, x: x + 1
    assert torch.equal(model(ROWS), ROWS + 1)


def test_the_stack_of_a_stopped_process_is_that_of_its_first_thread():
    """F7: any thread could handle the signal, and the first one went on meanwhile, out of where it was stuck."""
    file = StackFile()
    process = subprocess.Popen([sys.executable, "-c", STOPS, str(file.fd)], pass_fds=[file.fd])
    try:
        for _ in range(20):
            assert until(lambda: is_stopped(process.pid))
            current = file.ask(process.pid).partition("Current thread ")[2].partition("\n\n")[0]
            assert "in stops" in current
    finally:
        process.kill()
        process.wait()


STOPS = """
import os, signal, sys, threading
from unisono.engines.processes.post_mortem import write_stacks_to

def stops():
    os.kill(os.getpid(), signal.SIGSTOP)

write_stacks_to(int(sys.argv[1]))
for _ in range(8):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
while True:
    stops()
"""


def test_the_number_of_a_replica_is_its_place_in_device_ids(wrap):
    """F4, S2: also where a device before it has no rows."""
    model = wrap(in_worker(lambda: os._exit(3)), 3, shares=[1, 0, 1], engine="processes")
    died = death_of(model)
    assert died.replica == 2
    assert "replica 2 on cpu" in str(died)


def test_a_killed_fork_server_takes_all_workers_with_it(wrap):
    """F4: of all models; each one's error says so, and its next forward starts others, from another fork server."""
    models = [wrap(Calls(lambda module, x: x + 1), engine="processes") for _ in range(2)]
    for model in models:
        model(ROWS)
    process = fork_server.server._process
    assert process is not None
    workers = [pid for model in models for pid in workers_of(model)]
    os.kill(process.pid, signal.SIGKILL)
    assert have_ended(workers)
    for model in models:
        died = death_of(model)
        assert f"process {process.pid} was ended by SIGKILL" in str(died)
        assert died.pid in workers
    for model in models:
        assert torch.equal(model(ROWS), ROWS + 1)


# ---- the likely cause ------------------------------------------------------------------------------


def counters(root: Path, **files: str) -> Path:
    places = {"cgroup": "proc/self/cgroup", "vmstat": "proc/vmstat", "events": "sys/fs/cgroup/job/memory.events"}
    places["control"] = "sys/fs/cgroup/memory/memory.oom_control"
    for name, text in files.items():
        file = root / places[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_the_kernels_counters(tmp_path):
    """F4: of a control group, version 2 or 1, and of the machine; what is missing is left out."""
    assert oom_kills(tmp_path) == {}
    assert oom_kills(counters(tmp_path, vmstat="pgfault 1\noom_kill 4\n")) == {"this machine": 4}
    two = counters(tmp_path, cgroup="0::/job\n", events="max 0\noom 3\noom_kill 2\n")
    assert oom_kills(two) == {"this control group": 2, "this machine": 4}
    one = counters(tmp_path, cgroup="4:memory:/elsewhere\n0::/\n", control="under_oom 0\noom_kill 5\n")
    assert oom_kills(one) == {"this control group": 5, "this machine": 4}


@pytest.mark.parametrize(
    ("code", "before", "after", "words"),
    [
        (-9, {"this control group": 1}, {"this control group": 3}, "has struck 2 times in this control group"),
        (-9, {"this machine": 1}, {"this machine": 2}, "most likely by the kernel's out-of-memory killer"),
        (-9, {"this machine": 1}, {"this machine": 1}, "another process sent it"),
        (
            -9,
            {"this control group": 1, "this machine": 1},
            {"this control group": 1, "this machine": 2},
            "has not struck in this control group",
        ),
        (-9, {}, {}, "the kernel's out-of-memory killer, or another process"),
        (-40, {}, {}, "was ended by signal 40 (another process sent it)"),  # it has no name
    ],
)
def test_who_sent_a_signal(monkeypatch, code, before, after, words):
    """F4: the out-of-memory killer if its counter has risen; this process's own control group counts first."""
    monkeypatch.setattr(post_mortem, "oom_kills", lambda: after)
    assert words in how_it_ended(code, before)


def test_the_stack_of_a_process_that_waits_and_of_one_that_is_stopped():
    """F4: one that is stopped writes it, too, and is known as stopped."""
    stacks = StackFile()
    script = f"""
        import os, time
        from unisono.engines.processes.post_mortem import write_stacks_to

        write_stacks_to(os.open("/proc/{os.getpid()}/fd/{stacks.fd}", os.O_RDWR))

        def waits():
            print("ready", flush=True)
            time.sleep(600)

        waits()
    """
    with Program(script) as program:
        assert program.lines(1) == ["ready"]
        for _ in range(2):  # the second does not come behind the first
            text = stacks.ask(program.pid)
            assert text.count("in waits") == 1
        assert not is_stopped(program.pid)
        os.kill(program.pid, signal.SIGSTOP)
        assert until(lambda: is_stopped(program.pid))
        assert "in waits" in stacks.ask(program.pid)
    assert not is_stopped(program.pid)
    assert stacks.ask(program.pid) == ""
