"""The four models of the benchmark, in the form of `unisono bench package.module:build`.

The batch of each is chosen so that on two cores of about 2020 a step without communication takes some 575 ms (resnet),
90 ms (mlp), 260 ms (gpt) and 3 ms (tiny).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.training import models

_NUM_CLASSES = 10


def resnet() -> dict[str, Any]:
    """ResNet-18 of the training command on 32 pictures of 28 x 28: nearly all of it is convolutions."""
    model = models.build("resnet18", num_classes=_NUM_CLASSES, image_shape=(1, 28, 28))
    return _classifier(model, torch.randn(32, 1, 28, 28))


def mlp() -> dict[str, Any]:
    """20 million parameters and little to compute: reducing gradients and updating parameters weigh most."""
    model = nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 3072), nn.ReLU(), nn.Linear(3072, 1024), nn.ReLU(),
        nn.Linear(1024, _NUM_CLASSES),
    )  # fmt: skip
    return _classifier(model, torch.randn(64, 1024))


def gpt() -> dict[str, Any]:
    """A small transformer: many operations of middling size, and an output with a row for each token."""
    model = Transformer()
    tokens = torch.randint(Transformer.VOCABULARY, (12, Transformer.CONTEXT + 1))

    def loss(logits: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    return {"model": model, "inputs": tokens[:, :-1], "target": tokens[:, 1:].contiguous(), "criterion": loss}


def tiny() -> dict[str, Any]:
    """52 thin layers: there is very little to compute, so a step is nearly all overhead."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(52)))
    return _classifier(model, torch.randn(64, 16), num_classes=16)


def _classifier(model: nn.Module, inputs: Tensor, num_classes: int = _NUM_CLASSES) -> dict[str, Any]:
    labels = torch.randint(num_classes, (len(inputs),))
    return {"model": model, "inputs": inputs, "target": labels, "criterion": nn.CrossEntropyLoss()}


class Transformer(nn.Module):
    """A decoder of four blocks that predicts the next token: (rows, tokens) to logits (rows, tokens, vocabulary)."""

    VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS = 256, 128, 256, 8, 4

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(
            self.WIDTH, self.HEADS, 4 * self.WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.token = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.position = nn.Parameter(torch.randn(self.CONTEXT, self.WIDTH) * 0.02)
        self.blocks = nn.TransformerEncoder(block, self.BLOCKS, nn.LayerNorm(self.WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(self.CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each."""
        x = self.token(tokens) + self.position
        logits: Tensor = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return logits
