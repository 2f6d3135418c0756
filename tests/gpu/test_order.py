"""What a GPU does at the same time: the order of copies and kernels, read off the profiler's trace.

Run by `make gpu-check`; skipped, visibly, where there is no GPU. A trace is a list of what ran on the device, with its
stream, its beginning and its end. The sizes are such that a copy takes milliseconds and a launch microseconds.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from helpers.accelerators import on_cuda, on_two_gpus
from helpers.modules import Fn
from helpers.small_buckets import use_small_buckets
from unisono import DataParallel
from unisono.runtime import devices

pytestmark = on_cuda
ROWS, WIDTH = 2 * 16384, 2048
SHARD_BYTES = ROWS // 2 * WIDTH * 4


class Ran(NamedTuple):
    """A kernel or a copy."""

    kind: str
    name: str
    stream: int
    begin: float
    end: float
    num_bytes: int

    def overlaps(self, other: "Ran") -> bool:
        return self.begin < other.end and other.begin < self.end


def traced(run: Callable[[], object], folder: Path) -> list[Ran]:
    """Return what ran on the GPU for `run`, in order of beginning; it has run once before."""
    run()
    torch.accelerator.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.accelerator.synchronize()
    profile.export_chrome_trace(str(folder / "trace.json"))
    ran = read(folder / "trace.json")
    if not ran:
        pytest.skip("the profiler sees nothing of the GPU on this machine")
    return ran


def read(trace: Path) -> list[Ran]:
    ran = []
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy") and event.get("ph") == "X":
            begin, args = float(event["ts"]), event["args"]
            end, num_bytes = begin + float(event["dur"]), int(args.get("bytes", 0))
            ran.append(Ran(event["cat"], event["name"], int(args["stream"]), begin, end, num_bytes))
    return sorted(ran, key=lambda each: each.begin)


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_the_second_shard_travels_while_the_first_is_computed(tmp_path: Path, pinned: bool) -> None:
    """S11: two replicas on one GPU; the copies are on a stream of their own.

    From pageable memory the host has the second shard to copy first, into pinned memory, so only the order is certain.
    """
    model = DataParallel(layers(8).cuda(), ["cuda:0", "cuda:0"])
    x = torch.randn(ROWS, WIDTH)
    x = x.pin_memory() if pinned else x
    with torch.no_grad():
        ran = traced(lambda: model(x), tmp_path)
    shards = [
        each for each in ran if each.kind == "gpu_memcpy" and each.num_bytes == SHARD_BYTES and "HtoD" in each.name
    ]
    kernels = [each for each in ran if each.kind == "kernel"]
    assert len(shards) == 2
    assert {shard.stream for shard in shards}.isdisjoint(kernel.stream for kernel in kernels)
    assert shards[0].end <= shards[1].begin
    if pinned:
        assert any(kernel.overlaps(shards[1]) for kernel in kernels), (shards, kernels[:5])


def test_gradients_are_summed_while_backward_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N10: the second replica has memory of its own; buckets are summed on another stream than what is computed."""
    layer_bytes = (WIDTH + 1) * WIDTH * 4
    use_small_buckets(monkeypatch, layer_bytes)
    monkeypatch.setattr(devices, "_has_separate_memory", True)
    num_layers = 8
    model = DataParallel(layers(num_layers).cuda(), ["cuda:0", "cuda:0"])
    x = torch.randn(ROWS // 8, WIDTH, device="cuda:0")
    losses: list[torch.Tensor] = []

    def backward() -> None:
        model.zero_grad()
        losses[:] = [model(x).pow(2).mean()]
        torch.accelerator.synchronize()
        losses[0].backward()

    ran = traced(backward, tmp_path)
    kernels = [each for each in ran if each.kind == "kernel"]
    ((computes, _),) = Counter(kernel.stream for kernel in kernels).most_common(1)
    computing = [kernel for kernel in kernels if kernel.stream == computes]
    sums = [kernel for kernel in kernels if kernel.stream != computes][-num_layers:]  # parameters come before
    assert len(sums) == num_layers, kernels[:5]
    early = [each for each in sums if each.end < max(kernel.end for kernel in computing)]
    assert len(early) >= num_layers - 2, (sums, computing[-5:])


@on_two_gpus
def test_the_first_device_needs_no_more_memory() -> None:
    """N10, A7: with the loss in the module and scalars="mean", at most 1.15 times what the others need for a step."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(32)))

    def active_bytes(device: torch.device, which: str) -> int:
        """Return what tensors have, and what is kept for streams that may still be reading it."""
        return int(torch.accelerator.memory_stats(device)[f"active_bytes.all.{which}"])

    model = DataParallel(Fn(lambda y: y.pow(2).mean(), blocks).cuda(), scalars="mean")
    x = torch.randn(8192 * len(model.device_ids), 1024)
    for _ in range(2):
        model.zero_grad()
        for device in model.devices:
            torch.accelerator.synchronize(device)
            torch.accelerator.reset_peak_memory_stats(device)
        before = [active_bytes(device, "current") for device in model.devices]
        model(x).backward()
        for device in model.devices:
            torch.accelerator.synchronize(device)
        peaks = [active_bytes(device, "peak") for device in model.devices]
    first, *others = (peak - then for peak, then in zip(peaks, before, strict=True))
    assert first <= 1.15 * max(others), (first, others)
