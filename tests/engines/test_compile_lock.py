"""turns: one replica at a time where inputs are of a new kind, and nobody waits for ever."""

import threading

import pytest
import torch

from manyhands.engines import compile_lock
from manyhands.engines.compile_lock import CompileLock
from manyhands.runtime.thread_pool import ReplicaContext, one_pass, run_together

CPU = [torch.device("cpu")] * 3


def most_at_once(surroundings: list, meet: threading.Barrier | None = None) -> int:
    """Run three tasks in these surroundings; return how many of them were inside at the same time."""
    lock = threading.Lock()
    inside, most = 0, 0

    def task(index: int, surround: ReplicaContext) -> None:
        nonlocal inside, most
        with surround(index):
            with lock:
                inside += 1
                most = max(most, inside)
            if meet is not None:
                meet.wait(30)
            with lock:
                inside -= 1

    with one_pass(surroundings) as surround:
        outcomes = run_together([lambda i=i: task(i, surround) for i in range(3)], CPU)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return most


def test_a_new_kind_takes_turns() -> None:
    """R13: once; where one of several is new, too."""
    turn = CompileLock()
    assert most_at_once(turn.if_new(["a", "a", "b"])) == 1
    for kinds in (["a", "a", "b"], ["b", "b", "b"], ["a"]):
        assert turn.if_new(kinds) == []
    assert most_at_once(turn.if_new(["a", "c", "a"])) == 1
    assert most_at_once(turn.if_new(["c", "c", "c"]), threading.Barrier(3)) == 3


def test_after_many_kinds_all_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """R13: inputs that are new in every step."""
    monkeypatch.setattr(compile_lock, "_MOST_KINDS", 3)
    turn = CompileLock()
    assert [bool(turn.if_new([kind])) for kind in range(5)] == [True, True, True, False, False]


def test_a_pass_takes_turns_again_in_its_backward() -> None:
    """R13: each walk has turns of its own."""
    surroundings = CompileLock().if_new(["a"])
    assert most_at_once(surroundings) == 1
    assert most_at_once(surroundings) == 1


def test_an_error_ends_a_turn() -> None:
    """F1"""
    with one_pass(CompileLock().if_new(["a"])) as surround:
        for index in range(3):
            with pytest.raises(ValueError, match="mine"), surround(index):
                raise ValueError("mine")


def test_replicas_that_wait_for_each_other_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: they go ahead without their turn after a while."""
    monkeypatch.setattr(compile_lock, "_PATIENCE_S", 0.01)
    assert most_at_once(CompileLock().if_new(["a"]), threading.Barrier(3)) == 3
