"""What is left when the caller ends or is interrupted, and who can reach a worker, its channel and its memory."""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from helpers.deaths import workers_of
from helpers.modules import Calls
from helpers.programs import Program, have_ended
from unisono import DataParallel
from unisono.engines.processes import fork_server

# A program that says which processes its replicas are in; what it does then goes on for ever. Its sibling has a copy of
# each of its sockets, as a process has that C code forks, and outlives it.
_ENDLESS = """
    import os, subprocess, torch, unisono
    # Backward imports it in a thread, and an import that goes on makes Python forget that Ctrl-C has ended the program.
    import torch.fx.experimental.symbolic_shapes

    def busy(*args):
        print("busy", flush=True)
        while True:
            torch.ones(1000).sum()

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.waits = torch.nn.BatchNorm1d(1), False

        def forward(self, x):
            if not self.waits:
                print(os.getpid(), flush=True)
            if not self.waits or int(x[0]) not in BUSY:
                return self.norm(x)
            if not IN_BACKWARD:
                busy()
            y = self.norm(x)
            y.register_hook(busy)
            return y

    model = unisono.DataParallel(Slow(), ["cpu"] * 3, engine="processes", sync_batch_norm=True)
    x = torch.arange(3.0).view(3, 1)
    model(x).pow(3).sum().backward()
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name).startswith("socket:"):
                sockets.append(int(name))
        except OSError:
            pass
    null = subprocess.DEVNULL
    print(subprocess.Popen(["sleep", "1000"], pass_fds=sockets, stdout=null, stderr=null).pid, flush=True)
    model.module.waits = True
    model(x).pow(3).sum().backward()
    busy()
"""


@pytest.mark.parametrize(
    ("computing", "in_backward", "how"),
    [
        pytest.param({0}, False, signal.SIGINT, id="workers wait in forward"),
        pytest.param({0}, True, signal.SIGKILL, id="workers wait in backward, SIGKILL"),
        pytest.param({1}, False, signal.SIGINT, id="the caller waits in forward", marks=pytest.mark.slow),
        pytest.param({1}, True, signal.SIGINT, id="the caller waits in backward"),
        pytest.param({0, 1, 2}, False, signal.SIGINT, id="all compute, SIGINT", marks=pytest.mark.slow),
        pytest.param({0, 1, 2}, False, signal.SIGKILL, id="all compute, SIGKILL"),
        pytest.param({0, 1, 2}, False, signal.SIGTERM, id="all compute, SIGTERM", marks=pytest.mark.slow),
        pytest.param(set(), False, signal.SIGKILL, id="workers are idle, SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_no_process_outlives_a_program_though_another_one_has_its_channels(computing, in_backward, how):
    """F3, F5, F9, N5: whichever replica computes and whichever waits at a batch norm."""
    with Program(_ENDLESS.replace("BUSY", repr(computing)).replace("IN_BACKWARD", repr(in_backward))) as program:
        lines = program.lines(4 + (len(computing) or 1))
        replicas, sibling = {int(line) for line in lines[:3]}, int(lines[3])
        try:
            started = {child.pid for child in psutil.Process(program.pid).children(recursive=True)} - {sibling}
            assert replicas <= {program.pid, *started}
            assert len(started) == 3, "a fork server and two workers"
            os.kill(program.pid, how)
            assert program.end().returncode == -how
            assert have_ended(started)
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


@pytest.mark.usefixtures("nothing_is_left")
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
    not_ours = ("/dev/null", "/libffi.so.")  # libffi keeps its own file open, since its version 3.5
    opened = {**mine, **theirs}.items()
    descriptors = {path: target for path, target in opened if not any(each in target for each in not_ours)}
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
