"""A loss over the whole batch, of a batch whose activations do not fit: each replica runs its shard in parts.

    python examples/contrastive.py --parts 4

Contrastive training compares each row with every other row of the batch, so gradient accumulation over smaller batches
gives another loss. With `parts=` the embeddings of the whole batch are there at once, on all devices together, and the
activations of one part of each replica only. Backward computes each part once more.
"""

import argparse
import copy
import warnings
import weakref

import torch
import torch.nn.functional as F
from torch import nn

import unisono

ROWS, WIDTH = 96, 64
warnings.filterwarnings("ignore", "forward of Encoder writes into")  # what it counts is meant to be of all replicas


class Encoder(nn.Module):
    """Two layers, and a count of the rows whose hidden activations are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.rows_alive, self.most_rows = [], [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        self.rows_alive.append(len(x))  # a list: replicas append to the same one
        weakref.finalize(hidden, self.rows_alive.remove, len(x))
        self.most_rows[0] = max(self.most_rows[0], sum(self.rows_alive))
        return F.normalize(self.out(F.gelu(hidden)), dim=1)


def info_nce(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Each row of `left` shall be closest to the same row of `right`, among all rows."""
    return F.cross_entropy(left @ right.T / 0.1, torch.arange(len(left), device=left.device))


def train(model: nn.Module, views: list[tuple[torch.Tensor, ...]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for left, right in views:
        optimizer.zero_grad()
        loss = info_nce(model(left), model(right))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Contrastive training whose loss needs all embeddings of the batch at once, in little memory.",
        epilog="example: python examples/contrastive.py --parts 8",
    )
    parser.add_argument("--parts", type=int, default=4, help="in how many parts each replica runs its shard (4)")
    parts = parser.parse_args().parts

    torch.manual_seed(0)
    device_ids = pick_devices(2)
    plain = Encoder().to(device_ids[0])
    model = unisono.DataParallel(copy.deepcopy(plain), device_ids, parts=parts)
    pictures = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    views = [
        tuple((x + 0.3 * torch.randn_like(x)).to(device_ids[0]) for _ in range(2))  # two views of each picture
        for x in pictures
    ]
    for name, module in ("Plain module", plain), (f"Two replicas, {parts} parts each", model):
        losses = ", ".join(f"{loss:.4f}" for loss in train(module, views))
        print(f"{name}: losses {losses}; hidden activations of {module.most_rows[0]} rows at most")


def pick_devices(num: int) -> list[int] | list[str]:
    """Return `num` devices: accelerators, in turn if there are fewer than that; without any, the CPU `num` times."""
    present = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return [i % present for i in range(num)] if present else ["cpu"] * num


if __name__ == "__main__":
    main()
