"""NVIDIA's GPUs as the driver sees them: all of the machine, in PCI order, whatever CUDA_VISIBLE_DEVICES says.

The package nvidia-ml-py is optional. It loads the driver's own library and makes no CUDA context, so reading takes no
memory of a GPU. Each figure that a GPU or a driver does not have is None.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.console.options import is_installed, not_installed


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    memory_bytes: int | None  # of the GPU's


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, now."""

    number: int  # as nvidia-smi counts, in PCI order
    name: str | None
    pci: str | None  # its address, as `unisono.runtime.devices.pci_address` has it
    memory_bytes: int | None
    used_bytes: int | None
    load: float | None  # the part of the last moments in which a kernel ran, from 0 to 1
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    processes: tuple[GpuProcess, ...]  # this one left out


class GpuReader:
    """Reads all GPUs again and again."""

    def __init__(self) -> None:
        self.driver: str | None = None  # its version; None without one
        self.problem: str | None = None  # why nothing can be read, with the remedy; None if it can
        self._handles: list[Any] = []
        self._library: Any = None
        if not is_installed("pynvml"):
            self.problem = not_installed("nvidia-ml-py")
            return
        import pynvml

        try:
            pynvml.nvmlInit()
            self.driver = pynvml.nvmlSystemGetDriverVersion()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.problem = f"cannot read NVIDIA's driver ({error})"
            return
        self._library = pynvml

    def read(self) -> list[Gpu]:
        """Return every GPU, in PCI order; none where nothing can be read."""
        return [self._gpu(number, handle) for number, handle in enumerate(self._handles)]

    def _gpu(self, number: int, handle: Any) -> Gpu:
        nvml = self._library
        pci, memory = self._ask(nvml.nvmlDeviceGetPciInfo, handle), self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        limit_mw = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        return Gpu(
            number=number,
            name=self._ask(nvml.nvmlDeviceGetName, handle),
            pci=None if pci is None else f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}",
            memory_bytes=None if memory is None else int(memory.total),
            used_bytes=None if memory is None else int(memory.used),
            load=None if rates is None else rates.gpu / 100,
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, 0),  # 0: the sensor of the chip
            power_w=None if power_mw is None else power_mw / 1000,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            processes=tuple(GpuProcess(each.pid, each.usedGpuMemory) for each in processes if each.pid != os.getpid()),
        )

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call returns; None if the GPU or its driver does not know."""
        try:
            return function(*arguments)
        except self._library.NVMLError:
            return None
