"""An engine given to `DataParallel` as an object: it runs, belongs to one wrapper, and is made anew for a copy."""

import copy
import pickle

import pytest
import torch
from torch import nn

from manyhands import DataParallel
from manyhands.engines.base import Engine
from manyhands.engines.processes.engine import ProcessesEngine
from manyhands.engines.threads import ThreadsEngine


@pytest.mark.parametrize("make", [ThreadsEngine, lambda: ThreadsEngine(separate_memory=True), ProcessesEngine])
def test_an_engine_object_runs_the_replicas(make) -> None:
    """A13."""
    model = DataParallel(nn.Linear(4, 2), ["cpu", "cpu"], engine=make())
    x = torch.randn(6, 4)
    torch.testing.assert_close(model(x), model.module(x))
    model.close()


def test_an_engine_object_belongs_to_one_wrapper() -> None:
    """A13: it keeps what it knows about one module."""
    engine = ThreadsEngine()
    DataParallel(nn.Linear(4, 2), ["cpu", "cpu"], engine=engine)
    with pytest.raises(ValueError, match="belongs to another DataParallel already"):
        DataParallel(nn.Linear(4, 2), ["cpu", "cpu"], engine=engine)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_wrapper_has_an_engine_of_the_same_kind(again) -> None:
    """A14: with the same arguments; it can be given to no other wrapper either."""
    model = DataParallel(nn.Linear(4, 2), ["cpu", "cpu"], engine=ThreadsEngine(separate_memory=True))
    copied = again(model)
    assert copied._engine is not model._engine
    assert copied._engine._separate_memory
    x = torch.randn(6, 4)
    assert torch.equal(copied(x), model(x))


@pytest.mark.parametrize("engine", ["fibres", 3, ThreadsEngine])
def test_anything_else_is_refused(engine: object) -> None:
    """A13."""
    with pytest.raises(ValueError, match=r"expected one of \['threads', 'processes'\], or an Engine"):
        DataParallel(nn.Linear(4, 2), ["cpu"], engine=engine)


def test_the_contract_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Engine()
