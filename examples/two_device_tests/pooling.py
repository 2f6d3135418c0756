"""A layer as a library might have it: the mean over the first `lengths[i]` entries of each sequence."""

import torch
from torch import nn


class MaskedMean(nn.Module):
    """Average sequences of different lengths.

    >>> MaskedMean(4)(torch.ones(2, 5, 4), torch.tensor([5, 1])).shape
    torch.Size([2, 4])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)

    def forward(self, sequences: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        # Without `device=` this works on a CPU, and on one GPU it fails. With lengths.max() in place of
        # sequences.shape[1] each replica would have a mask as long as the longest sequence of its own shard.
        steps = torch.arange(sequences.shape[1], device=sequences.device)
        mask = (steps < lengths[:, None]).unsqueeze(-1)
        return (self.project(sequences) * mask).sum(1) / lengths[:, None]
