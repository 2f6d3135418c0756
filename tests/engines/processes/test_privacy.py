"""What other users of the machine can see of worker processes: nothing."""

import sys

import pytest

from helpers.programs import run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_PROGRAM = r"""
import os
import re
import socket
import stat
from pathlib import Path

import psutil
import torch

import unisono

shared = set(os.listdir("/dev/shm"))
model = unisono.DataParallel(torch.nn.Linear(4, 100_000), ["cpu"] * 3, engine="processes")
model(torch.randn(6, 4)).sum().backward()
me = psutil.Process()
others = me.children(recursive=True)
assert len(others) == 3, others  # two workers and the fork server
fds = [path for process in (me, *others) for path in list(Path(f"/proc/{process.pid}/fd").iterdir())]
fds = [fd for fd in fds if os.path.lexists(fd)]  # without those that were open for listing the others
assert len(fds) > 12

# ---- nothing has a name that another process could open

assert set(os.listdir("/dev/shm")) == shared
named, memory = set(), 0
for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
    inode, *path = line.split()[6:]
    named |= {inode} if path else set()
for kind in ("tcp", "tcp6", "udp", "udp6"):
    if Path(f"/proc/net/{kind}").exists():
        named |= {line.split()[9] for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]}
sockets = 0
for fd in fds:
    target = os.readlink(fd)
    if inode := re.fullmatch(r"socket:\[(\d+)\]", target):
        assert inode[1] not in named, (fd, target)
        sockets += 1
    elif target.startswith("/memfd:unisono"):
        assert os.stat(fd).st_nlink == 0
        memory += 1
    elif "/libffi.so." not in target:  # a library that keeps its own file open, since its version 3.5
        assert not stat.S_ISREG(os.stat(fd).st_mode) or fd.parts[2] == str(me.pid), (fd, target)
assert sockets >= 6 and memory >= 3, (sockets, memory)

# ---- another user can open neither memory nor channels; only root can become one to try

pid = os.fork() if os.geteuid() == 0 else None
if pid == 0:
    status = 1
    try:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        for process in (me, *others):
            for path in [f"/proc/{process.pid}/mem", *(fd for fd in fds if str(process.pid) in fd.parts)]:
                try:
                    os.close(os.open(path, os.O_RDONLY))
                    raise SystemExit(f"{path} can be read")
                except PermissionError:
                    pass
        status = 0
    finally:
        os._exit(status)
assert pid is None or os.waitpid(pid, 0)[1] == 0
"""


def test_other_users_can_read_nothing_and_connect_to_nothing() -> None:
    """T6: channels are pairs of connected sockets without an address; memory is in files without a name."""
    done = run_script(_PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
