"""Gradients reduced in shared memory and over torch.distributed, where one replica shows it.

What both do with several replicas, which can fail and die, is in tests/engines/processes/test_engine.py.
"""

import gc
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from helpers.in_time import in_time
from unisono.engines.processes.reducers import collectives, shared_memory
from unisono.engines.processes.reducers.collectives import CollectiveTransport, ProcessGroups
from unisono.engines.processes.reducers.shared_memory import SharedMemoryTransport
from unisono.runtime.buckets import buckets_of
from unisono.runtime.thread_pool import run_together

CPU = torch.device("cpu")
LARGE = 700_000  # items; some chunks in shared memory
Transport = SharedMemoryTransport | CollectiveTransport


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(collectives, "buckets_of", lambda forms: buckets_of(forms, full_bytes=1000))


def nothing(_: float) -> None:
    pass


def backward(
    transport: Transport, gradients: Mapping[int, torch.Tensor], leaves: Mapping[int, torch.Tensor] | None = None
) -> dict[int, torch.Tensor]:
    """Reduce the gradients of an only replica, in their order."""
    assert transport.begin_backward(leaves or {number: gradients[number] for number in sorted(gradients)}, (0,))
    reducer = transport.reducer(nothing)
    for number, gradient in gradients.items():
        assert reducer.add(number, gradient)
    reducer.end()
    return transport.results()


@pytest.mark.parametrize("make", [SharedMemoryTransport, lambda: CollectiveTransport(CPU, "gloo")])
def test_gradients_that_are_added_and_those_that_are_not(make):
    transport = make()
    assert transport.begin_backward({0: torch.empty(LARGE), 1: torch.empty(LARGE)}, (0,))
    reducer = transport.reducer(nothing)
    assert not reducer.add(2, torch.ones(LARGE))
    assert not reducer.add(0, torch.ones(LARGE, dtype=torch.float64))
    assert not reducer.add(0, torch.ones(LARGE).to_sparse())
    assert reducer.add(0, torch.ones(2 * LARGE)[::2])
    assert not reducer.add(0, torch.ones(LARGE)), "a second one is not"
    reducer.end()
    ((number, result),) = transport.results().items()
    assert number == 0
    assert torch.equal(result, torch.ones(LARGE))


def test_memory_is_reused_only_when_no_tensor_refers_to_it():
    transport = SharedMemoryTransport()

    def once(value: float) -> dict[int, torch.Tensor]:
        return backward(transport, {n: torch.full((LARGE,), value) for n in range(2)})

    first = once(1.0)
    kept, address = first[0][:5], first[1].data_ptr()
    del first
    second = once(2.0)
    assert second[0].data_ptr() == address, "memory is reused for any tensor of the same form"
    assert kept.tolist() == [1.0] * 5
    addresses = {tensor.data_ptr() for tensor in second.values()} | {kept.data_ptr()}
    del second, kept
    num_segments = len(transport.segments)
    assert {tensor.data_ptr() for tensor in once(3.0).values()} <= addresses
    assert len(transport.segments) == num_segments
    for value in range(shared_memory._IDLE_BACKWARDS + 1):
        once(float(value))
    assert len(transport.segments) < num_segments, "memory that is no longer needed is freed"


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_gradient_that_the_caller_has_moved_to_other_memory(is_kept):
    """`share_memory_()` moves a tensor's storage, and so does a queue of torch.multiprocessing that it is put into."""
    transport = SharedMemoryTransport()
    first = backward(transport, {0: torch.full((LARGE,), 1.0)})
    moved = first.pop(0).share_memory_()
    if not is_kept:
        del moved
    for value in (2.0, 3.0):
        assert torch.equal(backward(transport, {0: torch.full((LARGE,), value)})[0], torch.full((LARGE,), value))
    if is_kept:
        assert torch.equal(moved, torch.ones(LARGE))


def test_buckets_follow_the_order_of_the_first_backward():
    transport = CollectiveTransport(CPU, "gloo")
    leaves = {number: torch.empty(300) for number in range(4)}
    for order in ([2, 0, 3, 1], range(4)):
        backward(transport, dict.fromkeys(order, torch.ones(300)), leaves)
    assert [[n for n, _ in bucket.items] for bucket in transport._buckets] == [[2], [0], [3], [1]]


def test_buckets_whose_copies_to_the_host_end_out_of_order_are_reduced_in_order(monkeypatch):
    """On GPUs, over gloo: a bucket is reduced when its copy has ended; `end` waits for all copies."""
    ended: list[float] = []

    def begin_copy(flat: torch.Tensor) -> tuple[torch.Tensor, Callable[[bool], bool]]:
        value = flat[0].item()
        return flat.clone(), lambda wait: wait or value in ended

    def reduce(group: Any, flat: torch.Tensor) -> Any:
        reduced.append(flat[0].item())
        return reduce_by_torch(group, flat)

    reduced: list[float] = []
    reduce_by_torch = collectives.torch_private.reduce
    monkeypatch.setattr(collectives._devices, "same_device", lambda *_: False)
    monkeypatch.setattr(collectives._devices, "begin_copy_to_host", begin_copy)
    monkeypatch.setattr(collectives.torch_private, "reduce", reduce)
    transport = CollectiveTransport(CPU, "gloo")
    assert transport.begin_backward({n: torch.empty(300) for n in range(4)}, (0,))
    reducer = transport.reducer(nothing)
    seen = []
    for value, ended_now in ((3.0, []), (1.0, [1.0]), (2.0, [3.0]), (0.0, [2.0])):
        ended += ended_now
        assert reducer.add(int(value), torch.full((300,), value))
        seen.append(reduced[:])
    assert seen == [[], [], [3.0], [3.0, 2.0, 1.0]]
    reducer.end()
    assert reduced == [3.0, 2.0, 1.0, 0.0]
    results = transport.results()
    assert [results[n][0].item() for n in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_a_process_group_that_outlives_its_worker_group_writes_into_no_other_file(tmp_path):
    """A store writes to its file's path when the last reference to it goes, which a traceback may keep."""

    def make_reducers() -> list[Any]:
        transport = CollectiveTransport(CPU, "gloo")
        assert transport.begin_backward({0: torch.empty(3)}, (0, 1))
        (store,) = transport.segments
        groups = ProcessGroups(store, transport.rendezvous(1), CPU)
        tasks: list[Callable[[], Any]] = [partial(transport.reducer, nothing), lambda: (groups, groups.of((0, 1)))]
        kept = [outcome.value for outcome in in_time(lambda: run_together(tasks, [CPU] * 2))]
        assert all(kept)
        transport.end()
        return kept

    kept = make_reducers()
    gc.collect()
    with open(tmp_path / "mine", "w+b") as file:  # gets a file descriptor that has become free, if there is one
        kept.clear()
        gc.collect()
        file.seek(0, os.SEEK_END)
        assert file.tell() == 0


def test_a_process_that_ends_while_groups_connect(monkeypatch):
    """F4: the caller notices, although torch waits for the other process without end."""
    ended, began = threading.Event(), threading.Event()

    def connect(backend, store, rank, size):
        began.set()
        ended.wait()

    class DiedError(Exception):
        pass

    def on_wait(_: float) -> None:
        if began.is_set():
            raise DiedError

    monkeypatch.setattr(collectives.torch_private, "process_group", connect)
    transport = CollectiveTransport(CPU, "gloo")
    transport.begin_backward({0: torch.empty(3)}, (0,))
    with pytest.raises(DiedError):
        in_time(lambda: transport.reducer(on_wait))
    ended.set()
