"""The driver's library, with NVIDIA's GPUs that do not exist."""

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

GIB = 2**30


class NVMLError(Exception):
    """What the driver's library raises."""


def nvml(gpus: Sequence[dict[str, Any]]) -> ModuleType:
    """Return a `pynvml` of these GPUs: `bus`, and `load`, `used`, `pids` where they are not 0.

    Each process takes one GiB. A figure that is None is not supported.
    """

    def of(name: str, value: Any = 0) -> Any:
        def read(gpu: dict[str, Any], *_: Any) -> Any:
            found = gpu.get(name, value)
            if found is None:
                raise NVMLError("Not Supported")
            return found

        return read

    module: Any = ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.nvmlInit = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: "550.54"
    module.nvmlDeviceGetCount = lambda: len(gpus)
    module.nvmlDeviceGetHandleByIndex = lambda index: gpus[index]
    module.nvmlDeviceGetName = of("name", "Fake GPU")
    module.nvmlDeviceGetPciInfo = lambda gpu: SimpleNamespace(domain=0, bus=gpu["bus"], device=0)
    module.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(total=16 * GIB, used=gpu.get("used", 0) * GIB)
    module.nvmlDeviceGetUtilizationRates = lambda gpu: SimpleNamespace(gpu=of("load")(gpu))
    module.nvmlDeviceGetTemperature = of("temperature", 60)
    module.nvmlDeviceGetPowerUsage = of("power", 250_000)
    module.nvmlDeviceGetEnforcedPowerLimit = of("limit", 300_000)
    module.nvmlDeviceGetComputeRunningProcesses = lambda gpu: [
        SimpleNamespace(pid=pid, usedGpuMemory=GIB) for pid in gpu.get("pids", ())
    ]
    return module


def install(patch: pytest.MonkeyPatch, module: ModuleType | None) -> None:
    """Have `import pynvml` find this module; None: nothing."""
    find_spec = importlib.util.find_spec
    found = None if module is None else SimpleNamespace(origin="pynvml.py")
    patch.setattr(
        importlib.util, "find_spec", lambda name, *rest: found if name == "pynvml" else find_spec(name, *rest)
    )
    patch.setitem(sys.modules, "pynvml", module)
