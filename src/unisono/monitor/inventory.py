"""The machine as `unisono devices` reports it: accelerators, links, and the CPU."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from unisono.monitor import cpu
from unisono.monitor.nvml import Gpu, GpuReader
from unisono.runtime import devices, unequal_devices

_COPIED_BYTES = 64 << 20
_NUM_COPIES = 6  # of which the fastest counts
_MOST_FREE_LOAD = 0.1
_WHOLE_GPU = 0.9  # of the GPU's memory: a device that has less is a slice
_MOST_USED = 0.1  # of the memory; a free GPU may have a desktop on it
_MOST_USED_BYTES = 1 << 30  # a context takes half a gigabyte, which is much of a small GPU


@dataclass(frozen=True)
class Accelerator:
    """An accelerator that this process sees."""

    device: str  # its name in torch
    name: str | None = None  # of the product
    memory_bytes: int | None = None
    cores: int | None = None  # multiprocessors
    pci: str | None = None  # its address on the bus
    gpu: Gpu | None = None  # as the driver sees it; None if it cannot be read
    free_bytes: int | None = None  # of its memory, now
    is_free: bool | None = None  # whether it has nothing to do now; None if not known
    problem: str | None = None  # what torch raised when it was asked; None if it can be used


@dataclass(frozen=True)
class DeviceLink:
    """Copies from an accelerator to another one; None where that was not measured, or is not known."""

    source: str
    target: str
    peer_access: bool | None  # whether they reach each other's memory directly
    bytes_per_s: float | None = None
    arrives: bool | None = None  # whether direct copies arrive undamaged; if not, copies go through the host
    problem: str | None = None  # what torch raised when it copied


@dataclass(frozen=True)
class Inventory:
    """What this machine has."""

    accelerators: tuple[Accelerator, ...]
    gpus: tuple[Gpu, ...]  # every GPU of the machine, with those that this process does not see
    gpus_unread: str | None  # why `gpus` is empty although there may be some; None if there is no reason to ask
    driver: str | None  # NVIDIA's
    cuda: str | None  # the version that torch was built for
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES, or ROCm's variable, as NAME=VALUE; None if it is not set
    device_order: str  # by which CUDA numbers GPUs
    links: tuple[DeviceLink, ...]
    imbalance: str | None  # what to do about unequal accelerators; None if they are equal
    cpu: cpu.Cpu

    @property
    def has_problems(self) -> bool:
        """Whether an accelerator could not be asked, or a copy failed."""
        return any(each.problem for each in self.accelerators) or any(link.problem for link in self.links)


def take_inventory(reader: GpuReader, *, bandwidth: bool) -> Inventory:
    """Look at everything; with `bandwidth` measure copies between accelerators that are not busy."""
    gpus = tuple(reader.read())  # before torch, whose contexts take memory
    present = devices.accelerators()
    found = [_look_at(device, gpus) for device in present]
    usable = {device: each for device, each in zip(present, found, strict=True) if not each.problem}
    links = [
        _link(a, b, bandwidth and usable[a].is_free is not False and usable[b].is_free is not False)
        for a, b in permutations(usable, 2)
    ]
    return Inventory(
        accelerators=tuple(found),
        gpus=gpus,
        gpus_unread=reader.problem if any(each.pci for each in found) else None,
        driver=reader.driver,
        cuda=torch.version.cuda,
        visible_devices=_visible_devices(),
        device_order=os.environ.get("CUDA_DEVICE_ORDER") or "FASTEST_FIRST",
        links=tuple(links),
        imbalance=unequal_devices.imbalance([*usable]),
        cpu=cpu.describe(),
    )


def _visible_devices() -> str | None:
    # ROCm reads CUDA's variable too, if its own is not set.
    names = ["HIP_VISIBLE_DEVICES"] * (torch.version.hip is not None) + ["CUDA_VISIBLE_DEVICES"]
    return next((f"{name}={os.environ[name]}" for name in names if name in os.environ), None)


def _look_at(device: torch.device, gpus: Sequence[Gpu]) -> Accelerator:
    try:
        properties, pci = devices.properties_of(device), devices.pci_address(device)
        gpu = next((each for each in gpus if each.pci is not None and each.pci == pci), None)
        memory_bytes = getattr(properties, "total_memory", None)
        free_bytes = _free_of_whole_gpu(memory_bytes, gpu)
        if free_bytes is None and not devices.computes_on_host(device):
            free_bytes = devices.free_memory_bytes(device) or None
    except (RuntimeError, AssertionError) as error:  # a GPU that has fallen off the bus, or has no memory left
        return Accelerator(str(device), problem=_first_line(error))
    found = Accelerator(
        str(device),
        getattr(properties, "name", None),
        memory_bytes,
        getattr(properties, "multi_processor_count", None),
        pci,
        gpu,
        free_bytes,
    )
    return replace(found, is_free=_is_free(found))


def _free_of_whole_gpu(memory_bytes: int | None, gpu: Gpu | None) -> int | None:
    """Return the free memory as the driver says it, without a context of torch's; None if the device is a slice (MIG).

    torch's figure of the memory of a whole GPU is a little less than the driver's.
    """
    if gpu is None or gpu.memory_bytes is None or gpu.used_bytes is None:
        return None
    is_slice = memory_bytes is not None and memory_bytes <= _WHOLE_GPU * gpu.memory_bytes
    return None if is_slice else gpu.memory_bytes - gpu.used_bytes


def _is_free(found: Accelerator) -> bool | None:
    """Return whether a device has nothing to do: little load, little memory taken."""
    load = None if found.gpu is None else found.gpu.load
    has_little_load = None if load is None else load <= _MOST_FREE_LOAD
    if found.memory_bytes is None or found.free_bytes is None:
        return has_little_load
    used_bytes = found.memory_bytes - found.free_bytes
    return used_bytes <= max(_MOST_USED * found.memory_bytes, _MOST_USED_BYTES) and has_little_load is not False


def _link(source: torch.device, target: torch.device, measured: bool) -> DeviceLink:
    ask = getattr(torch.get_device_module(source), "can_device_access_peer", None)
    link = DeviceLink(str(source), str(target), None if ask is None else bool(ask(source, target)))
    if not measured:
        return link
    try:
        speed = _copy_bytes_per_s(source, target)
        return replace(link, bytes_per_s=speed, arrives=devices.copies_arrive(source, target))
    except RuntimeError as error:  # no memory left, for instance
        return replace(link, problem=_first_line(error))


def _copy_bytes_per_s(source: torch.device, target: torch.device) -> float:
    """Measure copies from one accelerator to another, as unisono makes them; return the fastest."""
    data = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=source)
    fastest_s = float("inf")
    for _ in range(_NUM_COPIES):  # the first one tests the pair, and allocates
        started = time.perf_counter()
        devices.copied_to(data, target)
        devices.wait_for_work(source)
        devices.wait_for_work(target)
        fastest_s = min(fastest_s, time.perf_counter() - started)
    return _COPIED_BYTES / fastest_s


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
