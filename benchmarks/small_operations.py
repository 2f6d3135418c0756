"""Models of many small operations, whose steps are mostly Python's own work, for `unisono bench` and the files here.

    unisono bench benchmarks.small_operations:tree_lstm

Each function returns a model, a batch, labels and a loss. The sizes are such that a step of the plain module takes 20
to 200 ms on one core of about 2020.
"""

from typing import Any

import torch
from torch import Tensor, nn

_NUM_CLASSES = 10


def tree_lstm() -> dict[str, Any]:
    """A binary tree LSTM that goes through the tree of each sample by itself: 32 trees with 16 leaves."""
    return _classifier(TreeLSTM(64), torch.randint(TreeLSTM.VOCABULARY, (32, 16)))


def rows() -> dict[str, Any]:
    """A loop over the samples of the batch, with four layers for each: 64 samples."""
    return _classifier(RowByRow(128), torch.randn(64, 128))


def lstm_cell() -> dict[str, Any]:
    """An LSTM cell in a loop over time: 64 sequences of 64 steps."""
    return _classifier(CellOverTime(64, 256), torch.randn(64, 64, 64))


def thin_blocks() -> dict[str, Any]:
    """60 residual blocks of 64 features: 512 samples."""
    model = nn.Sequential(*(ResidualBlock(64) for _ in range(60)), nn.Linear(64, _NUM_CLASSES))
    return _classifier(model, torch.randn(512, 64))


def tiny_operations() -> dict[str, Any]:
    """1,000 elementwise operations in a row: 64 samples of 32 features."""
    return _classifier(Elementwise(32, 500), torch.randn(64, 32))


class TreeLSTM(nn.Module):
    """Tokens (samples, leaves) to scores (samples, classes): neighbours are joined in pairs until one node is left.

    The cell is that of a binary tree LSTM: Tai, Socher and Manning, 2015, equations 9 to 14.
    """

    VOCABULARY = 100

    def __init__(self, width: int) -> None:
        super().__init__()
        self.leaves = nn.Embedding(self.VOCABULARY, 2 * width)
        self.join = nn.Linear(2 * width, 5 * width)
        self.scores = nn.Linear(width, _NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of each sample."""
        roots = [self._root(leaves) for leaves in self.leaves(tokens)]
        scores: Tensor = self.scores(torch.stack(roots))
        return scores

    def _root(self, leaves: Tensor) -> Tensor:
        nodes = [leaf.chunk(2) for leaf in leaves]
        while len(nodes) > 1:
            nodes = [self._joined(*pair) for pair in zip(nodes[::2], nodes[1::2], strict=True)]
        root: Tensor = nodes[0][0]
        return root

    def _joined(self, left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return hidden state and memory of the node above two nodes."""
        entered, left_kept, right_kept, shown, new = self.join(torch.cat([left[0], right[0]])).chunk(5)
        memory = entered.sigmoid() * new.tanh() + left_kept.sigmoid() * left[1] + right_kept.sigmoid() * right[1]
        return shown.sigmoid() * memory.tanh(), memory


class RowByRow(nn.Module):
    """Four layers, which get one sample at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))
        self.scores = nn.Linear(width, _NUM_CLASSES)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the scores of each sample."""
        return torch.stack([self.scores(self.layers(sample)) for sample in batch])


class CellOverTime(nn.Module):
    """Sequences (samples, steps, features) to scores of the last hidden state."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.cell, self.scores = nn.LSTMCell(features, width), nn.Linear(width, _NUM_CLASSES)

    def forward(self, sequences: Tensor) -> Tensor:
        """Return the scores of each sample."""
        state = None
        for step in sequences.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        scores: Tensor = self.scores(state[0])
        return scores


class ResidualBlock(nn.Module):
    """Adds a normalised, thin layer to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        added: Tensor = self.layer(x)
        return x + added


class Elementwise(nn.Module):
    """Multiplications and tanh, in turn, then a layer."""

    def __init__(self, width: int, num_pairs: int) -> None:
        super().__init__()
        self.factor, self.num_pairs = nn.Parameter(torch.ones(width)), num_pairs
        self.scores = nn.Linear(width, _NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of each sample."""
        for _ in range(self.num_pairs):
            x = torch.tanh(x * self.factor)
        scores: Tensor = self.scores(x)
        return scores


def _classifier(model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    labels = torch.randint(_NUM_CLASSES, (len(inputs),))
    return {"model": model, "inputs": inputs, "target": labels, "criterion": nn.CrossEntropyLoss()}
