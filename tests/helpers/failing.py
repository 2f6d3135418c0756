"""A module of which one replica fails, and what must be true then."""

import copy

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_unchanged
from helpers.contract import in_time
from helpers.losses import loss_of
from unisono import DataParallel


class FailureError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class FailsOn(nn.Module):
    """Raises in the replicas whose first row is in `on`, after it has written into its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.calls = nn.Buffer(torch.zeros(1))
        self.on: dict[float, BaseException] = {}
        self.in_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(self.norm(x))
        error = self.on.get(float(x[0, 0]))
        if error is not None and not self.in_backward:
            raise error
        if error is not None:

            def fail(grad: torch.Tensor) -> None:
                raise error

            y.register_hook(fail)
        return y


def numbered_rows() -> torch.Tensor:
    """Return a batch for FailsOn: the first rows of three replicas are 0, 3 and 6."""
    return torch.arange(8.0).repeat_interleave(2).view(8, 2)


# Of FailsOn on three replicas: the row that fails, and whether it fails in backward.
FAILURES = [(first_row, in_backward) for first_row in (0.0, 3.0, 6.0) for in_backward in (False, True)]


def assert_failure_leaves_nothing(
    model: DataParallel, error: BaseException, first_row: float, in_backward: bool
) -> BaseException:
    """Have one of three replicas of FailsOn fail: the error is its own, no gradient is left, and buffers are as before.

    Returns:
        The error. The module's state is what it was, and it fails no more.
    """
    before = copy.deepcopy(model.module.state_dict())
    model.module.on, model.module.in_backward = {first_row: error}, in_backward
    with pytest.raises(type(error)) as caught:
        in_time(lambda: loss_of(model(numbered_rows())).backward())
    assert caught.value is error
    assert all(p.grad is None for p in model.parameters())
    if not in_backward:
        assert_unchanged(model.module, before)
    model.module.load_state_dict(before)
    model.module.on = {}
    return caught.value
