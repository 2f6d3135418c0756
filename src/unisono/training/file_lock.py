"""A lock on an open file that one process at a time holds. The system releases it however the process ends.

flock, and on Windows msvcrt's lock of one byte: other processes cannot read or write that byte meanwhile, so it is one
that the file does not have.
"""

import os
import sys

if sys.platform == "win32":
    import msvcrt

    _BYTE = 2**30

    def _ask(file: int, how: int) -> None:
        before = os.lseek(file, 0, os.SEEK_CUR)
        os.lseek(file, _BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file, how, 1)
        finally:
            os.lseek(file, before, os.SEEK_SET)

    def _take(file: int) -> None:
        try:
            _ask(file, msvcrt.LK_NBLCK)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from error

    def release(file: int) -> None:
        """Let others take the lock, also where a child process still has the file open."""
        _ask(file, msvcrt.LK_UNLCK)
else:
    import fcntl

    def _take(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(file: int) -> None:
        """Let others take the lock, also where a child process still has the file open."""
        fcntl.flock(file, fcntl.LOCK_UN)


def take(file: int) -> bool:
    """Take the lock of a file; return False where its file system has no locks.

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        _take(file)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
