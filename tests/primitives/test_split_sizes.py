"""How many rows each replica gets."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.primitives.split_sizes import check_shares, split_rows

batches = st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, 2 * n + 1), st.just(n)))
weights_of = st.lists(st.one_of(st.just(0), st.integers(0, 5), st.floats(0, 1e6)), min_size=1, max_size=8).filter(any)


@pytest.mark.parametrize(
    ("rows", "devices", "shares", "expected"),
    [
        (10, 4, "chunk", [3, 3, 3, 1]),
        (5, 4, "chunk", [2, 2, 1, 0]),
        (10, 4, "even", [3, 3, 2, 2]),
        (2, 4, "even", [1, 1, 0, 0]),
        (30, 2, [2, 1], [20, 10]),
        (30, 2, (0.5, 0.5), [15, 15]),
        (10, 3, [1, 0, 1], [5, 0, 5]),
        (11, 3, [1, 0, 1], [6, 0, 5]),  # a tie goes to the lower replica
        (1, 2, [1, 100], [0, 1]),
        (0, 2, [2, 1], [0, 0]),
        (100, 3, [0.1, 0.2, 0.7], [10, 20, 70]),  # no row is lost to 0.1 + 0.2 != 0.3
        (7, 2, [5e-324, 5e-324], [4, 3]),
        (3, 3, [1, 1, 7], [1, 0, 2]),  # 1/3, 1/3 and 7/3 have the same remainder; as floats they have not
        (21, 2, [5, 9], [8, 13]),
        (7, 3, [1e308, 1e308, 5e307], [3, 3, 1]),  # also where the sum is no finite float
    ],
)
def test_shares(rows, devices, shares, expected):
    """S1, S2: "even" differs by one row at most; weights split in proportion; a share of 0 is idle."""
    assert split_rows(rows, devices, check_shares(shares, devices)) == expected


@given(batches)
def test_chunk_sizes_are_those_of_torch_chunk(batch):
    """S1: ceil(rows / n) rows each until they are used up."""
    rows, devices = batch
    sizes = split_rows(rows, devices)
    assert len(sizes) == devices
    assert [size for size in sizes if size] == [c.size(0) for c in torch.empty(rows, 0).chunk(devices) if c.size(0)]


@given(batches)
def test_even_sizes_add_up_and_differ_by_one_at_most(batch):
    """S2: the larger ones first."""
    rows, devices = batch
    sizes = split_rows(rows, devices, "even")
    assert (len(sizes), sum(sizes)) == (devices, rows)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 40), weights_of)
def test_weighted_sizes_add_up_and_stay_within_one_row_of_the_exact_share(rows, weights):
    """S2: Hamilton's method keeps the quota, and a replica with weight 0 gets nothing."""
    sizes = split_rows(rows, len(weights), check_shares(weights, len(weights)))
    assert (len(sizes), sum(sizes)) == (len(weights), rows)
    for size, weight in zip(sizes, weights, strict=True):
        exact = rows * weight / sum(weights)
        assert math.floor(exact - 1e-6) <= size <= math.ceil(exact + 1e-6)
        assert size == 0 or weight > 0


def test_check_shares_returns_the_normal_form():
    assert check_shares("chunk", 3) == "chunk"
    assert check_shares("even", 3) == "even"
    assert check_shares([2, 1], 2) == (2.0, 1.0)
    assert check_shares(range(3), 3) == (0.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("shares", "error", "message"),
    [
        ("measured", ValueError, r"shares='measured': expected \"chunk\", \"even\" or one weight a device"),
        ("", ValueError, "shares=''"),
        (2, TypeError, "shares=2: expected .* a sequence of numbers"),
        (None, TypeError, "shares=None"),
        ({0: 1, 1: 1}, TypeError, "a sequence of numbers"),
        (["1", "2"], TypeError, "a sequence of numbers"),
        ([True, False], TypeError, "a sequence of numbers"),
        ([1, 2, 3], ValueError, "has 3 weights for 2 devices"),
        ([], ValueError, "has 0 weights for 2 devices"),
        ([1, -1], ValueError, r"shares=\[1, -1\]: expected finite weights of 0 or more"),
        ([0, 0], ValueError, "at least one of them above 0"),
        ([1, math.nan], ValueError, "finite"),
        ([1, math.inf], ValueError, "finite"),
    ],
)
def test_check_shares_says_what_is_wrong(shares, error, message):
    """S2, A13: the value is shown, and what was expected."""
    with pytest.raises(error, match=message):
        check_shares(shares, 2)
