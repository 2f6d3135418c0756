"""Functions in a forked child of this process, as a program or a library forks one."""

import os
from collections.abc import Callable


def in_a_fork(function: Callable[[], int]) -> int:
    """Return what a function returns in a forked child, which then ends; 99 if it fails, -14 after a `signal.alarm`."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 99
    try:
        status = function()
    finally:
        os._exit(status)
