"""What torch says about accelerators, without using them: for people, in reports and warnings."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.runtime import devices as _devices
from unisono.runtime import torch_private


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
                f"{different[least]} has less than 75 % of the {what} of {different[most]}: every step waits for the "
                f"slowest replica. Give each its share, shares={weights}, or leave {different[least]} out of "
                "device_ids."
            )
    return None


def warn_if_unequal(devices: Sequence[torch.device]) -> None:
    """Warn about accelerators that are not balanced."""
    if said := imbalance(devices):
        warnings.warn(said, UserWarning, stacklevel=3)


@dataclass(frozen=True)
class Facts:
    """What torch says about an accelerator; None for what it does not say.

    Attributes:
        name: the product's.
        memory_bytes, cores: in all; a core is a multiprocessor.
        pci: as `pci_address` has it.
    """

    name: str | None
    memory_bytes: int | None
    cores: int | None
    pci: str | None


def facts(device: torch.device) -> Facts:
    """Return what torch says about an accelerator, without using it."""
    properties = _devices.properties_of(device)
    return Facts(
        getattr(properties, "name", None),
        getattr(properties, "total_memory", None),
        getattr(properties, "multi_processor_count", None),
        _devices.pci_address(device),
    )


def free_memory_bytes(device: torch.device) -> int | None:
    """Return the free memory of an accelerator; None if it is not known. (CUDA's contexts take some.)"""
    return None if _devices.computes_on_host(device) else torch_private.free_memory_bytes(device) or None


def can_access_peer(source: torch.device, target: torch.device) -> bool | None:
    """Return whether two accelerators can reach each other's memory; None for a kind that does not say."""
    ask = getattr(torch.get_device_module(source), "can_device_access_peer", None)
    return None if ask is None else bool(ask(source, target))
