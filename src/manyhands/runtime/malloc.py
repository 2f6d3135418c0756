"""keep_freed_memory: freed blocks stay with the process, for its next step to use again.

glibc's malloc gives a large block back to the kernel as soon as it is freed, and takes a new one from it for the next
tensor of that size. Each page of a new block is filled with zeros when it is first written, so a training, which frees
and takes the same sizes in every step, pays for the same pages in every step.

Threads other than the first have heaps of their own, of 64 MiB, and what does not fit into one is given back whatever
else is set. So all threads are to use the first one's; what it costs that they then wait for each other is too little
to be seen beside a tensor operation.

It is a setting of the whole process and cannot be taken back: what malloc did before depends on what it has freed so
far. Workers of the processes engine follow their caller (`thread_state.ProcessState`).
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import cast

# From glibc's malloc.h: what mallopt is to set.
_TRIM_THRESHOLD = -1  # free bytes at the end of the heap, from which on they go back to the kernel
_MMAP_THRESHOLD = -3  # bytes of a block that is not taken from a heap, but is a mapping of its own
_ARENA_MAX = -8  # how many sets of heaps there are; threads that have one already keep it

_LARGE = 2**30
_LARGEST_IN_OLD_GLIBC = 2**25  # up to 2.34, mallopt refuses a threshold above this for blocks of their own

_kept = False


def keep_freed_memory() -> bool:
    """Keep freed memory in this process instead of giving it back to the system after every step.

        >>> import sys
        >>> manyhands.keep_freed_memory() or not sys.platform.startswith("linux")
        True

    Training steps get faster by 5 to 25 % on the CPU, with and without `DataParallel`: the memory of one step is there
    for the next. The process stays as large as its largest step so far. Call it once, before the first step; the worker
    processes of `engine="processes"` do the same from their next step on. `manyhands train` calls it.

    Returns:
        Whether anything was done: it needs glibc, the C library of most Linux systems. Elsewhere nothing happens.
    """
    global _kept  # noqa: PLW0603  # the setting is the process's
    mallopt = _mallopt()
    if mallopt is None:
        return False
    own_mappings = mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _LARGEST_IN_OLD_GLIBC)
    _kept = bool(own_mappings and mallopt(_TRIM_THRESHOLD, _LARGE) and mallopt(_ARENA_MAX, 1))
    return _kept


def keeps_freed_memory() -> bool:
    """Return whether `keep_freed_memory` has had an effect in this process."""
    return _kept


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's mallopt; None where the C library is another one, whose mallopt may mean other things."""
    if not sys.platform.startswith("linux"):
        return None
    c_library = ctypes.CDLL(None)
    if not hasattr(c_library, "gnu_get_libc_version"):
        return None
    mallopt = c_library.mallopt
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return cast(Callable[[int, int], int], mallopt)
