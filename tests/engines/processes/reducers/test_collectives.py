"""Flat buckets over torch.distributed: who reduces what with whom, and what becomes of a replica that fails or is gone.

Here the replicas are threads, each with a group of its own; tests/engines/processes/test_engine.py has them in
processes."""

import gc
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from helpers.rounding import rounding_bound
from manyhands.engines.processes.reducers import collectives
from manyhands.engines.processes.reducers.collectives import (
    CollectiveConfig,
    CollectiveReducer,
    CollectiveTransport,
    Groups,
)
from manyhands.runtime.buckets import Bucket, Form, buckets_of

CPU = torch.device("cpu")
WAIT_S = 60.0


def run(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each task in a thread of its own; return their results. Fail if one raises, or hangs."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run_one(index: int, task: Callable[[], Any]) -> None:
        try:
            results[index] = task()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run_one, args=pair, daemon=True) for pair in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in reversed(threads):
        thread.join(WAIT_S)
        if errors:
            raise errors[0]
        assert not thread.is_alive(), "it hangs"
    return [results[i] for i in range(len(tasks))]


def nothing() -> None:
    pass


class Replicas:
    """The caller's side, and what workers have."""

    def __init__(self, num_replicas: int) -> None:
        self.replicas = tuple(range(num_replicas))
        self.caller = CollectiveTransport([CPU] * num_replicas)
        (store,) = self.caller.segments
        self.groups = [Groups(store, self.caller.rendezvous(replica), CPU) for replica in self.replicas]
        self.buckets: list[Sequence[Bucket]] = [()] * num_replicas

    def part_of(self, replica: int, told: CollectiveConfig) -> Any:
        """Return a worker's part."""
        self.buckets[replica] = told.buckets or self.buckets[replica]
        groups = self.groups[replica]
        return CollectiveReducer(self.buckets[replica], groups.of(told.replicas), groups.place(), CPU)

    def walk(
        self, like: dict[int, torch.Tensor], given: Sequence[dict[int, torch.Tensor]], failing: Sequence[int] = ()
    ) -> dict[int, torch.Tensor]:
        """Have every replica give its gradients; return the sums."""
        assert self.caller.begin_backward(like, self.replicas)
        told = [self.caller.config_for(replica) for replica in self.replicas]

        def task(replica: int) -> Callable[[], None]:
            def run_part() -> None:
                part = self.part_of(replica, told[replica]) if replica else self.caller.part(nothing)
                for number, gradient in given[replica].items():
                    assert part.add(number, gradient)
                if replica in failing:
                    part.fail()
                else:
                    part.end()

            return run_part

        run([task(replica) for replica in self.replicas])
        return self.caller.results()


@pytest.fixture
def small_buckets(monkeypatch):
    whole = collectives.buckets_of
    monkeypatch.setattr(collectives, "buckets_of", lambda forms: whole(forms, full_bytes=1000))


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_gradients_are_summed_and_what_nobody_has_is_missing(small_buckets, num_replicas):
    like = {
        0: torch.empty(300),
        1: torch.empty(20, 30).t(),
        2: torch.empty(5, dtype=torch.float64),
        3: torch.empty(7),
        4: torch.empty(3, dtype=torch.complex64),
        5: torch.empty(3, dtype=torch.bfloat16),
    }
    replicas = Replicas(num_replicas)
    for _ in range(3):
        given = [{n: torch.randn(t.shape, dtype=t.dtype) for n, t in like.items() if n != 3} for _ in replicas.replicas]
        del given[1][0]
        results = replicas.walk(like, given)
        assert sorted(results) == [0, 1, 2, 4, 5]
        for number, result in results.items():
            terms = torch.stack([each[number] for each in given if number in each])
            exact = terms.to(torch.promote_types(terms.dtype, torch.float64)).sum(0)
            assert result.dtype == terms.dtype
            assert ((result - exact).abs() <= rounding_bound(len(terms), terms.dtype) * terms.abs().sum(0)).all()
            assert result.stride() == like[number].stride()
            assert result.untyped_storage().nbytes() == result.nbytes, "memory of its own"


def test_buckets_follow_the_order_of_the_first_walk(small_buckets):
    like = {n: torch.empty(300) for n in range(4)}
    replicas = Replicas(2)
    ones = torch.ones(300)
    for _ in range(2):
        replicas.walk(like, [dict.fromkeys([2, 0, 3, 1], ones), dict.fromkeys(range(4), ones)])
    assert [[n for n, _ in bucket.items] for bucket in replicas.caller._buckets] == [[2], [0], [3], [1]]
    assert replicas.buckets[1] == replicas.caller._buckets


@pytest.mark.parametrize("failing", [0, 1])
def test_a_replica_that_fails_keeps_nobody_waiting_and_the_groups_in_step(small_buckets, failing):
    like = {n: torch.empty(300) for n in range(3)}
    replicas = Replicas(2)
    given = [dict.fromkeys(range(3), torch.ones(300)) for _ in range(2)]
    given[failing] = {2: torch.ones(300)}
    replicas.walk(like, given, failing=[failing])
    results = replicas.walk(like, [dict.fromkeys(range(3), torch.ones(300))] * 2)
    assert all(torch.equal(result, torch.full((300,), 2.0)) for result in results.values())


def test_buckets_that_are_still_on_their_way_to_the_host_keep_their_order(small_buckets, monkeypatch):
    """On GPUs, over gloo: a bucket is reduced when its copy is there; at the end copies are waited for."""
    there: list[float] = []

    def begin_copy(flat: torch.Tensor) -> tuple[torch.Tensor, Callable[[bool], bool]]:
        value = flat[0].item()
        return flat.clone(), lambda wait: wait or value in there

    reduced: list[float] = []
    reduce = collectives.torch_private.reduce
    monkeypatch.setattr(collectives._devices, "same_device", lambda *_: False)
    monkeypatch.setattr(collectives._devices, "begin_copy_to_host", begin_copy)
    monkeypatch.setattr(
        collectives.torch_private,
        "reduce",
        lambda group, flat: (reduced.append(flat[0].item()), reduce(group, flat))[1],
    )
    replicas = Replicas(1)
    assert replicas.caller.begin_backward({n: torch.empty(300) for n in range(4)}, (0,))
    part = replicas.caller.part(nothing)
    seen = []
    for value, now_there in ((3.0, []), (1.0, [1.0]), (2.0, [3.0]), (0.0, [2.0])):
        there += now_there
        assert part.add(int(value), torch.full((300,), value))
        seen.append(reduced[:])
    assert seen == [[], [], [3.0], [3.0, 2.0, 1.0]]
    part.end()
    assert reduced == [3.0, 2.0, 1.0, 0.0]
    results = replicas.caller.results()
    assert [results[n][0].item() for n in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_what_is_taken_and_what_is_not():
    replicas = Replicas(1)
    assert replicas.caller.begin_backward({0: torch.empty(3), 1: torch.empty(3)}, (0,))
    part = replicas.caller.part(nothing)
    assert not part.add(2, torch.ones(3))
    assert not part.add(0, torch.ones(3, dtype=torch.float64))
    assert not part.add(0, torch.ones(3).to_sparse())
    assert part.add(0, torch.ones(6)[::2])
    assert not part.add(0, torch.ones(3)), "a second one goes another way"
    part.end()
    assert list(replicas.caller.results()) == [0]


def test_parameters_are_sent():
    tensors = [torch.randn(3), torch.randn(4, 5).to(torch.float16), torch.tensor([True, False])]
    buckets = buckets_of({number: Form.of(tensor) for number, tensor in enumerate(tensors)})
    replicas = Replicas(2)

    def send() -> None:
        replicas.caller.begin_sending([bucket.flat(tensors) for bucket in buckets], (0, 1), nothing)
        replicas.caller.end_sending(nothing)

    _, flats = run([send, lambda: replicas.groups[1].receive(buckets, (0, 1))])
    for bucket, flat in zip(buckets, flats, strict=True):
        for number, piece in bucket.pieces(flat).items():
            assert torch.equal(piece, tensors[number])


def test_who_waits_looks_whether_the_others_are_there():
    replicas = Replicas(2)
    assert replicas.caller.begin_backward({0: torch.empty(3)}, (0, 1))
    told = replicas.caller.config_for(1)
    first, second = run([lambda: replicas.caller.part(nothing), lambda: replicas.part_of(1, told)])

    def gone() -> None:
        raise ChildProcessError("gone")

    with pytest.raises(ChildProcessError):
        first.end(gone)
    second.end()  # a group cannot go while it has something to do and the others are there


def test_who_waits_for_a_group_looks_whether_the_others_are_there():
    """One that never comes; where the group itself is made nobody could look."""
    replicas = Replicas(2)
    assert replicas.caller.begin_backward({0: torch.empty(3)}, (0, 1))

    def gone() -> None:
        raise ChildProcessError("gone")

    with pytest.raises(ChildProcessError):
        replicas.caller.part(gone)
    with pytest.raises(ChildProcessError):
        replicas.caller.begin_sending([torch.ones(3)], (0, 1), gone)


def test_a_group_that_lives_longer_than_its_team_writes_into_no_other_file(tmp_path):
    """A store writes to the path of its file when the last thing that refers to it goes: in a traceback, say."""

    def parts() -> list[Any]:
        replicas = Replicas(2)
        assert replicas.caller.begin_backward({0: torch.empty(3)}, (0, 1))
        told = replicas.caller.config_for(1)
        parts = run([lambda: replicas.caller.part(nothing), lambda: replicas.part_of(1, told)])
        replicas.caller.end()
        return parts

    kept = parts()
    gc.collect()
    with open(tmp_path / "mine", "w+b") as file:  # gets a number that has become free, if there is one
        kept.clear()
        gc.collect()
        file.seek(0, os.SEEK_END)
        assert file.tell() == 0
