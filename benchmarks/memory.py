"""How much memory a training step takes: `DataParallel` on two CPU replicas against the plain module.

    python benchmarks/memory.py                       # all of it, some five minutes on two cores
    python benchmarks/memory.py --runs 1 --steps 2    # a quick look
    python benchmarks/memory.py --replicas 4          # more replicas

Peak: ResNet-18, batches of 64 pictures, SGD with momentum. Every figure is from a process of its own, plain and wrapped
in turn, and is the memory beyond that before the first step (interpreter, torch, model, optimizer, batch). Two figures
answer two questions:

    resident    the largest resident set (ru_maxrss): the memory that the machine must have. It includes the free memory
                in the arenas of malloc, and differs by some tens of MiB from run to run.
    allocated   the most that was allocated at one time, sampled every millisecond from glibc's mallinfo2; without
                that noise. Absent with another C library.

The goal is a ratio of 1.15 or less. Growth: a small network with batch norm; the increase over 1,000
steps, after 1,000 others, of the largest resident set, of the allocated memory and of the number of Python's memory
blocks. The goal is none; the rest are free lists of Python and pages that malloc begins to use, with the plain module
too.
"""

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from unisono.console.tables import table

GOAL = 1.15
KINDS = ("plain", "wrapped")
SAMPLE_EVERY_S = 0.001
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="processes for each figure (default: 5)")
    parser.add_argument("--steps", type=int, default=5, help="training steps of ResNet-18 in each (default: 5)")
    parser.add_argument(
        "--long-steps",
        type=int,
        default=1000,
        help="counted steps of the small network, after as many others (default: 1000)",
    )
    parser.add_argument("--replicas", type=int, default=2, help="replicas of the wrapped module (default: 2)")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # for the child processes
    options = parser.parse_args()
    if options.measure:
        what, kind = options.measure
        measure = {"peak": measure_peak, "growth": measure_growth}[what]
        print(json.dumps(measure(kind, options)))
        return
    peaks = in_processes("peak", options)
    growths = in_processes("growth", options)
    print(
        f"\nPeak of a training step: ResNet-18, batch 64, {options.replicas} replicas on the CPU; medians of "
        f"{options.runs} processes each, MiB above what was there before the first step\n"
    )
    rows = []
    for figure in ("resident", "allocated"):
        plain, wrapped = (median(peaks[kind], figure) for kind in KINDS)
        if plain is None or wrapped is None:
            rows.append([figure, "", "", "not known with this C library", ""])
        else:
            shown = [f"{plain / MIB:.1f}", f"{wrapped / MIB:.1f}", f"{wrapped / plain:.2f}", f"{GOAL:.2f}"]
            rows.append([figure, *shown])
    print(table(["", *KINDS, "ratio", "goal"], rows))
    steps = options.long_steps
    print(f"\nGrowth over {steps} steps, after {steps} others: a small network; medians\n")
    rows = []
    for figure, unit, of_what in (
        ("resident", 1024, ", KiB"),
        ("allocated", 1024, ", KiB"),
        ("blocks", 1, " of Python"),
    ):
        values = [median(growths[kind], figure) for kind in KINDS]
        rows.append([figure + of_what, *("-" if value is None else f"{value / unit:.1f}" for value in values)])
    print(table(["", *KINDS], rows))


def in_processes(what: str, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Measure plain and wrapped in turn, each time in a fresh process; print each result."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for run in range(options.runs):
        for kind in KINDS:
            print(f"{what}: run {run + 1} of {options.runs}, {kind}", end="", flush=True)
            given = [
                f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ("steps", "long-steps", "replicas")
            ]
            child = [sys.executable, __file__, *given, "--measure", what, kind]
            done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True)
            found[kind].append(json.loads(done.stdout))
            shown = {
                name: value / MIB for name, value in found[kind][-1].items() if value is not None and name != "blocks"
            }
            print("".join(f"; {name} {value:.1f} MiB" for name, value in shown.items()), flush=True)
    return found


def median(runs: list[dict[str, Any]], figure: str) -> float | None:
    values = [run[figure] for run in runs]
    return None if None in values else statistics.median(values)


# ---- in the child processes ----------------------------------------------------------------------


def measure_peak(kind: str, options: argparse.Namespace) -> dict[str, int | None]:
    import torch

    from unisono.training import models

    step = training_step(small_network(), kind, options.replicas, torch.randn(4, 1, 8, 8))
    step()  # imports, threads
    model = models.build("resnet18", num_classes=10, image_shape=(1, 28, 28))
    step = training_step(model, kind, options.replicas, torch.randn(64, 1, 28, 28))
    resident, allocated = largest_resident(), allocated_now()
    with PeakOfAllocated() as peak:
        for _ in range(options.steps):
            step()
    return {
        "resident": largest_resident() - resident,
        "allocated": None if allocated is None else peak.most - allocated,
    }


def measure_growth(kind: str, options: argparse.Namespace) -> dict[str, int | None]:
    import torch

    step = training_step(small_network(), kind, options.replicas, torch.randn(64, 1, 8, 8))
    held = []
    for _ in range(2):
        for _ in range(options.long_steps):
            step()
        gc.collect()
        held.append((largest_resident(), allocated_now(), sys.getallocatedblocks()))
    before, after = held
    growth = [None if a is None or b is None else b - a for a, b in zip(before, after, strict=True)]
    return dict(zip(("resident", "allocated", "blocks"), growth, strict=True))


def small_network() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, 10)
    )


def training_step(model: Any, kind: str, num_replicas: int, images: Any) -> Callable[[], None]:
    import torch

    import unisono

    if kind == "wrapped":
        model = unisono.DataParallel(model, ["cpu"] * num_replicas, sync_batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    labels = torch.randint(0, 10, (len(images),))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def largest_resident() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    import resource  # not on Windows, where --help works all the same

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _MallocInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated_now() -> int | None:
    """Return how many bytes are allocated through malloc, in all threads; None without glibc."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd  # in arenas, and in maps of their own


class PeakOfAllocated:
    """Samples the allocated memory in a thread until the block ends."""

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample)

    def __enter__(self) -> "PeakOfAllocated":
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            self.most = max(self.most, allocated_now() or 0)


if __name__ == "__main__":
    main()
