"""An engine given to `DataParallel` as an object: it belongs to one wrapper, and is made anew for a copy."""

import pytest
import torch
from torch import nn

from unisono import DataParallel
from unisono.engines.distributed import DistributedEngine
from unisono.engines.processes.engine import Processes
from unisono.engines.threads import Threads


@pytest.mark.parametrize("make", [Threads, Processes])
def test_an_engine_object_belongs_to_one_wrapper_as_long_as_that_lives(make) -> None:
    """A13: it keeps what it knows about one module."""
    engine, x = make(), torch.randn(6, 4)
    with pytest.raises(ValueError, match="loss='median'"):
        DataParallel(nn.Linear(4, 2), ["cpu", "cpu"], engine=engine, loss="median")
    first = DataParallel(nn.Linear(4, 2), ["cpu", "cpu"], engine=engine)
    first(x).sum().backward()
    with pytest.raises(ValueError, match="belongs to another DataParallel"):
        DataParallel(nn.Linear(4, 2), ["cpu", "cpu"], engine=engine)
    del first
    second = DataParallel(nn.Linear(4, 3), ["cpu", "cpu"], engine=engine)
    torch.testing.assert_close(second(x), second.module(x))
    second.close()


@pytest.mark.parametrize(
    ("engine", "error", "message"),
    [
        ("fibres", ValueError, r"expected one of \['threads', 'processes'\], or an Engine"),
        (3, TypeError, "expected one of"),
        (Threads, TypeError, r"make one, Threads\(\)"),
        (DistributedEngine(Threads(), None, []), ValueError, "DataParallel makes this engine itself"),
    ],
    ids=["another name", "a number", "a class", "an engine of DataParallel's own"],
)
def test_anything_else_is_refused(engine: object, error: type[Exception], message: str) -> None:
    """A13"""
    with pytest.raises(error, match=message):
        DataParallel(nn.Linear(4, 2), ["cpu", "cpu"], engine=engine)


def test_flags_of_engines_are_flags() -> None:
    with pytest.raises(TypeError, match="separate_memory='no': expected True or False"):
        Threads(separate_memory="no")
    with pytest.raises(TypeError, match="share_memory=0: expected True or False"):
        Processes(share_memory=0)
