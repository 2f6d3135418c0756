"""How fast `DataParallel.map` is: against a plain loop, and against the pools of concurrent.futures, in one run.

    python benchmarks/map.py [--rounds 7]

Inference over the same batches on the CPU. A map has two replicas; the pools have two workers with half the intra-op
threads each, as the lanes of a map have; all of them take whole batches. Contenders take turns; lower quartiles are
compared. Set-up (starting workers, sending them the model, choosing lanes) is not counted: each contender runs before.
"""

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch
from timed import timed
from torch import nn

import unisono
from unisono.bench.results import upper_quartile
from unisono.console.tables import table
from unisono.primitives.measured_shares import lower_quartile
from unisono.training import models

WORKERS = 2
BATCHES = 8
BATCHES_TO_CHOOSE = 150  # of map, for each kind of batches

_model: nn.Module | None = None  # that of a process of the pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender is timed (default: 3)")
    rounds = parser.parse_args().rounds
    unisono.keep_freed_memory()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} intra-op threads, {WORKERS} workers")
    rows = []
    image = (1, 28, 28)
    image_rows = torch.randn(32, *image)
    for name, model, batch, num_batches in (
        ("ResNet-18, 32 rows", models.build("resnet18", num_classes=10, image_shape=image), image_rows, BATCHES),
        ("wide layers, 64 rows", mlp(2048, 5), torch.randn(64, 2048), BATCHES),
        ("52 thin layers, 64 rows", mlp(16, 52), torch.randn(64, 16), 30 * BATCHES),
    ):
        with contenders(model.eval(), [batch.clone() for _ in range(num_batches)]) as runs:
            times = timed(runs, rounds)
        loop_s = lower_quartile(times["plain loop"])
        for contender, seconds in times.items():
            speeds = [loop_s / each for each in (lower_quartile(seconds), upper_quartile(seconds), min(seconds))]
            speed, low, high = (f"{each:.2f}" for each in speeds)
            rows.append([name, contender, f"{num_batches / lower_quartile(seconds):.1f}", speed, f"{low} to {high}"])
    print(table(["model", "contender", "batches/s", "of the loop's speed", "range"], rows, text_columns=2))


def mlp(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


Runs = dict[str, Callable[[], object]]


@contextmanager
def contenders(model: nn.Module, batches: list[torch.Tensor]) -> Iterator[Runs]:
    """Yield the contenders; each runs the model over all batches."""
    each = max(1, torch.get_num_threads() // WORKERS)
    wrapper = unisono.DataParallel(model, ["cpu"] * WORKERS)
    for _ in range(-(-BATCHES_TO_CHOOSE // len(batches))):
        list(wrapper.map(batches))

    def loop() -> int:
        with torch.no_grad():
            return len([model(batch) for batch in batches])

    def call(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = model(batch)
            return output

    with ExitStack() as stack:
        # Made anew for each round: a pool's threads would keep half of the intra-op threads for all that follow.
        def thread_pool() -> int:
            before = torch.get_num_threads()
            with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(each,)) as pool:
                num_outputs = len(list(pool.map(call, batches)))
            torch.set_num_threads(before)
            return num_outputs

        spawn = multiprocessing.get_context("spawn")
        pool = stack.enter_context(ProcessPoolExecutor(WORKERS, spawn, initializer=take, initargs=(model, each)))
        yield {
            "plain loop": loop,
            "ThreadPoolExecutor": thread_pool,
            "ProcessPoolExecutor": lambda: len(list(pool.map(call_own, batches))),
            "map": lambda: len(list(wrapper.map(batches))),
        }


def take(model: nn.Module, num_threads: int) -> None:
    """Begin a process of the pool."""
    global _model  # noqa: PLW0603 - a pool's initializer has nowhere else to leave it
    torch.set_num_threads(num_threads)
    _model = model


def call_own(batch: torch.Tensor) -> torch.Tensor:
    assert _model is not None
    with torch.no_grad():
        output: torch.Tensor = _model(batch)
        return output


if __name__ == "__main__":
    main()
