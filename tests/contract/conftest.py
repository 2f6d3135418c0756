"""The contract of the replicas: wherever they are, numbers, state and errors are the plain module's.

The oracle is the plain module on the whole batch, in float64; where rows interact (batch normalisation in training) it
is `data_parallel`, the plain composition. Most tests run at each place of tests/helpers/contract.py.

The replicas are on the CPU, or on the devices that UNISONO_TEST_DEVICES names, in turn: "cuda:0" has them all on one
GPU, "cuda:0,cuda:1" on two. Models and batches are made on the first. That is how `make gpu-check` runs this folder.
On several devices memory is separate in any case: there, what runs in separate memory, with more buckets, is not run
"in one memory" too.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers.contract import DEVICES, ON_CPU, PLACES, Wrap, at, in_turn, on_first_device
from unisono import DataParallel

ON_THE_CPU_ONLY = ["memory", "nn_sweep", "properties"]
collect_ignore = [] if ON_CPU else [f"test_{name}.py" for name in ON_THE_CPU_ONLY]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if len(set(DEVICES)) == 1:
        return
    one, separate = PLACES
    found = {item.nodeid for item in items}
    twice = {item for item in items if one in item.nodeid and item.nodeid.replace(one, separate) in found}
    config.hook.pytest_deselected(items=[*twice])
    items[:] = [item for item in items if item not in twice]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the memory of the replicas is during the test."""
    with at(request.param):
        yield request.param


@pytest.fixture
def wrap(place: str, numerics: None) -> Wrap:
    """Wrap a module for some replicas at the place under test."""

    def wrap(module: nn.Module, num_replicas: int = 2, **options: Any) -> DataParallel:
        if options.get("sync_batch_norm") and not ON_CPU and num_replicas > len(set(DEVICES)):
            pytest.skip("replicas that wait for each other in batch norm need an accelerator each")
        return DataParallel(module, in_turn(num_replicas), **options)

    return wrap


@pytest.fixture
def numerics(float64: None) -> Iterator[None]:
    """Double precision, exact convolutions, and new tensors on the first device."""
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)  # no effect on the CPU
    with exact, on_first_device():
        yield
