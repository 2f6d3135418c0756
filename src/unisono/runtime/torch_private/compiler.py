"""Is this call traced, or is what it calls compiled, and what does torch.compile need where replicas run in threads?"""

import contextlib
import functools
import importlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.fx._symbolic_trace

from unisono.runtime.torch_private.modes import num_dispatch_modes

_c: Any = torch._C
_fx: Any = torch.fx._symbolic_trace

# ---- tracing -------------------------------------------------------------------------------------

# Return whether torch.jit traces in this thread.
traces_with_jit: Callable[[], bool] = _c._is_tracing

_FX_TRACES_BY_THREAD = hasattr(_fx, "_get_is_fx_tracing")  # from torch 2.14 on


def has_tracer() -> bool:
    """Return whether torch.jit or torch.fx traces in this thread; before torch 2.14, torch.fx in any."""
    flag = _fx._get_is_fx_tracing() if _FX_TRACES_BY_THREAD else _fx._is_fx_tracing_flag
    return bool(_c._is_tracing() or flag)


def is_tracing() -> bool:
    """Return whether operations are recorded in this thread, by torch.compile or export, rather than run."""
    return num_dispatch_modes() > 0 and any(_c._get_dispatch_mode(kind) is not None for kind in _RECORDING)


_RECORDING = tuple([getattr(_c._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")])

# ---- what torch.compile has made -----------------------------------------------------------------


def is_compiled(function: object) -> bool:
    """Return whether torch.compile made `function`."""
    return issubclass(type(function), types.FunctionType) and "_torchdynamo_orig_callable" in function.__dict__


def replays_cuda_graphs(function: object) -> bool:
    """Return whether torch.compile made `function` with CUDA graphs, as mode="reduce-overhead" does.

    Compiled with the backend "cudagraphs", or with the global setting, it is not noticed.
    """
    if not is_compiled(function):
        return False
    found = _with_cuda_graphs.get(function)
    if found is None:
        config_of: Any = getattr(function, "get_compiler_config", None)
        config = config_of() if callable(config_of) else None
        found = _with_cuda_graphs[function] = bool(config and config.get("triton.cudagraphs"))
    return found


_with_cuda_graphs: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()  # to ask takes milliseconds


def has_compiled_call(module: torch.nn.Module) -> bool:
    """Return whether calling `module` runs code that torch.compile made for this object."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch.compile raises when it cannot compile; none where nothing has been compiled."""
    dynamo = sys.modules.get("torch._dynamo")
    return () if dynamo is None else (dynamo.exc.TorchDynamoException,)


# ---- what it is told -----------------------------------------------------------------------------


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile runs as it is written, with all that it calls, between two of its graphs.

    It is the same one where torch.compile has not been imported: nothing is compiled there, and to import it is slow.
    """
    return _disabled(function) if "torch._dynamo" in sys.modules else function


@functools.cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def mark_static(tensors: Iterable[torch.Tensor]) -> None:
    """Tell torch.compile that tensors keep their addresses: CUDA graphs need no copies of them, and may change them.

    Fallback, where it cannot be imported: nothing.
    """
    with contextlib.suppress(ImportError):
        mark = importlib.import_module("torch._dynamo").mark_static_address
        for tensor in tensors:
            mark(tensor, guard=True)


def settings_of_compiler() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield the settings of torch.compile that are others while compiled replicas run in threads.

    Each is an object, the name of an attribute, and a function from its value to the other one.

    - Compiled code belongs to one device, and torch keeps few versions of a function (8); the devices beyond run
      uncompiled. It keeps as many for each accelerator as for one.
    - A call that finds its version moves it to the front of the list. A call in another thread that searches the list
      at that moment misses it, and compiles the same code again. The list stays in its order. Fallback, with torch 2.9:
      that happens.
    - Until torch 2.13 it counts once a process what the compiler does, and two threads that compile at the same time,
      such as those of two replicas' backward passes, raise "Metric(s) have already been set". Each thread counts for
      itself.
    """
    with contextlib.suppress(ImportError):
        config: Any = importlib.import_module("torch._dynamo.config")
        num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        if num_devices > 1:
            yield config, "recompile_limit", lambda limit: limit * num_devices
        keep_by_use = getattr(importlib.import_module("torch._C._dynamo.eval_frame"), "_set_lru_cache", None)
        if keep_by_use is not None:
            yield _OrderOfCode(keep_by_use), "is_by_use", lambda _: False
        utils: Any = importlib.import_module("torch._dynamo.utils")
        context = getattr(utils, "_METRICS_CONTEXT", None)
        if context is not None and not isinstance(context, threading.local):
            yield utils, "_METRICS_CONTEXT", _by_thread


class _OrderOfCode:
    """How torch.compile orders the versions of a function: those found last first, by default, or as they were made."""

    def __init__(self, set_by_use: Callable[[bool], None]) -> None:
        self._set_by_use, self._is_by_use = set_by_use, True

    @property
    def is_by_use(self) -> bool:
        return self._is_by_use

    @is_by_use.setter
    def is_by_use(self, value: bool) -> None:
        self._set_by_use(value)
        self._is_by_use = value


def _by_thread(context: Any) -> Any:
    return _class_by_thread(type(context))(on_exit=context._on_exit)  # type: ignore[arg-type]


@functools.cache  # a class refers to itself: only the garbage collector would free one of each pass
def _class_by_thread(of_context: type) -> type[Any]:
    return type("MetricsContextByThread", (of_context, threading.local), {})
