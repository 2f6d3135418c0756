"""What the tests of the engines share."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers import leftovers
from helpers.programs import until
from unisono import DataParallel
from unisono.engines.processes import fork_server


@pytest.fixture
def wrap() -> Iterator[Callable[..., DataParallel]]:
    """Wrap a module for some CPU replicas; close it after the test."""
    models: list[DataParallel] = []

    def wrap(module: nn.Module, num_replicas: int = 2, **options: Any) -> DataParallel:
        models.append(DataParallel(module, ["cpu"] * num_replicas, **options))
        return models[-1]

    yield wrap
    for model in models:
        model.close()


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No process, no mapping and no descriptor more than before the test."""
    if not fork_server.server.is_running:  # with it come two descriptors, which stay
        DataParallel(nn.Linear(1, 1), ["cpu"] * 2, engine="processes")(torch.zeros(2, 1))
    leftovers.end_workers_of_earlier_tests()
    before = leftovers.of_this_process()
    yield
    gc.collect()
    assert until(lambda: leftovers.of_this_process() == before), (before, leftovers.of_this_process())
