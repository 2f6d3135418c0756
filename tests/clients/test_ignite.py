"""pytorch-ignite: a wrapped model in its trainer, and in its Checkpoint, which looks for torch's wrapper."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from helpers.comparisons import assert_same_state
from helpers.contract import Wrap

ignite = pytest.importorskip("ignite")
engine_module = pytest.importorskip("ignite.engine")
handlers = pytest.importorskip("ignite.handlers")
metrics = pytest.importorskip("ignite.metrics")


def train(model: nn.Module, data: Dataset, folder: Path) -> tuple[list[float], dict[str, float], Path]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    loss = nn.CrossEntropyLoss()
    trainer = engine_module.create_supervised_trainer(model, optimizer, loss)
    losses: list[float] = []
    trainer.add_event_handler(
        engine_module.Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
    )
    to_save = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = handlers.Checkpoint(to_save, handlers.DiskSaver(folder, create_dir=True), n_saved=1)
    trainer.add_event_handler(engine_module.Events.EPOCH_COMPLETED, saver)
    average = handlers.EMAHandler(model, momentum=0.1)
    average.attach(trainer)
    trainer.run(DataLoader(data, batch_size=8), max_epochs=2)
    evaluator = engine_module.create_supervised_evaluator(
        average.ema_model, {"loss": metrics.Loss(loss), "accuracy": metrics.Accuracy()}
    )
    found = evaluator.run(DataLoader(data, batch_size=8)).metrics
    return losses, found, folder / saver.last_checkpoint


def test_trainer_metrics_checkpoint(wrap: Wrap, net: nn.Module, data: Dataset, tmp_path: Path) -> None:
    """X9: supervised trainer and evaluator, metrics, EMAHandler, Checkpoint: it holds the plain model's names."""
    model = copy.deepcopy(net)
    wrapped = wrap(model)
    losses, found, _ = train(net, data, tmp_path / "plain")
    wrapped_losses, wrapped_found, checkpoint = train(wrapped, data, tmp_path / "wrapped")
    torch.testing.assert_close(wrapped_losses, losses)
    torch.testing.assert_close(wrapped_found, found)
    assert_same_state(model, net)
    saved = torch.load(checkpoint)
    assert saved["model"].keys() == net.state_dict().keys()
    with torch.no_grad():
        model[0].weight.zero_()
    handlers.Checkpoint.load_objects({"model": wrapped}, saved)
    assert_same_state(model, net)
