"""How many rows each replica gets; tests/contract/test_properties.py compares all kinds with torch's."""

import math

import pytest

from unisono.primitives.split_sizes import check_shares, split_rows


@pytest.mark.parametrize(
    ("rows", "devices", "shares", "expected"),
    [
        (5, 4, "chunk", [2, 2, 1, 0]),
        (10, 4, "even", [3, 3, 2, 2]),
        (30, 2, (0.5, 0.25), [20, 10]),
        (11, 3, [1, 0, 1], [6, 0, 5]),  # a tie goes to the lower replica
        (1, 2, [1, 100], [0, 1]),
        (3, 3, range(3), [0, 1, 2]),
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


@pytest.mark.parametrize(
    ("shares", "error", "message"),
    [
        ("measure", ValueError, r"shares='measure': expected \"chunk\", \"even\", \"measured\" or one weight a device"),
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
        ([2**1025, 1], ValueError, "finite"),
    ],
)
def test_check_shares_says_what_is_wrong(shares, error, message):
    """S2, A13: the value is shown, and what was expected."""
    with pytest.raises(error, match=message):
        check_shares(shares, 2)
