"""An engine given to `DataParallel` as an object: it belongs to one wrapper, and is made anew for a copy."""

import copy
import pickle

import pytest
import torch
from torch import nn

from manyhands import DataParallel
from manyhands.engines.processes.engine import ProcessesEngine
from manyhands.engines.threads import ThreadsEngine


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
    over_gloo = again(DataParallel(nn.Linear(1, 1), ["cpu"] * 2, engine=ProcessesEngine(share_memory=False)))
    assert not over_gloo._engine._share_memory
