"""deepctr-torch: fit wraps the model in torch.nn.DataParallel, and computes loss and regularisation around it."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from helpers.comparisons import assert_same_state
from unisono.scripts.install import Installation

deepctr_torch = pytest.importorskip("deepctr_torch")
inputs = pytest.importorskip("deepctr_torch.inputs")
models = pytest.importorskip("deepctr_torch.models")


def model(**options: Any) -> torch.nn.Module:
    features = [
        inputs.SparseFeat("user", 11, embedding_dim=4),
        inputs.SparseFeat("item", 7, embedding_dim=4),
        inputs.DenseFeat("price", 1),
    ]
    made = models.DeepFM(
        features, features, dnn_hidden_units=(8, 8), l2_reg_dnn=0.01, seed=3, device="cpu", task="binary", **options
    )
    made.compile("adagrad", "binary_crossentropy", metrics=["mse"])
    return made


def fit(model: Any, batch_size: int) -> tuple[list[float], np.ndarray]:
    random = np.random.default_rng(0)
    x = {"user": random.integers(0, 11, 50), "item": random.integers(0, 7, 50), "price": random.random(50)}
    y = (x["user"] % 2).astype("float32")
    history = model.fit(x, y, batch_size=batch_size, epochs=2, verbose=2, shuffle=False, validation_split=0.2)
    return history.history["loss"], model.predict(x)


def test_fit_with_gpus(installed: Installation) -> None:
    """X9: `gpus=["cpu", "cpu"]`, with unisono installed: DeepFM, loss, weight penalties, predictions."""
    plain, replicated = model(), model(gpus=["cpu", "cpu"])
    replicated.load_state_dict(copy.deepcopy(plain.state_dict()))
    expected, predicted = fit(plain, 16)
    losses, predictions = fit(replicated, 8)  # deepctr has as many rows on each device
    assert len(installed.report().devices[0]) == 2
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(predictions, predicted, rtol=1e-4)
    assert_same_state(replicated, plain, 1e-5)
