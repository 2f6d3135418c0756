"""Activations are freed as in the plain module, and no reference cycle is made."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from helpers.contract import Wrap
from helpers.garbage import wait_for_workers
from helpers.losses import loss_of

pytestmark = pytest.mark.usefixtures("collector_off")


class Watched(nn.Module):
    """Keeps weak references to its intermediate results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        self.seen.append(weakref.ref(hidden))
        return self.b(torch.tanh(hidden) * hidden)  # hidden is saved for backward

    def alive(self) -> int:
        wait_for_workers()
        return sum(reference() is not None for reference in self.seen)


def test_activations_are_freed(wrap: Wrap) -> None:
    """N10: while backward runs, unless `retain_graph` keeps them; otherwise with the output or the loss."""
    model = wrap(Watched(), 3)
    output = model(torch.randn(8, 5))
    assert model.module.alive() == 3
    del output
    assert model.module.alive() == 0
    loss = loss_of(model(torch.randn(8, 5)))
    loss.backward(retain_graph=True)
    assert model.module.alive() == 3
    loss.backward()
    assert model.module.alive() == 0
    with pytest.raises(RuntimeError, match=r"backward through .* a second time"):
        loss.backward()
    loss = loss_of(model(torch.randn(8, 5)))
    loss.backward(retain_graph=True)
    del loss
    assert model.module.alive() == 0
