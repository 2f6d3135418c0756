"""What the system may refuse worker processes: descriptors, processes, memory, files of a size; and what then helps.

The system's own words ("Too many open files") name neither the limit nor the remedy. `explained` adds both, where
something is asked of the system; the error keeps its class and its `errno`.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator

with contextlib.suppress(ImportError):  # on Windows, where there are no workers
    import resource

_DESCRIPTORS_OF_A_WORKER = 10  # in the caller's process: a channel, and memory that two processes share
_OTHERWISE = 'use fewer devices, or use engine="threads"'


@contextlib.contextmanager
def explained(wanted: str) -> Iterator[None]:
    """Give an OSError of the block the limit that it comes from, and the remedy.

    Args:
        wanted: what is asked of the system, in words.
    """
    try:
        yield
    except OSError as error:
        raise explanation(error, wanted) from None


def explanation(error: OSError, wanted: str) -> OSError:
    """Return an equal error that says which limit it comes from, and what helps; `error` itself if that is not known.

    Args:
        wanted: what was asked of the system, in words.
    """
    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is None:
        return error
    return OSError(error.errno, f"{os.strerror(error.errno or 0)}: {wanted} cannot be had. {remedy()}")


def share_with(pid: int) -> None:
    """Give a process that this one has started the limits that this one has now (Linux)."""
    if hasattr(resource, "prlimit"):
        for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NPROC):
            with contextlib.suppress(OSError, ValueError):  # it has ended, or may have no more than it has
                resource.prlimit(pid, limit, resource.getrlimit(limit))


def _limit(number: int) -> str:
    soft, _ = resource.getrlimit(number)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def _descriptors() -> str:
    return (
        f"This process may have {_limit(resource.RLIMIT_NOFILE)} file descriptors, and needs about "
        f"{_DESCRIPTORS_OF_A_WORKER} for each worker process, beside its own: raise the limit (ulimit -n 1024, or "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ...)), {_OTHERWISE}."
    )


def _descriptors_of_the_machine() -> str:
    return f"All processes of this machine together have too many files open: raise fs.file-max, {_OTHERWISE}."


def _size_of_a_file() -> str:
    return (
        f"A file of this process may have {_limit(resource.RLIMIT_FSIZE)} bytes, and what processes share counts as "
        f'a file: raise the limit (ulimit -f unlimited), or use engine="threads".'
    )


def _memory() -> str:
    return (
        "This process may have an address space of "
        f"{_limit(resource.RLIMIT_AS)} bytes (ulimit -v), and the machine, or this control group, has a limit, too: "
        f"raise it, use smaller batches, {_OTHERWISE}."
    )


def _processes() -> str:
    return (
        f"This user may have {_limit(resource.RLIMIT_NPROC)} processes and threads (ulimit -u), and a control group "
        f"may have fewer (pids.max): raise the limit, {_OTHERWISE}."
    )


def _disk() -> str:
    return (
        f"Without memfd_create, processes share files in {tempfile.gettempdir()}, which is full: set TMPDIR to another "
        'folder, or use engine="threads".'
    )


_REMEDIES: dict[int, Callable[[], str]] = {
    errno.EMFILE: _descriptors,
    errno.ETOOMANYREFS: _descriptors,  # those in messages that have not been read count, too
    errno.ENFILE: _descriptors_of_the_machine,
    errno.EFBIG: _size_of_a_file,
    errno.ENOMEM: _memory,
    errno.EAGAIN: _processes,
    errno.ENOSPC: _disk,
}
