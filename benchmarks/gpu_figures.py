"""Figures on one GPU: the wrapper's cost, the floor, an epoch of ResNet-18, and a module that is all overhead.

    PYTHONPATH=src python benchmarks/gpu_figures.py              on the first GPU
    PYTHONPATH=src python benchmarks/gpu_figures.py --dry-run    tiny sizes on the CPU: it runs, and measures nothing

`make gpu-check` measures them among its checks. Times of a device are taken by its own events, after a warm-up, and are
medians. What is compared is run in turn. This has not been run on a GPU so far.
"""

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from manyhands import DataParallel
from manyhands.bench import one_device
from manyhands.training import models

SEEDS_S = {"1 GPU": 14.0, "2 GPUs": 9.3}  # an epoch in the tutorials that the project starts from
NUM_CLASSES = 10


class Figure(NamedTuple):
    """One number, or the reason why there is none."""

    name: str
    value: float | None
    unit: str
    note: str = ""


class Sizes(NamedTuple):
    """How much is done."""

    num_pictures: int = 60_000
    side: int = 28
    batch_rows: int = 256
    num_epochs: int = 3
    matrix: int = 8192
    num_products: int = 20
    num_forwards: int = 500
    num_blocks: int = 20
    steps_a_block: int = 20
    max_added_us: float | None = 20.0


DRY = Sizes(4, 8, 2, 1, 32, 2, 5, 1, 1, None)


class Bench(NamedTuple):
    """Where, and how much."""

    device: torch.device
    sizes: Sizes

    @property
    def dry(self) -> bool:
        return self.sizes is DRY

    def compiled(self, module: nn.Module, mode: str | None = None) -> nn.Module:
        """Return the module compiled; in a dry run by a compiler that does nothing."""
        return torch.compile(module, backend="eager") if self.dry else torch.compile(module, mode=mode)

    def seconds(self, run: Callable[[], object]) -> float:
        """Return how long the device takes for what `run` has it do."""
        if self.device.type == "cpu":
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        event = torch.get_device_module(self.device).Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Let float32 products and convolutions run in "TF32", or exactly ("fp32")."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "TF32" else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=precision == "TF32"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---- the figures ---------------------------------------------------------------------------------


def wrapper_on_one_device(bench: Bench) -> Iterator[Figure]:
    """What `DataParallel(model, [device])` adds to a forward, on the host; the goal is 20 µs at most."""
    for name in one_device.MODELS:
        added = one_device.added_us(name, bench.device, bench.sizes.num_forwards)
        yield Figure(f"the wrapper on one device adds, {name}", added, "µs a forward", "goal: 20 or less")
        if bench.sizes.max_added_us is not None:
            assert added <= bench.sizes.max_added_us, f"{name}: {added:.1f} µs, and the goal is 20"


def matrix_products(bench: Bench) -> Iterator[Figure]:
    """What the device can do at most, as large square products show it."""
    for precision in ("bf16", "TF32", "fp32"):
        yield Figure(f"matrix products in {precision}", tflops_per_s(bench, precision), "TFLOP/s")


def tflops_per_s(bench: Bench, precision: str) -> float:
    """Return the TFLOP/s of square products: 2 n³ operations each."""
    n = bench.sizes.matrix
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(n, n, device=bench.device, dtype=dtype) for _ in range(2))
    with products_in(precision):
        times = [bench.seconds(lambda: a @ b) for _ in range(3 + bench.sizes.num_products)]
    return 2 * n**3 / statistics.median(times[3:]) / 1e12


def tflop_of_an_epoch(sizes: Sizes) -> float:
    """Return the TFLOP of forward and backward over all pictures, as torch counts them."""
    model, rows = resnet18(sizes), 2
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(rows, 1, sizes.side, sizes.side)).sum().backward()
    return counter.get_total_flops() / rows * sizes.num_pictures / 1e12


def epoch_fp32_tf32(bench: Bench) -> Iterator[Figure]:
    """An epoch of the seeds' training in float32, with products in TF32."""
    return _epoch(bench, "fp32/TF32", "TF32", goal_s=2.5)


def epoch_bf16_compiled(bench: Bench) -> Iterator[Figure]:
    """An epoch in bfloat16 (autocast), channels last, compiled."""
    return _epoch(bench, "bf16, channels last, compiled", "bf16", goal_s=1.0)


def resnet18(sizes: Sizes) -> nn.Module:
    return models.build("resnet18", num_classes=NUM_CLASSES, image_shape=(1, sizes.side, sizes.side))


def _epoch(bench: Bench, name: str, precision: str, goal_s: float) -> Iterator[Figure]:
    """Time epochs of the plain module and of the wrapper on one device, in turn; data are on the device."""
    sizes, device = bench.sizes, bench.device
    low = precision == "bf16"
    pictures = torch.randn(sizes.num_pictures, 1, sizes.side, sizes.side, device=device)
    labels = torch.randint(NUM_CLASSES, (sizes.num_pictures,), device=device)
    plain = resnet18(sizes).to(device)
    if low:
        plain = bench.compiled(plain.to(memory_format=torch.channels_last))
    wrapped = DataParallel(plain, [device])  # the same parameters: what they are does not matter to the time
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9, foreach=True)

    def step(module: nn.Module, rows: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            loss = F.cross_entropy(module(pictures[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def epoch(module: nn.Module, num_rows: int = sizes.num_pictures) -> None:
        order = torch.randperm(sizes.num_pictures, device=device)
        num_steps = -(-num_rows // sizes.batch_rows)
        order = torch.cat([order, order])  # the last batch is filled up, so that all shapes are equal
        for rows in order[: num_steps * sizes.batch_rows].split(sizes.batch_rows):
            step(module, rows)

    with products_in(precision):
        began = time.perf_counter()
        for module in (plain, wrapped):
            epoch(module, 20 * sizes.batch_rows if not bench.dry else sizes.batch_rows)
        warm_up_s = bench.seconds(lambda: None) + time.perf_counter() - began
        times = [[bench.seconds(lambda m=m: epoch(m)) for m in (plain, wrapped)] for _ in range(sizes.num_epochs)]
    plain_s, wrapped_s = (statistics.median(column) for column in zip(*times, strict=True))
    beside = ", ".join(f"{seconds} s on {where}" for where, seconds in SEEDS_S.items())
    tflop, speed = tflop_of_an_epoch(sizes), tflops_per_s(bench, precision)
    yield Figure(f"an epoch in {name}, plain module", plain_s, "s")
    yield Figure(
        f"an epoch in {name}, DataParallel on one device",
        wrapped_s,
        "s",
        f"the tutorials: {beside}; goal on an H200: {goal_s} or less",
    )
    ratio = statistics.median(w / p for p, w in times)
    yield Figure(f"an epoch in {name}, DataParallel / plain", ratio, "", "median over pairs of epochs")
    yield Figure(
        f"an epoch in {name}, floor", tflop / speed, "s", f"{tflop:.4g} TFLOP at the {speed:.4g} TFLOP/s of products"
    )
    yield Figure(f"an epoch in {name}, warm-up", warm_up_s, "s", "both modules, compilation included")


def thin_layers(bench: Bench) -> Iterator[Figure]:
    """A training step of 52 thin layers, with CUDA graphs and without; all of them compute the same.

    There is nothing in it but overhead. Two ways of opting in, both around the plain module, which is then wrapped.
    """
    torch.manual_seed(0)
    origin = nn.Sequential(*(nn.Linear(16, 16) for _ in range(52))).to(bench.device)
    x, y = torch.randn(64, 16, device=bench.device), torch.randint(16, (64,), device=bench.device)

    def as_it_is(module: nn.Module) -> nn.Module:
        return module

    def graphed(module: nn.Module) -> nn.Module:
        torch.cuda.make_graphed_callables(module, (x.clone(),))
        return module

    def reduce_overhead(module: nn.Module) -> nn.Module:
        return bench.compiled(module, "reduce-overhead")

    def gradients(module: nn.Module) -> list[torch.Tensor]:
        F.cross_entropy(module(x), y).backward()
        return [p.grad.clone() for p in module.parameters()]

    expected = gradients(copy.deepcopy(origin))
    for name, prepare in {
        "as it is": as_it_is,
        "torch.cuda.make_graphed_callables": graphed,
        'torch.compile(mode="reduce-overhead")': reduce_overhead,
    }.items():
        if prepare is graphed and bench.device.type != "cuda":
            yield Figure(f"a step of 52 thin layers, {name}", None, "ms", "not run: CUDA graphs need CUDA")
            continue
        plain = prepare(copy.deepcopy(origin))
        wrapped = DataParallel(plain, [bench.device])
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.0, foreach=True)  # the parameters stay, for the comparison

        def steps(module: nn.Module, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for _ in range(bench.sizes.steps_a_block):
                optimizer.zero_grad()
                F.cross_entropy(module(x), y).backward()
                optimizer.step()

        times: list[list[float]] = []
        for _ in range(2 + bench.sizes.num_blocks):
            times.append([bench.seconds(lambda m=m: steps(m)) / bench.sizes.steps_a_block for m in (plain, wrapped)])
        for which, column in zip(("plain module", "DataParallel"), zip(*times[2:], strict=True), strict=True):
            yield Figure(f"a step of 52 thin layers, {name}, {which}", 1e3 * statistics.median(column), "ms")
        optimizer.zero_grad()
        for mine, theirs in zip(gradients(wrapped), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    function.__name__: function
    for function in (wrapper_on_one_device, matrix_products, epoch_fp32_tf32, thin_layers, epoch_bf16_compiled)
}


def bench_on(device: str, *, dry: bool) -> Bench:
    """Return where to measure, and how much: on the CPU only in a dry run."""
    return Bench(torch.device(device), DRY if dry else Sizes())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU; not a measurement")
    dry = parser.parse_args().dry_run
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None and not dry:
        parser.exit(0, "There is no GPU here: nothing was measured. --dry-run shows that the code runs.\n")
    print("Dry run on the CPU: not a measurement." if dry else f"On {torch.cuda.get_device_name(0)}.")
    for name, measure in FIGURES.items():
        for figure in measure(bench_on("cpu" if dry else f"{kind.type}:0", dry=dry)):
            value = "-" if figure.value is None else f"{figure.value:.4g} {figure.unit}"
            print(f"{name}: {figure.name}: {value}  {figure.note}", flush=True)


if __name__ == "__main__":
    main()
