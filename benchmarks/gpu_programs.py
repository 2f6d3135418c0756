"""Plain checks of the wrapper on the accelerators of this machine, with torch alone; gpu_check.py runs them.

    torchrun --nproc-per-node 2 benchmarks/gpu_programs.py    as a rank: two ranks train as the plain module does

Each check is a function that raises an error. The oracle is the plain module on the first device, in float64. They are
few: what the wrapper computes in detail is tested by tests/contract and tests/gpu, which need pytest.
"""

import argparse
import contextlib
import copy
import faulthandler
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono import DataParallel

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAM_S, RANK_S = 75.0, 60.0  # for a program of its own, and for a rank in one
NEED_MORE = ("transformers_trainer.py",)  # than torch
STEPS, ROWS, LEARNING_RATE = 5, 13, 0.05
assert_close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-10)

Check = Callable[[], None]


class Tokens(nn.Module):
    """An embedding and an attention layer over sequences of eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(x)).mean(1))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 4))


def normalised() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "perceptron": (perceptron, lambda rows: torch.randn(rows, 16).double()),
    "tokens": (Tokens, lambda rows: torch.randint(20, (rows, 8))),
    "convolutions and batch norm": (normalised, lambda rows: torch.randn(rows, 3, 8, 8).double()),
}


def checks_on(devices: Sequence[str], *, examples: bool) -> dict[str, Check]:
    """Return the checks for these devices, by name; the examples, as programs, on request."""
    places = {"three replicas on one device": [devices[0]] * 3}
    if len(devices) > 1:
        places = {f"a replica on each of {len(devices)} devices": list(devices), **places}
    checks: dict[str, Check] = {}
    for place, replicas in places.items():
        for model in MODELS:
            options = {"sync_batch_norm": True} if "batch norm" in model else {}
            if options and len({*replicas}) < len(replicas):  # on accelerators such replicas cannot wait for each other
                continue
            checks[f"{model}, {place}: trains as the plain module"] = partial(train, model, replicas, **options)
        checks[f"outputs on the host, {place}"] = partial(train, "perceptron", replicas, output_device="cpu")
        checks[f"fewer rows than replicas, {place}"] = partial(train, "perceptron", replicas, rows=1)
        checks[f"map, {place}"] = partial(map_batches, replicas)
    checks["two ranks under torchrun train as the plain module"] = two_ranks
    if examples:
        names = sorted(path.name for path in (REPOSITORY / "examples").glob("*.py") if path.name not in NEED_MORE)
        checks |= {f"examples/{name}": partial(run_program, f"examples/{name}") for name in names}
    return checks


# ---- in this process -----------------------------------------------------------------------------


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """The same kernels for the same shapes, and no rounded products."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


def train(name: str, replicas: Sequence[str], rows: int = ROWS, **options: Any) -> None:
    """Train a wrapped copy beside the plain module, with another number of rows in each step; compare all numbers."""
    torch.manual_seed(0)
    make, inputs_of = MODELS[name]
    plain = make().double().to(replicas[0])
    wrapped = DataParallel(copy.deepcopy(plain), list(replicas), **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=LEARNING_RATE, momentum=0.9) for each in (plain, wrapped)]
    with exact_convolutions():
        for step in range(STEPS):
            x, y = inputs_of(rows + step), torch.randn(rows + step, 4).double()
            outputs = []
            for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
                optimizer.zero_grad()
                output = model(x.to(replicas[0]))
                nn.functional.mse_loss(output, y.to(output.device)).backward()
                outputs.append(output.detach().cpu())
                optimizer.step()
            assert_close(outputs[1], outputs[0])
    expect_equal_state(wrapped.module, plain)


def expect_equal_state(own: nn.Module, plain: nn.Module) -> None:
    """Compare parameters and buffers."""
    for (name, value), expected in zip(own.state_dict().items(), plain.state_dict().values(), strict=True):
        assert_close(value, expected, msg=lambda text, name=name: f"{name}: {text}")


def map_batches(replicas: Sequence[str]) -> None:
    """Whole batches on whichever device is free: outputs in order."""
    torch.manual_seed(0)
    plain = perceptron().double().to(replicas[0])
    batches = [torch.randn(rows, 16).double() for rows in (5, 1, 8, 3, 8, 8)]
    outputs = list(DataParallel(copy.deepcopy(plain), list(replicas)).map(batches))
    with torch.no_grad():
        for output, batch in zip(outputs, batches, strict=True):
            assert_close(output.cpu(), plain(batch.to(replicas[0])).cpu())


# ---- programs of their own -----------------------------------------------------------------------


def two_ranks() -> None:
    """Start this file under torchrun: with two GPUs a rank has one each, and gradients go over NCCL."""
    run_program("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(Path(__file__).resolve()))


def run_program(*arguments: str) -> None:
    """Run a Python program from the repository's folder.

    Raises:
        RuntimeError: it has failed, or has not ended in time; with what it has written.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            status = subprocess.run(
                [sys.executable, *arguments],
                cwd=REPOSITORY,
                env={"NCCL_DEBUG": "WARN", **os.environ},  # which says why a connection fails
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PROGRAM_S,
                check=False,
            ).returncode
            ended = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, ended = None, f"no end after {PROGRAM_S:g} s"
        if status != 0:
            output.seek(0)
            raise RuntimeError(f"{' '.join(arguments)}: {ended}\n{output.read()[-8000:]}")


def main() -> None:
    """As a rank, train with its part of each batch; compare with the plain module on all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("it is a rank's program: start it under torchrun")
    faulthandler.dump_traceback_later(RANK_S, exit=True)  # torchrun's processes outlive whoever kills torchrun
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(rank)  # ranks may begin with different weights: all get those of rank 0
    model = DataParallel(normalised().double(), sync_batch_norm=True)
    device = next(model.parameters()).device
    plain = copy.deepcopy(model.module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=LEARNING_RATE) for each in (plain, model)]
    for step in range(STEPS):
        x, y = (torch.randn(ROWS + step, *shape, generator=generator).double() for shape in ((3, 8, 8), (4,)))
        for module, optimizer in zip((plain, model), optimizers, strict=True):
            own_x, own_y = (x, y) if module is plain else (each.tensor_split(world_size)[rank] for each in (x, y))
            optimizer.zero_grad()
            nn.functional.mse_loss(module(own_x.to(device)), own_y.to(device)).backward()
            optimizer.step()
    expect_equal_state(model.module, plain)
    print(f"rank {rank} on {device}: as the plain module", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
