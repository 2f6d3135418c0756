"""A lock of the user's in forward, around layers in which replicas wait for each other."""

import threading

import pytest
import torch
from torch import nn

from helpers.contract import Wrap
from helpers.in_time import in_time
from helpers.modules import Calls
from unisono import ReplicaTimeout
from unisono.runtime import exchange


@pytest.mark.parametrize("lock", [threading.Lock, threading.RLock, threading.Condition, threading.Semaphore])
def test_the_log_names_where_both_replicas_are(wrap: Wrap, lock, monkeypatch, caplog):
    """F7, N5: they waited for ever, without a word."""
    monkeypatch.setattr(exchange, "LOGGED_AFTER_S", 1.0)
    held = lock()

    def forward(model, x):
        with held:
            return model.layer(x)

    model = wrap(Calls(forward, layer=nn.BatchNorm1d(3)), sync_batch_norm=True, timeout=2.0)
    with pytest.raises(ReplicaTimeout):
        in_time(lambda: model(torch.rand(4, 3)))
    (message,) = [record.getMessage() for record in caplog.records if "no progress for 1 s" in record.getMessage()]
    assert message.count("in forward: with held:") == message.count("in forward: return model.layer(x)") == 1
    assert "replica 0 on" in message
    assert "replica 1 on" in message
    assert "\n" not in message
