"""What is left when the caller ends or is interrupted, and who can reach the channel to a worker."""

import contextlib
import gc
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from helpers import leftovers
from helpers.leftovers import end_workers_of_earlier_tests
from helpers.modules import Calls
from helpers.programs import Program, have_ended, until
from unisono import DataParallel
from unisono.engines.processes import fork_server

# A program that says which processes it has started, and waits: idle, or with a worker in the middle of a forward. Its
# sibling has a copy of each of its sockets, as a process has that C code forks, and outlives it.
_PROGRAM = """
    import os, subprocess, sys, time
    import psutil, torch
    import unisono

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.busy, self.caller = False, os.getpid()

        def forward(self, x):
            if self.busy and os.getpid() != self.caller:
                print("ready", flush=True)
                while True:
                    pass
            return x

    model = unisono.DataParallel(Model(), ["cpu"] * 2, engine="processes")
    model(torch.zeros(4, 1))
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name).startswith("socket:"):
                sockets.append(int(name))
        except OSError:
            pass
    sibling = subprocess.Popen(["sleep", "1000"], pass_fds=sockets)
    started = [p.pid for p in psutil.Process().children(recursive=True) if p.pid != sibling.pid]
    print(sibling.pid, *started, flush=True)
    if {busy}:
        model.module.busy = True
        model(torch.zeros(4, 1))
    print("ready", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.slow), True])
def test_workers_end_with_a_caller_whose_channels_another_process_has(busy):
    """F9: killed while its workers are idle, or in the middle of a forward."""
    with Program(_PROGRAM.replace("{busy}", str(busy))) as program:
        sibling, *started = map(int, program.lines(1)[0].split())
        try:
            assert len(started) == 2, "a fork server and a worker"
            assert program.lines(2)[1] == "ready"
            os.kill(program.pid, signal.SIGKILL)
            assert have_ended([program.pid, *started])
            assert psutil.pid_exists(sibling)
        finally:
            os.kill(sibling, signal.SIGKILL)


def test_workers_of_a_closed_model_end_though_another_process_has_their_channels():
    """F9: closing shuts the channel down for all copies."""
    model = DataParallel(nn.Linear(1, 1), ["cpu"] * 2, engine="processes")
    model(torch.zeros(2, 1))
    [worker] = model._engine._worker_group.workers
    copy = os.dup(worker.channel.fileno())
    model.close()
    assert have_ended([worker.pid])
    os.close(copy)


@pytest.mark.parametrize("in_backward", [False, True])
def test_ctrl_c_leaves_nothing(in_backward):
    """F3, F9: in a step; no process, no mapping and no descriptor, once the model is gone."""

    def interrupt(*_: object, caller: int = os.getpid()) -> None:
        if os.getpid() == caller:
            signal.raise_signal(signal.SIGINT)

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = module.layer(x)
        if module.interrupts and not in_backward:
            interrupt()
        if module.interrupts:
            y.register_hook(interrupt)
        return y

    DataParallel(nn.Linear(1, 1), ["cpu"] * 2, engine="processes")(torch.zeros(2, 1))  # the fork server stays
    end_workers_of_earlier_tests()
    before = leftovers.of_this_process()
    model = DataParallel(Calls(forward, layer=nn.Linear(200, 200), interrupts=False), ["cpu"] * 3, engine="processes")
    x = torch.randn(6, 200)
    model(x).sum().backward()
    pids = [worker.pid for worker in model._engine._worker_group.workers]
    model.module.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        model(x).sum().backward()
    assert have_ended(pids)
    model.module.interrupts = False
    model(x).sum().backward()
    del model
    gc.collect()
    assert until(lambda: leftovers.of_this_process() == before), (leftovers.of_this_process(), before)


def files_of(pid: int) -> set[str]:
    """Return what the file descriptors of a process refer to."""
    folder, found = Path(f"/proc/{pid}/fd"), set()
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found.add(os.readlink(folder / name))
    return found


def test_nothing_else_can_reach_the_channel_to_a_worker():
    """F9: no socket has a name or listens, no file has a name, and /proc shows descriptors to the user alone."""
    before = files_of(os.getpid())
    model = DataParallel(nn.Linear(200, 200), ["cpu"] * 3, engine="processes")
    model(torch.zeros(6, 200)).sum().backward()
    assert fork_server.server._process is not None
    workers = [worker.pid for worker in model._engine._worker_group.workers]
    pids = [fork_server.server._process.pid, *workers]
    new = set().union(*map(files_of, [os.getpid(), *pids])) - before
    everywhere = set().union(*map(files_of, pids))
    in_memory = {
        target for target in everywhere if target.startswith("/memfd:unisono") and target.endswith(" (deleted)")
    }
    sockets = {target for target in new if target.startswith("socket:")}
    assert in_memory
    assert len(sockets) >= 2 * len(workers)
    assert new - in_memory - sockets <= {"/dev/null"}
    inodes = {target[len("socket:[") : -1] for target in sockets}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    ours = [line for line in lines if line[6] in inodes]
    assert len(ours) == len(inodes), "all are sockets of this kind, so none is open to the network"
    assert all(len(line) == 7 for line in ours), "none has an address"
    assert not any(int(line[3], 16) & 0x10000 for line in ours), "none listens"
    for pid in pids:
        mode = os.stat(f"/proc/{pid}/fd")
        assert (mode.st_uid, mode.st_mode & 0o777) == (os.getuid(), 0o500)
    model.close()
