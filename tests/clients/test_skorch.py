"""skorch: the wrapper as the net's module; scikit-learn clones, pickles and searches such nets."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

skorch = pytest.importorskip("skorch")
sklearn = pytest.importorskip("sklearn.base")
model_selection = pytest.importorskip("sklearn.model_selection")


def net_around(module: Any, **options: Any) -> Any:
    return skorch.NeuralNetClassifier(
        module,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=0.5,
        max_epochs=2,
        batch_size=8,
        train_split=None,
        iterator_train__shuffle=False,
        verbose=0,
        **options,
    )


def test_fit_clone_pickle_search(net: nn.Module, data: TensorDataset) -> None:
    """X9: fit, predict_proba, clone, pickle, GridSearchCV over the learning rate."""
    x, y = (tensor.numpy() for tensor in data.tensors)
    options = {"module__module": copy.deepcopy(net), "module__device_ids": ["cpu", "cpu"]}
    wrapped = net_around(unisono.DataParallel, **options)
    plain = net_around(net)
    copies = [sklearn.clone(each) for each in (plain, wrapped)]
    for each in (plain, wrapped, *copies):
        each.fit(x, y)
    expected = plain.predict_proba(x)
    np.testing.assert_allclose(wrapped.history[:, "train_loss"], plain.history[:, "train_loss"])
    for each in (wrapped, copies[1], pickle.loads(pickle.dumps(wrapped))):
        np.testing.assert_allclose(each.predict_proba(x), expected)
    scores = []
    for each in copies:
        search = model_selection.GridSearchCV(each, {"lr": [0.01, 0.5]}, cv=2, scoring="neg_log_loss")
        scores.append(search.fit(x, y).cv_results_["mean_test_score"])
    np.testing.assert_allclose(scores[1], scores[0])
