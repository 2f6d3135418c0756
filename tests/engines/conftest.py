"""What the tests of the engines share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from unisono import DataParallel


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
