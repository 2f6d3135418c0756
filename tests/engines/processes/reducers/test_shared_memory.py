"""Large gradients summed in shared memory: the order, the memory, and what becomes of the others when one fails.

Here the replicas are threads, each with a `Reducer` of its own; tests/engines/processes/test_engine.py has them in
processes."""

import os
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from manyhands.engines.processes.reducers import shared_memory
from manyhands.engines.processes.reducers.shared_memory import ReduceBuffers, SharedMemoryReducer, SharedMemoryTransport
from manyhands.engines.processes.shared_memory import Segment

LARGE = 700_000  # items; some chunks
WAIT_S = 30.0


def ground_of_worker(sums: SharedMemoryTransport, replica: int) -> ReduceBuffers:
    """Return what a worker makes of what it is told."""
    told = sums.config_for(replica)
    assert told.specs is not None
    # As in a worker, the memory is mapped once more.
    attached = {s.number: Segment(os.dup(s.fd), s.num_bytes, s.number) for s in sums.segments}
    return ReduceBuffers(told.specs, attached, attached[told.turns])


def run(tasks: Sequence[Callable[[], None]]) -> None:
    """Run each task in a thread of its own; fail if one raises, or hangs."""
    errors: list[BaseException] = []

    def run_one(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run_one, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def summed(
    sums: SharedMemoryTransport, like: dict[int, torch.Tensor], given: Sequence[dict[int, torch.Tensor]]
) -> dict[int, torch.Tensor]:
    """Return the sums of what replicas give, by number."""
    replicas = tuple(range(len(given)))
    assert sums.begin_backward(like, replicas)
    sums._configured.clear()
    parts = [sums.reducer(lambda: None)]
    parts += [SharedMemoryReducer(ground_of_worker(sums, replica), replica, replicas) for replica in replicas[1:]]

    def task(replica: int) -> Callable[[], None]:
        part = parts[replica]

        def run_part() -> None:
            for number, gradient in given[replica].items():
                assert part.add(number, gradient)
            part.end()

        return run_part

    run([task(replica) for replica in replicas])
    return sums.results()


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_sums_are_in_replica_order_bit_for_bit(num_replicas):
    like = {3: torch.empty(LARGE), 5: torch.empty(300, 400).t(), 7: torch.empty(3)}
    given = [{n: torch.randn(t.shape) * 10.0**r for n, t in like.items() if n != 7} for r in range(num_replicas)]
    results = summed(SharedMemoryTransport(), like, given)
    assert list(results) == [3, 5]
    for number, result in results.items():
        expected = given[0][number]
        for other in given[1:]:
            expected = expected + other[number]
        assert torch.equal(result, expected)
        assert result.stride() == like[number].stride()


def test_a_replica_without_a_gradient_adds_nothing_and_one_that_nobody_has_is_missing():
    like = {n: torch.empty(LARGE) for n in range(3)}
    ones = torch.ones(LARGE)
    results = summed(SharedMemoryTransport(), like, [{0: ones}, {0: ones, 1: ones}, {1: ones}])
    assert torch.equal(results[0], 2 * ones)
    assert torch.equal(results[1], 2 * ones)
    assert 2 not in results


def test_what_is_taken_and_what_is_not():
    sums = SharedMemoryTransport()
    assert sums.begin_backward({0: torch.empty(LARGE)}, (0,))
    part = sums.reducer(lambda: None)
    assert not part.add(1, torch.ones(LARGE))
    assert not part.add(0, torch.ones(LARGE, dtype=torch.float64))
    assert not part.add(0, torch.ones(LARGE).to_sparse())
    assert part.add(0, torch.ones(2 * LARGE)[::2])
    assert not part.add(0, torch.ones(LARGE)), "a second one goes another way"
    part.end()
    assert torch.equal(sums.results()[0], torch.ones(LARGE))


def test_memory_is_used_again_only_when_nobody_refers_to_it():
    sums = SharedMemoryTransport()
    like = {0: torch.empty(LARGE), 1: torch.empty(LARGE)}

    def once(value: float) -> dict[int, torch.Tensor]:
        return summed(sums, like, [{n: torch.full((LARGE,), value) for n in like}])

    first = once(1.0)
    kept, address = first[0][:5], first[1].data_ptr()
    del first
    second = once(2.0)
    assert second[0].data_ptr() == address, "which of its kind a piece of memory is used for does not matter"
    assert kept.tolist() == [1.0] * 5
    addresses = {tensor.data_ptr() for tensor in second.values()} | {kept.data_ptr()}
    del second, kept
    num_segments = len(sums.segments)
    assert {tensor.data_ptr() for tensor in once(3.0).values()} <= addresses
    assert len(sums.segments) == num_segments
    for value in range(shared_memory._IDLE_BACKWARDS + 1):
        once(float(value))
    assert len(sums.segments) < num_segments, "what is no longer needed is given back"


def test_a_replica_that_fails_releases_the_others():
    sums = SharedMemoryTransport()
    assert sums.begin_backward({0: torch.empty(LARGE)}, (0, 1))
    ground = sums._buffers
    first, second = SharedMemoryReducer(ground, 0, (0, 1)), SharedMemoryReducer(ground, 1, (0, 1))
    assert second.add(0, torch.ones(LARGE))
    run([first.fail, second.end])


def test_who_waits_looks_whether_the_others_are_there():
    sums = SharedMemoryTransport()
    assert sums.begin_backward({0: torch.empty(LARGE)}, (0, 1))
    ground = sums._buffers
    part = SharedMemoryReducer(ground, 1, (0, 1))

    def gone() -> None:
        raise ChildProcessError("gone")

    with pytest.raises(ChildProcessError):
        part.end(gone)
