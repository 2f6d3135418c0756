"""What a user sees of an exception: the frames of what the user has written, and the notes.

Between the call of a wrapper and the forward of its module there are some ten frames of this package.
`leave_out_own_frames` removes ours where an exception leaves unisono, so that its traceback reads as the plain
module's. It also removes the frames of torch that call the replica: the wrapper's own call has the same ones. Where
unisono itself raises an exception, that last frame stays; Ctrl-C ends in the user's line. With UNISONO_TRACEBACK=full
in the environment all stay.
"""

import os
import sys
from collections.abc import Callable
from dis import opmap
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from unisono.runtime.errors import cause_of, context_of, notes_of, traceback_of
from unisono.runtime.thread_pool import inside_replica

P = ParamSpec("P")
T = TypeVar("T")

_RAISE = opmap["RAISE_VARARGS"]
_PACKAGE = __name__.partition(".")[0]
_SHOWS_NOTES = (8, 14)  # the first IPython that does
_TORCH_CALLS = {  # how torch calls a module, and a backward: (module, function)
    ("torch.nn.modules.module", "_wrapped_call_impl"),
    ("torch.nn.modules.module", "_call_impl"),
    ("torch.autograd.graph", "_engine_run_backward"),
}


def leave_out_own_frames(error: BaseException) -> None:
    """Remove unisono's frames from an exception that is about to leave it, and from those that it was caused by.

        >>> def forward(self, *inputs):
        ...     try:
        ...         return run(self, *inputs)
        ...     except BaseException as error:
        ...         leave_out_own_frames(error)
        ...         raise  # alone, because `raise error` adds this frame again

    In an IPython that does not show notes they are printed.
    """
    if os.environ.get("UNISONO_TRACEBACK") != "full":
        seen: set[int] = set()
        each: BaseException | None = error
        while each is not None and id(each) not in seen:
            seen.add(id(each))
            raises = not issubclass(type(each), KeyboardInterrupt)  # which comes from outside
            BaseException.with_traceback(each, _without_own_frames(traceback_of(each), raises=raises))
            each = context_of(each) if cause_of(each) is None else cause_of(each)
    notes = notes_of(error)
    if notes and not _notes_are_shown() and not inside_replica():
        print(*notes, sep="\n", file=sys.stderr)


def without_own_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Remove unisono's frames from what a function raises."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            leave_out_own_frames(error)
            raise

    return called


def is_raised_by_unisono(error: BaseException) -> bool:
    """Return whether an exception comes from a `raise` of unisono's, and not from the user's code or torch."""
    entry = traceback_of(error)
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry is not None and _is_own(entry) and entry.tb_frame.f_code.co_code[entry.tb_lasti] == _RAISE


def _without_own_frames(first: TracebackType | None, *, raises: bool) -> TracebackType | None:
    """Return a traceback without the frames of unisono, and of its calls.

    Args:
        raises: whether the innermost frame of all, which stays, may have raised the exception.
    """
    entries: list[TracebackType] = []
    left_out = False
    while first is not None:
        left_out = _is_own(first) or (left_out and _is_torch_call(first))
        if not left_out or (first.tb_next is None and raises):
            entries.append(first)
        first = first.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        entry.tb_next = kept
        kept = entry
    return kept


def _is_own(entry: TracebackType) -> bool:
    module = entry.tb_frame.f_globals.get("__name__")
    return isinstance(module, str) and module.partition(".")[0] == _PACKAGE


def _is_torch_call(entry: TracebackType) -> bool:
    frame = entry.tb_frame
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) in _TORCH_CALLS


def _notes_are_shown() -> bool:
    ipython: Any = sys.modules.get("IPython")
    shell = getattr(ipython, "get_ipython", lambda: None)()
    return shell is None or ipython.version_info >= _SHOWS_NOTES
