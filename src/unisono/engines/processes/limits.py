"""What the system may refuse worker processes: descriptors, processes, memory, files of a size; and what then helps.

The system's own words ("Too many open files") name neither the limit nor the remedy. `explained` adds both, where
something is asked of the system; the error keeps its class and its `errno`.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator

with contextlib.suppress(ImportError):  # on Windows, where there are no workers
    import resource


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
    if error.errno is None or error.errno not in _REMEDIES:
        return error
    remedy, limit = _REMEDIES[error.errno]
    remedy = remedy.format(limit=_soft(limit), folder=tempfile.gettempdir())
    return OSError(error.errno, f"{os.strerror(error.errno)}: {wanted} cannot be had. {remedy}")


def share_with(pid: int) -> None:
    """Give a process that this one has started the limits that this one has now (Linux)."""
    if hasattr(resource, "prlimit"):
        for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NPROC):
            with contextlib.suppress(OSError, ValueError):  # it has ended, or may have no more than it has
                resource.prlimit(pid, limit, resource.getrlimit(limit))


def _soft(limit: str | None) -> str:
    """Return the value that a limit has now, by its name in `resource`."""
    soft = resource.RLIM_INFINITY if limit is None else resource.getrlimit(getattr(resource, limit))[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


_OTHERWISE = 'use fewer devices, or use engine="threads"'
_DESCRIPTORS = (
    "This process may have {limit} file descriptors, and needs about 10 for each worker process, beside its own: raise "
    f"the limit (ulimit -n 1024, or resource.setrlimit(resource.RLIMIT_NOFILE, ...)), {_OTHERWISE}."
)
# By error: what helps, and the name of the limit in it.
_REMEDIES: dict[int, tuple[str, str | None]] = {
    errno.EMFILE: (_DESCRIPTORS, "RLIMIT_NOFILE"),
    errno.ETOOMANYREFS: (_DESCRIPTORS, "RLIMIT_NOFILE"),  # those in messages that have not been read count, too
    errno.ENFILE: (
        f"All processes of this machine together have too many files open: raise fs.file-max, {_OTHERWISE}.",
        None,
    ),
    errno.EFBIG: (
        "A file of this process may have {limit} bytes, and what processes share counts as a file: raise the limit "
        '(ulimit -f unlimited), or use engine="threads".',
        "RLIMIT_FSIZE",
    ),
    errno.ENOMEM: (
        "This process may have an address space of {limit} bytes (ulimit -v), and the machine, or this control group, "
        f"has a limit, too: raise it, use smaller batches, {_OTHERWISE}.",
        "RLIMIT_AS",
    ),
    errno.EAGAIN: (
        "This user may have {limit} processes and threads (ulimit -u), and a control group may have fewer (pids.max): "
        f"raise the limit, {_OTHERWISE}.",
        "RLIMIT_NPROC",
    ),
    errno.ENOSPC: (
        "Without memfd_create, processes share files in {folder}, which is full: set TMPDIR to another folder, or use "
        'engine="threads".',
        None,
    ),
}
