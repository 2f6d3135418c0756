"""Ctrl-C while a command starts: one line and exit status 130, as later.

To find `unisono.cli`, Python imports the package first, and with it torch, which takes seconds. So this is the first
file that the package imports. It needs nothing but the standard library, and does nothing in other programs. Until the
command's `main` has begun there is nothing to finish or to undo, so the process ends at once.
"""

import os
import signal
import sys
from types import FrameType

_STOPPED = 128 + signal.SIGINT  # as shells have it


def has_started() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"unisono: error: stopped at once\n")
    os._exit(_STOPPED)


def _is_of_command() -> bool:
    """Return whether this process has been started as `unisono` or `python -m unisono`.

    Processes that multiprocessing starts have the words of their parent, but not among those that started Python.
    """
    started_as = sys.argv[0] if sys.argv else ""
    name = os.path.splitext(os.path.basename(started_as))[0]
    is_command = name == "unisono" or (name == "-m" and "unisono" in sys.orig_argv)
    return is_command and started_as in sys.orig_argv


if _is_of_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # where it is not ignored
    signal.signal(signal.SIGINT, _end)
