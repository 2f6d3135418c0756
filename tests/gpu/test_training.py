"""The training command on a GPU: what makes it fast is there, nothing waits, and the numbers are right.

Run by `make gpu-check`; skipped, visibly, where there is no GPU. It needs nothing but torch, and pictures of its own.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from helpers.accelerators import on_cuda, on_two_gpus
from helpers.commands import idx_bytes, steps_of
from helpers.plain_training import train_plainly
from unisono.console.errors import OptionError
from unisono.runtime.precision import float32_products
from unisono.training import data
from unisono.training.computation import expect_compiler
from unisono.training.loop import train
from unisono.training.metrics import StepRecord
from unisono.training.observers import Observer
from unisono.training.options import Options
from unisono.training.run import Run
from unisono.training.run_folder import RunFolder

pytestmark = on_cuda
CUDA = torch.device("cuda", 0)
NUM_ROWS, SIDE, NUM_CLASSES = 512, 8, 4
BATCH_SIZE = 64
STEPS_PER_EPOCH = NUM_ROWS // BATCH_SIZE


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """IDX files of noise with one bright quarter, whose number is the label."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "t10k"):
        labels = torch.arange(NUM_ROWS) % NUM_CLASSES
        rows = torch.randint(0, 160, (NUM_ROWS, SIDE, SIDE), generator=generator)
        for row, label in zip(rows, labels.tolist(), strict=True):
            row[SIDE // 2 * (label // 2) :, SIDE // 2 * (label % 2) :][: SIDE // 2, : SIDE // 2] += 60
        for kind, tensor in ((f"{split}-images-idx3-ubyte", rows), (f"{split}-labels-idx1-ubyte", labels)):
            (folder / kind).write_bytes(idx_bytes(tensor))
    return folder


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Run]]:
    """The runs that would have been saved; nothing is saved or drawn, which would need more than torch."""
    kept: list[Run] = []

    def save(run: Run) -> None:
        kept.append(run)

    monkeypatch.setattr(Run, "save", save)
    monkeypatch.setattr(Run, "draw", lambda run: None)
    yield kept
    torch.cuda.set_sync_debug_mode("default")


def options_for(pictures: Path, **changes: Any) -> Options:
    return replace(Options(data=str(pictures), devices="cuda:0", epochs=2, batch_size=BATCH_SIZE), **changes)


def losses_of(folder: RunFolder) -> list[float]:
    return [step["loss"] for step in steps_of(folder.metrics)]


class NoWaiting(Observer):
    """Makes whatever waits for the GPU an error, from the second step of an epoch to the last but one."""

    def __init__(self, first_epoch: int = 1) -> None:
        self._first_epoch = first_epoch

    def step(self, record: StepRecord) -> None:
        step_in_epoch = (record.step - 1) % STEPS_PER_EPOCH + 1
        within = record.epoch >= self._first_epoch and 1 < step_in_epoch < STEPS_PER_EPOCH - 1
        torch.cuda.set_sync_debug_mode("error" if within else "default")


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_what_makes_it_fast(tmp_path: Path, runs: list[Run], pictures: Path, precision: str) -> None:
    """No step waits; data, layout and optimizer are what the precision asks for."""
    folder = RunFolder.for_new_run(tmp_path / "run")
    train(options_for(pictures, precision=precision), folder, observers={"no waiting": NoWaiting()})
    run = runs[-1]
    assert run.dataset.train_images.is_cuda
    assert run.computation._fused
    weights = [m.weight for m in run.live.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    inner = [weight for weight in weights if weight.size(1) > 1]
    assert inner
    expected = precision != "fp32"
    assert all(weight.is_contiguous(memory_format=torch.channels_last) == expected for weight in inner)


@pytest.mark.parametrize("fits", [True, False], ids=["pictures there", "pictures on the host"])
def test_losses_are_those_of_torch_alone(
    tmp_path: Path, runs: list[Run], pictures: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """In exact float32: neither rounded, nor read before they are there. Rows and rates are the same; nothing waits."""
    monkeypatch.setattr("unisono.training.run.has_room_for", lambda device, num_bytes: fits)
    options = options_for(pictures, model="mlp", lr=0.01)
    folder = RunFolder.for_new_run(tmp_path / "run")
    train(options, folder, observers={"no waiting": NoWaiting()})
    assert runs[-1].dataset.train_images.is_cuda == fits
    with float32_products(CUDA, rounded=False):
        losses, _ = train_plainly(options, data.load(options.data).on(CUDA), CUDA)
    assert losses_of(folder) == pytest.approx(losses, rel=1e-4)


@pytest.fixture
def compiler() -> None:
    """Skips, visibly, where torch.compile does not work for the GPU."""
    try:
        expect_compiler(CUDA)
    except OptionError as error:
        pytest.skip(str(error))
    torch.compiler.reset()
    counters.clear()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_a_compiled_step_is_captured(tmp_path: Path, runs: list[Run], pictures: Path, compiler: None) -> None:
    """In CUDA graphs, of which torch skipped none; the losses are those of torch alone.

    No step waits from the second epoch on: in the first one, torch compiles, tries kernels and captures graphs.
    """
    options = options_for(pictures, model="mlp", lr=0.01, compile=True, epochs=3)
    folder = RunFolder.for_new_run(tmp_path / "run")
    train(options, folder, observers={"no waiting": NoWaiting(first_epoch=2)})
    assert counters["inductor"]["cudagraph_skips"] == 0
    with float32_products(CUDA, rounded=False):
        losses, _ = train_plainly(options, data.load(options.data).on(CUDA), CUDA)
    assert losses_of(folder) == pytest.approx(losses, rel=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_compiled_in_bf16_it_is_as_accurate(tmp_path: Path, runs: list[Run], pictures: Path, compiler: None) -> None:
    accuracies = []
    for changes in ({}, {"precision": "bf16", "compile": True}):
        torch.compiler.reset()
        folder = RunFolder.for_new_run(tmp_path / str(len(accuracies)))
        accuracies.append(
            train(options_for(pictures, model="mlp", epochs=4, **changes), folder).metrics.epochs[-1].test_accuracy
        )
    assert accuracies[0] > 0.6
    assert accuracies[1] == pytest.approx(accuracies[0], abs=0.03)


@on_two_gpus
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_two_gpus_train_as_one(tmp_path: Path, runs: list[Run], pictures: Path, precision: str) -> None:
    """Synchronised batch norm over both: as one replica, within what float32 loses in a few steps."""
    losses = []
    for devices in ("cuda:0", "cuda:0,cuda:1"):
        folder = RunFolder.for_new_run(tmp_path / str(len(losses)))
        options = options_for(pictures, devices=devices, precision=precision, lr=0.001, epochs=1)
        train(options, folder)
        losses.append(losses_of(folder))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2 if precision == "fp32" else 1e-1)


def test_a_run_that_goes_on_elsewhere(tmp_path: Path, pictures: Path) -> None:
    """On the CPU for an epoch, then on the GPU: the losses are those of a run that was there all the time."""
    for name in ("safetensors", "matplotlib"):
        pytest.importorskip(name)
    options = options_for(pictures, model="mlp", lr=0.01, precision="tf32")
    whole, parts = (RunFolder.for_new_run(tmp_path / name) for name in ("whole", "parts"))
    train(options, whole)
    train(replace(options, devices="cpu", epochs=1), parts)
    train(options, parts, resume=True)
    assert losses_of(parts) == pytest.approx(losses_of(whole), rel=2e-2)
