"""What is done in the child of a fork; on a system that does not fork (Windows), nothing."""

import ctypes
import os
from collections.abc import Callable
from typing import Any


def in_forked_child(function: Callable[[], object]) -> None:
    """Have `function` called in the child of each fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def leak_process_group(group: Any) -> None:
    """Never free a process group: in the child of a fork, its destructor would wait for threads that the child lacks.

    Not even when the interpreter ends, which frees what modules refer to (more of it since Python 3.14).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
