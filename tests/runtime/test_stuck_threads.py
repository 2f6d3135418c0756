"""Threads that wait for a lock are told from threads that compute."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from helpers.garbage import no_garbage
from helpers.in_time import WAIT_S
from helpers.programs import until
from unisono.runtime import stuck_threads
from unisono.runtime.stuck_threads import StuckThreads, places_of_threads


@contextmanager
def running(function: Callable[[], object]) -> Iterator[int]:
    """Run a function in a thread; yield its ident."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    yield thread.ident or 0
    thread.join(WAIT_S)


def taken(lock: Any) -> None:
    with lock:
        pass


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck_threads, "SAID_AFTER_S", 0.0)


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock, threading.Condition, threading.Event])
@pytest.mark.parametrize("system_tells", [True, False])
def test_one_that_waits_for_a_lock(
    kind: Callable[[], object], system_tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: found once for one wait."""
    monkeypatch.setattr(stuck_threads, "_SYSTEM_TELLS", stuck_threads._SYSTEM_TELLS and system_tells)
    held, found = kind(), list[bool]()
    stuck = StuckThreads()
    if isinstance(held, threading.Event):
        wait, release = held.wait, held.set
    else:
        held.acquire()
        wait, release = partial(taken, held), held.release
    with running(wait) as ident:
        assert until(lambda: any(found) or found.append(stuck.are_found([ident], 1.0)))
        assert not any([stuck.are_found([ident], 1.0) for _ in range(10)])
        release()


@pytest.mark.only_on("linux", because="elsewhere nothing tells whether a thread sleeps")
def test_one_that_computes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """F7: however long it is in one line, or in one operation of torch."""
    monkeypatch.setattr(stuck_threads, "SAID_AFTER_S", 0.15)  # between two looks it may wait for Python's lock
    ended, matrix = threading.Event(), torch.ones(200, 200)

    def compute() -> None:
        while not ended.is_set():
            torch.linalg.matrix_power(matrix, 7)

    stuck, held = StuckThreads(), threading.Lock()
    held.acquire()
    with running(compute) as ident, running(partial(taken, held)) as waiting:
        try:
            assert not any([stuck.are_found([ident, waiting], 1.0) for _ in range(2000)])
        finally:
            ended.set()
            held.release()


def test_nothing_is_found_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """F7: nor where there is no thread; and nothing is logged then."""
    monkeypatch.setattr(stuck_threads, "SAID_AFTER_S", 100.0)
    assert not [StuckThreads().are_found([threading.get_ident()], waited_s) for waited_s in (0.0, 40.0)].count(True)
    assert not StuckThreads().are_found([], 100.0)
    StuckThreads().say({0: threading.get_ident()}, ["replica 0"], 40.0)
    assert not caplog.records


def test_no_cycle_holds_the_waiting_thread_s_frames() -> None:
    """N10: however long a step waits, its graph is freed with the last reference."""
    release = threading.Event()
    with running(release.wait) as ident, no_garbage():
        StuckThreads().say({0: ident}, ["replica 0"], 1.0)
        places_of_threads({0: ident})
        release.set()
