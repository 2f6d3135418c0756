"""State that is kept and put back."""

import random
import sys
import types

import pytest
import torch
from torch import nn

from manyhands.verification.state import RandomState, Snapshot


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


def test_what_was_replaced_added_and_removed_is_as_before() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    first, weight, table = model[0], model[0].weight, {"a": 1}
    model.table = table
    state = Snapshot(model)
    model[0] = nn.Identity()
    model.extra = 5
    table["b"] = 2
    first.weight = nn.Parameter(torch.zeros(2, 2))
    model[1].register_buffer("more", torch.zeros(1))
    model.eval()
    with torch.no_grad():
        weight += 1
    values = weight.detach().clone()
    state.restore(gradients=True)
    assert model[0] is first
    assert first.weight is weight
    assert torch.allclose(weight, values - 1)
    assert model.table is table
    assert table == {"a": 1}
    assert not hasattr(model, "extra")
    assert not hasattr(model[1], "more")
    assert model.training
    assert model[1].training
