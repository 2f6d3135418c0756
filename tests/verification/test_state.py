"""Random state that is noticed and put back; `verify` shows the rest."""

import random
import sys
import types

import pytest
import torch

from unisono.verification.state import RandomState


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
