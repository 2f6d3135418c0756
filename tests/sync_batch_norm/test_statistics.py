"""Mean and variance of several tensors together, and normalising by them: as torch's batch norm of their rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from manyhands.sync_batch_norm.statistics import Statistics

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("float64")


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8), offset=st.sampled_from([0.0, 1.0, 1e6]))
@settings(max_examples=30, deadline=None)
def test_statistics_of_parts_are_those_of_the_whole(sizes: list[int], offset: float) -> None:
    x = torch.randn(sum(sizes), 3, 2) + offset
    whole = Statistics.of_all([Statistics.of(part) for part in x.split(sizes)], CPU)
    assert whole.count == 2 * sum(sizes)
    if whole.count:
        var, mean = torch.var_mean(x, (0, 2), correction=0)
        torch.testing.assert_close(whole.mean, mean, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(whole.var, var, rtol=1e-9, atol=1e-9)  # digits are lost to the offset, not to us


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("at_once", [False, True])
def test_normalised_like_torchs_batch_norm(dtype: torch.dtype, layout: torch.memory_format, at_once: bool) -> None:
    """Values, gradients, running statistics, and the layout; linked to the rows before, or as they are normalised."""
    x = torch.randn(6, 3, 4, 4).to(dtype).to(memory_format=layout)
    weight, bias = torch.rand(3).to(dtype), torch.randn(3).to(dtype)
    results = []
    for mine in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        running = [torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)]
        if mine:
            statistics = Statistics.of(leaves[0])
            if not at_once:
                statistics = statistics.with_history(leaves[0], lambda grad: grad)
            statistics.update(*running, 0.3)
            output = statistics.normalise(*leaves, 1e-5, (lambda grad: grad) if at_once else None)
        else:
            output = F.batch_norm(leaves[0], *running, *leaves[1:], training=True, momentum=0.3)
        (output.double().pow(2) * torch.linspace(0, 1, x.numel()).view_as(x)).sum().backward()
        assert output.dtype == dtype
        assert output.is_contiguous(memory_format=layout)
        results.append([output, *running, *(leaf.grad for leaf in leaves)])
    tolerance = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).double().norm() <= tolerance * theirs.double().norm()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_derivatives_of_any_order(affine: bool, at_once: bool) -> None:
    def normalised(
        x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if at_once:
            return Statistics.of(x).normalise(x, weight, bias, 1e-3, lambda grad: grad)
        parts = [Statistics.of(part).with_history(part, lambda grad: grad) for part in x.split([1, 3])]
        return Statistics.of_all(parts, CPU).normalise(x, weight, bias, 1e-3)

    leaves = [torch.randn(shape, requires_grad=True) for shape in ([(4, 2, 2), (2,), (2,)] if affine else [(4, 2, 2)])]
    assert torch.autograd.gradcheck(normalised, leaves)

    def gradient(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(normalised(x, *others).pow(3).sum(), x, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(gradient, leaves)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, True), (True, True, False)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_that_are_not_needed(needed: tuple[bool, ...], create_graph: bool) -> None:
    """The statistics' gradient is not reduced for rows that need none, so that no replica waits for it."""
    leaves = [torch.randn(shape) for shape in ((4, 2, 3), (2,), (2,))]
    asked: list[torch.Tensor] = []

    def of_gradient(grad: torch.Tensor) -> torch.Tensor:
        asked.append(grad)
        return grad

    results = []
    for mine in (True, False):
        own = [leaf.clone().requires_grad_(flag) for leaf, flag in zip(leaves, needed, strict=True)]
        if mine:
            output = Statistics.of(own[0]).normalise(*own, 1e-5, of_gradient)
        else:
            output = F.batch_norm(own[0], None, None, *own[1:], training=True)
        wanted = [leaf for leaf in own if leaf.requires_grad]
        results.append(torch.autograd.grad(output.pow(3).sum(), wanted, create_graph=create_graph))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)
    assert len(asked) == needed[0]


def test_detached_statistics_are_leaves() -> None:
    x = torch.randn(4, 2, requires_grad=True)
    without, with_history = Statistics.of(x), Statistics.of(x).with_history(x, lambda grad: grad)
    assert with_history.mean.grad_fn is not None
    assert with_history.detached().mean.is_leaf
    assert with_history.detached().var.requires_grad
    assert not without.detached().mean.requires_grad
