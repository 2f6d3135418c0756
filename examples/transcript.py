"""Which rows each replica gets: 100 rows in batches of 30, on any number of devices.

    python examples/transcript.py --devices 4

The module reports the sizes of its input and output. Wrapped in `DataParallel`, it is called once for every replica,
with that replica's rows; the caller sees whole batches, as before. Batches are split into chunks of ceil(rows /
devices) rows: 30 rows on 4 devices are 8, 8, 8 and 6; the last batch, 10 rows, on 8 devices is five chunks of 2, and
three devices stay idle.

It uses accelerators if there are any, and CPU replicas otherwise. Replicas run at the same time, so the order of their
lines within a batch varies.
"""

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unisono

INPUT_SIZE, OUTPUT_SIZE = 5, 2
NUM_ROWS, BATCH_ROWS = 100, 30


class RandomDataset(Dataset[torch.Tensor]):
    def __init__(self, num_rows: int, size: int) -> None:
        self.rows = torch.randn(num_rows, size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUT_SIZE, OUTPUT_SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        # One write for the whole line: print() writes its newline separately, and another replica could write between.
        sys.stdout.write(f"    In model: input {list(x.shape)} output {list(output.shape)} on {x.device}\n")
        return output


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Show which rows each replica gets.", epilog="example: python examples/transcript.py --devices 4"
    )
    parser.add_argument("--devices", type=positive, default=2, metavar="N", help="number of replicas (default: 2)")
    device_ids = pick_devices(parser.parse_args().devices)

    model = unisono.DataParallel(Model().to(device_ids[0]), device_ids)  # the one new line
    print(f"Replicas: {len(device_ids)}")
    for batch in DataLoader(RandomDataset(NUM_ROWS, INPUT_SIZE), batch_size=BATCH_ROWS, shuffle=True):
        output = model(batch)  # the batch may be on any device: each replica's rows are copied to its device
        print(f"Outside: input {list(batch.shape)} output {list(output.shape)}")


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
