"""When the gradient of statistics is reduced; tests/contract has the numbers."""

import pytest
import torch
from torch.nn import functional as F

from unisono.sync_batch_norm.statistics import Statistics

pytestmark = pytest.mark.usefixtures("float64")


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
