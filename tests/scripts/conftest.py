"""What tests of scripts share."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch


@pytest.fixture
def own_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what a program has for itself: `__main__`, arguments, paths, its hook, random state."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with torch.random.fork_rng(devices=[]):
        yield
