"""What does torch keep once a process, for all threads alike, and which functions change it?"""

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch.nn.utils.parametrize
from torch.utils import _python_dispatch, _pytree

from unisono.runtime.contexts import contextmanager

# ---- registries ----------------------------------------------------------------------------------

_HOOKS_OF_EVERY_MODULE = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


def hooks_of_every_module() -> dict[str, list[Any]]:
    """Return the hooks that are registered for all modules alike, by their registry."""
    return {name: [*getattr(torch.nn.modules.module, name).values()] for name in _HOOKS_OF_EVERY_MODULE}


def flatten_registered(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Any] | None:
    """Return a container's children, a function that rebuilds it from new ones, and its context (what is no child).

    A library registers these functions with torch's pytree; None for a class that is not registered.
    """
    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda others: node.unflatten_fn(others, context), context


# ---- parametrizations ----------------------------------------------------------------------------

_parametrize: Any = torch.nn.utils.parametrize


def caches_parametrizations() -> bool:
    """Return whether `torch.nn.utils.parametrize.cached()` is on."""
    return bool(_parametrize._cache_enabled)


@contextmanager
def parametrizations_not_cached() -> Iterator[None]:
    """Switch `torch.nn.utils.parametrize.cached()` off: its cache has the live module as key for all replicas."""
    cached = _parametrize._cache_enabled  # how many `cached()` are open, in all threads
    _parametrize._cache_enabled -= cached
    try:
        yield
    finally:
        _parametrize._cache_enabled += cached


def cell_of_cached_parametrizations() -> Iterator[Any]:
    """Yield the cell that has the generator function behind `torch.nn.utils.parametrize.cached()`.

    A program that has imported `cached` calls what is in the cell, too.
    """
    cached: Any = _parametrize.cached
    for cell in cached.__closure__:
        if getattr(cell.cell_contents, "__name__", None) == cached.__name__:
            yield cell


# ---- flags of dispatch modes ---------------------------------------------------------------------

_namespace_of_flags = vars(_python_dispatch)
_DISPATCH_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)

# Return the flags by which torch tells, for the whole process, that a `TorchDispatchMode` is active. A mode sets them,
# and at its end sets them to what it found. Where modes of several threads overlap, the flags stay set, and older
# releases of torch compile nothing any more.
dispatch_mode_flags: Callable[[], tuple[bool, ...]] = partial(
    operator.itemgetter(*_DISPATCH_MODE_FLAGS), _namespace_of_flags
)


def clear_dispatch_mode_flags(before: Sequence[bool]) -> None:
    """Clear the flags that were not set when `dispatch_mode_flags` returned these.

    Those that were are left alone: the mode of another thread may have ended, or go on.
    """
    if dispatch_mode_flags() != before:
        found = zip(_DISPATCH_MODE_FLAGS, before, strict=True)
        _namespace_of_flags.update([(name, False) for name, flag in found if not flag])


# ---- settings ------------------------------------------------------------------------------------

# The functions that change it, in the releases of torch that have them: from 2.9 to 2.15 not all do. Left out are
# settings without a context manager that no forward changes for a while (preferred libraries, torch.set_warn_always).
_PROCESS_STATE_SETTERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        torch._C,
        (
            *(f"_set_sdp_use_{name}" for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")),
            *("_set_sdp_priority_order", "_set_default_dtype", "_set_default_tensor_type"),
            *("_set_deterministic_algorithms", "_set_deterministic_fill_uninitialized_memory"),
            *("_set_float32_matmul_precision", "_set_fp32_precision_setter", "_set_check_sparse_tensor_invariants"),
            *(f"_set_cudnn_{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
            *("_set_cudnn_depthwise_kernel", "_cuda_set_cudnn_benchmark_limit"),
            *("_set_mkldnn_enabled", "_set_mkldnn_deterministic", "_set_onednn_allow_tf32", "_set_nnpack_enabled"),
            *(f"_set_cublas_allow_{name}" for name in ("tf32", "fp16_accumulation")),
            *(f"_set_cublas_allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")),
        ),
    ),
    (torch, ("set_anomaly_enabled",)),
    (torch.backends.ContextProp, ("__set__",)),  # torch.backends.cudnn.benchmark = True
)


def process_state_setters() -> Iterator[tuple[Any, str]]:
    """Yield each function that changes what torch keeps once a process: the object that has it, and its name.

    Fallback: what this release of torch lacks is left out.
    """
    return ((owner, name) for owner, names in _PROCESS_STATE_SETTERS for name in names if name in vars(owner))


def forward_mode() -> list[tuple[Any, str]]:
    """Return the functions with which forward-mode differentiation begins and ends, as above."""
    of_func, by_hand = torch._functorch.eager_transforms, torch.autograd.forward_ad
    return [(by_hand, "enter_dual_level"), (by_hand, "exit_dual_level"), (of_func, "jvp_increment_nesting")]


def tracing() -> Iterator[tuple[Any, str]]:
    """Yield the method that traces a function as torch.func does, with torch.fx, whose state is the process's.

    None where torch has not imported it.
    """
    tracer: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if tracer is not None:
        yield tracer._MakefxTracer, "trace"
