import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.training.schedule import epoch_batches, learning_rate, num_steps


@given(rows=st.integers(1, 500), batch_size=st.integers(1, 600), epoch=st.integers(0, 3))
def test_every_row_comes_once_in_steps_of_nearly_one_size(rows: int, batch_size: int, epoch: int) -> None:
    batches = epoch_batches(rows, batch_size, seed=0, epoch=epoch)
    sizes = [len(batch) for batch in batches]
    assert len(batches) == num_steps(rows, batch_size)
    assert torch.cat(batches).sort().values.tolist() == list(range(rows))
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("rows", "batch_size", "sizes"),
    [
        (60_000, 256, {250}),  # 240 steps instead of 235
        (60_000, 512, {500}),
        (10_000, 256, {250}),
        (5_000, 256, {250}),
        (1437, 128, {119, 120}),  # 1437 = 3 * 479
        (60_000, 7_000, {6_666, 6_667}),  # 9 steps; 10 would be more than a sixteenth more
        (100, 512, {100}),
    ],
)
def test_steps_have_one_size_where_about_as_many_steps_divide_the_rows(
    rows: int, batch_size: int, sizes: set[int]
) -> None:
    assert {len(batch) for batch in epoch_batches(rows, batch_size, seed=0, epoch=0)} == sizes
    assert num_steps(rows, batch_size) <= math.ceil(rows / batch_size) * 17 / 16


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    order = torch.cat(epoch_batches(100, 10, seed=1, epoch=2))
    torch.manual_seed(12345)
    assert torch.equal(torch.cat(epoch_batches(100, 10, seed=1, epoch=2)), order)
    assert not torch.equal(torch.cat(epoch_batches(100, 10, seed=1, epoch=3)), order)
    assert not torch.equal(torch.cat(epoch_batches(100, 10, seed=2, epoch=2)), order)


def test_the_rate_warms_up_and_then_stays() -> None:
    rates = [learning_rate(i, peak=0.4, schedule="constant", warmup_steps=2, total_steps=4) for i in range(4)]
    assert rates == [0.2, 0.4, 0.4, 0.4]
