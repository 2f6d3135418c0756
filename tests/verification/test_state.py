"""Random state that is noticed and put back; `verify` shows the rest."""

import random
import sys
import threading
import types

import pytest
import torch
from torch import nn

from unisono.verification.state import RandomState, fresh


def test_every_generator_is_noticed_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a model has for itself is a copy's, and is not put back."""
    own = torch.Generator()
    fake = types.SimpleNamespace(state=5)
    fake.random = types.SimpleNamespace(
        get_state=lambda: fake.state, set_state=lambda state: setattr(fake, "state", state)
    )
    monkeypatch.setitem(sys.modules, "numpy", fake)

    def draw_numpy() -> None:
        fake.state += 1

    def draw_own() -> None:
        torch.rand(1, generator=own)

    draws = (lambda: torch.rand(1), random.random, draw_numpy, draw_own)
    for draw, whose in zip(
        draws,
        ("torch's generator", "Python's generator (random)", "numpy's generator", "a generator of its own"),
        strict=True,
    ):
        state = RandomState([own])
        assert not state.moved()
        draw()
        assert state.moved() == [whose]
        state.restore()
        assert bool(state.moved()) is (draw is draw_own)


def test_what_forward_does_with_copies_of_inputs_is_seen_by_nobody() -> None:
    """X10: containers, objects and modules; of an object that has a lock, its attributes."""
    layer, with_lock = nn.BatchNorm1d(2), types.SimpleNamespace(lock=threading.Lock(), seen=0)
    names: list[str] = []
    inputs = {"layer": layer, "names": names, "with_lock": with_lock}
    copy = fresh(inputs)
    copy["layer"](torch.ones(3, 2))
    copy["names"].append("a")
    copy["with_lock"].seen += 1
    assert (layer.num_batches_tracked, names, with_lock.seen) == (0, [], 0)
    with open(__file__) as file:
        marker = object()
        assert fresh([file, marker, type]) == [file, marker, type]
