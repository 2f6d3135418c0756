import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.training.schedule import epoch_batches, learning_rate, num_steps


@given(rows=st.integers(1, 500), batch_size=st.integers(1, 600), epoch=st.integers(0, 3))
def test_every_row_comes_once_in_steps_of_nearly_one_size(rows: int, batch_size: int, epoch: int) -> None:
    batches = epoch_batches(rows, batch_size, seed=0, epoch=epoch)
    sizes = [len(batch) for batch in batches]
    assert len(batches) == num_steps(rows, batch_size)
    assert torch.cat(batches).sort().values.tolist() == list(range(rows))
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    before = torch.get_rng_state()
    order = torch.cat(epoch_batches(100, 10, seed=1, epoch=2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12345)
    assert torch.equal(torch.cat(epoch_batches(100, 10, seed=1, epoch=2)), order)
    assert not torch.equal(torch.cat(epoch_batches(100, 10, seed=1, epoch=3)), order)
    assert not torch.equal(torch.cat(epoch_batches(100, 10, seed=2, epoch=2)), order)


def test_warm_up_rises_in_a_line_and_the_cosine_falls_to_nearly_nothing() -> None:
    rates = [learning_rate(step, peak=0.4, schedule="cosine", warmup_steps=4, total_steps=104) for step in range(104)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates[54] == pytest.approx(0.2)
    assert 0 < rates[-1] < 0.001
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))


def test_constant_without_warm_up() -> None:
    rates = {learning_rate(step, peak=0.1, schedule="constant", warmup_steps=0, total_steps=9) for step in range(9)}
    assert rates == {0.1}


def test_a_run_may_be_warm_up_only() -> None:
    rates = [learning_rate(step, peak=1.0, schedule="cosine", warmup_steps=2, total_steps=2) for step in range(2)]
    assert rates == [0.5, 1.0]
