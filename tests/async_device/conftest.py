"""What several files here use."""

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def fresh_device(collector_off: None) -> Iterator[None]:
    """Give a test the settings of the process, the first device, and memory of its own; what it has queued ends."""
    from async_device import C  # makes the devices

    settings = C.settings()
    yield
    C.set_seed(settings["QUEUED_SEED"])
    C.set_delay(settings["QUEUED_DELAY_US"], settings["QUEUED_DELAY_PERCENT"])
    C.set_blocking(bool(settings["QUEUED_BLOCKING"]))
    C.set_poison(settings["QUEUED_POISON"])
    C.set_memory(settings["QUEUED_MEMORY_MIB"] << 20)
    C.synchronize_all()
    C.set_device(0)


@pytest.fixture
def delays() -> Iterator[Callable[..., None]]:
    """Return what begins random delays of kernels, given a seed; they end with the test."""
    from async_device import C  # makes the devices

    def delay(seed: int, longest_us: int = 500) -> None:
        C.set_seed(seed)
        C.set_delay(longest_us, 30)

    yield delay
    C.set_delay(0, 30)
    C.synchronize_all()
