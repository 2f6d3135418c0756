"""Replicas run one at a time where inputs are of a new kind, and none waits for ever."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from helpers.as_accelerators import simulated_as_accelerators
from unisono import DataParallel
from unisono.engines import compiled_modules
from unisono.engines.compiled_modules import CompileLock
from unisono.runtime.thread_pool import PassContext, ReplicaContext, one_pass, run_together

CPU = [torch.device("cpu")] * 3


def most_at_once(contexts: list[PassContext], barrier: threading.Barrier | None = None) -> int:
    """Run three tasks in these contexts; return how many of them were inside at the same time."""
    lock = threading.Lock()
    inside, most = 0, 0

    def task(index: int, context: ReplicaContext) -> None:
        nonlocal inside, most
        with context(index):
            with lock:
                inside += 1
                most = max(most, inside)
            if barrier is not None:
                barrier.wait(30)
            with lock:
                inside -= 1

    with one_pass(contexts) as context:
        outcomes = run_together([lambda i=i: task(i, context) for i in range(3)], CPU)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return most


def test_one_at_a_time_where_a_kind_is_new() -> None:
    """R13: once, in forward and in backward; where one of several is new, too."""
    lock = CompileLock()
    contexts = lock.if_new(["a", "a", "b"])
    assert [most_at_once(contexts) for _ in ("forward", "backward")] == [1, 1]
    for kinds in (["a", "a", "b"], ["b", "b", "b"], ["a"]):
        assert lock.if_new(kinds) == []
    assert most_at_once(lock.if_new(["a", "c", "a"])) == 1
    assert most_at_once(lock.if_new(["c", "c", "c"]), threading.Barrier(3)) == 3


def test_after_many_kinds_all_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """R13: inputs that are new in every step."""
    monkeypatch.setattr(compiled_modules, "_MOST_KINDS", 3)
    lock = CompileLock()
    assert [bool(lock.if_new([kind])) for kind in range(5)] == [True, True, True, False, False]


def test_replicas_that_wait_for_each_other_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: they run without the lock after a while."""
    monkeypatch.setattr(compiled_modules, "_PATIENCE_S", 0.01)
    assert most_at_once(CompileLock().if_new(["a"]), threading.Barrier(3)) == 3


@pytest.mark.parametrize(
    ("num_devices", "use", "message"),
    [
        (2, DataParallel.__call__, r'compiled with CUDA graphs.*mode="max-autotune-no-cudagraphs"'),
        # On one device too: its lane is in a thread of its own, and ahead of the caller.
        (
            1,
            lambda model, x: list(model.map([x])),
            "map and evaluate cannot run a module that is compiled with CUDA graphs",
        ),
    ],
    ids=["several accelerators", "map"],
)
def test_cuda_graphs_are_refused(sim: Any, monkeypatch: Any, num_devices: int, use: Any, message: str) -> None:
    """R13, I1: before anything is compiled; on one device, and on the CPU, the mode is torch's own affair."""
    compiled = torch.compile(nn.Linear(2, 2).to(sim[0]), mode="reduce-overhead")
    model = DataParallel(compiled, sim[:num_devices])
    with simulated_as_accelerators(monkeypatch), pytest.raises(RuntimeError, match=message):
        use(model, torch.ones(4, 2, device=sim[0]))


def test_replicas_that_begin_apart_take_turns_until_one_has_run() -> None:
    """R13, I1: a map's lanes; what fails has not run."""
    lock = CompileLock()
    began, second_is_in = threading.Event(), threading.Event()

    def second() -> None:
        assert began.wait(30)
        with lock.while_new("a"):
            second_is_in.set()

    thread = threading.Thread(target=second)
    thread.start()
    with pytest.raises(ValueError, match="as asked"), lock.while_new("a"):  # noqa: PT012
        began.set()
        assert not second_is_in.is_set()
        raise ValueError("as asked")
    thread.join(30)
    assert second_is_in.is_set()
    with lock.while_new("a"), lock.while_new("a"):  # known: no lock
        pass
    assert lock.if_new(["a"]) == []
