"""Wrap only a part of a model: the second of three blocks.

    python examples/middle_block.py

`DataParallel` is a module like any other, so it can be used anywhere in a model. Here the blocks before and after it
get whole batches, and each replica of the block in the middle gets a share. The output and the gradients are those of
the same model without the wrapper, and gradients flow through the wrapper to the block before it.
"""

import copy
import sys
from collections.abc import Callable

import torch
from torch import nn

import unisono

NUM_REPLICAS, BATCH_ROWS = 2, 30


class ThreeBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Linear(10, 20)
        self.block2 = nn.Linear(20, 20)
        self.block3 = nn.Linear(20, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block3(self.block2(self.block1(x)))


def main() -> None:
    torch.manual_seed(0)
    device_ids = pick_devices(NUM_REPLICAS)
    plain = ThreeBlocks().to(device_ids[0])
    model = copy.deepcopy(plain)
    batch = torch.randn(BATCH_ROWS, 10).to(device_ids[0])

    for name, block in model.named_children():
        block.register_forward_hook(report(name))  # replicas have the hooks of the original
    model.block2 = unisono.DataParallel(model.block2, device_ids)

    output, expected = model(batch), plain(batch)
    print(f"Outside: input {list(batch.shape)} output {list(output.shape)}")
    output.square().mean().backward()
    expected.square().mean().backward()

    torch.testing.assert_close(output, expected)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    print("Output and gradients: as without the wrapper")


def report(name: str) -> Callable[[nn.Module, tuple[torch.Tensor], torch.Tensor], None]:
    """Return a forward hook that writes one line, in one call, so that the lines of several replicas do not mix."""

    def hook(block: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        sys.stdout.write(f"    In {name}: input {list(inputs[0].shape)} output {list(output.shape)}\n")

    return hook


def pick_devices(num: int) -> list[int] | list[str]:
    """Return `num` devices: accelerators, in turn if there are fewer than that; without any, the CPU `num` times."""
    present = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return [i % present for i in range(num)] if present else ["cpu"] * num


if __name__ == "__main__":
    main()
