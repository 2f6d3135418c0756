"""The table of the time to expect of an epoch: it is up to date, and its amounts are those of the model."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def epoch_time() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("epoch_time")
    sys.path.pop(0)


def test_the_page_is_what_the_script_computes(epoch_time: ModuleType) -> None:
    """And its order of the ways is the one that the training command relies on."""
    text, estimates = epoch_time.page()
    assert text == (BENCHMARKS / "epoch_time.md").read_text()
    assert "| 164 TFLOP |" in text
    as_written, compiled, with_graphs = estimates
    assert as_written.num_launches > compiled.num_launches == with_graphs.num_launches
    assert as_written.host_s > as_written.gpu_s, "without a compiler the host decides"
    assert with_graphs.host_s < compiled.host_s
    assert with_graphs.step_s == with_graphs.gpu_s
