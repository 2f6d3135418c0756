"""What is left when the caller ends or is interrupted, and who can reach the channel to a worker."""

import contextlib
import gc
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from helpers import leftovers
from helpers.deaths import workers_of
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
    pids = workers_of(model)
    model.module.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        model(x).sum().backward()
    assert have_ended(pids)
    model.module.interrupts = False
    model(x).sum().backward()
    del model
    gc.collect()
    assert until(lambda: leftovers.of_this_process() == before), (leftovers.of_this_process(), before)


def descriptors_of(pid: int) -> dict[Path, str]:
    """Return what each file descriptor of a process refers to."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found[Path(f"/proc/{pid}/fd", name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def sockets_with_an_address() -> set[str]:
    """Return the inodes of the sockets to which another process could connect."""
    lines = [line.split()[6:] for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    inodes = {inode for inode, *path in lines if path}
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        table = Path(f"/proc/net/{kind}")
        inodes |= {line.split()[9] for line in table.read_text().splitlines()[1:]} if table.exists() else set()
    return inodes


def none_can_be_opened_by_another_user(paths: Iterable[Path]) -> bool:
    """Try it as another user, which only root can become."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            for path in paths:
                with pytest.raises(PermissionError):
                    os.open(path, os.O_RDONLY)
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def test_nothing_else_can_reach_a_worker_its_channel_or_its_memory():
    """F9, T6: channels are pairs of connected sockets without an address; memory is in files without a name."""
    before, in_shm = set(descriptors_of(os.getpid()).values()), set(os.listdir("/dev/shm"))
    model = DataParallel(nn.Linear(200, 200), ["cpu"] * 3, engine="processes")
    model(torch.zeros(6, 200)).sum().backward()
    assert fork_server.server._process is not None
    pids = [fork_server.server._process.pid, *workers_of(model)]
    assert len(pids) == 3
    theirs = {path: target for pid in pids for path, target in descriptors_of(pid).items()}
    mine = {path: target for path, target in descriptors_of(os.getpid()).items() if target not in before}
    descriptors = {path: target for path, target in {**mine, **theirs}.items() if target != "/dev/null"}
    sockets = {target[len("socket:[") : -1] for target in descriptors.values() if target.startswith("socket:")}
    assert len(sockets) >= 4
    assert not sockets & sockets_with_an_address()
    memory = {path for path, target in descriptors.items() if target.startswith("/memfd:unisono")}
    assert len(memory) >= 3
    assert all(os.stat(path).st_nlink == 0 for path in memory)
    assert set(os.listdir("/dev/shm")) == in_shm
    others = {target for path, target in descriptors.items() if path not in memory and not target.startswith("socket:")}
    assert others <= before, "the workers have the program's standard streams"
    for pid in pids:
        mode = os.stat(f"/proc/{pid}/fd")
        assert (mode.st_uid, mode.st_mode & 0o777) == (os.getuid(), 0o500)
    if os.geteuid() == 0:
        memories = [Path(f"/proc/{pid}/mem") for pid in (os.getpid(), *pids)]
        assert none_can_be_opened_by_another_user([*memories, *descriptors])
    model.close()
