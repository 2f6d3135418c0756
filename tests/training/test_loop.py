"""Trainings of a perceptron on digits, which take a second each."""

import contextlib
import json
import math
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch._dynamo.testing import CompileCounterWithBackend

from helpers import commands as records
from helpers.host_waits import noted_on_simulated_devices
from helpers.plain_training import train_plainly
from unisono.console.errors import DivergedError, Interrupted, OptionError
from unisono.console.progress import Progress
from unisono.profiling.profile import Profile
from unisono.training import checkpoint, data, loop, models
from unisono.training import run as run_module
from unisono.training.loop import evaluate, train
from unisono.training.metrics import StepRecord
from unisono.training.observers import Observer
from unisono.training.options import Options
from unisono.training.ranks import ALONE
from unisono.training.run import Run
from unisono.training.run_folder import RunFolder

SMALL = Options(model="mlp", devices="cpu*2", epochs=2)  # 12 steps an epoch
# Of 360 test rows: where two answers of a row are equal within rounding, either may win.
ONE_ROW = 1.01 / 360


class Recorder(Progress, Observer):
    """Keeps what it is shown and told, and raises Ctrl-C after a step."""

    def __init__(self, stop_after: int = 0) -> None:
        self.said: list[str] = []
        self.steps_in_epoch: list[int] = []
        self.replicas: list[str] = []
        self._stop_after = stop_after

    def say(self, line: str) -> None:
        self.said.append(line)

    def begin(self, task: str, total: int | None = None) -> None:
        self.said.append(task)

    def update(self, task: str, done: int, total: int | None, text: str, details: str = "") -> None:
        self.steps_in_epoch.append(done)
        self.replicas.append(details)

    def step(self, record: StepRecord) -> None:
        if record.step == self._stop_after:
            signal.raise_signal(signal.SIGINT)


def metrics_of(folder: RunFolder) -> list[dict[str, Any]]:
    return records.metrics_of(folder.metrics)


def losses_of(folder: RunFolder) -> list[float]:
    return [line["loss"] for line in records.steps_of(folder.metrics)]


def assert_same_run(folder: RunFolder, other: RunFolder) -> None:
    assert metrics_of(folder) == metrics_of(other)
    assert folder.model.read_bytes() == other.model.read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of two epochs that nothing has disturbed."""
    folder = RunFolder.for_new_run(tmp_path_factory.mktemp("uninterrupted"))
    train_on(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.for_new_run(tmp_path)


def train_on(folder: RunFolder, *, resume: bool = False, stop_after: int = 0, **changes: Any) -> Recorder:
    """Train, with these changes of the options, until Ctrl-C after a step or to the end; return what was shown."""
    recorder = Recorder(stop_after)
    ends = pytest.raises(Interrupted) if stop_after else contextlib.nullcontext()
    # Most of the time of such a run would go into its picture, which those that call `train` themselves have.
    with patch.object(Run, "draw"), ends:
        train(replace(SMALL, **changes), folder, recorder, observers={"recorder": recorder}, resume=resume)
    return recorder


def test_a_run_leaves_its_results(folder: RunFolder) -> None:
    display = Recorder()
    run = train(SMALL, folder, display)

    names = {path.name for path in folder.path.iterdir()} - {".lock"}
    assert names == {path.name for path in folder._files()} - {"timeline.json", "timeline.png"}
    assert folder.curves.read_bytes().startswith(b"\x89PNG")
    lines = metrics_of(folder)
    steps = [line for line in lines if line["kind"] == "step"]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["step"] for line in steps] == list(range(1, 25))
    assert {line["rows"] for line in steps} == {119, 120}
    assert sum(line["rows"] for line in steps) == 2 * 1437
    assert [line["epoch"] for line in epochs] == [1, 2]
    assert epochs[1]["train_loss"] == pytest.approx(
        sum(line["loss"] * line["rows"] for line in steps[12:]) / 1437, rel=1e-12
    )
    assert epochs[1]["test_loss"] < epochs[0]["test_loss"]
    assert run.summary()[0].startswith(f"test accuracy {epochs[1]['test_accuracy']:.4f}, ")
    assert f"epoch 2/2: train loss {epochs[1]['train_loss']:.4f}, test accuracy" in display.said[-1]

    config = json.loads(folder.config.read_text())
    assert Options(**config["options"]) == SMALL
    assert config["devices"] == ["cpu", "cpu"]


def test_the_weights_have_clean_names_and_the_accuracy_that_was_printed(uninterrupted: RunFolder) -> None:
    digits = data.load("digits")
    model = models.build("mlp", num_classes=10, image_shape=digits.image_shape)
    model.load_state_dict(safetensors.torch.load_file(uninterrupted.model))
    with torch.no_grad():
        logits = model(digits.test_images)
    last = metrics_of(uninterrupted)[-1]
    accuracy = (logits.argmax(1) == digits.test_labels).double().mean().item()
    assert accuracy == pytest.approx(last["test_accuracy"], abs=ONE_ROW)
    assert F.cross_entropy(logits, digits.test_labels).item() == pytest.approx(last["test_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "replicas"),
    [
        ({"devices": "1"}, []),
        ({"devices": "cpu*3"}, ["cpu 40 rows"] * 3),
    ],
)
def test_losses_do_not_depend_on_devices(uninterrupted, folder, changes, replicas):
    display = train_on(folder, **changes)
    losses, expected = losses_of(folder), losses_of(uninterrupted)
    assert losses[:20] == pytest.approx(expected[:20], rel=1e-5)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert re.findall(r"cpu \d+ rows(?= \d+ ms)", display.replicas[0]) == replicas


@pytest.mark.parametrize(
    ("ahead", "shown", "stopped"),
    [(0, 12, 12), (1, 1, 2), (1, 12, 12), (1, 22, 23)],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(uninterrupted, folder, monkeypatch, ahead, shown, stopped):
    """One step ahead, as on accelerators: when step 1 is shown, step 2 has been queued, and is saved too.

    Step 12 ends an epoch, and is shown when no step is pending.
    """
    monkeypatch.setattr(Run, "steps_ahead", ahead)
    display = train_on(folder, stop_after=shown)
    assert display.said[-1] == f"stopped after step {stopped}; to resume: unisono train --resume {folder}"
    assert len(losses_of(folder)) == stopped
    torch.manual_seed(99)  # as if something else had happened in between

    resumed = train_on(folder, resume=True)
    assert display.steps_in_epoch + resumed.steps_in_epoch == [*range(1, 13)] * 2
    assert_same_run(folder, uninterrupted)


def test_a_stop_during_the_evaluation_evaluates_again(uninterrupted, folder, monkeypatch):
    def stopped(run: Run) -> tuple[float, float]:
        signal.raise_signal(signal.SIGTERM)
        return evaluate(run)

    monkeypatch.setattr(loop, "evaluate", stopped)
    with pytest.raises(Interrupted) as caught:
        train_on(folder)
    monkeypatch.undo()
    assert caught.value.received == signal.SIGTERM
    assert [line["kind"] for line in metrics_of(folder)] == ["step"] * 12
    train_on(folder, resume=True)
    assert metrics_of(folder) == metrics_of(uninterrupted)


def test_a_finished_run_has_nothing_left_to_do(uninterrupted: RunFolder, folder: RunFolder) -> None:
    """T1: but to write weights and picture. Killed between checkpoint and these, they stayed those of before."""
    shutil.copytree(uninterrupted.path, folder.path, dirs_exist_ok=True)
    for path in (folder.model, folder.curves):
        path.write_bytes(b"of the epoch before")
    display = Recorder()
    run = train(SMALL, folder, display, resume=True)
    assert display.steps_in_epoch == []
    assert display.said[-1] == "nothing left to do: 2 epochs are finished; to continue: --epochs 4"
    assert run.summary()[0].startswith(f"test accuracy {metrics_of(folder)[-1]['test_accuracy']:.4f}, ")
    assert_same_run(folder, uninterrupted)
    assert folder.curves.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("ahead", "spoilt", "stop_after", "message"),
    [
        (0, 3, 0, r"loss is (nan|inf) in step 4 \(epoch 1\), at learning rate 0.01.*earlier checkpoints stay in"),
        (0, 12, 0, r"the test loss is (nan|inf) after epoch 1"),
        (
            0,
            15,
            0,
            r"in step 16 \(epoch 2\).*start again with a lower rate \(--lr 0.025, .* earlier checkpoints stay in",
        ),
        (1, 15, 0, r"the training loss is (nan|inf) in step 16 \(epoch 2\).* earlier checkpoints stay in"),
        (1, 15, 15, r"the training loss is (nan|inf) in step 16 \(epoch 2\).* earlier checkpoints stay in"),
    ],
)
def test_a_loss_that_is_no_number_stops_the_run(folder, monkeypatch, ahead, spoilt, stop_after, message):
    """Nothing after it is recorded or saved, also where the run is stopped or saved before the loss has been read."""
    monkeypatch.setattr(Run, "steps_ahead", ahead)
    monkeypatch.setattr(run_module, "_SAVE_EVERY_S", 0.0 if ahead else math.inf)
    monkeypatch.setattr(loop, "learning_rate", lambda step, **_: 1e30 if step + 1 == spoilt else 0.01)
    with pytest.raises(DivergedError, match=message):
        train_on(folder, stop_after=stop_after)
    assert len(losses_of(folder)) == spoilt
    if folder.checkpoint.exists():
        saved = checkpoint.read(folder)
        assert all(tensor.isfinite().all() for tensor in (*saved.model.values(), *saved.momenta.values()))


@pytest.mark.parametrize("ahead", [0, 1])
def test_long_epochs_are_saved_in_between_with_all_steps(folder, monkeypatch, ahead):
    """T2: and before the first step. Killed there, a run could not be resumed."""
    monkeypatch.setattr(Run, "steps_ahead", ahead)
    monkeypatch.setattr(run_module, "_SAVE_EVERY_S", 0.0)
    saved = []
    save = Run.save

    def note(run: Run) -> None:
        save(run)
        lines = checkpoint.read(run.folder).metrics
        saved.append((lines.count(b'"kind": "step"'), run.metrics.num_steps))

    monkeypatch.setattr(Run, "save", note)
    train_on(folder, epochs=1)
    assert saved[:3] == ([(0, 0), (1, 1), (2, 2)] if ahead == 0 else [(0, 0), (2, 2), (4, 4)])
    assert all(steps == recorded for steps, recorded in saved)


# Older releases of torch warn of autocast that is off, too.
@pytest.mark.filterwarnings("ignore:In sim autocast, but the target dtype:UserWarning")
def test_an_accelerator_that_has_room_for_the_data_is_waited_for_once_a_step(uninterrupted, folder, monkeypatch, sim):
    """Copied from the host is the order of an epoch's rows; read are the loss of each step, and the sums of a test."""
    monkeypatch.setattr("unisono.training.run.has_room_for", lambda device, num_bytes: True)
    options = replace(SMALL, devices="1")
    begun = Run(options, folder, Recorder(), ALONE, {}, resume=False, profile=False)
    with contextlib.closing(folder), contextlib.closing(begun) as run, noted_on_simulated_devices() as noted:
        assert {tensor.device for tensor in (run.dataset.train_images, run.dataset.test_labels)} == {sim[0]}
        loop._train_epoch(run, 0)
        assert noted.waits == ["copy_, cpu to sim:0"] + ["aten._local_scalar_dense.default"] * 12
        noted.waits.clear()
        evaluate(run)
        assert noted.waits == ["tolist"]
    losses = losses_of(folder)
    assert losses == pytest.approx(losses_of(uninterrupted)[: len(losses)], rel=1e-4)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """What has been compiled, by a compiler that makes nothing faster and takes no time."""
    counter = CompileCounterWithBackend("eager")
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda what, mode=None, **how: compile_it(what, backend=counter, **how))
    monkeypatch.setattr(run_module, "expect_compiler", lambda device: None)
    torch.compiler.reset()
    yield counter
    torch.compiler.reset()


@pytest.mark.parametrize(("devices", "num_graphs"), [("1", 4), ("cpu*3", 3)])
def test_each_size_is_compiled_once(uninterrupted, folder, graphs, devices, num_graphs):
    """Steps of 120 and 119 rows, shared by the replicas, and tests of 120; on one replica the update, too."""
    display = train_on(folder, devices=devices, compile=True)
    if devices == "1" or hasattr(torch._C._dynamo.eval_frame, "_set_lru_cache"):
        assert graphs.frame_count == num_graphs
    else:  # replicas that look for their code at the same moment may compile it again
        assert graphs.frame_count >= num_graphs
    records.assert_same_metrics(folder.metrics, uninterrupted.metrics, rel=1e-4)
    assert len([line for line in display.said if line.startswith("compiling the model: ")]) == 1
    assert folder.model.stat().st_size == uninterrupted.model.stat().st_size


def test_a_compiled_run_that_was_stopped_goes_on_to_the_same_numbers(tmp_path, graphs):
    """Momenta come back. All steps have one size, for which they are compiled."""
    whole, parts = (RunFolder.for_new_run(tmp_path / name) for name in ("whole", "parts"))
    how: dict[str, Any] = {"devices": "1", "compile": True, "batch_size": 1437, "epochs": 3}
    train_on(whole, **how)
    torch.compiler.reset()  # torch keeps a few versions of a function, and each run makes its own
    train_on(parts, stop_after=2, **how)
    torch.compiler.reset()
    train_on(parts, resume=True, **how)
    assert graphs.frame_count == 3 * 3
    assert_same_run(parts, whole)


def test_the_plain_loop_has_the_same_losses(uninterrupted: RunFolder) -> None:
    losses, accuracy = train_plainly(SMALL, data.load("digits"))
    assert losses_of(uninterrupted) == pytest.approx(losses, rel=1e-5)
    assert metrics_of(uninterrupted)[-1]["test_accuracy"] == pytest.approx(accuracy, abs=ONE_ROW)


@pytest.mark.parametrize(("precision", "rounded"), [("fp32", False), ("tf32", True), ("bf16", True)])
def test_what_a_precision_rounds(uninterrupted, folder, monkeypatch, precision, rounded):
    """fp32 is exact; with bf16, what stays in float32 is computed as with tf32, which the CPU does not have."""
    products = Mock(return_value=contextlib.nullcontext())
    monkeypatch.setattr(loop, "float32_products", products)
    train_on(folder, precision=precision)
    products.assert_called_once_with(torch.device("cpu"), rounded=rounded)
    assert (losses_of(folder) == losses_of(uninterrupted)) == (precision != "bf16")
    assert losses_of(folder) == pytest.approx(losses_of(uninterrupted), rel=0.05)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_compiler_that_fails_in_a_step(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    """One line; after Ctrl-C, which reaches the programs that it has started too, as after any other Ctrl-C."""

    def fails(*_: object) -> None:
        if interrupted:
            signal.raise_signal(signal.SIGINT)
        raise InternalTorchDynamoError("g++ was ended")

    monkeypatch.setattr(loop, "_train_epoch", fails)
    display = Recorder()
    expected = pytest.raises(Interrupted) if interrupted else pytest.raises(OptionError, match=r"g\+\+ was ended")
    with expected:
        train(SMALL, folder, display)
    assert any("stopped while compiling" in line for line in display.said) == interrupted


def conv_with_batch_norm(*_: object, **__: object) -> nn.Module:
    # Tanh: a ReLU has a kink, and there rounding decides which gradient is passed on.
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(288, 10))


def losses_with(path: Path, **changes: Any) -> list[float]:
    """Return the losses of an epoch."""
    folder = RunFolder.for_new_run(path / str(changes))
    train_on(folder, epochs=1, **changes)
    return losses_of(folder)


def test_a_profiled_run_has_the_same_numbers(uninterrupted, folder, tmp_path):
    """T9: and its files are of the steps of the last epoch, also where the run goes on in two parts."""
    train(replace(SMALL, epochs=1), folder, profile=True)
    run = train(SMALL, RunFolder.reopen(folder.path), resume=True, profile=True)
    assert_same_run(folder, uninterrupted)
    assert sum(sum(step.rows.values()) for step in run.profile.steps()) == 1437
    events = json.loads(folder.trace.read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == set(range(12))
    assert folder.timeline.read_bytes().startswith(b"\x89PNG")


def test_a_profile_of_no_steps_leaves_no_files(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """T9: as where a step is compiled as a whole, so that the model is not called."""
    monkeypatch.setattr(Profile, "steps", lambda profile: [])
    run = train(replace(SMALL, epochs=1), folder, profile=True)
    assert str(run.profile).startswith("nothing was profiled")
    assert not folder.trace.exists()
    assert not folder.timeline.exists()


def test_batch_norm_sees_the_rows_of_all_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are those of one device; by torch's rule they are not."""
    monkeypatch.setattr(models, "build", conv_with_batch_norm)
    alone = pytest.approx(losses_with(tmp_path, devices="cpu"), rel=1e-4)
    assert losses_with(tmp_path) == alone
    assert losses_with(tmp_path, sync_batch_norm=False) != alone


@pytest.mark.parametrize(
    ("batch_size", "synchronised", "message", "enough_rows"),
    [
        (2, False, r" 2 on 2 replicas \(2 x cpu\) .* use --batch-size 8$", 8),
        (1, True, r" 1 on .* leaves a single row .*: use --batch-size 4$", 4),
    ],
)
def test_a_single_row_for_batch_norm_is_explained(
    folder, tmp_path, monkeypatch, batch_size, synchronised, message, enough_rows
):
    with_batch_norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    monkeypatch.setattr(models, "build", lambda *_, **__: with_batch_norm)
    # Small data: the runs with enough rows take hundreds of steps on digits.
    pictures, labels = torch.randint(256, (41, 8, 8)), torch.arange(41) % 10
    records.write_idx(tmp_path, [pictures, labels, pictures, labels])
    how = {"sync_batch_norm": synchronised, "data": str(tmp_path), "epochs": 1}
    with pytest.raises(OptionError, match=f"--batch-size{message}"):
        train_on(folder, batch_size=batch_size, **how)
    train_on(folder, batch_size=enough_rows, **how)


def test_what_cannot_be_set_up_leaves_the_earlier_run_alone(uninterrupted: RunFolder) -> None:
    before = {path: path.read_bytes() for path in uninterrupted.path.iterdir()}
    with pytest.raises(OptionError):
        train(replace(SMALL, devices="gpu"), RunFolder.for_new_run(uninterrupted.path, overwrite=True))
    with pytest.raises(data.DataError):
        train(replace(SMALL, data="/nowhere"), uninterrupted)
    assert {path: path.read_bytes() for path in uninterrupted.path.iterdir()} == before
