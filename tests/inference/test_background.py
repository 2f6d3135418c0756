"""Tasks in the background: they run while the caller goes on, and each ends, also one that cannot start or is stuck."""

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from helpers.in_time import WAIT_S, in_time
from unisono.inference.background import Background
from unisono.runtime import thread_pool
from unisono.runtime.thread_pool import inside_replica, replica_path
from unisono.runtime.thread_state import ThreadState

CPU = torch.device("cpu")


def in_background(*tasks: Callable[[], Any], at_end: Callable[[], None] = lambda: None) -> Background:
    with torch.no_grad():
        state = ThreadState.capture()
    return Background(tasks, [CPU] * len(tasks), state, stop=lambda: None, at_end=at_end)


def test_background_tasks_run_while_the_caller_goes_on() -> None:
    """I1, I4: all at once, as replicas, with the state that they are given; the last one calls `at_end`."""
    go, ended, seen = threading.Event(), SimpleQueue(), SimpleQueue()

    def task() -> None:
        seen.put((replica_path(), torch.is_grad_enabled()))
        assert go.wait(WAIT_S)

    background = in_background(task, task, at_end=lambda: ended.put(threading.get_ident()))
    assert sorted(seen.get(timeout=WAIT_S) for _ in range(2)) == [((0,), False), ((1,), False)]
    assert not inside_replica()
    assert torch.is_grad_enabled()
    assert ended.empty()
    go.set()
    in_time(background.wait)
    assert ended.get(timeout=WAIT_S) != threading.get_ident()
    assert ended.empty()


def test_what_a_background_task_raises_ends_that_task_only() -> None:
    """I6: `wait` returns, and the error is nobody else's."""

    def fail() -> None:
        raise ValueError("as asked")

    in_time(in_background(fail, lambda: None).wait)


def test_a_background_that_cannot_start_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """I7: where the system has no thread left; `stop` and `at_end` are called, and other calls have the workers."""
    ended, stopped = SimpleQueue(), threading.Event()
    in_time(in_background(lambda: None).wait)
    (first,) = thread_pool.pool.borrow([CPU])
    thread_pool.pool.give_back([first])

    def no_thread(device: torch.device) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(thread_pool.pool, "_idle", [first])
    monkeypatch.setattr(thread_pool, "Worker", no_thread)
    tasks = [lambda: stopped.wait(WAIT_S)] * 2
    state = ThreadState.capture()
    with pytest.raises(RuntimeError, match="can't start"):
        Background(tasks, [CPU] * 2, state, stop=stopped.set, at_end=lambda: ended.put(None))
    assert stopped.is_set()
    assert ended.get(timeout=WAIT_S) is None
    assert thread_pool.pool._idle == [first]


def test_background_tasks_have_the_threads_of_their_devices_each_time() -> None:
    """I4: torch's caches are in them. A task that is stuck keeps its thread for itself."""

    def threads_of(*devices: torch.device) -> list[threading.Thread]:
        found: dict[int, threading.Thread] = {}
        tasks = [partial(lambda i: found.update({i: threading.current_thread()}), i) for i, _ in enumerate(devices)]
        background = Background(tasks, devices, ThreadState.capture(), stop=lambda: None, at_end=lambda: None)
        in_time(background.wait)
        return [found[i] for i, _ in enumerate(devices)]

    other = torch.device("meta")
    first = threads_of(CPU, other)
    assert threads_of(other, CPU) == first[::-1]
    stuck, release = SimpleQueue(), threading.Event()

    def wait() -> None:
        stuck.put(threading.current_thread())
        assert release.wait(WAIT_S)

    background = in_background(wait)
    assert stuck.get(timeout=WAIT_S) is first[0]
    background.abandon(0)
    assert threads_of(CPU) != first[:1]
    release.set()
    in_time(first[0].join)
