"""Trainings of a perceptron on digits, which take a second each."""

import contextlib
import json
import math
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.rounding import rounding_bound
from manyhands.console.errors import DivergedError, Interrupted, OptionError
from manyhands.training import data, loop, models, under_way
from manyhands.training import run as run_module
from manyhands.training.interrupts import StopRequest
from manyhands.training.loop import evaluate, train
from manyhands.training.options import Options
from manyhands.training.run import Run, describe
from manyhands.training.run_folder import RunFolder
from manyhands.training.schedule import epoch_batches
from manyhands.training.work import StepReport

SMALL = Options(model="mlp", devices="cpu*2", epochs=2)  # 12 steps an epoch
# Of 360 test rows: where two answers of a row are equal within rounding, either may win.
ONE_ROW = 1.01 / 360


class Recorder:
    """A display that keeps what it is told, and can act on a step."""

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        self.said: list[str] = []
        self.reports: list[StepReport] = []
        self._on_step = on_step

    def say(self, line: str) -> None:
        self.said.append(line)

    def busy(self, what: str) -> None:
        self.said.append(what)

    def step(self, report: StepReport) -> None:
        self.reports.append(report)
        self._on_step(report.record.step)

    def download(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        raise AssertionError("digits need no download")

    def close(self) -> None:
        pass


def ctrl_c_after(step: int) -> Recorder:
    return Recorder(lambda now: signal.raise_signal(signal.SIGINT) if now == step else None)


def new_folder(path: Path) -> RunFolder:
    return RunFolder.for_new_run(path)


def metrics_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what differs from run to run: the time."""
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


def losses_of(folder: RunFolder) -> list[float]:
    return [line["loss"] for line in metrics_of(folder) if line["kind"] == "step"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of two epochs that nothing has disturbed."""
    folder = new_folder(tmp_path_factory.mktemp("uninterrupted"))
    train(SMALL, folder, Recorder())
    return folder


def test_a_run_leaves_its_results(tmp_path: Path) -> None:
    folder, display = new_folder(tmp_path), Recorder()
    outcome = train(SMALL, folder, display)

    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == [
        "checkpoint.previous.pt",
        "checkpoint.pt",
        "config.json",
        "curves.png",
        "metrics.jsonl",
        "model.safetensors",
    ]
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
    assert outcome.test_accuracy == epochs[1]["test_accuracy"]
    assert outcome.places == [[torch.device("cpu")] * 2]

    assert [share.rows for share in display.reports[0].shares] == [60, 60]
    assert all(share.seconds > 0 for report in display.reports for share in report.shares)
    assert f"epoch 2/2: train loss {epochs[1]['train_loss']:.4f}, test accuracy" in display.said[-1]

    config = json.loads(folder.config.read_text())
    assert Options(**config["options"]) == SMALL
    assert config["devices"] == ["cpu", "cpu"]


def test_the_weights_have_clean_names_and_the_accuracy_that_was_told(uninterrupted: RunFolder) -> None:
    digits = data.load("digits")
    model = models.build("mlp", num_classes=10, image_shape=digits.image_shape)
    model.load_state_dict(safetensors.torch.load_file(uninterrupted.model))
    with torch.no_grad():
        logits = model(digits.test_images)
    told = metrics_of(uninterrupted)[-1]
    accuracy = (logits.argmax(1) == digits.test_labels).double().mean().item()
    assert accuracy == pytest.approx(told["test_accuracy"], abs=ONE_ROW)
    assert F.cross_entropy(logits, digits.test_labels).item() == pytest.approx(told["test_loss"], rel=1e-5)


def test_equal_seeds_give_equal_runs(uninterrupted: RunFolder, tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    train(SMALL, folder, Recorder())
    assert metrics_of(folder) == metrics_of(uninterrupted)
    assert folder.model.read_bytes() == uninterrupted.model.read_bytes()


@pytest.mark.parametrize("devices", ["1", "cpu*3"])
def test_losses_do_not_depend_on_the_devices(uninterrupted: RunFolder, tmp_path: Path, devices: str) -> None:
    folder = new_folder(tmp_path)
    train(replace(SMALL, devices=devices), folder, Recorder())
    assert losses_of(folder)[:20] == pytest.approx(losses_of(uninterrupted)[:20], rel=1e-5)


def test_losses_do_not_depend_on_the_parts_of_a_batch(uninterrupted: RunFolder, tmp_path: Path) -> None:
    folder, display = new_folder(tmp_path), Recorder()
    train(replace(SMALL, accumulate=7), folder, display)
    assert losses_of(folder) == pytest.approx(losses_of(uninterrupted), rel=1e-4)
    assert sum(share.rows for share in display.reports[0].shares) == 120


def test_bfloat16_trains_to_other_numbers_nearby(uninterrupted: RunFolder, tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    train(replace(SMALL, precision="bf16"), folder, Recorder())
    assert losses_of(folder) != losses_of(uninterrupted)
    assert losses_of(folder) == pytest.approx(losses_of(uninterrupted), rel=0.05)


def test_the_learning_rate_warms_up_over_the_first_epoch(uninterrupted: RunFolder) -> None:
    rates = [line["learning_rate"] for line in metrics_of(uninterrupted) if line["kind"] == "step"]
    assert rates[:12] == pytest.approx([SMALL.lr * step / 12 for step in range(1, 13)])
    assert rates[12] == SMALL.lr
    assert rates[-1] < SMALL.lr / 10


@pytest.mark.parametrize("step", [1, 7, 12, 13, 23])
def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(
    uninterrupted: RunFolder, tmp_path: Path, step: int
) -> None:
    folder, display = new_folder(tmp_path), ctrl_c_after(step)
    with pytest.raises(Interrupted):
        train(SMALL, folder, display)
    assert display.said[-1] == f"stopped after step {step}; to go on: manyhands train --resume {tmp_path}"
    assert len(losses_of(folder)) == step
    torch.manual_seed(99)  # whatever happens in between

    resumed = Recorder()
    train(SMALL, folder, resumed, resume=True)
    assert resumed.reports[0].record.step == step + 1
    assert metrics_of(folder) == metrics_of(uninterrupted)
    assert folder.model.read_bytes() == uninterrupted.model.read_bytes()


def test_steps_after_the_checkpoint_are_taken_again(uninterrupted: RunFolder, tmp_path: Path) -> None:
    """As after a power cut: metrics.jsonl is further than the checkpoint, and that one is damaged besides."""
    folder = new_folder(tmp_path)
    with pytest.raises(Interrupted):
        train(SMALL, folder, ctrl_c_after(5))
    train(SMALL, folder, Recorder(), resume=True)
    folder.checkpoint.write_bytes(b"damaged")  # the one of the end; the one before is that after epoch 1
    with folder.metrics.open("a") as file:
        file.write('{"kind": "st')

    display = Recorder()
    train(SMALL, folder, display, resume=True)
    assert display.said[0].startswith("checkpoint.pt is damaged")
    assert display.said[0].endswith("using checkpoint.previous.pt, of step 12")
    assert display.reports[0].record.step == 13
    assert metrics_of(folder) == metrics_of(uninterrupted)


def test_a_stop_during_the_evaluation_evaluates_again(
    uninterrupted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(run: Run, stop: StopRequest) -> tuple[float, float]:
        signal.raise_signal(signal.SIGTERM)
        return evaluate(run, stop)

    folder = new_folder(tmp_path)
    monkeypatch.setattr(loop, "evaluate", stopped)
    with pytest.raises(Interrupted) as caught:
        train(SMALL, folder, Recorder())
    monkeypatch.undo()
    assert caught.value.received == signal.SIGTERM
    assert [line["kind"] for line in metrics_of(folder)] == ["step"] * 12
    train(SMALL, folder, Recorder(), resume=True)
    assert metrics_of(folder) == metrics_of(uninterrupted)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    first = train(replace(SMALL, epochs=1), folder, Recorder())
    before = folder.checkpoint.read_bytes()
    display = Recorder()
    assert train(replace(SMALL, epochs=1), folder, display, resume=True) == first
    assert display.reports == []
    assert folder.checkpoint.read_bytes() == before


def test_a_finished_run_can_be_made_longer_and_moved(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    train(replace(SMALL, epochs=1), folder, Recorder())
    display = Recorder()
    train(replace(SMALL, devices="cpu*3"), folder, display, resume=True)
    assert [report.record.step for report in display.reports] == list(range(13, 25))
    assert len(display.reports[0].shares) == 3
    assert json.loads(folder.config.read_text())["devices"] == ["cpu"] * 3


def test_evaluation_counts_every_row_once_on_all_replicas(tmp_path: Path) -> None:
    run = Run.begin(replace(SMALL, batch_size=100), new_folder(tmp_path), Recorder())
    seen: list[torch.Tensor] = []
    run.live.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with StopRequest() as stop:
        loss, accuracy = evaluate(run, stop)
    run.close()

    assert sorted(len(rows) for rows in seen) == [30, 30, 50, 50, 50, 50, 50, 50]
    images, labels = run.dataset.test_images, run.dataset.test_labels
    as_rows = lambda tensor: sorted(map(tuple, tensor.flatten(1).tolist()))  # noqa: E731
    assert as_rows(torch.cat(seen)) == as_rows(images)
    run.live.eval()
    with torch.no_grad():
        logits = run.live(images)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert accuracy == pytest.approx((logits.argmax(1) == labels).double().mean().item(), abs=ONE_ROW)


def spoil_step(number: int) -> Callable[..., float]:
    """Return a schedule whose rate in one step, counted from 1, is far too high."""
    return lambda step, **_: 1e30 if step + 1 == number else 0.01


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (3, r"the training loss is (nan|inf) in step 4 \(epoch 1\), at learning rate 0.01.*nothing had been saved yet"),
        (12, r"the test loss is (nan|inf) after epoch 1"),
        (
            15,
            r"in step 16 \(epoch 2\).*start again with a lower rate \(--lr 0.025\).*checkpoint of step 12 stays",
        ),
    ],
)
def test_a_loss_that_is_no_number_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: int, message: str
) -> None:
    monkeypatch.setattr(loop, "learning_rate", spoil_step(spoilt))
    folder = new_folder(tmp_path)
    with pytest.raises(DivergedError, match=message):
        train(SMALL, folder, Recorder())
    if folder.checkpoint.exists():
        weights = torch.load(folder.checkpoint, weights_only=True)["model"].values()
        assert all(tensor.isfinite().all() for tensor in weights)


@pytest.fixture
def one_step_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are read a step later, as on accelerators."""
    monkeypatch.setattr(Run, "steps_ahead", 1)


@pytest.mark.usefixtures("one_step_ahead")
def test_losses_that_are_read_a_step_later_are_the_same(uninterrupted: RunFolder, tmp_path: Path) -> None:
    folder, display = new_folder(tmp_path), Recorder()
    train(SMALL, folder, display)
    assert metrics_of(folder) == metrics_of(uninterrupted)
    assert folder.model.read_bytes() == uninterrupted.model.read_bytes()
    assert [report.step_in_epoch for report in display.reports] == [*range(1, 13)] * 2


@pytest.mark.usefixtures("one_step_ahead")
@pytest.mark.parametrize(("told", "stopped"), [(1, 2), (7, 8), (11, 12), (12, 12), (22, 23)])
def test_a_step_that_is_under_way_when_the_run_is_stopped_is_saved_too(
    uninterrupted: RunFolder, tmp_path: Path, told: int, stopped: int
) -> None:
    """When step 1 is shown, step 2 has been taken; the signal comes then, and is seen before step 3.

    Step 12 ends an epoch, and is shown when nothing is under way.
    """
    folder, display = new_folder(tmp_path), ctrl_c_after(told)
    with pytest.raises(Interrupted):
        train(SMALL, folder, display)
    assert display.said[-1].startswith(f"stopped after step {stopped};")
    assert len(losses_of(folder)) == stopped
    train(SMALL, folder, Recorder(), resume=True)
    assert metrics_of(folder) == metrics_of(uninterrupted)
    assert folder.model.read_bytes() == uninterrupted.model.read_bytes()


@pytest.mark.usefixtures("one_step_ahead")
@pytest.mark.parametrize("stop", [False, True])
def test_a_loss_that_turns_out_to_be_no_number_a_step_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    """Nothing after it is recorded or saved, also where the run is stopped or saved before the loss has been read."""
    monkeypatch.setattr(loop, "learning_rate", spoil_step(15))
    monkeypatch.setattr(under_way, "_SAVE_EVERY_S", 0.0)
    folder = new_folder(tmp_path)
    with pytest.raises(
        DivergedError, match=r"the training loss is (nan|inf) in step 16 \(epoch 2\).* of step \d+ stays"
    ):
        train(SMALL, folder, ctrl_c_after(15) if stop else Recorder())
    assert [line["step"] for line in metrics_of(folder) if line["kind"] == "step"] == list(range(1, 16))
    weights = torch.load(folder.checkpoint, weights_only=True)["model"].values()
    assert all(tensor.isfinite().all() for tensor in weights)


@pytest.mark.usefixtures("one_step_ahead")
def test_long_epochs_are_saved_in_between_with_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "_SAVE_EVERY_S", 0.0)
    saved = []
    keep = Run.keep

    def note(run: Run) -> None:
        keep(run)
        saved.append((torch.load(run.folder.checkpoint, weights_only=True)["steps"], len(run.metrics.steps)))

    monkeypatch.setattr(Run, "keep", note)
    train(replace(SMALL, epochs=1), new_folder(tmp_path), Recorder())
    assert saved[0] == (2, 2)
    assert all(steps == recorded for steps, recorded in saved)


def test_data_that_fit_are_trained_on_where_the_model_is(
    uninterrupted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sim: list[torch.device]
) -> None:
    """On a simulated accelerator: nothing is copied from the host within an epoch but the order of the rows."""
    monkeypatch.setattr("manyhands.runtime.devices.has_room_for", lambda device, num_bytes: True)
    run = Run.begin(replace(SMALL, devices="1"), new_folder(tmp_path), Recorder())
    assert {tensor.device for tensor in (run.dataset.train_images, run.dataset.test_labels)} == {sim[0]}
    with contextlib.closing(run), StopRequest() as stop:
        loop._train_epoch(run, 0, under_way.UnderWay(run, Recorder()), Recorder(), stop)
        loss, accuracy = evaluate(run, stop)
    assert [record.loss for record in run.metrics.steps] == pytest.approx(losses_of(uninterrupted)[:12], rel=1e-4)
    (told,) = [line for line in metrics_of(uninterrupted) if line["kind"] == "epoch" and line["epoch"] == 1]
    assert loss == pytest.approx(told["test_loss"], rel=1e-4)
    assert accuracy == pytest.approx(told["test_accuracy"], abs=ONE_ROW)


class Waits(TorchDispatchMode):
    """Notes the operations that would wait for an accelerator: those whose result decides what the host does next."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            index.dtype is torch.bool for index in args[1] if isinstance(index, torch.Tensor)
        )
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_a_step_reads_its_loss_and_nothing_else(tmp_path: Path) -> None:
    run = Run.begin(replace(SMALL, devices="1", accumulate=3), new_folder(tmp_path), Recorder())
    with contextlib.closing(run), StopRequest() as stop:
        steps = under_way.UnderWay(run, Recorder())
        with Waits() as waits:
            loop._train_epoch(run, 0, steps, Recorder(), stop)
        assert waits.names == ["_local_scalar_dense"] * 12
        with Waits() as waits:
            evaluate(run, stop)
        assert waits.names == []


def test_tf32_on_the_cpu_is_float32(uninterrupted: RunFolder, tmp_path: Path) -> None:
    folder, display = new_folder(tmp_path), Recorder()
    train(replace(SMALL, precision="tf32"), folder, display)
    assert display.said[1] == "cpu has no TF32: float32 stays exact, as with --precision fp32"
    assert metrics_of(folder) == metrics_of(uninterrupted)


# ---- compiled ------------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """What has been compiled, by a compiler that makes nothing faster and takes no time."""
    counter = CompileCounterWithBackend("aot_eager")
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda what, **options: compile_it(what, backend=counter, **options))
    monkeypatch.setattr(run_module, "expect_compiler", lambda device: None)
    torch.compiler.reset()
    yield counter
    torch.compiler.reset()


@pytest.mark.parametrize(("devices", "sizes"), [("1", 2), ("cpu*2", 2), ("cpu*3", 2)])
def test_a_model_is_compiled_for_each_size_once(
    uninterrupted: RunFolder, tmp_path: Path, graphs: CompileCounterWithBackend, devices: str, sizes: int
) -> None:
    """Steps of 120 and 119 rows, shared by the replicas; test batches of other sizes are not compiled."""
    folder, display = new_folder(tmp_path), Recorder()
    train(replace(SMALL, devices=devices, compile=True), folder, display)
    assert graphs.frame_count == sizes
    assert losses_of(folder) == pytest.approx(losses_of(uninterrupted), rel=1e-4)
    busy = [line for line in display.said if line.startswith("compiling")]
    assert busy == [f"compiling the model for steps of {rows} rows" for rows in (120, 119)]
    assert json.loads(folder.config.read_text())["options"]["compile"]
    assert folder.model.stat().st_size == uninterrupted.model.stat().st_size


def test_a_compiled_run_goes_on_uncompiled_and_the_reverse(
    uninterrupted: RunFolder, tmp_path: Path, graphs: CompileCounterWithBackend
) -> None:
    folder = new_folder(tmp_path)
    with pytest.raises(Interrupted):
        train(replace(SMALL, compile=True), folder, ctrl_c_after(5))
    assert graphs.frame_count == 1
    with pytest.raises(Interrupted):
        train(SMALL, folder, ctrl_c_after(13), resume=True)
    assert graphs.frame_count == 1
    train(replace(SMALL, compile=True), folder, Recorder(), resume=True)
    assert losses_of(folder) == pytest.approx(losses_of(uninterrupted), rel=1e-4)


def test_a_batch_norm_that_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: CompileCounterWithBackend
) -> None:
    """On one device there is nothing to synchronise; on two, synchronised, it is refused before anything is done."""
    monkeypatch.setattr(models, "build", conv_with_batch_norm)
    losses = {}
    for compile_it in (False, True):
        folder = new_folder(tmp_path / str(compile_it))
        train(replace(SMALL, devices="1", epochs=1, compile=compile_it), folder, Recorder())
        losses[compile_it] = losses_of(folder)
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    assert graphs.frame_count == 2
    with pytest.raises(OptionError, match="--no-sync-batch-norm or --devices 1, or leave out --compile"):
        train(replace(SMALL, compile=True), new_folder(tmp_path / "two"), Recorder())
    assert not (tmp_path / "two" / "metrics.jsonl").exists()
    train(replace(SMALL, compile=True, sync_batch_norm=False, epochs=1), new_folder(tmp_path / "two"), Recorder())


def plain_float32_loop(options: Options) -> tuple[list[float], float]:
    """Return the losses and the test accuracy of training without manyhands' loop, wrapper or options."""
    digits = data.load("digits")
    torch.manual_seed(options.seed)
    model = models.build(options.model, num_classes=10, image_shape=digits.image_shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)
    losses = []
    for epoch in range(options.epochs):
        for rows in epoch_batches(1437, options.batch_size, seed=options.seed, epoch=epoch):
            step, steps = len(losses), 12 * options.epochs
            warm_up, rest = (step + 1) / 12, 0.5 + 0.5 * math.cos(math.pi * (step - 12) / (steps - 12))
            optimizer.param_groups[0]["lr"] = 0.05 * (warm_up if step < 12 else rest)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(digits.train_images[rows]), digits.train_labels[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        correct = model(digits.test_images).argmax(1) == digits.test_labels
    return losses, correct.double().mean().item()


def test_the_plain_loop_has_the_same_losses(uninterrupted: RunFolder) -> None:
    losses, accuracy = plain_float32_loop(SMALL)
    assert losses_of(uninterrupted) == pytest.approx(losses, rel=1e-5)
    assert metrics_of(uninterrupted)[-1]["test_accuracy"] == pytest.approx(accuracy, abs=ONE_ROW)


@pytest.mark.parametrize(("precision", "expected"), [("fp32", False), ("tf32", True), ("bf16", True)])
def test_what_is_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, expected: bool) -> None:
    """fp32 is exact; with bf16, what stays in float32 is computed as with tf32."""
    asked: list[bool] = []

    def noting(device: torch.device, *, rounded: bool) -> contextlib.AbstractContextManager[None]:
        asked.append(rounded)
        return contextlib.nullcontext()

    monkeypatch.setattr(loop.devices, "float32_products", noting)
    train(replace(SMALL, precision=precision, epochs=1), new_folder(tmp_path), Recorder())
    assert asked == [expected]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_compiler_that_fails_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    """One line; after Ctrl-C, which reaches the programs that it has started too, as after any other Ctrl-C."""

    def fails(*_: object) -> None:
        if interrupted:
            signal.raise_signal(signal.SIGINT)
        raise InternalTorchDynamoError("g++ was ended")

    monkeypatch.setattr(loop, "_train_epoch", fails)
    display = Recorder()
    expected = pytest.raises(Interrupted) if interrupted else pytest.raises(OptionError, match=r"g\+\+ was ended")
    with expected:
        train(SMALL, new_folder(tmp_path), display)
    assert any("stopped while compiling" in line for line in display.said) == interrupted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_bfloat16_compiled_is_as_accurate_as_a_plain_float32_loop(tmp_path: Path) -> None:
    torch.compiler.reset()
    options = Options(model="mlp", devices="1", precision="bf16", compile=True, epochs=5)
    folder = new_folder(tmp_path)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the code is compiled for this number; threads of so small a model only wait
    try:
        outcome = train(options, folder, Recorder())
    finally:
        torch.set_num_threads(num_threads)
    losses, accuracy = plain_float32_loop(options)
    assert losses_of(folder) == pytest.approx(losses, rel=0.1, abs=0.02)
    assert outcome.test_accuracy == pytest.approx(accuracy, abs=0.005)


def conv_with_batch_norm(*_: object, **__: object) -> nn.Module:
    # Tanh: a ReLU has a kink, and there rounding decides which gradient is passed on.
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(288, 10))


def test_batch_norm_sees_the_rows_of_all_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are those of one device; by torch's rule they are not."""
    monkeypatch.setattr(models, "build", conv_with_batch_norm)
    losses = {}
    for name, changes in {
        "one device": {"devices": "cpu"},
        "two": {},
        "two, in processes": {"engine": "processes"},
        "three, in parts": {"devices": "cpu*3", "accumulate": 2},
        "one, in parts": {"devices": "cpu", "accumulate": 2},
        "two, each by itself": {"sync_batch_norm": False},
    }.items():
        folder = new_folder(tmp_path / name)
        train(replace(SMALL, epochs=1, **changes), folder, Recorder())
        assert json.loads(folder.config.read_text())["options"]["sync_batch_norm"] == ("by itself" not in name)
        losses[name] = losses_of(folder)
    assert losses["two"] == pytest.approx(losses["one device"], rel=1e-4)
    assert losses["two, in processes"] == pytest.approx(losses["one device"], rel=1e-4)
    assert losses["three, in parts"] == pytest.approx(losses["one, in parts"], rel=1e-4)
    assert losses["two, each by itself"] != pytest.approx(losses["one device"], rel=1e-4)


class InDouble(nn.Module):
    """A model that computes in double precision."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.double())


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_processes_train_as_one_device_does(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In double precision: in float32, rounding flips some of a ResNet's ReLUs within a few steps."""
    build = models.build
    monkeypatch.setattr(models, "build", lambda *args, **options: InDouble(build(*args, **options)))
    losses = {}
    for name, changes in {"one device": {"devices": "cpu"}, "processes": {"engine": "processes"}}.items():
        folder = new_folder(tmp_path / name)
        with pytest.raises(Interrupted):
            train(replace(SMALL, model=model, batch_size=32, **changes), folder, ctrl_c_after(3))
        losses[name] = losses_of(folder)
    assert len(losses["processes"]) == 3
    # The loss of 32 rows is a sum in float32, and its rounding goes into three steps.
    assert losses["processes"] == pytest.approx(losses["one device"], rel=2 * rounding_bound(3 * 32))


def test_a_single_row_for_batch_norm_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_batch_norm(*_: object, **__: object) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))

    monkeypatch.setattr(models, "build", with_batch_norm)
    by_itself = replace(SMALL, batch_size=2, sync_batch_norm=False)
    message = r"--batch-size 2 on 2 replicas \(2 x cpu\) .* --batch-size 8, or leave out --no-sync-batch-norm$"
    with pytest.raises(OptionError, match=message):
        train(by_itself, new_folder(tmp_path), Recorder())
    train(replace(by_itself, batch_size=8, epochs=1), new_folder(tmp_path), Recorder())


def test_a_single_row_of_all_devices_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_batch_norm(*_: object, **__: object) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))

    monkeypatch.setattr(models, "build", with_batch_norm)
    with pytest.raises(OptionError, match=r"--batch-size 1 on .* leaves batch norm a single row.* --batch-size 4$"):
        train(replace(SMALL, batch_size=1), new_folder(tmp_path), Recorder())
    train(replace(SMALL, batch_size=4, epochs=1), new_folder(tmp_path), Recorder())


def test_what_cannot_be_set_up_leaves_the_earlier_run_alone(uninterrupted: RunFolder) -> None:
    before = {path: path.read_bytes() for path in uninterrupted.path.iterdir()}
    for options in (replace(SMALL, devices="gpu"), replace(SMALL, model="vgg"), replace(SMALL, init="zero")):
        with pytest.raises(OptionError):
            train(options, RunFolder.for_new_run(uninterrupted.path, overwrite=True), Recorder())
    with pytest.raises(data.DataError):
        train(replace(SMALL, data="/nowhere"), uninterrupted, Recorder())
    assert {path: path.read_bytes() for path in uninterrupted.path.iterdir()} == before


def test_long_epochs_are_saved_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "_SAVE_EVERY_S", 0.0)
    folder = new_folder(tmp_path)

    def look(step: int) -> None:
        if step > 1:
            assert torch.load(folder.checkpoint, weights_only=True)["steps"] == step - 1

    train(replace(SMALL, epochs=1), folder, Recorder(look))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["cpu"], "cpu"),
        (["cpu"] * 8, "8 replicas (8 x cpu)"),
        (["cuda:0", "cuda:1"], "2 replicas (cuda:0, cuda:1)"),
        (["cuda:0", "cuda:0", "cuda:1"], "3 replicas (2 x cuda:0, cuda:1)"),
    ],
)
def test_describe(names: list[str], text: str) -> None:
    assert describe(list(map(torch.device, names))) == text
