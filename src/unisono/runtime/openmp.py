"""pause_threads: the calling thread's idle OpenMP threads end, so that they occupy no core that a worker needs.

After an operation in which they took part (a loss, an optimizer's step), OpenMP's threads wait for more work for about
2 ms with their cores at full speed. At the beginning of a pass these are the cores of the worker processes.

Guarantees
    - Only the pool of the calling thread ends: GNU OpenMP has one for each thread that starts parallel regions. Other
      threads compute meanwhile.
    - The next parallel region starts a pool anew, with the same number of threads. Results are the same.

Assumes GNU OpenMP, as in torch's own builds for Linux. With another runtime nothing happens.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from unisono.runtime.forks import in_forked_child

_SOFT = 1  # omp_pause_soft: what the user has set stays


def pause_threads() -> None:
    """End the idle OpenMP threads of the calling thread's pool, if it has one; it takes about 0.1 ms then.

    Call it before the workers get something to do: it waits until the threads have ended, and one whose core is taken
    takes milliseconds to end.
    """
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """Return `omp_pause_resource_all` of the OpenMP that torch uses; None if it is not GNU's, or older than 9."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        # Symbols are looked up in a library and in those that it needs, so the name of OpenMP's file does not matter.
        libraries = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"), os.RTLD_NOLOAD)
        pause = libraries.omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    if hasattr(libraries, "__kmpc_fork_call"):  # LLVM's or Intel's, which pause the threads of the whole process
        return None
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return cast(Callable[[int], int], pause)


def _after_fork() -> None:
    """Let the child of a fork pause nothing: it has its parent's pool without the threads, and would wait for them."""
    global _pause  # noqa: PLW0603
    _pause = functools.cache(lambda: None)


in_forked_child(_after_fork)
