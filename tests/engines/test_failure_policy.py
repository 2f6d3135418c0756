"""The options of the engines that say what becomes of a step in which a replica fails."""

import copy
import pickle
from typing import Any

import pytest
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
@pytest.mark.parametrize("engine", [Threads(rescue=True, timeout=5), Processes(on_worker_loss="retry", timeout=5)])
def test_a_copied_wrapper_has_the_options_of_its_engine(engine: Engine, copied: Any) -> None:
    """A8: and an engine of its own."""
    model = DataParallel(nn.Linear(2, 2), ["cpu"] * 2, engine=copy.copy(engine))
    again = copied(model)
    assert again.engine is not model.engine
    for option in ("timeout", "rescue", "row_limits"):
        assert getattr(again.engine, option) == getattr(model.engine, option)
    again.engine.timeout = 7
    assert model.engine.timeout == 5
