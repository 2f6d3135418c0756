"""Activations are freed as in the plain module, and no reference cycle is made."""

import gc
import weakref

import pytest
import torch

from helpers.contract import Watched, Wrap, fresh, loss_of, mlp, num_here, over_gloo_too

pytestmark = pytest.mark.usefixtures("collector_off")


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
