"""A model that is half on the CPU and half on a device; then its device half on several devices.

    python examples/half_on_cpu.py

An embedding table may be too large for an accelerator, so it stays on the CPU; the rest of the model runs on the
device. To use several devices, wrap the half that is to be replicated, not the whole model: all parameters of a
wrapper's module are on one device. Both ways train, and each gradient is on the device of its parameter.

On a machine without an accelerator the devices are simulated: `sim:0` and `sim:1` are CPU memory, but torch treats them
as two accelerators, so a tensor on the wrong device is an error on a laptop too.
"""

import sys

import torch
from torch import nn

import unisono
from unisono.testing import simulated_accelerators

NUM_WORDS, BATCH_ROWS, NUM_REPLICAS = 1000, 30, 2


class Reported(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        # One write for the whole line, because replicas write at the same time.
        sys.stdout.write(f"    In model: input {list(x.shape)} output {list(output.shape)} on {x.device}\n")
        return output


class HalfOnCpu(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.embedding = nn.Embedding(NUM_WORDS, 10)  # on the CPU
        self.rest = Reported(10, 10).to(device)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        x = x.to(self.device)  # in backward the gradient takes the same way back
        return self.rest(x)


def main() -> None:
    torch.manual_seed(0)
    devices = pick_devices(NUM_REPLICAS)
    model = HalfOnCpu(devices[0])
    words = torch.randint(NUM_WORDS, (BATCH_ROWS,))

    print(f"Halves: embedding on {model.embedding.weight.device}, rest on {model.rest.weight.device}")
    one_device = step(model, words)

    model.rest = unisono.DataParallel(model.rest, devices)
    print(f"Halves: embedding on {model.embedding.weight.device}, rest on {', '.join(map(str, devices))}")
    several_devices = step(model, words)

    for name, tensor in several_devices.items():
        torch.testing.assert_close(tensor, one_device[name.replace("rest.module.", "rest.")])
    print("Output and gradients: the same both ways")


def step(model: nn.Module, words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run one forward and backward; return the output, and each parameter's gradient by the parameter's name."""
    model.zero_grad()
    output = model(words)
    print(f"Outside: input {list(words.shape)} on {words.device} output {list(output.shape)} on {output.device}")
    output.square().mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    print(f"Gradients: {', '.join(f'{name} on {grad.device}' for name, grad in grads.items())}")
    return {"output": output, **grads}


def pick_devices(num: int) -> list[torch.device]:
    """Return `num` devices: accelerators, in turn if there are fewer than that; without any, simulated ones."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        with simulated_accelerators(num) as simulated:  # from here on torch knows them
            return simulated
    return [torch.device(kind.type, i % torch.accelerator.device_count()) for i in range(num)]


if __name__ == "__main__":
    main()
