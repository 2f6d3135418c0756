"""A lock of the user's in forward, around layers in which replicas wait for each other."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from helpers.contract import Wrap, on_the_cpu, over_places
from helpers.in_time import in_time
from helpers.modules import Calls
from unisono import ReplicaTimeout
from unisono.runtime import stuck_threads

LOCKS = [(threading.Lock,), (threading.RLock,), (threading.Condition,), (threading.Semaphore,)]


@over_places("lock", LOCKS, separate=LOCKS[:1])  # each waits for its timeout
def test_the_log_names_where_both_replicas_are(wrap: Wrap, lock, monkeypatch, caplog):
    """F7, N5: they waited for ever, without a word."""
    monkeypatch.setattr(stuck_threads, "SAID_AFTER_S", 0.6)
    held = lock()

    def forward(model, x):
        with held:
            return model.layer(x)

    model = wrap(Calls(forward, layer=nn.BatchNorm1d(3)), sync_batch_norm=True, timeout=2.0)
    with pytest.raises(ReplicaTimeout):
        in_time(lambda: model(torch.rand(4, 3)))
    (message,) = [record.getMessage() for record in caplog.records if "while replicas wait" in record.getMessage()]
    assert message.count("in forward: with held:") == message.count("in forward: return model.layer(x)") == 1
    assert "replica 0 on" in message
    assert "replica 1 on" in message
    assert "\n" not in message


@contextmanager
def released_by_the_log(lock) -> Iterator[list[str]]:
    """Hold a lock in this thread, which logs, until it has logged something; yield what it has."""
    messages: list[str] = []

    class Release(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not messages:
                lock.release()
            messages.append(record.getMessage())

    log, handler = logging.getLogger("unisono"), Release()
    lock.acquire()
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


def forward(model, x):
    with held:
        return model.layer(x)


def backward(model, x):
    x.register_hook(lambda grad: held.__enter__() and held.__exit__(None, None, None))
    return model.layer(x)


held = threading.RLock()


@pytest.mark.parametrize(
    ("function", "run"),
    [
        (forward, lambda model, x: model(x)),
        pytest.param(backward, lambda model, x: model(x).sum().backward(), marks=on_the_cpu),
        (forward, lambda model, x: list(model.map([x] * 8))),
    ],
    ids=["forward", "backward", "map"],
)
def test_the_log_names_where_a_replica_waits_for_a_lock_of_the_callers(wrap: Wrap, function, run, monkeypatch):
    """F7: an RLock that the caller holds, too: forward waited for ever, without a word. The log names the line."""
    monkeypatch.setattr(stuck_threads, "SAID_AFTER_S", 0.3)
    model = wrap(Calls(function, layer=nn.Linear(3, 3)), timeout=60.0)  # so that no map computes in this thread
    x = torch.rand(4, 3, requires_grad=True)

    def call() -> list[str]:
        with released_by_the_log(held) as messages:
            run(model, x)
        return messages

    (message,) = in_time(call)
    assert "while the calling thread waits: replica " in message
    assert "replica 1 on" in message
    assert "with held:" in message if function is forward else "held.__enter__" in message
    assert "A lock that the calling thread holds, an RLock too, is not held by the threads of the other" in message
