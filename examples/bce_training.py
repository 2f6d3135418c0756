"""A training loop on several devices: a binary classifier, trained with and without the wrapper.

    python examples/bce_training.py --devices 2 --epochs 10

The loop, the loss and the optimizer do not change: the wrapper gathers the output, and sums the gradients of the
replicas into the parameters that the optimizer has. Both trainings begin with the same weights, use the same batches
and reach the same numbers, within the rounding of float32.
"""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unisono

INPUT_SIZE, NUM_ROWS, BATCH_ROWS = 5, 100, 30
LEARNING_RATE, SEED = 0.5, 0


class RandomDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random rows; a row's target is 1 if its values add up to more than 0."""

    def __init__(self, num_rows: int, size: int) -> None:
        self.rows = torch.randn(num_rows, size)
        self.targets = (self.rows.sum(1, keepdim=True) > 0).float()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[index], self.targets[index]


def train(model: nn.Module, dataset: RandomDataset, device: int | str, epochs: int) -> list[float]:
    """Train `model`, print the mean loss of each epoch, and return these losses."""
    batches = DataLoader(dataset, BATCH_ROWS, shuffle=True, generator=torch.Generator().manual_seed(SEED))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    criterion = nn.BCELoss()  # of the gathered output: a mean over all rows of the batch
    losses = []
    for epoch in range(1, epochs + 1):
        total = 0.0
        for rows, targets in batches:
            rows, targets = rows.to(device), targets.to(device)
            loss = criterion(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        losses.append(total / len(dataset))
        print(f"    epoch {epoch}: loss {losses[-1]:.6f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a classifier on several devices, and again without the wrapper.",
        epilog="example: python examples/bce_training.py --devices 2 --epochs 10",
    )
    parser.add_argument("--devices", type=positive, default=2, metavar="N", help="number of replicas (default: 2)")
    parser.add_argument("--epochs", type=positive, default=10, metavar="N", help="times over the data (default: 10)")
    options = parser.parse_args()

    torch.manual_seed(SEED)
    device_ids = pick_devices(options.devices)
    dataset = RandomDataset(NUM_ROWS, INPUT_SIZE)
    plain = nn.Sequential(nn.Linear(INPUT_SIZE, 1), nn.Sigmoid()).to(device_ids[0])
    model = unisono.DataParallel(copy.deepcopy(plain), device_ids)

    print(f"Wrapped, replicas: {options.devices}")
    losses = train(model, dataset, device_ids[0], options.epochs)
    for replica, timing in enumerate(model.replica_timings):
        print(f"    In the last step: replica {replica} trained on {timing.rows} rows on {timing.device}")
    print("Plain module:")
    plain_losses = train(plain, dataset, device_ids[0], options.epochs)

    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.module.state_dict(), plain.state_dict())
    difference = max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True))
    print(f"Same numbers: losses differ by {difference:.1e} at most")


def pick_devices(num: int) -> list[int] | list[str]:
    """Return `num` devices: accelerators, in turn if there are fewer than that; without any, the CPU `num` times."""
    present = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return [i % present for i in range(num)] if present else ["cpu"] * num


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return int(text)


if __name__ == "__main__":
    main()
