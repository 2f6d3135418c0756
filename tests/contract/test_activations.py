"""Activations are freed as in the plain module, and no reference cycle is made."""

import gc
import weakref

import pytest
import torch
from torch import nn

from helpers.contract import (
    Watched,
    Wrap,
    fresh,
    loss_of,
    mlp,
    num_here,
    over_gloo_too,
    penalty_loss,
)

pytestmark = pytest.mark.usefixtures("collector_off")


class WithMethodAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.op = self.run

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


class WithHiddenModule(Watched):
    """Reaches, through a plain list, a module that has a method of its own as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [WithMethodAttribute()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](super().forward(x))


@over_gloo_too
def test_activations_are_freed(wrap: Wrap, engine: str) -> None:
    """N10: while backward runs, unless `retain_graph` keeps them; otherwise with the output or the loss."""
    model = wrap(Watched(), 3)
    output = model(torch.randn(8, 5))
    assert model.module.alive() == num_here(engine, 3)
    del output
    assert model.module.alive() == 0
    loss = loss_of(model(torch.randn(8, 5)))
    loss.backward(retain_graph=True)
    assert model.module.alive() == num_here(engine, 3)
    loss.backward()
    assert model.module.alive() == 0
    assert loss.grad_fn is not None
    loss = loss_of(model(torch.randn(8, 5)))
    loss.backward(retain_graph=True)
    del loss
    assert model.module.alive() == 0


@pytest.mark.parametrize("order", [0, 1, 2])
def test_no_reference_cycles(wrap: Wrap, order: int) -> None:
    """N10: after a forward, a backward, and a double backward; also where attributes are methods of the module."""
    model = wrap(WithHiddenModule(), 3)

    def step() -> None:
        x = fresh(torch.randn(8, 5))
        if order == 2:
            penalty_loss(model, x).backward()
        else:
            output = model(x)
            if order == 1:
                loss_of(output).backward()

    step()  # what is made once and kept
    model.module.seen.clear()
    gc.collect()
    step()
    assert model.module.alive() == 0
    assert gc.collect() == 0


def test_a_failed_forward_leaves_nothing_behind(wrap: Wrap) -> None:
    """N10, F1: so that a batch that ran out of memory can be tried again in parts."""
    model = wrap(Watched(), 3)
    model(torch.randn(8, 5))
    model.module.seen.clear()
    gc.collect()
    for _ in range(2):
        failed = False
        model.module.fails = True
        try:  # not pytest.raises, which keeps the exception, and by it the frames
            model(torch.randn(8, 5))
        except MemoryError:
            failed = True
        model.module.fails = False
        assert failed
        assert model.module.alive() == 0
        assert gc.collect() == 0


def test_inputs_and_outputs_are_not_kept(wrap: Wrap) -> None:
    """N10: neither the engine nor an idle worker keeps anything of the last step."""
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
