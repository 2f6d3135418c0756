"""What tests of scripts share."""

import sys
import sysconfig
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from unisono.scripts import install


@pytest.fixture
def every_module() -> None:
    """Let `install` look through all modules of the process, as it does in a program."""


@pytest.fixture(autouse=True)
def _own_modules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `install` leave out installed packages: pytest's and torch's friends take it half a second each time."""
    every, packages = install._namespaces, sysconfig.get_path("purelib")

    def own() -> Iterator[tuple[str, dict[str, Any]]]:
        return (each for each in every() if packages not in (each[1].get("__file__") or ""))

    if "every_module" not in request.fixturenames:
        monkeypatch.setattr(install, "_namespaces", own)


@pytest.fixture
def own_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what a program has for itself: `__main__`, arguments, paths, its hook, random state."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with torch.random.fork_rng(devices=[]):
        yield
