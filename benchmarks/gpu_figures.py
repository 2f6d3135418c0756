"""Figures on one GPU: the wrapper's cost, the floor, epochs of `unisono train`, and a module with little to compute.

    python benchmarks/gpu_figures.py                                on the first GPU
    python benchmarks/gpu_figures.py --data path/to/fashion-mnist   with the accuracy on real pictures
    python benchmarks/gpu_figures.py --dry-run                      tiny sizes on the CPU: it runs, and
                                                                    measures nothing

`make gpu-check` measures them among its checks. Device times are measured with the device's own events after a warm-up,
and are medians; contenders take turns. Epochs are those of the training command itself, on generated pictures, with the
times that it reports. A dry run is on the CPU, or on the asynchronous device of tests/async_device where that has been
imported; its numbers mean nothing.
"""

import argparse
import contextlib
import copy
import json
import math
import random
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import one_device
import torch
import torch.nn.functional as F
from timed import timed
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from unisono import DataParallel
from unisono.console.errors import OptionError
from unisono.runtime.devices import wait_for_work
from unisono.runtime.precision import float32_products
from unisono.training import computation, data, loop, models, schedule
from unisono.training.computation import expect_compiler
from unisono.training.metrics import StepRecord
from unisono.training.observers import Observer
from unisono.training.options import Options
from unisono.training.run import Run
from unisono.training.run_folder import RunFolder

TUTORIALS_S = {"1 GPU": 14.0, "2 GPUs": 9.3}  # an epoch in the tutorials that the project starts from
NUM_CLASSES = 10
REPOSITORY = Path(__file__).resolve().parents[1]
SUBSET = "shared/data/fashion-mnist-6k"  # 5,000 pictures of Fashion-MNIST to train on and 1,256 to test on
DATA = "--data DIR names a folder of IDX files, best a few thousand pictures"


class Figure(NamedTuple):
    """One number, or the reason why there is none."""

    name: str
    value: float | None
    unit: str
    note: str = ""


class Sizes(NamedTuple):
    """What is measured: the model of the epochs, and the sizes."""

    num_pictures: int = 60_000
    side: int = 28
    batch_rows: int = 256
    num_epochs: int = 3
    profiled_steps: int = 30
    accuracy_epochs: int = 8
    accuracy_seeds: int = 3
    matrix: int = 8192
    num_products: int = 20
    num_forwards: int = 500
    num_blocks: int = 20
    steps_a_block: int = 20
    model: str = "resnet18"
    rows_a_gpu: int = 64
    width: int = 64


DRY = Sizes(4, 8, 2, 1, 1, 1, 1, 32, 2, 5, 1, 1, "mlp", 2, 2)  # torch.compile takes seconds for a ResNet


class Bench(NamedTuple):
    """The device and the sizes of a measurement."""

    device: torch.device
    sizes: Sizes
    data: Path | None = None  # real pictures; None: there are none

    @property
    def dry(self) -> bool:
        return self.sizes is DRY

    @property
    def every_device(self) -> list[torch.device]:
        """All devices of the kind; on the CPU two replicas."""
        if self.device.type == "cpu":
            return [self.device] * 2
        return [torch.device(self.device.type, index) for index in range(torch.accelerator.device_count())]

    def compiled(self, module: nn.Module, mode: str | None = None) -> Any:
        """Return the module compiled; in a dry run by a compiler that does nothing."""
        return torch.compile(module, backend="eager") if self.dry else torch.compile(module, mode=mode)

    @property
    def compiler(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of `unisono train --compile`: in a dry run the compiler does nothing."""
        does_nothing = partial(torch.compile, backend="eager")
        return mock.patch.object(torch, "compile", does_nothing) if self.dry else contextlib.nullcontext()

    def no_compiler(self) -> str | None:
        """Return why the compiler does not work for the device; None if it works."""
        try:
            with self.compiler:
                expect_compiler(self.device)
        except OptionError as error:
            return str(error)
        return None

    def seconds(self, run: Callable[[], object]) -> float:
        """Return how long the device takes for the work that `run` queues."""
        if self.dry:  # on a device that may have no events with times
            began = time.perf_counter()
            run()
            wait_for_work(self.device)
            return time.perf_counter() - began
        event = torch.get_device_module(self.device).Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


# ---- the figures ---------------------------------------------------------------------------------


def wrapper_on_one_device(bench: Bench) -> Iterator[Figure]:
    """The host time that `DataParallel(model, [device])` adds to a forward; a slow host misses the goal."""
    for name in one_device.MODELS:
        added = one_device.added_us(name, bench.device, bench.sizes.num_forwards)
        met = "met" if added <= one_device.GOAL_US else "missed"
        yield Figure(f"the wrapper on one device adds, {name}", added, "µs a forward", f"goal: 20 or less, {met}")


def matrix_products(bench: Bench) -> Iterator[Figure]:
    """The peak speed of the device, measured with large square matrix products."""
    for precision in ("bf16", "TF32", "fp32"):
        yield Figure(f"matrix products in {precision}", tflops_per_s(bench, precision), "TFLOP/s")


def tflops_per_s(bench: Bench, precision: str) -> float:
    """Return the TFLOP/s of square products: 2 n³ operations each."""
    n = bench.sizes.matrix
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(n, n, device=bench.device, dtype=dtype) for _ in range(2))
    with float32_products(bench.device, rounded=precision == "TF32"):
        times = timed({"a @ b": lambda: a @ b}, bench.sizes.num_products, num_untimed=3, seconds_of=bench.seconds)
    return 2 * n**3 / statistics.median(times["a @ b"]) / 1e12


def tflop_of_an_epoch(sizes: Sizes) -> float:
    """Return the TFLOP of forward and backward over all pictures, as torch counts them."""
    model, rows = models.build(sizes.model, num_classes=NUM_CLASSES, image_shape=(1, sizes.side, sizes.side)), 2
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(rows, 1, sizes.side, sizes.side)).sum().backward()
    return counter.get_total_flops() / rows * sizes.num_pictures / 1e12


def epoch_tf32(bench: Bench) -> Iterator[Figure]:
    """Epochs of `unisono train --precision tf32`."""
    return _epochs(bench, Options(precision="tf32"), goal_s=2.5)


def epoch_bf16_compiled(bench: Bench) -> Iterator[Figure]:
    """Epochs of `unisono train --precision bf16 --compile`."""
    return _epochs(bench, Options(precision="bf16", compile=True), goal_s=0.55)


def epoch_without_graphs(bench: Bench) -> Iterator[Figure]:
    """The same as `epoch_bf16_compiled`, without CUDA graphs: what they are worth."""
    return _epochs_in_mode(bench, "default")


def epoch_with_autotuning(bench: Bench) -> Iterator[Figure]:
    """The same with torch.compile's other mode that has CUDA graphs: whether it should be the default."""
    return _epochs_in_mode(bench, "max-autotune")


def _epochs_in_mode(bench: Bench, mode: str) -> Iterator[Figure]:
    with mock.patch.object(computation, "GRAPHS_MODE", mode):
        yield from _epochs(bench, Options(precision="bf16", compile=True), goal_s=0.55, mode=f", mode {mode}")


def _epochs(bench: Bench, options: Options, goal_s: float, mode: str = "") -> Iterator[Figure]:
    """Train the tutorials' model on as many pictures as theirs: some timed epochs, and a profiled one."""
    sizes = bench.sizes
    how = f"--precision {options.precision}{' --compile' if options.compile else ''}{mode}"
    name = f"an epoch of unisono train {how}"
    if options.compile and (reason := bench.no_compiler()) is not None:
        yield Figure(name, None, "s", f"not run: {reason}")
        return
    num_epochs = sizes.num_epochs + 2  # the first is a warm-up, and the last is profiled
    options = replace(options, model=sizes.model, batch_size=sizes.batch_rows, epochs=num_epochs)
    options = replace(options, lr=1e-4)
    look = KernelTime(bench.device, num_epochs, sizes.profiled_steps)
    with generated_pictures(sizes) as folder:
        epochs = trained(bench, replace(options, data=str(folder)), look)
    warm_up_s, *times_s = [epoch["train_seconds"] for epoch in epochs[:-1]]
    beside = ", ".join(f"{seconds} s on {where}" for where, seconds in TUTORIALS_S.items())
    epoch_s = statistics.median(times_s)
    met = "met" if epoch_s <= goal_s else "missed"
    yield Figure(name, epoch_s, "s", f"the tutorials: {beside}; goal on an H200: {goal_s} or less, {met}")
    products = options.precision.replace("tf", "TF")
    tflop, speed = tflop_of_an_epoch(sizes), tflops_per_s(bench, products)
    floor_s = tflop / speed
    yield Figure(f"{name}, floor", floor_s, "s", f"{tflop:.4g} TFLOP at the {speed:.4g} TFLOP/s of products")
    yield Figure(f"{name}, in floors", epoch_s / floor_s, "")
    yield Figure(f"{name}, without any kernel running", look.idle_percent(), "%", look.note)
    yield Figure(f"{name}, the first one", warm_up_s, "s", "includes compiling and choosing kernels")


def epoch_on_every_gpu(bench: Bench) -> Iterator[Figure]:
    """Epochs of `unisono train --precision tf32` on all GPUs of the machine, batch norm synchronised."""
    sizes, count = bench.sizes, len(bench.every_device)
    name = f"an epoch of unisono train --precision tf32 on {count} devices"
    if count < 2:
        yield Figure("an epoch of unisono train --precision tf32 on several GPUs", None, "s", "not run: there is one")
        return
    options = Options(
        model=sizes.model,
        devices=",".join(map(str, bench.every_device)),
        precision="tf32",
        batch_size=sizes.batch_rows * count,
        epochs=sizes.num_epochs + 1,
        lr=1e-4,
    )
    with generated_pictures(sizes) as folder:
        _, *times_s = [epoch["train_seconds"] for epoch in trained(bench, replace(options, data=str(folder)))]
    beside = ", ".join(f"{seconds} s on {where}" for where, seconds in TUTORIALS_S.items())
    note = f"{sizes.batch_rows} rows a device; the tutorials: {beside}"
    yield Figure(name, statistics.median(times_s), "s", note)


def every_gpu_side_by_side(bench: Bench) -> Iterator[Figure]:
    """A step of ResNet-50 on all GPUs: threads and torch's DataParallel in one process, and DDP in one for each GPU."""
    devices = bench.every_device
    count = len(devices)
    name = f"a step of ResNet-50 on {count} devices, {bench.sizes.rows_a_gpu} rows each"
    if count < 2:
        yield Figure("a step of ResNet-50 on several GPUs", None, "ms", "not run: there is one")
        return
    in_one_process: dict[str, Callable[[nn.Module], nn.Module]] = {
        "unisono.DataParallel": lambda module: DataParallel(module, devices, sync_batch_norm=False),
        "torch.nn.DataParallel": nn.DataParallel,
    }
    for contender, wrap in in_one_process.items():
        if wrap is nn.DataParallel and bench.device.type not in ("cpu", "cuda", "xpu"):
            yield Figure(f"{name}, {contender}", None, "ms", f"not run: it has no copies for {bench.device.type}")
            continue
        torch.manual_seed(0)
        seconds = step_seconds(wrap(resnet50(bench.sizes.width).to(devices[0])), devices, bench.sizes)
        yield Figure(f"{name}, {contender}", 1e3 * seconds, "ms")
    ddp = f"{name}, DistributedDataParallel, a process each"
    if bench.device.type not in torch.distributed.Backend.default_device_backend_map:
        yield Figure(ddp, None, "ms", f"not run: torch has no process group for {bench.device.type}")
        return
    with tempfile.TemporaryDirectory() as folder:
        start_processes(ddp_steps, (devices, bench.sizes, folder), count, start_method="spawn")
        slowest_s = max(float(file.read_text()) for file in Path(folder).glob("rank-*"))
    yield Figure(ddp, 1e3 * slowest_s, "ms")


def ddp_steps(rank: int, devices: list[torch.device], sizes: Sizes, folder: str) -> None:
    """Take a rank's steps, and write how long one took."""
    device, store = devices[rank], torch.distributed.FileStore(f"{folder}/store", len(devices))
    on_cpu = device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(rank)
    backend = torch.distributed.get_default_backend_for_device(device)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=len(devices))
    module = resnet50(sizes.width).to(device)
    model = nn.parallel.DistributedDataParallel(
        module, device_ids=None if on_cpu else [rank], gradient_as_bucket_view=True
    )
    Path(folder, f"rank-{rank}").write_text(str(step_seconds(model, [device], sizes)))
    torch.distributed.destroy_process_group()


def step_seconds(model: nn.Module, devices: Sequence[torch.device], sizes: Sizes) -> float:
    """Return how long a training step takes, the median over blocks of steps in which nothing waits."""
    rows = sizes.rows_a_gpu * len(devices)
    x, y = torch.randn(rows, 3, 224, 224), torch.randint(1000, (rows,))
    x, y = x.to(devices[0]), y.to(devices[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

    def block() -> None:
        for _ in range(sizes.steps_a_block):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        for device in dict.fromkeys(devices):
            wait_for_work(device)

    return statistics.median(timed({"block": block}, sizes.num_blocks)["block"]) / sizes.steps_a_block


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or channels != 4 * width:
            self.skip = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet50(width: int = 64) -> nn.Module:
    """Return ResNet-50 for pictures of 224 x 224 and 1,000 classes: 25.6 million parameters with this width."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, channels = [], width
    for stage, num_blocks in enumerate((3, 4, 6, 3)):
        for block in range(num_blocks):
            blocks.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
            channels = 4 * width << stage
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def trained(bench: Bench, options: Options, look: Observer | None = None) -> list[dict[str, float]]:
    """Run `unisono train` on the device, if the options name no other; return the records of its epochs.

    Its weights and pictures are not saved.
    """
    torch.compiler.reset()  # it caches few versions of a function: drop those of other figures
    not_saved = mock.patch.multiple(Run, save=lambda run: None, draw=lambda run: None)
    with tempfile.TemporaryDirectory() as folder, bench.compiler, not_saved:
        results = RunFolder.for_new_run(Path(folder, "run"))
        devices = str(bench.device) if options.devices == "auto" else options.devices
        loop.train(replace(options, devices=devices), results, observers={"look": look} if look else {})
        records = map(json.loads, results.metrics.read_text().splitlines())
        return [record for record in records if record["kind"] == "epoch"]


@contextlib.contextmanager
def generated_pictures(sizes: Sizes) -> Iterator[Path]:
    """Write random pictures as the IDX files that the training command reads; yield their folder."""
    noise = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        for split, num_rows in (("train", sizes.num_pictures), ("t10k", max(2, sizes.num_pictures // 6))):
            shape = (num_rows, sizes.side, sizes.side)
            pictures = noise.randbytes(math.prod(shape))  # not by way of numpy, which may be missing
            labels = bytes(row % NUM_CLASSES for row in range(num_rows))
            for kind, size, values in (("images-idx3", shape, pictures), ("labels-idx1", shape[:1], labels)):
                head = bytes([0, 0, 8, len(size)]) + struct.pack(f">{len(size)}I", *size)
                Path(name, f"{split}-{kind}-ubyte").write_bytes(head + values)
        yield Path(name)


class KernelTime(Observer):
    """Profiles some steps of one epoch, to see how long the device ran no kernel at all."""

    def __init__(self, device: torch.device, epoch: int, num_steps: int) -> None:
        self._epoch, self._num_steps, self._steps_seen = epoch, num_steps, 0
        kind = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}.get(device.type)
        self._profile = profile(activities=[kind]) if kind else None
        self.note = f"from a profile of {num_steps} steps" if kind else "not run: the profiler sees no kernels here"

    def step(self, record: StepRecord) -> None:
        if self._profile is None or record.epoch != self._epoch:
            return
        self._steps_seen += 1
        if self._steps_seen == 1:
            self._profile.start()
        elif self._steps_seen == 1 + self._num_steps:
            self._profile.stop()

    def idle_percent(self) -> float | None:
        if self._profile is None:
            return None
        on_host = torch.autograd.DeviceType.CPU
        ranges = [event.time_range for event in self._profile.events() if event.device_type != on_host]
        spans = sorted((r.start, r.end) for r in ranges)
        if not spans:
            self.note = "not run: the profile has no kernels in it"
            return None
        busy, end = 0.0, spans[0][0]
        for start, stop in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return 100 * (1 - busy / (end - spans[0][0]))


def accuracy_bf16_compiled(bench: Bench) -> Iterator[Figure]:
    """The test accuracy of `unisono train --precision bf16 --compile`, less that of a plain float32 loop."""
    name = "test accuracy of unisono train --precision bf16 --compile, less that of a plain float32 loop"
    sizes = bench.sizes
    if bench.data is None and not bench.dry:
        yield Figure(name, None, "points", f"not run: no data; {DATA}")
        return
    if (reason := bench.no_compiler()) is not None:
        yield Figure(name, None, "points", f"not run: {reason}")
        return
    with generated_pictures(DRY) if bench.dry else contextlib.nullcontext(bench.data) as folder:
        options = Options(
            data=str(folder), model=sizes.model, batch_size=sizes.batch_rows, epochs=sizes.accuracy_epochs
        )
        if bench.dry:
            options = replace(options, lr=1e-4)  # two rows a step would diverge
        differences = []
        for seed in range(sizes.accuracy_seeds):
            seeded = replace(options, seed=seed)
            plain = plain_accuracy(bench, seeded)
            ours = trained(bench, replace(seeded, precision="bf16", compile=True))[-1]["test_accuracy"]
            differences.append(100 * (ours - plain))
            yield Figure(f"{name}, seed {seed}", differences[-1], "points", f"{ours:.4f} and {plain:.4f}")
        mean = statistics.mean(differences)
        met = "met" if abs(mean) <= 0.5 else "missed"
        yield Figure(f"{name}, mean", mean, "points", f"goal: from -0.5 to 0.5, {met}")


def plain_accuracy(bench: Bench, options: Options) -> float:
    """Train as the options say in exact float32, with torch alone; return the test accuracy."""
    pictures = data.load(options.data).on(bench.device)
    torch.manual_seed(options.seed)
    shape, num_classes = pictures.image_shape, pictures.num_classes
    model = models.build(options.model, num_classes=num_classes, image_shape=shape).to(bench.device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=computation.MOMENTUM, weight_decay=computation.WEIGHT_DECAY
    )
    num_rows, step = len(pictures.train_labels), 0
    num_steps = schedule.num_steps(num_rows, options.batch_size)
    with float32_products(bench.device, rounded=False):
        for epoch in range(options.epochs):
            for rows in schedule.epoch_batches(num_rows, options.batch_size, seed=options.seed, epoch=epoch):
                optimizer.param_groups[0]["lr"] = schedule.learning_rate(
                    step, peak=options.lr, steps_per_epoch=num_steps, epochs=options.epochs
                )
                rows = rows.to(bench.device)
                optimizer.zero_grad()
                F.cross_entropy(model(pictures.train_images[rows]), pictures.train_labels[rows]).backward()
                optimizer.step()
                step += 1
        model.eval()
        with torch.no_grad():
            found = torch.cat([model(part).argmax(1) for part in pictures.test_images.split(options.batch_size)])
    return (found == pictures.test_labels).double().mean().item()


def thin_layers(bench: Bench) -> Iterator[Figure]:
    """A training step of 52 thin layers, which is nearly all overhead, with CUDA graphs and without.

    Two ways to use CUDA graphs apply to the plain module, which is then wrapped; the wrapper's own is graphs=True. All
    compute the same.
    """
    torch.manual_seed(0)
    origin = nn.Sequential(*(nn.Linear(16, 16) for _ in range(52))).to(bench.device)
    x, y = torch.randn(64, 16, device=bench.device), torch.randint(16, (64,), device=bench.device)

    def unchanged(module: nn.Module) -> nn.Module:
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
        "unchanged": unchanged,
        "torch.cuda.make_graphed_callables": graphed,
        'torch.compile(mode="reduce-overhead")': reduce_overhead,
    }.items():
        if prepare is graphed and bench.device.type != "cuda":
            yield Figure(f"a step of 52 thin layers, {name}", None, "ms", "not run: CUDA graphs need CUDA")
            continue
        plain = prepare(copy.deepcopy(origin))
        wrapped = DataParallel(plain, [bench.device])
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.0, foreach=True)  # parameters stay

        def steps(module: nn.Module, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for _ in range(bench.sizes.steps_a_block):
                optimizer.zero_grad()
                F.cross_entropy(module(x), y).backward()
                optimizer.step()

        blocks = {"plain module": partial(steps, plain), "DataParallel": partial(steps, wrapped)}
        if prepare is unchanged:
            other = copy.deepcopy(origin)
            with_graphs = DataParallel(other, [bench.device], graphs=True)
            blocks["DataParallel, graphs=True"] = partial(
                steps, with_graphs, torch.optim.SGD(other.parameters(), lr=0.0, foreach=True)
            )
        times = timed(blocks, bench.sizes.num_blocks, num_untimed=2, seconds_of=bench.seconds)
        for which, seconds in times.items():
            a_step_ms = 1e3 * statistics.median(seconds) / bench.sizes.steps_a_block
            yield Figure(f"a step of 52 thin layers, {name}, {which}", a_step_ms, "ms")
        optimizer.zero_grad()
        for own, reference in zip(gradients(wrapped), expected, strict=True):
            torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-6)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    function.__name__: function
    for function in (
        wrapper_on_one_device,
        matrix_products,
        epoch_tf32,
        every_gpu_side_by_side,
        epoch_on_every_gpu,
        epoch_bf16_compiled,
        thin_layers,
        accuracy_bf16_compiled,
        epoch_without_graphs,
        epoch_with_autotuning,
    )
}
MINUTES_LONG = ("epoch_with_autotuning",)  # torch tries kernels: `make gpu-check` leaves it to this program


def bench_on(device: str, *, dry: bool, data: Path | None = None) -> Bench:
    """Return the device and the sizes.

    Without `data`, real pictures are searched in the repository and beside it.
    """
    folders = [data] if data else [REPOSITORY / SUBSET, REPOSITORY.parent / SUBSET]
    return Bench(torch.device(device), DRY if dry else Sizes(), next(filter(Path.is_dir, folders), None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU; not a measurement")
    parser.add_argument("--data", type=Path, metavar="DIR", help=f"IDX files for the accuracy (default: {SUBSET})")
    given = parser.parse_args()
    dry = given.dry_run
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None and not dry:
        parser.exit(0, "There is no GPU here: nothing was measured. --dry-run shows that the code runs.\n")
    print(
        "Dry run on the CPU: not a measurement." if dry else f"On {torch.get_device_module(kind).get_device_name(0)}."
    )
    for name, measure in FIGURES.items():
        for figure in measure(bench_on("cpu" if dry else f"{kind.type}:0", dry=dry, data=given.data)):
            value = "-" if figure.value is None else "it runs" if dry else f"{figure.value:.4g} {figure.unit}"
            note = "" if dry and figure.value is not None else figure.note
            print(f"{name}: {figure.name}: {value}  {note}", flush=True)


if __name__ == "__main__":
    main()
