"""Critical sections: Ctrl-C is deferred in them, never lost, and the program's own handler stays what it was."""

import _thread
import faulthandler
import gc
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from helpers.forks import in_a_fork
from helpers.in_time import in_time
from helpers.outside import system_handler
from unisono.runtime import interrupts
from unisono.runtime.interrupts import (
    acquire,
    at_deletion,
    critical,
    deliver,
    interruptible,
    interruptibly,
    uninterruptible,
)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that a handler of the program's own has been called for."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGINT, before)


done: list[str] = []  # by the program of `test_ctrl_c_comes`
held = threading.Lock()
held.acquire()


def in_turn(*steps: Callable[[], object] | str) -> Callable[[], None]:
    """Return a function that calls functions, and notes words in `done`, one after the other."""

    def program() -> None:
        for step in steps:
            done.append(step) if isinstance(step, str) else step()

    return program


@uninterruptible
def hook() -> None:
    ctrl_c()
    done.append("our hook")


# A program that is interrupted, and what it has done when Ctrl-C comes.
PROGRAMS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "at the end of a section": (critical(in_turn(ctrl_c, "all of it")), ["all of it"]),
    "once for several signals": (critical(in_turn(ctrl_c, ctrl_c, "all of it")), ["all of it"]),
    "after an outer section": (critical(in_turn(critical(ctrl_c), "all of it")), ["all of it"]),
    "at once in what the user has written": (
        critical(in_turn("ours", partial(interruptibly, in_turn(hook, ctrl_c, "not this")))),
        ["ours", "our hook"],
    ),
    "after a section in what the user has written": (
        critical(partial(interruptibly, in_turn(critical(in_turn(ctrl_c, "the inner section")), "not this"))),
        ["the inner section"],
    ),
    "in a wait": (critical(in_turn(_thread.interrupt_main, "noted", deliver, "not this")), ["noted"]),
    "in a wait for a lock": (critical(in_turn(ctrl_c, "noted", partial(acquire, held, 1e6), "not this")), ["noted"]),
}


@pytest.mark.parametrize("when", PROGRAMS)
def test_ctrl_c_comes(when: str) -> None:
    """F3, A10: and does not interrupt the next section."""
    program, expected = PROGRAMS[when]
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        program()
    assert done == expected
    critical(lambda: None)()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_lock_is_waited_for_as_long_as_is_asked() -> None:
    """F3"""
    assert acquire(threading.Lock(), 0)
    assert not acquire(held, 0)


def test_the_programs_own_handler_is_called_once_a_signal(handled: list[int]) -> None:
    """F3: later, but not for another reason, and not in another number."""
    during: list[int] = []
    section = critical(in_turn(ctrl_c, ctrl_c, lambda: during.append(len(handled))))
    own = signal.getsignal(signal.SIGINT)
    section()
    section()
    assert (during, handled) == ([0, 2], [signal.SIGINT] * 4)
    assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.only_on("linux", "macos", because="signals of POSIX")
def test_signals_are_handled_in_their_order_after_the_section() -> None:
    """F3: each by its own handler, and a handler that raises leaves all of the program's in place."""
    handled: list[int] = []
    kinds = (signal.SIGUSR1, signal.SIGALRM, signal.SIGINT)
    before = {kind: signal.signal(kind, lambda number, _: handled.append(number)) for kind in kinds[:2]}
    own = {kind: signal.getsignal(kind) for kind in kinds}

    try:
        with pytest.raises(KeyboardInterrupt):
            critical(in_turn(*(partial(signal.raise_signal, kind) for kind in kinds)))()
        assert handled == [signal.SIGUSR1, signal.SIGALRM]
        assert {kind: signal.getsignal(kind) for kind in kinds} == own
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def test_a_handler_set_within_a_section_stays(handled: list[int]) -> None:
    """F3: what the user's code sets in forward."""
    another: Any = lambda number, frame: None  # noqa: E731
    critical(signal.signal)(signal.SIGINT, another)
    assert signal.getsignal(signal.SIGINT) is another


def test_a_handler_found_in_a_section_works_when_it_is_put_back_later(handled: list[int]) -> None:
    """F3: a first forward sets a handler, and the program puts back after it what was there. Ctrl-C was lost for ever.

    Sections go on deferring it.
    """
    before = critical(signal.signal)(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, before)
    ctrl_c()
    assert len(handled) == 1

    during: list[int] = []
    critical(in_turn(ctrl_c, lambda: during.append(len(handled))))()
    assert (during, len(handled)) == ([1], 2)


def test_a_handler_set_in_a_section_may_call_the_one_before(handled: list[int]) -> None:
    """F3: what cleans up and then calls the handler that it found. The next step never ended."""
    cleaned_up: list[int] = []

    before: Any = critical(signal.getsignal)(signal.SIGINT)

    def chained(number: int, frame: FrameType | None) -> None:
        cleaned_up.append(number)
        assert len(cleaned_up) < 10, "the signal comes again and again"
        before(number, frame)

    critical(signal.signal)(signal.SIGINT, chained)
    ctrl_c()
    assert (len(cleaned_up), len(handled)) == (1, 1)
    critical(ctrl_c)()
    assert (len(cleaned_up), len(handled)) == (2, 2)


@pytest.mark.only_on("linux", "macos", because="forks")
def test_a_child_that_is_forked_in_a_section_has_the_programs_handlers() -> None:
    """F3: a forward that starts a process by fork. A signal in it was a KeyError."""

    @interruptible
    def child() -> int:
        try:
            ctrl_c()
        except KeyboardInterrupt:
            return 42
        return 1

    assert critical(in_a_fork)(child) == 42


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_python_does_not_handle_the_signal_nothing_changes(disposition: signal.Handlers) -> None:
    """F3: a program under nohup ignores it."""
    before = signal.signal(signal.SIGINT, disposition)
    try:
        assert critical(signal.getsignal)(signal.SIGINT) is disposition
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.only_on("linux", because="reads the system's handlers as glibc has them")
def test_a_handler_set_in_c_stays_and_nothing_is_deferred(handled: list[int]) -> None:
    """F3: faulthandler's, over one of Python's, was lost with the first step; and one of Python's lost its flags."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.siginterrupt(signal.SIGINT, False)
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            numbers = (signal.SIGINT, signal.SIGUSR1)
            found = [*map(system_handler, numbers)]
            during = critical(system_handler)(signal.SIGUSR1)
            critical(signal.raise_signal)(signal.SIGUSR1)
            assert [*map(system_handler, numbers)] == found
            assert during == found[1]
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, before)
        file.seek(0)
        assert b"test_a_handler_set_in_c_stays" in file.read()


def test_other_threads_leave_the_handler_alone() -> None:
    """F3: nor do they raise what the main thread has noted."""
    main = signal.getsignal(signal.SIGINT)
    assert in_time(lambda: critical(signal.getsignal)(signal.SIGINT)) is main
    elsewhere: list[Any] = []

    with pytest.raises(KeyboardInterrupt):
        critical(in_turn(ctrl_c, lambda: elsewhere.append(in_time(critical(deliver)))))()
    assert elsewhere == [None]


def test_what_a_section_returns_and_raises_is_its_functions() -> None:
    """F1"""
    assert critical(divmod)(7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError) as caught:
        in_time(partial(critical(divmod), 7, 0))
    assert caught.value.__context__ is None  # it was a ValueError in other threads, of signal.signal
    with pytest.raises(ZeroDivisionError):
        critical(divmod)(7, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- finalizers ------------------------------------------------------------------------------------


class Owner:
    def __init__(self, *calls: Any) -> None:
        self.finalizer = at_deletion(*calls)


@pytest.mark.parametrize("drop", [lambda owner: None, lambda owner: setattr(owner, "finalizer", None)])
def test_calls_are_made_once_when_an_object_goes(drop: Callable[[Owner], None]) -> None:
    """N10: in order, with the last reference or before."""
    calls: list[int] = []
    owner = Owner(map(calls.append, [1]), map(calls.append, [2]))
    drop(owner)
    del owner
    gc.collect()
    assert calls == [1, 2]


def test_the_calls_free_a_cycle() -> None:
    """N10: that is what they are for in a replica."""
    calls: list[int] = []
    owner: Any = Owner(map(calls.append, [1]))
    owner.itself = owner
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert (gone(), calls) == (None, [1])


def test_a_finalizer_does_not_swallow_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: Python printed "Exception ignored in: <function Stamp.__del__>", and the program went on."""
    swallowed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    done: list[int] = []
    owner = Owner(map(_thread.interrupt_main, [signal.SIGINT]), map(done.append, [1]))
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes at the next place where Python looks for signals
        del owner
        len(done)
    assert (done, swallowed) == ([1], [])


def test_a_signal_in_the_middle_of_a_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: it delivered what was noted, and the delivery that it had interrupted found nothing: an IndexError."""
    called: list[int] = []
    state, ident = interrupts._state, threading.get_ident()
    state.main = ident
    state.noted += [(lambda number, _: called.append(number), number) for number in (1, 2)]

    def ident_and_a_signal() -> int:  # asked between the look at what is noted, and taking it
        monkeypatch.undo()
        interrupts.deliver()
        return ident

    monkeypatch.setattr(threading, "get_ident", ident_and_a_signal)
    interrupts.deliver()
    assert called == [1, 2]
