"""Files under names that someone else may have taken first: with a link, a pipe, a device.

Through a link, a write would reach another file of the user's; opening a pipe may wait for ever. So such a name is an
error. Assumes that the folder's names do not change between a check and the use of the name that follows.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path

_NO_LINK_NO_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_BYTES_AS_THEY_ARE = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)  # Windows has these, and not the others


class NotRegularFileError(OSError):
    """Under a name is a link, a pipe, a device or a folder, and an ordinary file is expected."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "expected an ordinary file, but it is a link, a pipe or a device", str(path))


def open_regular(path: Path, flags: int, mode: int = 0o666) -> int:
    """Return a descriptor of an ordinary file, as `os.open` does.

    Raises:
        NotRegularFileError: it is something else.
        OSError: it cannot be opened.
    """
    expect_regular(path)
    file = os.open(path, flags | _NO_LINK_NO_WAIT | _BYTES_AS_THEY_ARE, mode)  # whatever has come there since the check
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotRegularFileError(path)
    return file


def make_anew(path: Path) -> None:
    """Make an empty file; an ordinary file that is there goes.

    Raises:
        NotRegularFileError: something else is there, which stays.
        OSError: the file cannot be made.
    """
    expect_regular(path)
    path.unlink(missing_ok=True)
    os.close(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def expect_regular(path: Path) -> None:
    """Check that under a name is an ordinary file, or nothing.

    Raises:
        NotRegularFileError: it is something else.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise NotRegularFileError(path)
