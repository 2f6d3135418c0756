"""The four verbs one by one: scatter, replicate, parallel_apply and gather make `data_parallel`.

    python examples/verbs_by_hand.py

This is what the wrapper does in every forward, one step at a time. Each verb can be used by itself, on any devices.
Each is differentiable, so one `backward()` of the loss gives the gradients of the parameters.
"""

import copy
import sys
from collections.abc import Sequence

import torch
from torch import nn

import unisono

NUM_REPLICAS, BATCH_ROWS = 3, 31


class Reported(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        # One write for the whole line, because replicas write at the same time.
        sys.stdout.write(f"    In model: input {list(x.shape)} output {list(output.shape)} on {x.device}\n")
        return output


def data_parallel(module: nn.Module, batch: torch.Tensor, device_ids: Sequence[int] | Sequence[str]) -> torch.Tensor:
    """Run `module` on `batch`, a share of the rows on each device; return the output on the first device."""
    shards = unisono.scatter(batch, device_ids)  # a list of tensors: shard i on device i
    device_ids = device_ids[: len(shards)]  # a small batch may have fewer shards than there are devices
    replicas = unisono.replicate(module, device_ids)  # a list of modules: replica i on device i
    outputs = unisono.parallel_apply(replicas, shards)  # replica i to shard i, in threads
    print(f"Shards: {[len(shard) for shard in shards]} rows, replicas: {len(replicas)}, outputs: {len(outputs)}")
    return unisono.gather(outputs, device_ids[0])  # the rows in their original order


def main() -> None:
    torch.manual_seed(0)
    device_ids = pick_devices(NUM_REPLICAS)
    plain = Reported(5, 2).to(device_ids[0])
    module = copy.deepcopy(plain)
    batch = torch.randn(BATCH_ROWS, 5).to(device_ids[0])

    print("By hand:")
    output = data_parallel(module, batch, device_ids)
    print(f"Outside: input {list(batch.shape)} output {list(output.shape)}")
    output.square().mean().backward()
    print("Plain module:")
    expected = plain(batch)
    expected.square().mean().backward()

    torch.testing.assert_close(output, expected)
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    print("Output and gradients: those of the plain module")


def pick_devices(num: int) -> list[int] | list[str]:
    """Return `num` devices: accelerators, in turn if there are fewer than that; without any, the CPU `num` times."""
    present = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return [i % present for i in range(num)] if present else ["cpu"] * num


if __name__ == "__main__":
    main()
