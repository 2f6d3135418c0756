"""The running backward, and how one is run: its result in each way, and where torch lacks a part."""

import contextlib
import sys
from typing import Any

import pytest
import torch

from unisono.runtime.torch_private import engine


@pytest.mark.parametrize("can_remove", [True, False])
def test_what_the_nodes_of_a_backward_see(can_remove: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: what the block around the backward has been given, and nothing after it; blocks may be inside each other."""
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append({**engine.backward_context()}))

    def backward() -> None:
        engine.run_backward([x.sum()], [torch.ones(())], keep=False)

    if not can_remove:  # as in torch 2.9
        monkeypatch.setattr(engine, "_CAN_REMOVE", False)
        monkeypatch.setattr(engine, "_run", torch.autograd.Variable._execution_engine.run_backward)
    with engine.with_backward_context({1: "outer", 2: "outer"}):
        with engine.with_backward_context({2: "inner"}):
            backward()
        backward()
    backward()
    assert seen == [{1: "outer", 2: "inner"}, {1: "outer", 2: "outer"}, {}]


@pytest.mark.parametrize("way", ["engine", "torch 2.9", "torch's functions", "mode"])
def test_backward_and_gradients(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do what torch's functions do."""
    if way == "torch 2.9":  # whose function around the engine does less than later ones
        monkeypatch.setattr(engine, "_run", torch.autograd.Variable._execution_engine.run_backward)
    if way == "torch's functions":
        monkeypatch.setattr(engine, "_none_handles_functions", lambda tensors: False)
    a, b, unused = (torch.linspace(1, 2, 3).requires_grad_() for _ in range(3))
    ends, grads = [a * b, (a * a).sum()], [torch.tensor([1.0, 2.0, 3.0]), torch.tensor(2.0)]
    expected = torch.tensor([1.0, 2.0, 3.0]) * b.detach() + 4 * a.detach()
    with torch.device("cpu") if way == "mode" else contextlib.nullcontext():
        found = engine.gradients(ends, [a, unused], grads, create_graph=True)
        assert found[1] is None
        torch.testing.assert_close(found[0], expected)
        (second,) = engine.gradients(found[:1], [a], [torch.ones(3)], keep=True)
        torch.testing.assert_close(second, torch.full((3,), 4.0))
        engine.run_backward(ends, grads, keep=True)
        engine.run_backward(ends, grads, keep=False)
        torch.testing.assert_close(a.grad, 2 * expected)
        with pytest.raises(RuntimeError, match="second time"):
            engine.run_backward(ends, grads, keep=False)
        with pytest.raises(RuntimeError, match="shape"):
            engine.run_backward([a * b], [torch.ones(2)], keep=False)


def test_what_torch_would_import_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: it is there afterwards; where it cannot be imported, nothing happens."""
    load, module = engine._import_what_backward_imports.__wrapped__, "torch.fx.experimental.symbolic_shapes"
    load()
    assert module in sys.modules
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    load()
