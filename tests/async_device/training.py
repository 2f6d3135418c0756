"""A short training in which the library's waits and its uses of `record_stream` are needed.

    python -m async_device.training 5           train five times; print the digest of each number, each time
    python -m async_device.training 5 FAULT     with a fault of async_device/faults.py planted

Its numbers are those of the plain module on the CPU, and the same bits in each run, however late kernels are.
"""

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import async_device  # noqa: F401 - it makes the devices
from async_device.faults import FAULTS
from helpers.small_buckets import use_small_buckets
from unisono import DataParallel
from unisono.runtime import devices, streams

DEVICES = [torch.device(f"queued:{index}") for index in range(torch.accelerator.device_count())]  # of replicas
FIRST, SECOND = DEVICES[:2]
OUTPUTS = ("the first device", "the host", "the second device")
ROWS, WIDTH, NUM_STEPS = 24, 24, 4  # as many rows on each of two, three and four devices
NUM_COLLECTED = 8  # several, so that the last copy is late enough to be overtaken
TOLERANCE = 1e-10  # to the plain module's numbers; two runs have the same bits

# The seeds with which a fault has to be seen, and how late kernels are: the longest delay, and how many have one.
SEEDS = range(1, 21)
DELAY_US, DELAY_PERCENT = 500, 30
BALLAST = 1 << 18  # numbers a row: its copy takes so long that the host gets ahead of the copies behind it
LEAVES = 4  # the place of the layer whose values leave forward
BUCKET_BYTES = WIDTH * WIDTH * 8  # so that each layer has one
PIECE_BYTES = BUCKET_BYTES // 4  # of what is sent along a chain of devices


class Branches(nn.Module):
    """Two branches, the right one on a stream of its own; backward computes its gradients there."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x) if x.device.type == "cpu" else sum_of_branches(self, x)


def sum_of_branches(net: nn.Module, x: Tensor) -> Tensor:
    """Return `net.left(x) + net.right(x)`, the latter computed on a stream of its own."""
    here, side = torch.accelerator.current_stream(x.device), torch.Stream(device=x.device)
    side.wait_stream(here)
    x.record_stream(side)
    with torch.get_device_module(x.device).stream(side):
        right = net.right(x)
    left = net.left(x)
    here.wait_stream(side)
    right.record_stream(here)
    return left + right


class NotOnFirst(nn.Module):
    """In training, adds a layer to the rows of all devices but the first: replicas there have no gradients of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.device == FIRST or not torch.is_grad_enabled():
            return x
        if x.device in DEVICES:
            return x + self.layer(x)
        first, *others = x.chunk(len(DEVICES))
        rest = torch.cat(others)
        return torch.cat([first, rest + self.layer(rest)])


class LeavesForward(nn.Module):
    """Keeps what goes through it, for a loss of its own, in a list that all replicas share."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.kept.append(x)
        return x

    def loss(self, device: torch.device) -> Tensor:
        """Return the loss of what has been kept, and forget that."""
        parts = [(x * x).sum() / ROWS for x in self.kept]
        self.kept.clear()
        return torch.stack([part.to(device) for part in parts]).sum()


class LateGradients(nn.Module):
    """Returns its input. It has no parameters, and its backward is many kernels, so that the host gets far ahead."""

    def forward(self, x: Tensor) -> Tensor:
        return _ManyKernels.apply(x)


class _ManyKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        for _ in range(100):
            grad = grad * 1
        return grad


class Collects(nn.Module):
    """Has no output: it hands what it computes to a function. So nothing but the wrapper waits for its devices."""

    def __init__(self, collect: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.collect = collect

    def forward(self, ballast: Tensor, *xs: Tensor) -> None:
        self.collect(torch.stack(xs).sum(0))


def trained() -> dict[str, Tensor]:
    """Train on all devices; return all outputs, losses, gradients and parameters by name, on the host.

    Each step calls three wrappers of one module, which have their outputs on the first device, on the host and on the
    second device, the last one on streams of the caller's own. Batches are in pageable memory, in pinned memory, or on
    either device, and are overwritten as soon as the call has returned. Then another wrapper has two replicas on each
    device, a loss that leaves forward, its backward on other streams than its forward, and batches that need gradients.
    Those go through a wrapper without parameters first, so that no sum keeps what follows waiting.
    """
    module, collected = net().to(FIRST), dict[torch.device, Tensor]()
    models = [DataParallel(module, DEVICES, output_device=device) for device in (None, "cpu", SECOND)]
    two_each = [device for device in DEVICES for _ in range(2)]
    before, of_two_each = (DataParallel(each, two_each) for each in (LateGradients(), module))
    collects = DataParallel(Collects(lambda x: collected.__setitem__(x.device, x)), DEVICES)
    own_streams = [torch.Stream(device=device) for device in DEVICES]
    optimizer, found = sgd(module), dict[str, Tensor]()
    with _small_buckets():
        for number, batch in enumerate(batches()):
            optimizer.zero_grad()
            for which, (model, where) in enumerate(zip(models, OUTPUTS, strict=True)):
                step = f"step {number}, output on {where}"
                ballast = _placed(
                    torch.zeros(ROWS, BALLAST if which == 0 and number < 2 else 1, dtype=torch.float64), number
                )
                xs = [_placed(batch, number + which) for _ in range(NUM_COLLECTED)]
                with torch.no_grad():
                    collects(ballast, *xs)
                for x in reversed(xs):  # the last copy first: it is the latest
                    x.fill_(1e3)
                x = _placed(batch, number + which)
                with _using(own_streams if model is models[-1] else []):
                    found[f"{step}: output"], found[f"{step}: loss"] = _step(model, x)
                module[LEAVES].kept.clear()
                found |= {f"{step}: collected {i}": collected.pop(device) for i, device in enumerate(DEVICES)}
            x = _placed(batch, number)
            scale = torch.full((WIDTH,), 0.5, dtype=torch.float64, device=x.device, requires_grad=True)
            with _using(own_streams):
                losses = [of_two_each(before(x * scale)).pow(2).mean(), module[LEAVES].loss(FIRST)]
            losses[0].backward(retain_graph=True)
            losses[1].backward()
            found[f"step {number}: gradient of scale"] = cast(Tensor, scale.grad)
            found |= gradients_of(module, number)
            optimizer.step()
        for name, (copy, is_there) in [(n, devices.begin_copy_to_host(p.data)) for n, p in module.named_parameters()]:
            is_there(True)
            found[name] = copy.clone()
        found |= mapped(module, batches())
    return {name: tensor.cpu() for name, tensor in found.items()}


def mapped(module: nn.Module, batches: Tensor) -> dict[str, Tensor]:
    """Map batches with the outputs on the first device, on the host and on the second device; return all by name."""
    found = dict[str, Tensor]()
    for device, where in zip((None, "cpu", SECOND), OUTPUTS, strict=True):
        model = DataParallel(module, DEVICES, output_device=device)
        found |= {f"map to {where}, {i}": y.clone() for i, y in enumerate(model.map([*batches]))}
    return {name: tensor.cpu() for name, tensor in found.items()}


def trained_plainly() -> dict[str, Tensor]:
    """Do what `trained` does with the plain module, on the CPU."""
    module = net()
    optimizer, found = sgd(module), dict[str, Tensor]()
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        for where in OUTPUTS:
            step = f"step {number}, output on {where}"
            output = module(batch)
            loss = output.pow(2).mean()
            loss.backward()
            found |= {f"{step}: output": output.detach(), f"{step}: loss": loss.detach()}
            found |= {
                f"{step}: collected {i}": rows for i, rows in enumerate((NUM_COLLECTED * batch).chunk(len(DEVICES)))
            }
            module[LEAVES].kept.clear()
        scale = torch.full((WIDTH,), 0.5, dtype=torch.float64, requires_grad=True)
        (module(LateGradients()(batch * scale)).pow(2).mean() + module[LEAVES].loss(batch.device)).backward()
        found[f"step {number}: gradient of scale"] = cast(Tensor, scale.grad)
        found |= gradients_of(module, number)
        optimizer.step()
    found |= {name: parameter.detach() for name, parameter in module.named_parameters()}
    return found | mapped_plainly(module, batches())


@torch.no_grad()
def mapped_plainly(module: nn.Module, batches: Tensor) -> dict[str, Tensor]:
    outputs = module(batches)
    return {f"map to {where}, {i}": y for where in OUTPUTS for i, y in enumerate(outputs)}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> list[str]:
    """Return the names of the numbers that differ; with no tolerance in any bit, where NaN equals NaN."""
    assert found.keys() == expected.keys()
    close = functools.partial(torch.allclose, rtol=tolerance, atol=tolerance, equal_nan=not tolerance)
    return [name for name, tensor in expected.items() if not close(found[name], tensor)]


def net() -> nn.Module:
    """Return the module that is trained, in double precision, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        return nn.Sequential(first, nn.Tanh(), NotOnFirst(), Branches(), LeavesForward(), nn.Tanh(), last).double()


def batches() -> Tensor:
    return torch.randn(NUM_STEPS, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def gradients_of(module: nn.Module, step: int) -> dict[str, Tensor]:
    named = [(name, parameter.grad) for name, parameter in module.named_parameters()]
    return {f"step {step}: gradient of {name}": grad.clone() for name, grad in named if grad is not None}


def _step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    output = model(x)
    x.fill_(1e3)
    loss = output.pow(2).mean()
    loss.backward()
    return output.detach(), loss.detach()


def _placed(batch: Tensor, number: int) -> Tensor:
    """Return a copy of a batch: in pinned memory, made just now by one of the devices, or in pageable memory."""
    match number % 4:
        case 0:
            return batch.pin_memory()
        case 3:
            return batch.clone()
        case other:
            return batch.to((FIRST, SECOND)[other - 1]) / 4 * 4


@contextlib.contextmanager
def _using(streams: Iterable[torch.Stream]) -> Iterator[None]:
    """Within the context, queue work on these streams instead of the current ones, which wait for them at the end."""
    with contextlib.ExitStack() as stack:
        for own in streams:
            here = torch.accelerator.current_stream(own.device)
            own.wait_stream(here)
            stack.callback(here.wait_stream, own)
            stack.enter_context(torch.get_device_module(own.device).stream(own))
        yield


@contextlib.contextmanager
def _small_buckets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_small_buckets(patch, BUCKET_BYTES)
        patch.setattr(streams, "_PIECE_BYTES", PIECE_BYTES)
        yield


def main(num_trainings: str, *faults: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for fault in faults:
            FAULTS[fault].plant(patch)
        # In the first of them the host is slow, and kernels are hardly late.
        found = [trained() for _ in range(int(num_trainings))]
    digests = [{name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in of.items()} for of in found]
    print(json.dumps(digests))


if __name__ == "__main__":
    main(*sys.argv[1:])
