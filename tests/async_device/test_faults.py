"""Planted faults: each is seen in at most 20 runs of a short training, or of a map, and nothing is seen without one."""

from collections.abc import Callable

import pytest
from torch import Tensor

from async_device.faults import FAULTS, MAP_FAULTS
from async_device.training import (
    DELAY_US,
    FIRST,
    SEEDS,
    TOLERANCE,
    WIDTH,
    batches,
    differences,
    mapped,
    mapped_plainly,
    net,
    trained,
    trained_plainly,
)

# Each forward computes its branch on another stream of torch's pool, and autograd may still hold the last graph.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return trained_plainly()


@pytest.fixture(scope="module")
def bits() -> dict[str, Tensor]:
    """The numbers without delays."""
    return trained()


def test_without_a_fault_all_bits_are_those_without_delays(
    plain: dict[str, Tensor], bits: dict[str, Tensor], delays: Callable[..., None]
) -> None:
    assert not differences(bits, plain, TOLERANCE)
    for seed in SEEDS:
        delays(seed)
        assert not differences(trained(), bits), f"seed {seed}"


@pytest.fixture
def assert_is_seen(monkeypatch: pytest.MonkeyPatch, delays: Callable[..., None]) -> Callable[..., None]:
    def check(fault: str, run: Callable[[], dict[str, Tensor]], expected: dict[str, Tensor], longest_us: int) -> None:
        FAULTS[fault].plant(monkeypatch)
        for seed in SEEDS:
            delays(seed, longest_us)
            try:
                is_seen = bool(differences(run(), expected, TOLERANCE))
            except RuntimeError as error:  # a first step compares the values of copies with the live ones
                assert "forward has written into parameter" in str(error)  # noqa: PT017 - most faults raise nothing
                is_seen = True
            if is_seen:
                print(f"seen in run {seed}: {fault}")
                return
        pytest.fail(f"not seen in {len(SEEDS)} runs")

    return check


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in MAP_FAULTS])
def test_a_planted_fault_is_seen(fault: str, plain: dict[str, Tensor], assert_is_seen: Callable[..., None]) -> None:
    assert_is_seen(fault, trained, plain, DELAY_US)


@pytest.mark.parametrize("fault", MAP_FAULTS)
def test_a_fault_of_maps_is_seen_in_a_map(fault: str, assert_is_seen: Callable[..., None]) -> None:
    """With many small batches and longer delays than the training, which would have to run more often."""
    small = batches().reshape(16, -1, WIDTH)
    expected = mapped_plainly(net(), small)
    assert_is_seen(fault, lambda: mapped(net().to(FIRST), small), expected, 4 * DELAY_US)
