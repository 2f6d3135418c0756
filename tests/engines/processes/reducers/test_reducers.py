"""Gradients reduced in shared memory and over torch.distributed: the contract of both, then what only one has.

Here the replicas are threads; in tests/engines/processes/test_engine.py they are processes.
"""

import gc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from manyhands.engines.processes.reducers import collectives, shared_memory
from manyhands.engines.processes.reducers.base import Reducer
from manyhands.engines.processes.reducers.collectives import CollectiveReducer, CollectiveTransport, ProcessGroups
from manyhands.engines.processes.reducers.shared_memory import ReduceBuffers, SharedMemoryReducer, SharedMemoryTransport
from manyhands.engines.processes.shared_memory import Segment
from manyhands.runtime.buckets import Form, buckets_of

CPU = torch.device("cpu")
LARGE = 700_000  # items; some chunks in shared memory
WAIT_S = 60.0
both_transports = pytest.mark.parametrize("transport", ["shared memory", "gloo"])


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(collectives, "buckets_of", lambda forms: buckets_of(forms, full_bytes=1000))


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


def worker_died() -> None:
    raise ChildProcessError("as asked")


class Replicas:
    """The caller's transport, and the buckets or buffers that each worker keeps."""

    def __init__(self, transport: str, num_replicas: int) -> None:
        self.replicas = tuple(range(num_replicas))
        self.caller = (
            SharedMemoryTransport() if transport == "shared memory" else CollectiveTransport([CPU] * num_replicas)
        )
        self.kept: dict[int, Any] = {}
        self.groups: dict[int, ProcessGroups] = {}

    def groups_of(self, replica: int) -> ProcessGroups:
        (store,) = self.caller.segments
        return self.groups.setdefault(replica, ProcessGroups(store, self.caller.rendezvous(replica), CPU))

    def begin_backward(self, like: dict[int, torch.Tensor]) -> list[Callable[[], Reducer]]:
        """Begin a backward; return how each replica makes its reducer: all of them at the same time."""
        assert self.caller.begin_backward(like, self.replicas)
        configs = {replica: self.caller.config_for(replica) for replica in self.replicas[1:]}
        return [partial(self.caller.reducer, nothing), *(partial(self._reducer, r, configs[r]) for r in configs)]

    def _reducer(self, replica: int, config: Any) -> Reducer:
        """Make a worker's reducer, as `Worker` does."""
        if isinstance(self.caller, SharedMemoryTransport):
            if config.specs is not None:
                mapped = {s.number: Segment(os.dup(s.fd), s.num_bytes, s.number) for s in self.caller.segments}
                self.kept[replica] = ReduceBuffers(config.specs, mapped, mapped[config.turns])
            return SharedMemoryReducer(self.kept[replica], replica, config.replicas)
        if config.buckets is not None:
            self.kept[replica] = config.buckets
        return CollectiveReducer(self.kept[replica], self.groups_of(replica).of(config.replicas), CPU, CPU)

    def backward(
        self, like: dict[int, torch.Tensor], added: Sequence[Mapping[int, torch.Tensor]], failing: int | None = None
    ) -> dict[int, torch.Tensor]:
        """Have every replica add its gradients; return the sums."""

        def add_all(replica: int, make: Callable[[], Reducer]) -> None:
            reducer = make()
            for number, gradient in added[replica].items():
                assert reducer.add(number, gradient)
            (reducer.fail if replica == failing else reducer.end)()

        run([partial(add_all, *pair) for pair in enumerate(self.begin_backward(like))])
        return self.caller.results()


# ---- both ----------------------------------------------------------------------------------------


@both_transports
@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_gradients_are_summed_and_those_that_no_replica_has_are_missing(transport, num_replicas):
    """N1: in shared memory bit for bit in replica order; gloo's order matters to none of the numbers here."""
    like = {
        0: torch.empty(LARGE),
        1: torch.empty(300, 400).t(),
        2: torch.empty(10_000, dtype=torch.float64),
        3: torch.empty(LARGE),
        4: torch.empty(10_000, dtype=torch.complex64),
        5: torch.empty(40_000, dtype=torch.bfloat16),
    }
    replicas = Replicas(transport, num_replicas)

    def random(like: torch.Tensor, replica: int) -> torch.Tensor:
        if transport == "gloo":
            return torch.randint(-3, 4, like.shape).to(like.dtype)
        return torch.randn(like.shape, dtype=like.dtype) * 10.0**replica

    for _ in range(3):
        added = [{n: random(t, replica) for n, t in like.items() if n != 3} for replica in replicas.replicas]
        del added[1][0], added[0][1]
        results = replicas.backward(like, added)
        assert sorted(results) == [0, 1, 2, 4, 5]
        for number, result in results.items():
            first, *others = [each[number] for each in added if number in each]
            assert torch.equal(result, sum(others, first))
            assert result.stride() == like[number].stride()
            assert result.untyped_storage().nbytes() == result.nbytes, "memory of its own"


@both_transports
def test_gradients_that_are_added_and_those_that_are_not(transport):
    replicas = Replicas(transport, 1)
    (make,) = replicas.begin_backward({0: torch.empty(LARGE), 1: torch.empty(LARGE)})
    reducer = make()
    assert not reducer.add(2, torch.ones(LARGE))
    assert not reducer.add(0, torch.ones(LARGE, dtype=torch.float64))
    assert not reducer.add(0, torch.ones(LARGE).to_sparse())
    assert reducer.add(0, torch.ones(2 * LARGE)[::2])
    assert not reducer.add(0, torch.ones(LARGE)), "a second one is not"
    reducer.end()
    ((number, result),) = replicas.caller.results().items()
    assert number == 0
    assert torch.equal(result, torch.ones(LARGE))


@both_transports
@pytest.mark.parametrize("failing", [0, 1])
def test_a_replica_that_fails_does_not_block_the_others_nor_the_next_backward(transport, failing):
    like = {n: torch.empty(LARGE) for n in range(3)}
    replicas = Replicas(transport, 2)
    ones = dict.fromkeys(range(3), torch.ones(LARGE))
    added = [ones, ones]
    added[failing] = {2: torch.ones(LARGE)}
    replicas.backward(like, added, failing)
    for result in replicas.backward(like, [ones, ones]).values():
        assert torch.equal(result, torch.full((LARGE,), 2.0))


@both_transports
def test_a_replica_that_waits_for_another_calls_on_wait(transport):
    first, second = run(Replicas(transport, 2).begin_backward({0: torch.empty(LARGE)}))
    with pytest.raises(ChildProcessError):
        first.end(worker_died)
    run([first.fail, second.end])  # a process group cannot be freed while it has work to do


# ---- shared memory -------------------------------------------------------------------------------


def test_memory_is_reused_only_when_no_tensor_refers_to_it():
    replicas = Replicas("shared memory", 1)
    like = {0: torch.empty(LARGE), 1: torch.empty(LARGE)}

    def once(value: float) -> dict[int, torch.Tensor]:
        return replicas.backward(like, [{n: torch.full((LARGE,), value) for n in like}])

    first = once(1.0)
    kept, address = first[0][:5], first[1].data_ptr()
    del first
    second = once(2.0)
    assert second[0].data_ptr() == address, "memory is reused for any tensor of the same form"
    assert kept.tolist() == [1.0] * 5
    addresses = {tensor.data_ptr() for tensor in second.values()} | {kept.data_ptr()}
    del second, kept
    num_segments = len(replicas.caller.segments)
    assert {tensor.data_ptr() for tensor in once(3.0).values()} <= addresses
    assert len(replicas.caller.segments) == num_segments
    for value in range(shared_memory._IDLE_BACKWARDS + 1):
        once(float(value))
    assert len(replicas.caller.segments) < num_segments, "memory that is no longer needed is freed"


# ---- collectives ---------------------------------------------------------------------------------


def test_buckets_follow_the_order_of_the_first_backward():
    like = {n: torch.empty(300) for n in range(4)}
    replicas = Replicas("gloo", 2)
    ones = torch.ones(300)
    for _ in range(2):
        replicas.backward(like, [dict.fromkeys([2, 0, 3, 1], ones), dict.fromkeys(range(4), ones)])
    assert [[n for n, _ in bucket.items] for bucket in replicas.caller._buckets] == [[2], [0], [3], [1]]
    assert replicas.kept[1] == replicas.caller._buckets


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
    replicas = Replicas("gloo", 1)
    (make,) = replicas.begin_backward({n: torch.empty(300) for n in range(4)})
    reducer = make()
    seen = []
    for value, ended_now in ((3.0, []), (1.0, [1.0]), (2.0, [3.0]), (0.0, [2.0])):
        ended += ended_now
        assert reducer.add(int(value), torch.full((300,), value))
        seen.append(reduced[:])
    assert seen == [[], [], [3.0], [3.0, 2.0, 1.0]]
    reducer.end()
    assert reduced == [3.0, 2.0, 1.0, 0.0]
    results = replicas.caller.results()
    assert [results[n][0].item() for n in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_parameters_are_sent():
    tensors = [torch.randn(3), torch.randn(4, 5).to(torch.float16), torch.tensor([True, False])]
    buckets = buckets_of({number: Form.of(tensor) for number, tensor in enumerate(tensors)})
    replicas = Replicas("gloo", 2)

    def send() -> None:
        replicas.caller.begin_sending([bucket.flat(tensors) for bucket in buckets], (0, 1), nothing)
        replicas.caller.end_sending(nothing)

    _, flats = run([send, lambda: replicas.groups_of(1).receive(buckets, (0, 1))])
    for bucket, flat in zip(buckets, flats, strict=True):
        for number, piece in bucket.pieces(flat).items():
            assert torch.equal(piece, tensors[number])


def test_a_caller_that_waits_for_a_process_group_calls_on_wait():
    """A worker never joins it; while torch makes the group, `on_wait` could not be called."""
    caller = Replicas("gloo", 2).caller
    assert caller.begin_backward({0: torch.empty(3)}, (0, 1))
    with pytest.raises(ChildProcessError):
        caller.reducer(worker_died)
    with pytest.raises(ChildProcessError):
        caller.begin_sending([torch.ones(3)], (0, 1), worker_died)


def test_a_process_group_that_outlives_its_worker_group_writes_into_no_other_file(tmp_path):
    """A store writes to its file's path when the last reference to it goes, which a traceback may keep."""

    def make_reducers() -> list[Any]:
        replicas = Replicas("gloo", 2)
        reducers = run(replicas.begin_backward({0: torch.empty(3)}))
        replicas.caller.end()
        return reducers

    kept = make_reducers()
    gc.collect()
    with open(tmp_path / "mine", "w+b") as file:  # gets a file descriptor that has become free, if there is one
        kept.clear()
        gc.collect()
        file.seek(0, os.SEEK_END)
        assert file.tell() == 0
