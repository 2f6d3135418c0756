"""poutyne: Model(device=[...]) calls torch.nn.parallel.data_parallel."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unisono
from helpers.comparisons import assert_same_state

poutyne = pytest.importorskip("poutyne")


def train(network: nn.Module, data: Dataset, device: Any) -> tuple[list[float], list[float]]:
    model = poutyne.Model(network, torch.optim.SGD(network.parameters(), 0.5), "cross_entropy", device=device)
    history = model.fit_generator(DataLoader(data, batch_size=8), epochs=2, verbose=False, progress_options=None)
    return [epoch["loss"] for epoch in history], [
        model.evaluate_generator(DataLoader(data, batch_size=8), verbose=False)
    ]


def test_a_list_of_devices(net: nn.Module, data: Dataset) -> None:
    """X9: `device=["cpu", "cpu"]`, fit and evaluate, with unisono installed."""
    model = copy.deepcopy(net)
    expected = train(net, data, "cpu")
    with unisono.install() as installed:
        results = train(model, data, ["cpu", "cpu"])
        assert installed.report().functions == {"data_parallel": 15}
    torch.testing.assert_close(results, expected, rtol=1e-6, atol=0)
    assert_same_state(model, net)
