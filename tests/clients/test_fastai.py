"""fastai: parallel_ctx wraps the learner's model in the DataParallel that fastai.distributed has imported."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from helpers.comparisons import assert_same_state
from unisono.scripts.install import Installation

distributed = pytest.importorskip("fastai.distributed")
basics = pytest.importorskip("fastai.basics")
pytest.importorskip("fastai.callback.schedule")


@pytest.fixture
def float64() -> None:
    """fastai's averages of losses are in single precision."""
    torch.manual_seed(0)


class Recorded(basics.Callback):
    def before_fit(self) -> None:
        self.losses: list[float] = []

    def after_batch(self) -> None:
        self.losses.append(float(self.learn.loss))


def fit(model: nn.Module, data: Dataset, device_ids: list[Any] | None) -> tuple[list[float], torch.Tensor]:
    loaders = basics.DataLoaders(
        basics.DataLoader(data, bs=8, num_workers=0), basics.DataLoader(data, bs=8, num_workers=0), device="cpu"
    )
    learner = basics.Learner(loaders, model, loss_func=nn.CrossEntropyLoss(), opt_func=basics.SGD, cbs=[Recorded()])
    with (
        learner.no_bar(),
        learner.no_logging(),
        learner.parallel_ctx(device_ids) if device_ids else contextlib.nullcontext(),
    ):
        learner.fit_one_cycle(2, 0.5)
        predictions = learner.get_preds(reorder=False)[0]
    return learner.recorded.losses, predictions


def test_parallel_ctx(installed: Installation, net: nn.Module, data: Dataset) -> None:
    """X9: fit_one_cycle and get_preds in `learn.parallel_ctx(["cpu", "cpu"])`, with unisono installed after fastai."""
    model = copy.deepcopy(net)
    expected = fit(net, data, None)
    actual = fit(model, data, ["cpu", "cpu"])
    assert set(installed.report().devices) == {(torch.device("cpu"),) * 2}
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_state(model, net, 1e-5)
