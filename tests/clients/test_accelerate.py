"""accelerate: a wrapped model in an Accelerator."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unisono
from helpers.comparisons import assert_same_state
from helpers.contract import Wrap

accelerate = pytest.importorskip("accelerate")


def train(model: nn.Module, data: Dataset, folder: Path) -> tuple[nn.Module, list[float]]:
    """Train two epochs, with accumulation and clipping; the second one twice, from the state saved after the first."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
    losses = []

    def epoch() -> None:
        for x, y in loader:
            with accelerator.accumulate(prepared):
                loss = nn.functional.cross_entropy(prepared(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())

    epoch()
    accelerator.save_state(folder)
    epoch()
    accelerator.load_state(folder)
    epoch()
    assert losses[5:10] == losses[10:]
    unwrapped = accelerator.unwrap_model(prepared)
    accelerator.save_model(prepared, folder / "model")
    accelerator.free_memory()
    return unwrapped, losses


def test_prepare_train_save_and_load_state(wrap: Wrap, net: nn.Module, data: Dataset, tmp_path: Path) -> None:
    """X9: prepare, accumulate, clip, save_state, load_state, save_model, unwrap_model."""
    model = copy.deepcopy(net)
    plain, expected = train(net, data, tmp_path / "plain")
    unwrapped, losses = train(wrap(model), data, tmp_path / "wrapped")
    assert unwrapped is model
    assert not isinstance(unwrapped, unisono.DataParallel)
    torch.testing.assert_close(losses, expected)
    assert_same_state(model, plain)
