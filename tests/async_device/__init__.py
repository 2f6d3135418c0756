"""An asynchronous accelerator that computes on the host: `import async_device`, and torch has devices "queued:0", ...

README.md beside this file says what it simulates, and which variables of the environment it reads. It is one
PrivateUse1 backend, as `unisono.testing`'s simulated devices are: one process has the one or the other.
"""

import atexit
import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from async_device import build

NAME = "queued"

torch.utils.rename_privateuse1_backend(NAME)
C = build.load()


def _index(device: Any = None) -> int:
    if device is None:
        return int(C.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(C.current_device()) if index is None else int(index)


class device(contextlib.AbstractContextManager[None]):  # noqa: N801 - torch's name
    """Makes a device current, as torch.cuda.device does."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = C.current_device()
        C.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        C.set_device(self.before)


@contextlib.contextmanager
def stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream current, and its device, as torch.cuda.stream does."""
    before, index = torch.accelerator.current_stream(stream.device), C.current_device()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        C.set_device(index)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    generators[C.current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generator of every device."""
    for generator in generators:
        generator.manual_seed(seed)


generators = tuple(C.default_generator(index) for index in range(C.device_count()))
ENTRY_POINT = str(Path(__file__).with_name("entry_point"))
sys.path.append(ENTRY_POINT)  # processes that multiprocessing spawns get this list, and have the device too


def environment() -> dict[str, str]:
    """Return the variables with which a child process has the device as soon as it imports torch.

        subprocess.run([sys.executable, "program.py"], env={**os.environ, **async_device.environment()})

    torch imports what the entry points `torch.backends` name, and one is in a folder that PYTHONPATH then names. The
    child begins with this process's settings (QUEUED_...), as they are now.
    """
    others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != ENTRY_POINT]
    settings = {name: str(value) for name, value in C.settings().items()}
    return {**settings, "PYTHONPATH": os.pathsep.join([ENTRY_POINT, *others])}


@contextlib.contextmanager
def held(one: torch.Stream) -> Iterator[None]:
    """Hold a stream back until the end of the block: what is queued on it does not run before."""
    marker = C.Marker()
    with stream(one):
        C.stream_waits(one.device_index, marker)
    try:
        yield
    finally:
        marker.set()


def _module() -> types.ModuleType:
    """Return what torch finds as torch.queued, as it finds torch.cuda."""
    module = types.ModuleType(f"torch.{NAME}")
    names = {
        "is_available": lambda: C.device_count() > 0,
        "is_initialized": lambda: True,
        "_initialized": True,  # activation checkpoints ask for it, else they do not keep the random state
        "_is_in_bad_fork": C.is_in_bad_fork,
        "device_count": C.device_count,
        "current_device": C.current_device,
        "set_device": lambda device: C.set_device(_index(device)),
        "device": device,
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "set_stream": torch.accelerator.set_stream,
        "stream": stream,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "default_generators": generators,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[_index(device)].set_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
        "is_current_stream_capturing": lambda: C.is_capturing(C.current_device()),
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name=NAME, total_memory=C.settings()["QUEUED_MEMORY_MIB"] << 20, uuid=f"{NAME}-{_index(device)}"
        ),
        "memory_allocated": lambda device=None: torch.accelerator.memory_allocated(_index(device)),
        "max_memory_allocated": lambda device=None: torch.accelerator.max_memory_allocated(_index(device)),
        "mem_get_info": lambda device=None: torch.accelerator.get_memory_info(_index(device)),
        "empty_cache": torch.accelerator.empty_cache,
    }
    module.__dict__.update(names)
    return module


torch._register_device_module(NAME, _module())
torch.utils.generate_methods_for_privateuse1_backend()
atexit.register(lambda: None if C.is_in_bad_fork() else C.synchronize_all())

from async_device import process_group  # noqa: E402 - it asks for the device

process_group.register()
