"""Activations are freed as in the plain module, and no reference cycle is made."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from helpers.contract import Wrap
from helpers.losses import fresh, loss_of
from helpers.modules import mlp

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
    assert loss.grad_fn is not None
    loss = loss_of(model(torch.randn(8, 5)))
    loss.backward(retain_graph=True)
    del loss
    assert model.module.alive() == 0


def test_inputs_and_outputs_are_not_kept(wrap: Wrap) -> None:
    """N10: nothing of the last step is kept."""
    model = wrap(mlp(), 3)
    x = fresh(torch.randn(8, 5))
    output = model(x)
    references = [weakref.ref(x), weakref.ref(output)]
    loss_of(output).backward()
    del x, output
    assert [reference() for reference in references] == [None, None]
    module = weakref.ref(model.module)
    del model
    gc.collect()  # modules have cycles of their own
    assert module() is None
