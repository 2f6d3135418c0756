"""What is a tensor's is exchanged. tests/primitives/test_change_tracking.py looks at tensors, and
tests/autograd/test_gradient_sums.py asks who refers to them."""

import torch
from torch import nn

from unisono.runtime.torch_private import tensor_objects


def test_an_exchange() -> None:
    """R15: what a graph has saved stays valid, and nothing counts as a write."""
    one, other = nn.Parameter(torch.ones(2)), torch.zeros(2)
    one.label = "a"  # type: ignore[attr-defined]
    saved = one * one
    tensor_objects.exchange(one, other)
    assert (type(one), vars(one), one.tolist(), one.requires_grad) == (nn.Parameter, {"label": "a"}, [0, 0], False)
    assert (type(other), other.tolist(), other._version) == (torch.Tensor, [1, 1], 0)
    saved.sum().backward()
    assert other.grad is not None
    assert other.grad.tolist() == [2, 2]
