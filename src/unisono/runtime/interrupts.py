"""A signal's handler cannot split a critical section: it runs at its end, or where the section waits or calls back.

Python runs handlers in the main thread, between any two calls: that of SIGINT raises KeyboardInterrupt, and programs
set others that raise, such as the time limits of test runners (SIGALRM). In code that holds a lock, has borrowed a
worker or has set the thread's state, that leaves things half done, and no `finally` helps: it may be interrupted too.
So a step defers signals instead, as trio does with Ctrl-C:

    forward, backward     @critical           the signal is noted, and handled at the end
      the user's module     @interruptible      handled at once, as in the plain module
        our own hooks         @uninterruptible    noted again: locks are held here
      a wait                deliver()           handles what was noted

Whether a signal is deferred depends on the functions that are running: the innermost one that is marked decides.
Marks are on functions, so they cost no call. A section costs four for each handled signal: it looks what the system
does at the signal, puts its own handler in the place of the program's, and puts both back.

Guarantees
    - What the program's own handler does, it still does, once a signal: default_int_handler raises KeyboardInterrupt,
      another one may only take a note. It is called later, by as much as a section computes.
    - Where Python does not handle a signal (it is ignored, or a function in C handles it, such as faulthandler's), and
      in other threads, where handlers never run, nothing changes, and nothing is deferred.
    - After a section handlers are those of before, in Python and in the system, with their flags (`siginterrupt`).

Covers the signals of `_SIGNALS`. Those of sampling profilers (SIGPROF, SIGVTALRM) are left alone: their handlers look
at the running frame. Assumes that a wait in a section calls `deliver` several times a second.
"""

import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import repeat
from signal import SIG_DFL, SIG_IGN, SIGINT, Signals
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeAlias, TypeVar

from unisono.runtime.forks import in_forked_child

try:
    from _signal import getsignal, signal  # type: ignore[import-not-found]  # `signal.signal` is three calls around it
except ImportError:  # another implementation of Python
    from signal import getsignal, signal

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Handler: TypeAlias = Callable[[int, FrameType | None], Any]

WAKE_S = 0.1  # how often a wait wakes to deliver: Ctrl-C cannot always wake it (_thread.interrupt_main)

# The rest are named where the system has them.
_SIGNALS = (SIGINT, *(s for s in Signals if s.name in ("SIGALRM", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")))

_marked: dict[CodeType, bool] = {}  # whether a signal may be handled within a function


def interruptible(function: F) -> F:
    """Mark a function of a critical section in which signals are handled at once: it calls the user's code."""
    _marked[function.__code__] = True
    return function


def uninterruptible(function: F) -> F:
    """Mark a function that what the user has written may call, and that no signal may split."""
    _marked[function.__code__] = False
    return function


@interruptible
def interruptibly(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call what the user has written, from a critical section: signals are handled at once in it."""
    return function(*args, **kwargs)


def critical(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function a critical section."""

    @functools.wraps(function)
    def section(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.get_ident() != _state.main:  # where alone handlers run, and can be set
            return function(*args, **kwargs)
        handlers = [*map(getsignal, _SIGNALS)]
        if _Note in map(type, handlers):  # a section inside another
            try:
                return function(*args, **kwargs)
            finally:
                if _state.noted and _is_interruptible(sys._getframe(1)):
                    deliver()
        ours: dict[int, Any] = {
            number: handler
            for number, handler in zip(_SIGNALS, handlers, strict=True)
            if handler not in _NOT_OURS and _is_handled_by_python(number)
        }
        if not ours:
            return function(*args, **kwargs)
        try:
            # In C: between two of them nothing runs but a handler.
            [*map(signal, ours, map(_Note, repeat(_note), ours.values()))]
        except BaseException:
            _restore(ours)
            raise
        try:
            return function(*args, **kwargs)
        finally:
            _restore(ours)
            if _state.noted:
                deliver()

    _marked[section.__code__] = False  # type: ignore[attr-defined]  # one code for all sections
    return section


def _restore(handlers: Mapping[int, Any]) -> None:
    """Put the program's handlers back, but where the user's code has set another one meanwhile."""
    inside: list[Any] = []
    try:
        inside += map(signal, handlers, handlers.values())  # in C, as above
    except BaseException:  # a handler that was back has raised
        inside += map(signal, [*handlers][len(inside) :], [*handlers.values()][len(inside) :])
        raise
    finally:
        for number, found in zip(handlers, inside, strict=False):
            if type(found) is not _Note:
                signal(number, found)
            elif _sigaction is not None:
                _sigaction(number, _actions[number].memory, None)


# ---- what the system does at a signal ----------------------------------------------------------------
#
# Python knows its own handlers only. faulthandler, or a library in C, may have set another one after them.


def _is_handled_by_python(number: int) -> bool:
    """Return whether the handler that Python has for a signal is the one that the system calls."""
    if _sigaction is None:
        return True
    action = _actions[number]
    _sigaction(number, None, action.memory)
    return action.handler.value == _pythons_own()


@functools.cache
def _pythons_own() -> int | None:
    """Return the address of the function in C that calls the handlers in Python; None where it cannot be found.

    It is read off a signal that does nothing by default, and that nobody handles.
    """
    assert _sigaction is not None
    before, with_handler = _Action(), _Action()
    for number in map(Signals.__getitem__, ("SIGURG", "SIGWINCH", "SIGCHLD")):
        _sigaction(number, None, before.memory)
        default = getsignal(number)
        if default == SIG_DFL and before.handler.value is None:
            signal(number, lambda *_: None)
            _sigaction(number, None, with_handler.memory)
            signal(number, default)
            _sigaction(number, before.memory, None)
            return with_handler.handler.value
    return None


class _Action:
    """A `struct sigaction`: its memory, more than it needs, which begins with the address of the handler."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(1024)
        self.handler = ctypes.c_void_p.from_buffer(self.memory)


_sigaction = ctypes.PyDLL(None).sigaction if os.name == "posix" else None
_actions = {int(number): _Action() for number in _SIGNALS}


def deliver() -> None:
    """Let the program's handlers act on what was noted: KeyboardInterrupt is raised here. Called while waiting."""
    while _state.noted and threading.get_ident() == _state.main:
        try:
            handler, number = _state.noted.pop(0)
        except IndexError:  # a signal has come since the line above, and has delivered them
            return
        try:
            handler(number, sys._getframe(1))
        except BaseException:
            _state.noted.clear()  # as where Python finds several at once
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
    """Of the section of the main thread, which is `main`: the signals noted, each with the program's handler."""

    def __init__(self) -> None:
        self.noted: list[tuple[Handler, int]] = []
        self.main = threading.main_thread().ident


class _Note(functools.partial[None]):
    """What is in the place of a program's handler while a section is running: `_note` with that handler.

    The user's code may take it for the program's, and put it back, or call it, after the section, or in a forked child.
    """


def _note(handler: Handler, number: int, frame: FrameType | None) -> None:
    """Note a signal, and handle it if that need not wait."""
    _state.noted.append((handler, number))
    if _is_interruptible(frame):
        deliver()


def _is_interruptible(frame: FrameType | None) -> bool:
    """Return whether a signal may be handled now: in what is marked so, or where no section is running."""
    while frame is not None:
        mark = _marked.get(frame.f_code)
        if mark is not None:
            return mark
        frame = frame.f_back
    return True


_NOT_OURS = (None, SIG_DFL, SIG_IGN)
_state = _State()
in_forked_child(_state.__init__)  # type: ignore[misc]
