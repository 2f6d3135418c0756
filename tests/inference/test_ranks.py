"""map and evaluate in several processes: each computes its part of the same batches, and rank 0 has all outputs."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.modules import Fn
from helpers.ranks import end_ranks, run_ranks
from unisono import DataParallel

NUM_BATCHES = 7


def batches() -> list[torch.Tensor]:
    """Return batches of different sizes, full of their own number."""
    return [torch.full((1 + k % 3, 2), float(k)) for k in range(NUM_BATCHES)]


def computed_by(rank: int, device_ids: list[str] | None = None) -> DataParallel:
    """Return a model that adds the rank, so that an output shows who computed it."""
    return DataParallel(Fn(lambda x: x + rank / 10), device_ids or ["cpu"])


def all_outputs(rank: int, device_ids: list[str]) -> list[torch.Tensor]:
    model = computed_by(rank, device_ids)
    outputs = list(model.map(batches()))
    of_samples = list(model.map(torch.arange(10.0)[:, None], batch_size=3))
    assert [len(output) for output in of_samples] == ([3, 3, 3, 1] if rank == 0 else [])
    out = torch.zeros(sum(map(len, batches())), 2)
    assert model.map(batches(), out=out) is out
    assert torch.equal(out, torch.cat(outputs)) if rank == 0 else not out.any()
    assert list(model.map([])) == []
    return outputs


@pytest.mark.parametrize(("world_size", "device_ids"), [(2, ["cpu"]), (3, ["cpu"]), (2, ["cpu", "cpu"])])
def test_rank_0_has_all_outputs_in_order(world_size: int, device_ids: list[str]) -> None:
    """I14: each rank computes its part; the other ranks' iterators yield nothing, and a step follows."""
    first, *others = run_ranks(world_size, all_outputs, device_ids)
    for k, (output, x) in enumerate(zip(first, batches(), strict=True)):
        assert torch.equal(output, x + (k % world_size) / 10)
    assert others == [[]] * (world_size - 1)


def evaluated(rank: int) -> Any:
    model = DataParallel(nn.Identity(), ["cpu"])
    pairs = [(x, -x) for x in batches()]
    metric = {"sum": "sum"}
    return model.evaluate(
        pairs, lambda output, target: {"mean": (output - target).mean(), "sum": output.sum()}, reduction=metric
    ), model.evaluate(pairs[:1], lambda output, target: 3)


def test_an_evaluation_is_over_all_ranks_rows() -> None:
    """I14, I12: each row counts once, and each rank has the result."""
    rows = torch.cat(batches())
    for found, of_one_batch in run_ranks(2, evaluated):
        assert found == {"mean": pytest.approx(2 * rows.mean().item()), "sum": rows.sum().item()}
        assert of_one_batch == 3


def maps_and_fails(rank: int, fails: str, bad: int, its_rank: int) -> tuple[int, str, list[str]]:
    def forward(x: torch.Tensor) -> Any:
        if len(x) and x[0, 0] == bad and fails == "a forward":
            raise ValueError("as asked")
        return (lambda: x) if x[0, 0] == bad and fails == "an output that cannot be pickled" else x

    def source() -> Any:
        yield from batches()[:bad]
        if rank == its_rank and fails == "the loader":
            raise ValueError("as asked")
        yield from batches()[bad : NUM_BATCHES if fails != "the loader" else bad]

    model = DataParallel(Fn(forward), ["cpu"])
    num_outputs, found, notes = 0, "", [""]
    try:
        for _ in model.map(source()):
            num_outputs += 1
    except (RuntimeError, ValueError, AttributeError, pickle.PicklingError) as error:
        found, notes = f"{type(error).__name__}: {error}", getattr(error, "__notes__", notes)
    assert len(list(model.map(batches()[:3]))) == (3 if rank == 0 else 0)
    return num_outputs, found, notes


@pytest.mark.parametrize(
    ("world_size", "fails", "bad"),
    [(2, "a forward", 4), (3, "a forward", 5), (2, "the loader", 3), (2, "an output that cannot be pickled", 3)],
)
def test_a_batch_that_fails_ends_the_map_on_all_ranks(world_size: int, fails: str, bad: int) -> None:
    """I14, I6: rank 0 has the outputs before it; the error of another rank names the batch; then all go on together."""
    its_rank = bad % world_size
    for rank, (num_outputs, found, notes) in enumerate(run_ranks(world_size, maps_and_fails, fails, bad, its_rank)):
        assert num_outputs == (bad if rank == 0 else 0)
        error = "" if fails == "an output that cannot be pickled" else "ValueError: as asked"
        if rank == its_rank and error:
            assert found == error
            assert rank == 0 or f"batch {bad}" in notes[0]
        elif rank == 0:
            assert found.startswith(f"RuntimeError: batch {bad} failed on rank {its_rank}: {error}")
        elif rank != its_rank:
            assert found == f"RuntimeError: rank {its_rank} failed at batch {bad}"


def drawn(rank: int, ones: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    return list(DataParallel(nn.Dropout(0.5), ["cpu"]).map(ones))


def test_random_numbers_are_those_of_one_process() -> None:
    """I14, I5: batch k has the stream that it has on one device, whichever rank computes it."""
    ones = [torch.ones(1, 20)] * 5
    torch.manual_seed(7)
    alone = list(DataParallel(nn.Dropout(0.5), ["cpu"], process_group=False).map(ones))
    together, _ = run_ranks(2, drawn, ones)
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def ends_early(rank: int) -> int:
    model = computed_by(rank)
    for _ in model.map(batches()):
        break
    with model.map(batches()) as outputs:
        found = [next(outputs)] if rank == 0 else list(outputs)
    return len(found) + 10 * len(list(model.map(batches())))


def test_rank_0_may_end_early() -> None:
    """I14, I7: the other ranks end, too, and all go on together."""
    assert run_ranks(2, ends_early) == [1 + 10 * NUM_BATCHES, 0]


Batches = list[torch.Tensor]
DIFFERENT: dict[str, Callable[[Batches, int], Batches]] = {
    "each rank its own": lambda all_batches, rank: all_batches[rank::2],
    "one more": lambda all_batches, rank: all_batches[: 6 + rank],
    "another order": lambda all_batches, rank: all_batches[:: -1 if rank else 1],
}


def given_its_own(rank: int, kind: str, evaluates: bool) -> None:
    model, own = DataParallel(nn.Identity(), ["cpu"]), DIFFERENT[kind](batches(), rank)
    with pytest.raises(RuntimeError, match="got different batches"):
        model.evaluate([(x, x) for x in own], lambda *_: 1) if evaluates else list(model.map(own))


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("kind", DIFFERENT)
def test_batches_that_differ_are_an_error_on_all_ranks(kind: str, evaluates: bool) -> None:
    """I14: a loader of which each rank has its own part would lose rows."""
    run_ranks(2, given_its_own, kind, evaluates)


def ends_in_the_middle(rank: int) -> None:
    model = DataParallel(nn.Identity(), ["cpu"])

    def source() -> Any:
        yield from batches()[:4]
        if rank:
            raise KeyboardInterrupt
        yield from batches()[4:]

    list(model.map(source()))


def test_a_rank_that_ends_in_the_middle_is_not_waited_for() -> None:
    """I14, C12: the other one raises an error that names it."""
    first, second = end_ranks(2, ends_in_the_middle)
    assert "rank 1 failed" in first.error
    assert "KeyboardInterrupt" in second.error


def fails_in_its_metric(rank: int) -> str:
    def fail(output: torch.Tensor, target: Any) -> int:
        if rank:
            raise ValueError("in the metric")
        return 1

    with pytest.raises((ValueError, RuntimeError)) as caught:
        DataParallel(nn.Identity(), ["cpu"]).evaluate([(x, x) for x in batches()], fail)
    return str(caught.value)


def test_an_error_of_one_ranks_metric_is_known_to_all() -> None:
    """I14, I12"""
    first, second = run_ranks(2, fails_in_its_metric)
    assert first == "the evaluation failed on rank 1: ValueError: in the metric"
    assert second == "in the metric"
