"""Lightning and Fabric: a wrapped module in a LightningModule, and set up by Fabric; Fabric's own strategy "dp"."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from helpers.comparisons import assert_same_state
from helpers.contract import Wrap
from unisono.scripts.install import Installation

lightning = pytest.importorskip("lightning")
fabric_strategies = pytest.importorskip("lightning.fabric.strategies")


class Classifier(lightning.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.net(x), y))

    def predict_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def fit(net: nn.Module, data: Dataset, folder: Path) -> tuple[list[float], float, torch.Tensor]:
    loader = DataLoader(data, batch_size=8)
    model = Classifier(net)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
    )
    trainer.fit(model, loader, loader)
    validated = float(trainer.callback_metrics["val"])
    predicted = torch.cat(trainer.predict(model, loader))
    trainer.save_checkpoint(folder / "last.ckpt")
    again = Classifier(copy.deepcopy(net))
    again.load_state_dict(torch.load(folder / "last.ckpt", weights_only=False)["state_dict"])
    assert_same_state(again, model)
    return model.losses, validated, predicted


def test_trainer(wrap: Wrap, net: nn.Module, data: Dataset, tmp_path: Path) -> None:
    """X9: Trainer with clipping and accumulation, around a LightningModule whose network is wrapped; checkpoint."""
    model = copy.deepcopy(net)
    expected = fit(net, data, tmp_path / "plain")
    actual = fit(wrap(model), data, tmp_path / "wrapped")
    torch.testing.assert_close(actual, expected)
    assert_same_state(model, net)


def fabric_losses(fabric: Any, net: nn.Module, data: Dataset, folder: Path) -> list[float]:
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.5))
    losses = []
    for x, y in fabric.setup_dataloaders(DataLoader(data, batch_size=8)):
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    before = copy.deepcopy(model.state_dict())
    fabric.save(folder / "state.ckpt", {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        next(model.parameters()).zero_()
    fabric.load(folder / "state.ckpt", {"model": model, "optimizer": optimizer})
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    return losses


def test_fabric_around_a_wrapper(wrap: Wrap, net: nn.Module, data: Dataset, tmp_path: Path) -> None:
    """X9: Fabric.setup of a wrapped model: backward, clip_gradients, save, load."""
    model = copy.deepcopy(net)
    expected = fabric_losses(lightning.Fabric(accelerator="cpu", devices=1), net, data, tmp_path / "plain")
    actual = fabric_losses(lightning.Fabric(accelerator="cpu", devices=1), wrap(model), data, tmp_path / "wrapped")
    torch.testing.assert_close(actual, expected)
    assert_same_state(model, net)


def test_fabric_strategy_dp(installed: Installation, net: nn.Module, data: Dataset, tmp_path: Path) -> None:
    """X9: Fabric's DataParallelStrategy wraps the model itself, with unisono installed after Lightning."""
    model = copy.deepcopy(net)
    expected = fabric_losses(lightning.Fabric(accelerator="cpu", devices=1), net, data, tmp_path / "plain")
    strategy = fabric_strategies.DataParallelStrategy(parallel_devices=[torch.device("cpu")] * 2)
    actual = fabric_losses(
        lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy), model, data, tmp_path / "dp"
    )
    assert installed.report().rows == 37
    torch.testing.assert_close(actual, expected)
    assert_same_state(model, net)
