"""Modules that draw random numbers, for tests."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.losses import fresh, loss_of, tensors_in
from helpers.modules import Calls


def run_steps(model: nn.Module, x: torch.Tensor, seed: int = 3, num_steps: int = 2) -> list[Any]:
    """Return what some steps from a seed give: outputs, gradients, and the random state in the end."""
    torch.manual_seed(seed)
    seen: list[Any] = []
    for _ in range(num_steps):
        x = fresh(x)
        model.zero_grad()
        output = model(x)
        loss_of(output).backward()
        seen += [*(tensor.detach() for tensor in tensors_in(output)), x.grad]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*seen, torch.get_rng_state()]


def recomputed(module: nn.Module, reentrant: bool) -> nn.Module:
    """Return a module whose activations are computed again in backward."""
    return Calls(lambda model, x: checkpoint(model.module, x, use_reentrant=reentrant), module=module)


def with_dropout(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, width), nn.Dropout(0.2))


class RandomLayers(nn.Module):
    """Draws in many ways: in dropout layers, inside an LSTM, inside attention, and in activations computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(with_dropout(), recomputed(with_dropout(), True), recomputed(with_dropout(), False))
        self.recurrent = nn.LSTM(5, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.blocks(x)[:, None].expand(-1, 3, -1))
        return self.attention(hidden)
