"""What some processes tell each other by way of the launcher's store: where each is, who has failed, who has ended.

It works before there is a connection between them, and when one has been lost. Nothing here waits, and nothing raises:
a store that cannot be reached has gone with the process in which it was, and then nobody is there to be told, or asked.
"""

import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

distributed: Any = torch.distributed
STORE_ERRORS = (
    getattr(distributed, "DistNetworkError", RuntimeError),
    getattr(distributed, "DistStoreError", RuntimeError),
)


class FailureStore:
    """What is told, seen from one of the processes.

    Attributes:
        pid: this process's number. A child of it, a loader's worker perhaps, tells nothing: nobody waits for it.
        place: its machine and its number.
        places: those of all processes, in rank order, once they are known.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.pid = os.getpid()
        self.place = f"{machine()} {self.pid}"
        self.places: Sequence[str] = ()
        self._store, self._rank = store, rank
        self._store_has_gone = False

    def introduce(self) -> None:
        """Let the others know where this process is."""
        self.say(f"process/{self._rank}", self.place)

    def say(self, key: str, text: str, *, first_only: bool = False) -> None:
        """Put up a text; with `first_only`, unless somebody has."""
        if self._store_has_gone or os.getpid() != self.pid:
            return
        try:
            if first_only:
                self._store.compare_set(key, "", text)
            else:
                self._store.set(key, text)
        except STORE_ERRORS:
            self._store_has_gone = True

    def text(self, key: str) -> str:
        """Return a text that somebody has put up; "" if there is none."""
        if self._store_has_gone:
            return ""
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except STORE_ERRORS:
            self._store_has_gone = True
            return ""

    def has_gone(self, rank: int) -> bool:
        """Return whether another process has ended; of other machines only those that have said so are known."""
        place = self.places[rank] if self.places else self.text(f"process/{rank}")
        its_machine, _, pid = place.rpartition(" ")
        return bool(self.text(f"ended/{rank}")) or (bool(pid) and its_machine == machine() and not _runs(int(pid)))

    def end(self) -> None:
        """Tell those on other machines that this process's program has ended; on its own, it can be seen.

        Not more than needed: the store may have ended before, which torch then says at length.
        """
        if not self.places or any(place.rpartition(" ")[0] != machine() for place in self.places):
            self.say(f"ended/{self._rank}", "ended")


@functools.cache
def machine() -> str:
    """Return what is the same for processes that can see each other's numbers."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")  # two containers may call themselves alike
    except OSError:
        numbers = ""
    return f"{socket.gethostname()} {numbers}"


def _runs(pid: int) -> bool:
    """Return whether a process of this machine runs; one that has ended and not been waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # not ours to ask, or a system without /proc
        return True
