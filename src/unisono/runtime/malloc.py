"""keep_freed_memory: the process keeps freed blocks, and its next step uses them again.

glibc's malloc returns a large block to the kernel as soon as it is freed, and requests a new one for the next tensor of
that size. The kernel zeroes each page of a new block at the first write. A training allocates and frees the same sizes
in every step, so it pays for the same pages in every step.

Threads other than the first have arenas of their own, made of heaps of 64 MiB. glibc deletes a heap when all of it is
free, except where the heap before it has less room left than `M_TOP_PAD`: with a pad of two heaps none is deleted
(`heap_trim` in glibc's malloc/arena.c). A block of more than 64 MiB does not fit into a heap: in these threads it is
returned to the kernel whatever the settings. One arena for all threads would keep it, too, but threads would wait for
each other at every allocation. benchmarks/allocators.md has what each costs.

The setting belongs to the process and cannot be undone: malloc's default depends on what was freed before. So a user's
process is left as it is until the user calls the function.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import cast

# From glibc's malloc.h: what mallopt is to set.
_TRIM_THRESHOLD = -1  # from this many free bytes at its end, a heap is trimmed: they are returned to the kernel
_TOP_PAD = -2  # how many bytes more than necessary are requested from the kernel, and kept when a heap is trimmed
_MMAP_THRESHOLD = -3  # from this many bytes, a block is a mapping of its own, outside of the heaps

_TWO_HEAPS = 2 * 2**26
_LARGE = 2**30
_LARGEST_IN_OLD_GLIBC = 2**25  # up to 2.34, mallopt refuses a larger mmap threshold


def keep_freed_memory() -> bool:
    """Keep freed memory in this process instead of giving it back to the system after every step.

        >>> import sys
        >>> unisono.keep_freed_memory() or not sys.platform.startswith("linux")
        True

    Training steps on the CPU get faster, with and without `DataParallel`, by up to a fifth (benchmarks/allocators.md):
    each step uses the memory of the last one. Call it once, before the first step. A plain `import unisono` does not:
    it changes no setting of your process. `unisono train` calls this.

    The process does not get smaller: each thread keeps what it has had, which can be several times the largest step
    where sizes differ from step to step. Blocks of more than 64 MiB are kept in the main thread only; docs/benchmark.md
    says what keeps them in all threads.

    Returns:
        Whether anything was done: it needs glibc, the C library of most Linux systems. Elsewhere nothing happens.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    own_mappings = mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _LARGEST_IN_OLD_GLIBC)
    return bool(own_mappings and mallopt(_TRIM_THRESHOLD, _LARGE) and mallopt(_TOP_PAD, _TWO_HEAPS))


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's mallopt; None for any other C library, whose mallopt may mean other things."""
    if not sys.platform.startswith("linux"):
        return None
    c_library = ctypes.CDLL(None)
    if not hasattr(c_library, "gnu_get_libc_version"):
        return None
    mallopt = c_library.mallopt
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return cast(Callable[[int, int], int], mallopt)
