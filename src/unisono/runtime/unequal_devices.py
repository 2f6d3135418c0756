"""Accelerators of unequal size: the warning, with the shares that balance them."""

from collections.abc import Sequence

import torch

from unisono.runtime import devices as _devices
from unisono.runtime.errors import warn


def imbalance(devices: Sequence[torch.device]) -> str | None:
    """Return a sentence if an accelerator has less than 75 % of the memory or cores of the largest (torch's threshold).

    It names the shares that balance them.
    """
    different = [device for device in dict.fromkeys(devices) if not _devices.computes_on_host(device)]
    if len(different) < 2:
        return None
    properties = [_devices.properties_of(device) for device in different]
    for what, attribute in (("memory", "total_memory"), ("cores", "multi_processor_count")):
        values = [getattr(p, attribute, None) for p in properties]
        known = [value for value in values if value]
        if len(known) == len(values) and min(known) < 0.75 * max(known):
            least, most = values.index(min(known)), values.index(max(known))
            weights = [round(values[different.index(device)] / max(known), 2) for device in devices]
            return (
                f"There is an imbalance between your GPUs: {different[least]} has less than 75 % of the "
                f"{what} of {different[most]}, and every step waits for the slowest replica. Use "
                f"shares={weights}, or leave {different[least]} out of device_ids."
            )
    return None


def warn_if_unequal(devices: Sequence[torch.device]) -> None:
    """Warn about accelerators that are not balanced."""
    if said := imbalance(devices):
        warn(said)
