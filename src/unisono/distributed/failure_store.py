"""What ranks write into the launcher's store: where each runs, which one failed and why, which ones have exited.

The store works before the ranks are connected, and after a connection is lost. Nothing here waits, and nothing raises:
a store that cannot be reached is gone with the process that hosted it; then writes do nothing, and reads return "".
"""

import ctypes
import functools
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

distributed: Any = torch.distributed
STORE_ERRORS = (
    getattr(distributed, "DistNetworkError", RuntimeError),
    getattr(distributed, "DistStoreError", RuntimeError),
)


class FailureStore:
    """The store, as one rank sees it."""

    def __init__(self, store: Any, rank: int) -> None:
        self.pid = os.getpid()  # a process forked from it, such as a loader's worker, writes nothing: none waits for it
        self.location = f"{host_id()} {self.pid}"
        self.locations: Sequence[str] = ()  # those of all ranks, in rank order, once they are known
        self._store, self._rank = store, rank
        self._is_lost = False

    def register(self) -> None:
        """Publish where this rank runs."""
        self.set(f"process/{self._rank}", self.location)

    def set(self, key: str, text: str, *, first_only: bool = False) -> None:
        """Write a text; with `first_only`, unless the key has one."""
        if os.getpid() == self.pid:
            self._ask(partial(self._store.compare_set, key, "") if first_only else partial(self._store.set, key), text)

    def get(self, key: str) -> str:
        """Return the text of a key; "" if there is none."""
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else "") or ""

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        if os.getpid() == self.pid:
            self._ask(self._store.delete_key, key)

    def _ask(self, function: Callable[..., Any], *arguments: str) -> Any:
        """Return what a function of the store returns; None if the store is lost."""
        if not self._is_lost:
            try:
                return function(*arguments)
            except STORE_ERRORS:
                self._is_lost = True
        return None

    def has_exited(self, rank: int) -> bool:
        """Return whether another rank has exited; on another host, only if it has published that."""
        location = self.locations[rank] if self.locations else self.get(f"process/{rank}")
        host, _, pid = location.rpartition(" ")
        return bool(self.get(f"ended/{rank}")) or (bool(pid) and host == host_id() and not _runs(int(pid)))

    def report_exit(self) -> None:
        """Publish that this program has ended, if a rank runs on another host; those of this host can see it.

        Not otherwise: the store may be gone already, and torch would print long warnings.
        """
        if not self.locations or any(location.rpartition(" ")[0] != host_id() for location in self.locations):
            self.set(f"ended/{self._rank}", "ended")


@functools.cache
def host_id() -> str:
    """Return a text that is equal for processes that see each other's pids, and differs otherwise."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # two containers may have the same host name
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}"


if sys.platform == "win32":
    _SYNCHRONIZE, _ACCESS_DENIED, _WAIT_TIMEOUT = 0x00100000, 5, 0x102  # winnt.h, winerror.h

    def _runs(pid: int) -> bool:
        """Return whether a process of this host runs. (`os.kill(pid, 0)` is Ctrl-C here, for a whole console.)"""
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.OpenProcess.restype = ctypes.c_void_p
        process = kernel.OpenProcess(_SYNCHRONIZE, False, pid)
        if not process:
            return ctypes.get_last_error() == _ACCESS_DENIED
        try:
            return kernel.WaitForSingleObject(ctypes.c_void_p(process), 0) == _WAIT_TIMEOUT
        finally:
            kernel.CloseHandle(ctypes.c_void_p(process))
else:

    def _runs(pid: int) -> bool:
        """Return whether a process of this host runs; a zombie does not. Without /proc, it does."""
        try:
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
        except ProcessLookupError:
            return False
        except (OSError, IndexError):  # no permission, or a system without /proc
            return True
