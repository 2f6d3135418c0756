"""What a user sees of an exception: the frames of what the user has written, and the notes.

Between the call of a wrapper and the forward of its module there are some ten frames of this package, and some of them
are in another process. `leave_out_own_frames` removes ours where an exception leaves unisono, so that its traceback
reads as the plain module's. It also removes the frames of torch that call the replica: the wrapper's own call has the
same ones. Where unisono itself raises an exception, that last frame stays. With UNISONO_TRACEBACK=full in the
environment all of them stay.

A traceback cannot be pickled. A worker sends its frames as `FrameSummary`s, of which `rebuilt` makes a traceback that
reads the same, in a debugger too; it lacks the local variables.
"""

import ast
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from types import CodeType, FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar

from unisono.runtime.thread_pool import inside_replica

P = ParamSpec("P")
T = TypeVar("T")

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
            each.with_traceback(_without_own_frames(each.__traceback__))
            each = each.__context__ if each.__cause__ is None else each.__cause__
    notes = getattr(error, "__notes__", ())
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


def _without_own_frames(first: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of unisono, and of its calls, except for the innermost frame of all."""
    entries: list[TracebackType] = []
    left_out = False
    while first is not None:
        left_out = _is_own(first) or (left_out and _is_torch_call(first))
        if first.tb_next is None or not left_out:
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


# ---- from one process to another ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrameSummary:
    """One entry of a traceback.

    Attributes:
        file, module, name, qualified_name: of the code that was running.
        line: where it was.
        span: the last line, and the first and last column, of what was computed there; None: not known.
    """

    file: str
    module: str
    name: str
    qualified_name: str
    line: int
    span: tuple[int, int, int] | None


def summaries(entry: TracebackType | None) -> list[FrameSummary]:
    """Return the entries of a traceback, the outermost first."""
    found: list[FrameSummary] = []
    while entry is not None:
        frame, code = entry.tb_frame, entry.tb_frame.f_code
        position = next(islice(code.co_positions(), entry.tb_lasti // 2, None), (None,) * 4)
        first, last, start, end = position
        span = None
        if first == entry.tb_lineno and last is not None and start is not None and end is not None:
            span = (last, start, end) if (first, start) <= (last, end) else None  # rewritten code may have any
        module = str(frame.f_globals.get("__name__", ""))
        line = entry.tb_lineno or 0  # None is possible: an interrupt between two lines
        found.append(FrameSummary(code.co_filename, module, code.co_name, code.co_qualname, line, span))
        entry = entry.tb_next
    return found


def rebuilt(frames: Sequence[FrameSummary]) -> TracebackType | None:
    """Return a traceback that reads as the one of which these are the entries."""
    traceback: TracebackType | None = None
    for summary in reversed(frames):
        traceback = _entry(summary, traceback)
    return traceback


def _entry(summary: FrameSummary, following: TracebackType | None) -> TracebackType:
    """Return an entry whose code has the names and the place of other code. It has never run.

    Its frame is that of a generator, which no frame has called: else it would keep the frames here, and their locals.
    """
    function = ast.parse("def generator(): yield")
    last, start, end = summary.span or (summary.line, 0, 0)
    for node in ast.walk(function):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno, node.end_lineno, node.col_offset, node.end_col_offset = summary.line, last, start, end
    (code,) = [c for c in compile(function, summary.file, "exec").co_consts if isinstance(c, CodeType)]
    code = code.replace(co_name=summary.name, co_qualname=summary.qualified_name)
    frame = FunctionType(code, {"__name__": summary.module})().gi_frame
    places, place = [*code.co_positions()], (summary.line, last, start, end)
    instruction = places.index(place) if summary.span and place in places else 0
    return TracebackType(following, frame, 2 * instruction, summary.line)
