"""What several files here use."""

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def delays() -> Iterator[Callable[[int], None]]:
    """Return what begins random delays of kernels, given a seed; they end with the test."""
    from async_device import C  # makes the devices

    def delay(seed: int) -> None:
        C.set_seed(seed)
        C.set_delay(500, 30)

    yield delay
    C.set_delay(0, 30)
    C.synchronize_all()
