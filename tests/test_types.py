"""What type checkers and subscripts see of the public names: at least as much as of torch's."""

import copy
import importlib.metadata
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono
from helpers.programs import run_script
from unisono.options import WrapperOptions

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "typed" / "program.py"


@pytest.mark.slow
def test_type_checkers_accept_and_reject() -> None:
    """Strict mypy, with the settings and the cache of `make check`: without a cache torch alone takes a minute.

    Pyright says the same. It is run by hand, because its package downloads the program.
    """
    mypy = [sys.executable, "-m", "mypy", PROGRAM]
    found = subprocess.run(mypy, cwd=ROOT, text=True, capture_output=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_typed_program_runs() -> None:
    ended = run_script(PROGRAM.read_text())
    assert ended.returncode == 0, ended.stderr


def test_torch_needs_what_the_types_need() -> None:
    """`typing_extensions` is imported, and declared by torch alone."""
    assert any(each.startswith("typing-extensions") for each in importlib.metadata.requires("torch") or [])


class Own(unisono.DataParallel[nn.Linear]):
    pass


@pytest.mark.parametrize("cls", [unisono.DataParallel, unisono.DataParallel[nn.Linear], Own], ids=str)
def test_a_subscript_changes_no_rule_of_torchs(cls: type[unisono.DataParallel]) -> None:
    """A subclass, a copy and a pickle are of the same class, and are torch's too."""
    model = cls(nn.Linear(5, 2), ["cpu", "cpu"])
    for each in (model, copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(each, unisono.DataParallel)
        assert isinstance(each, nn.DataParallel)
        assert type(each) is type(model)
        assert torch.equal(each(torch.ones(4, 5)), model.module(torch.ones(4, 5)))


def test_functions_that_pass_options_on_know_all_of_them() -> None:
    parameters = inspect.signature(unisono.DataParallel).parameters.values()
    keywords = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert keywords == WrapperOptions.__annotations__.keys() | {"process_group"}
