"""The options that say what becomes of a step in which a replica fails or is stuck."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unisono import DataParallel

BAD_TIMEOUTS = [
    *[(value, ValueError) for value in (0, -1, float("nan"), float("inf"), 2**32 / 1000, 1e10)],
    *[(value, TypeError) for value in (True, "60", torch.tensor(1.0))],
]


@pytest.mark.parametrize(
    ("option", "good", "bad", "error"),
    [*[("timeout", 60, *case) for case in BAD_TIMEOUTS], *[("rescue", True, bad, TypeError) for bad in (1, None)]],
)
def test_options_are_checked_at_first_and_where_they_are_assigned(
    option: str, good: Any, bad: Any, error: type[Exception]
) -> None:
    """A13, F7, F11: one that cannot be used is refused, and stays what it was.

    2**32 milliseconds are 0 in 32 bits, so a replica was given up at once; larger ones were OverflowErrors.
    """
    model = DataParallel(nn.Linear(2, 2), ["cpu"] * 2, **{option: good})
    assert getattr(model, option) == good
    with pytest.raises(error, match=rf"{option}=.*: expected "):
        setattr(model, option, bad)
    assert getattr(model, option) == good
    with pytest.raises(error, match=rf"{option}=.*: expected "):
        DataParallel(nn.Linear(2, 2), ["cpu"] * 2, **{option: bad})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_wrapper_has_the_same_options_and_its_own(copied: Callable[[DataParallel], DataParallel]) -> None:
    """A8, A14"""
    model = DataParallel(nn.Linear(4, 2), ["cpu"] * 2, rescue=True, timeout=5)
    other, x = copied(model), torch.randn(6, 4)
    assert (other.rescue, other.timeout) == (True, 5)
    other.timeout = 7
    assert model.timeout == 5
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
