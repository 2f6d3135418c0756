"""The weights, against torch's own optimizer and against weights in float32."""

import pytest
import torch
from torch import nn

from unisono.training.weights import Weights


def small_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


def backward(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    module.zero_grad()
    weight = next(module.parameters())
    module(torch.rand(6, 1, 4, 4).to(weight.dtype)).float().square().sum().backward()


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_steps_are_those_of_torchs_sgd(momentum: float) -> None:
    """Bit for bit, the first one too: momenta begin with zeros here, and with the first gradient there."""
    ours, theirs = small_module(), small_module()
    weights = Weights(ours, momentum=momentum, weight_decay=0.01)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)
    for step in range(4):
        backward(ours, step)
        backward(theirs, step)
        rate = 0.1 / (step + 1)
        weights.step(rate)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_parameter_without_a_gradient_is_an_error() -> None:
    """Left out of the list, the gradients behind it would go to the wrong weights."""
    module = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
    weights = Weights(module)
    module[1](torch.ones(1, 2)).sum().backward()
    with pytest.raises(AttributeError):
        weights.step(0.1)


def rounding_left(weights: Weights, module: nn.Module) -> list[torch.Tensor]:
    """Return how far each parameter is from its master, in the units of the master."""
    return [m - p.float() for m, p in zip(weights.masters, module.parameters(), strict=True)]


def test_what_bfloat16_cannot_show_is_not_lost() -> None:
    """Each step is too small to change the weights in bfloat16; together they do. Batch norm stays in float32."""
    module = small_module()
    weights = Weights(module, in_bfloat16=True)
    assert [p.dtype for p in module.parameters()] == [torch.bfloat16] + 2 * [torch.float32] + 2 * [torch.bfloat16]
    assert all(buffer.dtype != torch.bfloat16 for buffer in module.buffers())
    assert any(left.any() for left in rounding_left(weights, module)), "masters have not been rounded"

    (linear, master) = module[3].weight, weights.masters[3]
    with torch.no_grad():
        master.fill_(1.0)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 2.0**-10)
    for _ in range(8):
        weights.step(0.5)  # by 2**-11, and numbers of bfloat16 below 1 are 2**-8 apart
    assert torch.equal(master, torch.full_like(master, 1 - 2.0**-8))
    assert torch.equal(linear.float(), master)
    assert torch.equal(module[1].weight, torch.full((4,), 1 - 2.0**-8)), "the parameter is its own master"


def test_nothing_changes_its_address() -> None:
    """As CUDA graphs need it."""
    module = small_module()
    weights = Weights(module, momentum=0.9, in_bfloat16=True)
    addresses = [tensor.data_ptr() for tensor in weights.static()]
    backward(module, 0)
    weights.step(0.1)
    weights.load(weights.state_dict(), weights.momenta)
    assert [tensor.data_ptr() for tensor in weights.static()] == addresses
