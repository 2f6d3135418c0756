"""Shares that cannot be used; how many rows each replica gets is in tests/contract/test_properties.py."""

import math

import pytest
import torch

from unisono.primitives.split_sizes import IdleDevices, check_shares


@pytest.mark.parametrize(
    ("shares", "error", "message"),
    [
        (
            "measure",
            ValueError,
            r"shares='measure': expected \"chunk\", \"even\", \"measured\" or one weight for each device",
        ),
        ("", ValueError, "shares=''"),
        (2, TypeError, "shares=2: expected .* a sequence of numbers"),
        (None, TypeError, "shares=None"),
        ({0: 1, 1: 1}, TypeError, "a sequence of numbers"),
        (["1", "2"], TypeError, "a sequence of numbers"),
        ([True, False], TypeError, "a sequence of numbers"),
        ([1, 2, 3], ValueError, "has 3 weights for 2 devices"),
        ([], ValueError, "has 0 weights for 2 devices"),
        ([1, -1], ValueError, r"shares=\[1, -1\]: expected finite weights, 0 or more"),
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


def test_of_many_devices_the_message_has_the_first_ones(caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    IdleDevices().see([1] * 6 + [0] * 93, [cpu] * 99, lambda: [True] * 99)
    assert "a batch of 6 rows gives [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ...] rows to the 99" in caplog.text
