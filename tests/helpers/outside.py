"""A snapshot of all that torch and Python keep once a process, and what differs between two of them.

    before = snapshot()
    model(x).sum().backward()
    print(differences(before, snapshot()))   # ["torch.random.default_generator", "signal SIGINT", ...]

Compared are the attributes of every module of torch and of Python's library, the entries of its classes, what its
functions close over and what its containers hold, all by identity; flags that only a call can read; and signal
handlers, those of Python and those of the system.
"""

import atexit
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_torch: Any = torch
_warnings: Any = warnings
Snapshot = dict[str, tuple[Any, ...]]

_MOST_ENTRIES = 5000  # of a container, by which tables of data are left out
_LIBRARIES = {*sys.stdlib_module_names, "torch"} - {"__main__"}
_NEVER = {"linecache", "sys.modules", "tracemalloc"}
# What changes with any call: counters, and caches whose entries are looked up, not set.
_CHANGING = ("__warningregistry__", "__annotations__", "__annotate__", "__abstractmethods__", "_abc_impl")

_FLAGS: dict[str, Callable[[], Any]] = {
    "anomaly mode": lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
    "cudnn": lambda: [getattr(torch.backends.cudnn, n) for n in ("enabled", "benchmark", "deterministic")],
    "default device": torch.get_default_device,
    "default dtype": torch.get_default_dtype,
    "deterministic algorithms": lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "dispatch modes": lambda: (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
    "float32 products": lambda: (
        torch.get_float32_matmul_precision(),
        _torch.backends.cuda.matmul.fp32_precision,
        _torch.backends.mkldnn.matmul.fp32_precision,
        _torch.backends.cudnn.conv.fp32_precision,
    ),
    "grad mode": lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    "linear algebra": lambda: (torch.backends.cuda.preferred_linalg_library(), torch.backends.quantized.engine),
    "mkldnn, nnpack": lambda: (torch.backends.mkldnn.enabled, torch._C._get_nnpack_enabled()),
    "number of threads": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "sdpa": lambda: [
        *[getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")],
        torch._C._get_sdp_priority_order(),
    ],
    "saved-tensor hooks": lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    "torch.compile's settings": lambda: _settings("torch._dynamo.config"),
    "torch.func's level": torch._C._functorch.maybe_current_level,
    "warn always": torch.is_warn_always_enabled,
    "collector": lambda: (gc.isenabled(), gc.get_threshold()),
    "collector's callbacks": lambda: [*map(id, gc.callbacks)],
    "cores": lambda: os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
    "environment": lambda: dict(os.environ),
    "exit functions": atexit._ncallbacks,
    "faulthandler": faulthandler.is_enabled,
    "limits": lambda: (sys.getrecursionlimit(), sys.getswitchinterval()),
    "trace functions": lambda: (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
    "warnings' filters": lambda: warnings.filters[1:],
}


def snapshot() -> Snapshot:
    """Return what there is now, by name; the objects are kept alive, so identities can be compared."""
    filters = [*warnings.filters]
    warnings.simplefilter("ignore")  # names that are deprecated say so when they are read
    try:
        return _snapshot()
    finally:
        _warnings.filters[:] = filters
        _warnings._filters_mutated()


def _snapshot() -> Snapshot:
    found: Snapshot = {f"flag: {name}": ("equal", flag()) for name, flag in _FLAGS.items()}
    for number in signal.valid_signals():
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        found[f"handler: {name}"] = ("is", signal.getsignal(number))
        found[f"handler in C: {name}"] = ("equal", system_handler(number))
    seen: set[int] = set()
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in _LIBRARIES and isinstance(module, types.ModuleType) and name not in _NEVER:
            for key, value in [*vars(module).items()]:
                if key not in _CHANGING:
                    _add(found, f"{name}.{key}", value, name, seen)
                if isinstance(value, types.ModuleType) and value.__name__ == name:  # torch.backends are modules in one
                    for inner, attribute in [*vars(value).items()]:
                        _add(found, f"{name}.{inner}", attribute, name, seen)
    return found


def _add(found: Snapshot, path: str, value: Any, home: str, seen: set[int]) -> None:
    """Add an attribute, and what is in it as far as it belongs to the module `home`."""
    if isinstance(value, types.ModuleType):  # one that is imported later is no change
        return
    found[path] = ("is", value)
    if id(value) in seen:
        return
    if isinstance(value, types.FunctionType):
        seen.add(id(value))
        for name, inner in _of_function(value):
            found[f"{path}.{name}"] = ("is", inner)
            if isinstance(inner, types.FunctionType) and "__wrapped__" not in name:
                _add(found, f"{path}.{name}", inner, home, seen)
    elif isinstance(value, type):
        if value.__module__ == home:
            seen.add(id(value))
            for name, inner in [*vars(value).items()]:
                if name in _CHANGING:
                    continue
                for suffix, part in _of_descriptor(inner):
                    _add(found, f"{path}.{name}{suffix}", part, home, seen)
    elif isinstance(value, dict | list | set | deque) and len(value) <= _MOST_ENTRIES:
        found[f"{path} (entries)"] = ("entries", _entries(value), [value])
    elif type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "__dict__"):
        seen.add(id(value))
        for name, inner in [*vars(value).items()]:
            found[f"{path}.{name}"] = ("is", inner)
            if isinstance(inner, dict | list | set):
                found[f"{path}.{name} (entries)"] = ("entries", _entries(inner), [inner])


def _of_descriptor(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, staticmethod | classmethod):
        yield "", value.__func__
    elif isinstance(value, property):
        yield from ((f".{name}", getattr(value, name)) for name in ("fget", "fset", "fdel"))
    else:
        yield "", value


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield "__code__", function.__code__
    yield "__defaults__", function.__defaults__
    for name, value in vars(function).items():
        yield name, value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"<{name}>", cell.cell_contents
        except ValueError:  # it is empty
            yield f"<{name}>", None


def _entries(container: Any) -> Any:
    if isinstance(container, Mapping):
        return {_key(key): _key(value) for key, value in [*container.items()]}
    return [*map(_key, container)] if not isinstance(container, set) else {*map(_key, container)}


def _key(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    return value if isinstance(value, str | bytes | int | float | bool | None) else id(value)


def _settings(name: str) -> dict[str, Any]:
    module = sys.modules.get(name)
    return {} if module is None else {key: getattr(module, key) for key in module._config}


_libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
_RESTORER = 0x04000000  # glibc sets this flag itself


class _Action(ctypes.Structure):
    """A `struct sigaction` of glibc; of its set of signals, the first 8 bytes are used."""

    _fields_ = (("handler", ctypes.c_void_p), ("mask", ctypes.c_uint8 * 128), ("flags", ctypes.c_int))


def system_handler(number: int) -> tuple[int, int]:
    """Return the address of the function that the system calls at a signal, and the flags of sigaction(2)."""
    action = _Action()
    buffer = ctypes.create_string_buffer(256)
    _libc.sigaction(number, None, buffer)
    ctypes.memmove(ctypes.addressof(action), buffer, ctypes.sizeof(action))
    return action.handler or 0, action.flags & ~_RESTORER


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Return the names of what differs. A module that has been loaded meanwhile is no difference."""
    loaded = {name.rpartition(".")[0] for name in before}
    names = [name for name in before if name not in after or not _same(before[name], after[name])]
    return names + [name for name in after if name not in before and name.rpartition(".")[0] in loaded]


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if one[0] != other[0]:
        return False
    if one[1] is other[1]:
        return True
    return (one[0] != "is" or isinstance(one[1], str | int | float | tuple)) and bool(one[1] == other[1])
