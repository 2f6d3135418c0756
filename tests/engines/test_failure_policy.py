"""The options of the engines that say what becomes of a step in which a replica fails."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from unisono import DataParallel, Processes, Threads
from unisono.engines.base import Engine

CASES = [
    ("timeout", 60, "60", TypeError),
    ("rescue", True, 1, TypeError),
    ("rescue", True, None, TypeError),
    ("on_worker_loss", "retry", "Retry", ValueError),
    ("on_worker_loss", "retry", None, TypeError),
    ("on_worker_loss", "retry", True, TypeError),
]


@pytest.mark.parametrize("engine", [Threads, Processes])
@pytest.mark.parametrize(("option", "good", "bad", "error"), CASES, ids=str)
def test_options_that_change_later_are_checked_as_at_first(
    engine: type[Engine], option: str, good: Any, bad: Any, error: type[Exception]
) -> None:
    """A13, F10: an option that cannot be used is refused where it is assigned, and stays what it was."""
    if engine is Threads and option == "on_worker_loss":
        with pytest.raises(TypeError, match="on_worker_loss"):
            engine(on_worker_loss=good)
        with pytest.raises(AttributeError, match="Threads has no option 'on_worker_loss'"):
            engine().on_worker_loss = good
        return
    model = DataParallel(nn.Linear(2, 2), ["cpu"] * 2, engine=engine())
    setattr(model.engine, option, good)
    assert getattr(model.engine, option) == getattr(engine(**{option: good}), option) == good
    with pytest.raises(error, match=option):
        setattr(model.engine, option, bad)
    assert getattr(model.engine, option) == good
    with pytest.raises(error, match=rf"{option}=.*: expected "):
        engine(**{option: bad})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize(
    ("engine", "own", "options"),
    [
        (Threads, {"separate_memory": True}, {"rescue": True, "timeout": 5}),
        (Processes, {"share_memory": False}, {"on_worker_loss": "retry", "timeout": 5}),
    ],
)
def test_a_copied_wrapper_has_an_engine_of_its_own_with_the_same_options(
    engine: type[Engine], own: dict[str, Any], options: dict[str, Any], copied: Any
) -> None:
    """A8, A14"""
    model = DataParallel(nn.Linear(4, 2), ["cpu"] * 2, engine=engine(**own, **options))
    again = copied(model)
    assert again.engine is not model.engine
    assert {name: getattr(again.engine, name) for name in options} == options
    assert {name: getattr(again.engine, f"_{name}") for name in own} == own
    again.engine.timeout = 7
    assert model.engine.timeout == 5
    x = torch.randn(6, 4)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    for each in (again, model):
        each.close()
