"""The engines' contract: whatever runs the replicas, numbers, state and errors are the plain module's.

The oracle is the plain module on the whole batch, in float64; where rows interact (batch normalisation in training) it
is `data_parallel`, the plain composition. A new engine is added to ENGINE_ARGUMENTS in tests/helpers/contract.py.

The replicas are on the CPU, or on the devices that UNISONO_TEST_DEVICES names, in turn: "cuda:0" has them all on one
GPU, "cuda:0,cuda:1" on two. Models and batches are made on the first. That is how `make gpu-check` runs this folder.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers.contract import ENGINE_ARGUMENTS, ENGINES, ON_CPU, EngineFor, Wrap, in_turn, on_first_device
from helpers.kept_workers import KeptWorkers
from unisono import DataParallel

ON_THE_CPU_ONLY = ["memory", "nn_sweep", "properties", "scripted"]
collect_ignore = [] if ON_CPU else [f"test_{name}.py" for name in ON_THE_CPU_ONLY]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The name of the engine under test."""
    return request.param


@pytest.fixture(scope="module")
def workers_of_this_file() -> Iterator[KeptWorkers]:
    workers = KeptWorkers()
    yield workers
    workers.end()


@pytest.fixture
def engine_for(workers_of_this_file: KeptWorkers, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineFor]:
    """Return the argument `engine` of DataParallel for the name of an engine and the devices of the replicas."""
    yield lambda name, devices: ENGINE_ARGUMENTS[name](devices, workers_of_this_file, monkeypatch)
    workers_of_this_file.take_back()


@pytest.fixture
def wrap(engine: str, numerics: None, engine_for: EngineFor) -> Wrap:
    """Wrap a module for some replicas on the engine under test; options may be the wrapper's and the engine's."""

    def wrap(module: nn.Module, num_replicas: int = 2, **options: Any) -> DataParallel:
        devices = in_turn(num_replicas)
        of_engine = {name: options.pop(name) for name in ("rescue", "on_worker_loss") if name in options}
        model = DataParallel(module, devices, engine=engine_for(engine, devices), **options)
        for name, value in of_engine.items():
            setattr(model.engine, name, value)
        return model

    return wrap


@pytest.fixture
def numerics(float64: None) -> Iterator[None]:
    """Double precision, exact convolutions, and new tensors on the first device."""
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)  # no effect on the CPU
    with exact, on_first_device():
        yield


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
