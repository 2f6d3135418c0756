"""What can be found out about a worker that has died or does not answer: how it ended, the likely cause, its stack.

A worker cannot be asked any more, so it prepares while it starts: Python's faulthandler writes the stacks of its
threads into a `StackFile`, memory without a name that the caller reads, when the worker crashes and when it gets
`STACK_SIGNAL`. That is done in C, inside the signal's handler: neither the interpreter lock nor a lock of the user's
can hold it up. A process that is stopped (SIGSTOP, a debugger) handles no signal. The kernel says so (`is_stopped`),
and it writes its stack if it is continued before it is ended.

Which process sent a SIGKILL cannot be found out. But the kernel counts how often its out-of-memory killer struck, in
this process's control group and on the machine: `oom_kills` before and after tell it from other senders.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from unisono.engines.processes.shared_memory import unnamed_file
from unisono.runtime.cgroups import cgroup_folders
from unisono.runtime.interrupts import at_deletion

# Ignored by a process that does not handle it, so it cannot harm a worker that has only just started.
STACK_SIGNAL = getattr(signal, "SIGURG", 0)  # 0: on Windows, where there are no workers
_MOST_BYTES = 1 << 16
_WRITTEN_WITHIN_S = 2.0  # what a running process needs to write its stack, on a busy machine
_SLEEP_S = 0.01
_CGROUP = "this control group"
_MACHINE = "this machine"

_CAUSES = {  # by name, because some systems lack some of them
    "SIGSEGV": "an invalid memory access, usually an error in C or C++ code: an extension, or libraries that do "
    "not fit together",
    "SIGBUS": "memory that could not be had when it was touched: a mapped file that was truncated, or a full "
    "file system behind it",
    "SIGABRT": "C or C++ code that gave up: a failed assertion, an exception that nothing caught, damaged memory; "
    "its message is on standard error",
    "SIGILL": "an instruction that this processor lacks: a library that was built for another one",
    "SIGFPE": "an integer division by zero in C or C++ code",
    "SIGXCPU": "the limit of processor time (ulimit -t)",
    "SIGXFSZ": "the limit of a file's size (ulimit -f)",
    "SIGSYS": "a system call that this sandbox forbids",
}
_SENT = "another process sent it"
_EXITED = "something in it called os._exit, or C's exit"
_UNKNOWN_SENDER = "the kernel's out-of-memory killer, or another process (kill -9, a scheduler)"


class StackFile:
    """Memory into which a worker writes its Python stacks, and from which the caller reads them.

    Attributes:
        fd: its file descriptor, open as long as this object exists.
    """

    def __init__(self) -> None:
        self.fd = unnamed_file("unisono-stack")
        self._closed = at_deletion(map(os.close, [self.fd]))

    def read(self) -> str:
        """Return what has been written."""
        text = os.pread(self.fd, _MOST_BYTES, 0).decode(errors="replace")
        return text.partition("\nExtension modules:")[0].strip()

    def ask(self, pid: int) -> str:
        """Have a process that has called `write_stacks_to` write its stacks now; return them, "" if it cannot.

        One that is stopped goes on for that: end it afterwards.
        """
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)  # of the file that both processes have open
        with contextlib.suppress(ProcessLookupError, PermissionError):
            _signal_first_thread(pid, STACK_SIGNAL)
            if is_stopped(pid):
                os.kill(pid, signal.SIGCONT)  # the first thing that it then does is to handle the other signal
        until = time.monotonic() + _WRITTEN_WITHIN_S
        before, text = "", self.read()
        while time.monotonic() < until and (not text or text != before):
            time.sleep(_SLEEP_S)
            before, text = text, self.read()
        return text


def _signal_first_thread(pid: int, number: int) -> None:
    """Send a signal to the first thread of a process, in which a worker runs its replica.

    A signal to the process may be handled by any of its threads, while the first one, which was stopped, goes on and
    leaves the place where it was stuck. Where the system has no such call, it is sent to the process.
    """
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None or tgkill(pid, pid, number):
        os.kill(pid, number)


def write_stacks_to(fd: int) -> None:
    """Have this process write its Python stacks to a `StackFile` when it crashes or gets `STACK_SIGNAL`."""
    faulthandler.enable(file=fd)
    faulthandler.register(STACK_SIGNAL, file=fd)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or by a debugger; False where that cannot be read."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] in ("T", "t")


def oom_kills(root: Path = Path("/")) -> dict[str, int]:
    """Return how many processes the kernel's out-of-memory killer has killed, by where; without what is unreadable."""
    counts = {}
    names = ("memory.events", "memory.oom_control")  # in versions 2 and 1 of control groups
    of_group = [folder / name for folder in cgroup_folders(root, "memory") for name in names]
    for where, files in ((_CGROUP, of_group), (_MACHINE, [root / "proc/vmstat"])):
        for file in files:
            with contextlib.suppress(OSError, ValueError):
                lines = [line.split() for line in file.read_text().splitlines()]
                found = [int(line[1]) for line in lines if len(line) == 2 and line[0] == "oom_kill"]
                if found:
                    counts[where] = found[0]
                    break
    return counts


def how_it_ended(code: int, kills_before: Mapping[str, int]) -> str:
    """Return in words how a process ended, and why, as far as that can be told.

    Args:
        code: its exit status, or minus the number of the signal that ended it.
        kills_before: `oom_kills` at a time when it was running.
    """
    if code >= 0:
        return f"exited with status {code} ({_EXITED})"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"was ended by signal {-code} ({_SENT})"
    cause = _sender_of_sigkill(kills_before) if number == signal.SIGKILL else _CAUSES.get(number.name, _SENT)
    return f"was ended by {number.name} ({cause})"


def _sender_of_sigkill(before: Mapping[str, int]) -> str:
    after = oom_kills()
    for where in (_CGROUP, _MACHINE):
        if where in before and where in after:
            num_kills = after[where] - before[where]
            if num_kills > 0:
                return (
                    "most likely by the kernel's out-of-memory killer: since the workers were started it has struck "
                    f"{num_kills} times in {where}"
                )
            return (
                "another process sent it: kill -9, a scheduler, a supervisor. The kernel's out-of-memory killer has "
                f"not struck in {where}"
            )
    return _UNKNOWN_SENDER
