"""Simulated devices that count as accelerators, without streams."""

import contextlib
from collections.abc import Iterator

import pytest

from unisono.runtime import devices, unequal_devices


@contextlib.contextmanager
def simulated_as_accelerators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make simulated devices count as accelerators. They have no streams, and are one kind of device."""
    with monkeypatch.context() as patch:
        patch.setattr(devices, "computes_on_host", lambda device: device.type == "cpu")
        patch.setattr(devices, "has_streams", lambda device: False)
        patch.setattr(devices, "current_streams", lambda devices: [])
        patch.setattr(devices, "using", lambda device, streams: contextlib.nullcontext())
        patch.setattr(unequal_devices, "imbalance", lambda devices: None)
        yield
