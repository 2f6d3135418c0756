"""The machine as `unisono devices` reports it: accelerators, links, CPU, and the engine that suits them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from unisono.monitor import cpu
from unisono.monitor.nvml import Gpu, GpuReader
from unisono.monitor.visibility import Visibility, visibility
from unisono.runtime import devices

_COPIED_BYTES = 64 << 20
_MOST_FREE_LOAD = 0.1
_WHOLE_GPU = 0.9  # of the GPU's memory: a device that has less is a slice
_MOST_USED = 0.1  # of the memory; a free GPU may have a desktop on it
_MOST_USED_BYTES = 1 << 30  # a context takes half a gigabyte, which is much of a small GPU


@dataclass(frozen=True)
class Accelerator:
    """An accelerator that this process sees.

    Attributes:
        device: its name in torch.
        name, memory_bytes, cores, pci: as in `unisono.runtime.devices.Facts`.
        pci_rank: its place in PCI order among those that this process sees, from 0.
        gpu: its number in nvidia-smi, which counts all GPUs in PCI order; None if it cannot be read.
        free_bytes: of its memory, now.
        load: from 0 to 1.
        pids: other processes that compute on it.
        is_free: whether it has nothing to do now; None if not known.
        problem: what torch raised when it was asked; None if it can be used.
    """

    device: str
    name: str | None = None
    memory_bytes: int | None = None
    cores: int | None = None
    pci: str | None = None
    pci_rank: int | None = None
    gpu: int | None = None
    free_bytes: int | None = None
    load: float | None = None
    pids: tuple[int, ...] = ()
    is_free: bool | None = None
    problem: str | None = None


@dataclass(frozen=True)
class DeviceLink:
    """Copies from an accelerator to another one.

    Attributes:
        peer_access: whether they reach each other's memory directly; None if not known.
        bytes_per_s: measured; None if it was not.
        arrives: whether direct copies arrive undamaged; if not, copies go through the host. None if not measured.
        problem: what torch raised when it copied; None if nothing.
    """

    source: str
    target: str
    peer_access: bool | None
    bytes_per_s: float | None = None
    arrives: bool | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Advice:
    """The engine to use, and why.

    Attributes:
        engine: "threads" or "processes"; None: the plain module.
        code: the line to write.
        reason: in a sentence.
    """

    engine: str | None
    code: str
    reason: str


@dataclass(frozen=True)
class Inventory:
    """What this machine has.

    Attributes:
        driver: NVIDIA's; cuda: the version that torch was built for.
        gpus: every GPU of the machine, with those that this process does not see.
        gpus_unread: why `gpus` is empty although there may be some; None if there is no reason to ask.
        imbalance: what to do about unequal accelerators; None if they are equal.
    """

    accelerators: tuple[Accelerator, ...]
    gpus: tuple[Gpu, ...]
    gpus_unread: str | None
    driver: str | None
    cuda: str | None
    visibility: Visibility
    links: tuple[DeviceLink, ...]
    imbalance: str | None
    cpu: cpu.Cpu
    advice: Advice

    @property
    def has_problems(self) -> bool:
        """Whether an accelerator could not be asked, or a copy failed."""
        return any(each.problem for each in self.accelerators) or any(link.problem for link in self.links)


def take_inventory(reader: GpuReader, *, bandwidth: bool, environment: Mapping[str, str] = os.environ) -> Inventory:
    """Look at everything.

    Args:
        reader: of NVIDIA's GPUs.
        bandwidth: whether to measure copies between accelerators that are not busy.
    """
    gpus = reader.read()  # before torch, whose contexts take memory
    present = devices.accelerators()
    found = _with_pci_ranks([_look_at(device, gpus) for device in present])
    usable = [device for device, each in zip(present, found, strict=True) if not each.problem]
    is_busy = {device for device, each in zip(present, found, strict=True) if each.is_free is False}
    links = [
        _link(source, target, bandwidth and not {source, target} & is_busy)
        for source, target in permutations(usable, 2)
    ]
    processor = cpu.describe()
    return Inventory(
        accelerators=tuple(found),
        gpus=tuple(gpus),
        gpus_unread=reader.problem if any(each.pci for each in found) else None,
        driver=reader.driver,
        cuda=torch.version.cuda,
        visibility=visibility(environment, len(gpus) if gpus else None, is_rocm=torch.version.hip is not None),
        links=tuple(links),
        imbalance=devices.imbalance(usable),
        cpu=processor,
        advice=advised(found, processor),
    )


def _look_at(device: torch.device, gpus: Sequence[Gpu]) -> Accelerator:
    try:
        facts = devices.facts(device)
        gpu = next((each for each in gpus if facts.pci is not None and each.pci == facts.pci), None)
        free_bytes = _free_of_whole_gpu(facts.memory_bytes, gpu)
        if free_bytes is None:
            free_bytes = devices.free_memory_bytes(device)
    except (RuntimeError, AssertionError) as error:  # a GPU that has fallen off the bus, or has no memory left
        return Accelerator(str(device), problem=_first_line(error))
    load = gpu.load if gpu is not None else None
    return Accelerator(
        device=str(device),
        name=facts.name,
        memory_bytes=facts.memory_bytes,
        cores=facts.cores,
        pci=facts.pci,
        gpu=gpu.number if gpu is not None else None,
        free_bytes=free_bytes,
        load=load,
        pids=gpu.pids if gpu is not None else (),
        is_free=_is_free(facts.memory_bytes, free_bytes, load),
    )


def _free_of_whole_gpu(memory_bytes: int | None, gpu: Gpu | None) -> int | None:
    """Return the free memory of a GPU; None if the driver does not say, or if the device is a slice (MIG) of the GPU.

    Args:
        memory_bytes: of the device; of a whole GPU, a little less than the driver's figure.
    """
    if gpu is None or gpu.memory_bytes is None or gpu.used_bytes is None:
        return None
    if memory_bytes is not None and memory_bytes <= _WHOLE_GPU * gpu.memory_bytes:
        return None
    return gpu.memory_bytes - gpu.used_bytes


def _is_free(memory_bytes: int | None, free_bytes: int | None, load: float | None) -> bool | None:
    """Return whether a device has nothing to do: little load, little memory taken."""
    if memory_bytes is None or free_bytes is None:
        return None if load is None else load <= _MOST_FREE_LOAD
    is_empty = memory_bytes - free_bytes <= max(_MOST_USED * memory_bytes, _MOST_USED_BYTES)
    return is_empty and (load is None or load <= _MOST_FREE_LOAD)


def _with_pci_ranks(found: Sequence[Accelerator]) -> list[Accelerator]:
    addresses = sorted(each.pci for each in found if each.pci is not None)
    return [each if each.pci is None else replace(each, pci_rank=addresses.index(each.pci)) for each in found]


def _link(source: torch.device, target: torch.device, measured: bool) -> DeviceLink:
    peer = devices.can_access_peer(source, target)
    if not measured:
        return DeviceLink(str(source), str(target), peer)
    try:
        speed = devices.copy_bytes_per_s(source, target, _COPIED_BYTES)
        return DeviceLink(str(source), str(target), peer, speed, devices.copies_arrive(source, target))
    except RuntimeError as error:  # no memory left, for instance
        return DeviceLink(str(source), str(target), peer, problem=_first_line(error))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def advised(found: Sequence[Accelerator], processor: cpu.Cpu) -> Advice:
    """Return the engine for these accelerators, or for this CPU."""
    usable = [each for each in found if not each.problem]
    free = [each for each in usable if each.is_free is not False]
    if usable and not free:
        return Advice("threads", "model = unisono.DataParallel(model)", "every accelerator is busy now")
    if usable:
        numbers = ", ".join(each.device.rpartition(":")[2] for each in free)
        chosen = "" if len(free) == len(found) else f", [{numbers}]"
        reason = (
            "on accelerators threads are faster than processes"
            if len(free) > 1
            else "one accelerator is free: one replica, and the module is called directly"
        )
        return Advice("threads", f"model = unisono.DataParallel(model{chosen})", reason)
    cores = processor.usable_cores
    if cores == 1:
        return Advice(None, "the plain module", "there is one core, on which replicas could only take turns")
    replicas = max(2, len(processor.numa_nodes))
    return Advice(
        "processes",
        f'model = unisono.DataParallel(model, ["cpu"] * {replicas}, engine="processes")',
        f"{cores} cores and no accelerator. Where the model's operations keep all cores busy already, the plain module "
        "is as fast: `unisono bench package.module:build` measures yours",
    )
