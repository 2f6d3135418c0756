"""Ctrl-C cannot split a critical section: it is raised when the section ends, or where the section waits or calls back.

Python raises KeyboardInterrupt in the main thread between any two calls. In code that holds a lock, has borrowed a
worker or has set the thread's state, that leaves things half done, and no `finally` helps: it may be interrupted too.
So a step defers the signal instead, as trio does:

    forward, backward     @critical           Ctrl-C is noted, and raised at the end
      the user's module     @interruptible      Ctrl-C is raised at once, as in the plain module
        our own hooks         @uninterruptible    noted again: locks are held here
      a wait                deliver()           raises what was noted

Whether an interrupt is deferred depends on the functions that are running: the innermost one that is marked decides.
Marks are on functions, so they cost no call. A section costs four: it puts its own handler of SIGINT in the place of
the program's, and puts that back.

Guarantees
    - What the program's own handler does, it still does, once a signal: default_int_handler raises KeyboardInterrupt,
      another one may only take a note. It is called later, by as much as a section computes.
    - Where Python does not handle SIGINT (it is ignored, or a C program handles it), and in other threads, where it is
      never raised, nothing changes.

Assumes that a wait in a section calls `deliver` several times a second.
"""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from signal import SIG_DFL, SIG_IGN, SIGINT
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

try:
    from _signal import getsignal, signal  # type: ignore[import-not-found]  # `signal.signal` is three calls around it
except ImportError:  # another implementation of Python
    from signal import getsignal, signal

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

WAKE_S = 0.1  # how often a wait wakes to deliver: Ctrl-C cannot always wake it (_thread.interrupt_main)

_marked: dict[CodeType, bool] = {}  # whether Ctrl-C may be raised within a function


def interruptible(function: F) -> F:
    """Mark a function of a critical section in which Ctrl-C is raised at once: it calls what the user has written."""
    _marked[function.__code__] = True
    return function


def uninterruptible(function: F) -> F:
    """Mark a function that what the user has written may call, and that Ctrl-C must not split."""
    _marked[function.__code__] = False
    return function


@interruptible
def interruptibly(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call what the user has written, from a critical section: Ctrl-C is raised at once in it."""
    return function(*args, **kwargs)


def critical(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function a critical section."""

    @functools.wraps(function)
    def section(*args: P.args, **kwargs: P.kwargs) -> T:
        before = getsignal(SIGINT)
        if before in _NOT_OURS:
            return function(*args, **kwargs)
        if before is _note:  # a section inside another
            try:
                return function(*args, **kwargs)
            finally:
                if _state.noted and _is_interruptible(sys._getframe(1)):
                    deliver()
        try:
            signal(SIGINT, _note)
            _state.handler, is_main = before, True
        except ValueError:  # as every thread but the main one gets
            is_main = False
        try:
            return function(*args, **kwargs)
        finally:
            if is_main:
                inside = signal(SIGINT, before)
                if inside is not _note:  # the user's code has set another one
                    signal(SIGINT, inside)
                if _state.noted:
                    deliver()

    _marked[section.__code__] = False  # type: ignore[attr-defined]  # one code for all sections
    return section


def deliver() -> None:
    """Let the program's handler act on what was noted: KeyboardInterrupt is raised here. To be called while waiting."""
    while _state.noted and threading.get_ident() == _state.main:
        _state.noted -= 1
        handler: Any = _state.handler
        try:
            handler(SIGINT, sys._getframe(1))
        except BaseException:
            _state.noted = 0  # as where Python finds several at once
            raise


def acquire(lock: threading.Lock, patience_s: float) -> bool:
    """Acquire a lock; return False if it was not free for so many seconds. Ctrl-C is raised meanwhile."""
    until = time.monotonic() + patience_s
    while not lock.acquire(timeout=WAKE_S):
        deliver()
        if time.monotonic() > until:
            return False
    return True


class at_deletion(zip):  # type: ignore[type-arg]  # noqa: N801 - used like a function
    """Takes one item of each iterator when it is deleted: with the last reference to it, or before.

    For what a finalizer has to do. Python prints a KeyboardInterrupt that it raises in a `__del__`, and goes on; but C
    code it does not interrupt. So there is no Python here, nor in the iterators: each maps a C function.

        >>> released = []
        >>> _ = at_deletion(map(released.append, [7]))
        >>> del _
        >>> released
        [7]
    """

    __del__ = zip.__next__


class _State:
    """What the section of the main thread has noted."""

    noted = 0
    handler: object = None
    main = 0


def _note(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT while a section is running."""
    _state.main = threading.get_ident()
    _state.noted += 1
    if frame is not None and _is_interruptible(frame):
        deliver()


def _is_interruptible(frame: FrameType | None) -> bool:
    while frame is not None:
        mark = _marked.get(frame.f_code)
        if mark is not None:
            return mark
        frame = frame.f_back
    return False


_NOT_OURS = (None, SIG_DFL, SIG_IGN)
_state = _State()
os.register_at_fork(after_in_child=_state.__init__)  # type: ignore[misc]
