"""State that is kept and put back."""

import random
import sys
import types

import pytest
import torch
from torch import nn

from unisono.verification.state import RandomState, Snapshot


def test_every_generator_is_noticed_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator()
    fake = types.SimpleNamespace(state=5)
    fake.random = types.SimpleNamespace(
        get_state=lambda: fake.state, set_state=lambda state: setattr(fake, "state", state)
    )
    monkeypatch.setitem(sys.modules, "numpy", fake)

    def draw_numpy() -> None:
        fake.state += 1

    for draw in (lambda: torch.rand(1), random.random, lambda: torch.rand(1, generator=own), draw_numpy):
        state = RandomState([own])
        assert not state.has_moved()
        draw()
        assert state.has_moved()
        state.restore()
        assert not state.has_moved()


def test_modules_that_only_attributes_closures_and_hooks_lead_to() -> None:
    hidden, captured, hooked = (nn.BatchNorm1d(2) for _ in range(3))
    model = nn.Linear(2, 2)
    model.tricks = [hidden]
    model.register_forward_hook(lambda module, args, output: hooked(output))

    def criterion(output: torch.Tensor) -> torch.Tensor:
        return captured(output).sum()

    state = Snapshot(model, criterion)
    for module in (hidden, captured, hooked):
        module(torch.randn(3, 2))
        assert module.running_mean.abs().max() > 0
    state.restore(gradients=True)
    for module in (hidden, captured, hooked):
        assert module.running_mean.tolist() == [0.0, 0.0]
