import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.training.schedule import epoch_batches, learning_rate, num_steps


@given(rows=st.integers(1, 2000), batch_size=st.integers(1, 600), epoch=st.integers(0, 3))
def test_every_row_comes_once_in_steps_of_nearly_one_size(rows: int, batch_size: int, epoch: int) -> None:
    batches = epoch_batches(rows, batch_size, seed=0, epoch=epoch)
    sizes = [len(batch) for batch in batches]
    assert len(batches) == num_steps(rows, batch_size)
    assert torch.cat(batches).sort().values.tolist() == list(range(rows))
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1
    fewest = math.ceil(rows / batch_size)
    few = range(fewest, fewest + fewest // 16 + 1)  # up to a sixteenth more steps, if these have one size
    assert len(batches) == min((number for number in few if rows % number == 0), default=fewest)


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    order = torch.cat(epoch_batches(100, 10, seed=1, epoch=2))
    torch.manual_seed(12345)
    assert torch.equal(torch.cat(epoch_batches(100, 10, seed=1, epoch=2)), order)
    assert not torch.equal(torch.cat(epoch_batches(100, 10, seed=1, epoch=3)), order)
    assert not torch.equal(torch.cat(epoch_batches(100, 10, seed=2, epoch=2)), order)


def test_the_rate_warms_up_and_then_falls() -> None:
    """So an epoch of a run of one epoch is the first of a longer run."""
    rates = [learning_rate(step, peak=0.4, steps_per_epoch=2, epochs=2) for step in range(4)]
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.2])
    assert rates[:2] == [learning_rate(step, peak=0.4, steps_per_epoch=2, epochs=1) for step in range(2)]
