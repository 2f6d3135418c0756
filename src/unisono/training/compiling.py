"""`--compile`: how torch.compile is asked, and the errors of the compiler.

It compiles for one input size at a time (`dynamic=False`: code for a known size is the fastest). An epoch's steps have
at most two sizes, usually one (schedule.py), and so have the replicas' shards; each size is compiled once, at its first
step. What is compiled, and what CUDA graphs need of it, is in computation.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.console.errors import OptionError
from unisono.runtime import devices

# The mode that captures what is compiled in CUDA graphs. "max-autotune" also tries many Triton kernels for each product
# and convolution. That takes minutes, and cuDNN, which chooses among kernels of its own (devices.float32_products), is
# hard to beat with convolutions in channels_last. `make gpu-check` measures both, to see whether this default is right.
GRAPHS_MODE = "reduce-overhead"


def compiled_module(live: nn.Module) -> nn.Module:
    """Return a module with the parameters of `live` that is compiled at its first calls.

    `live.compile()` would not do: torch compiles nothing in a `Sequential` that is called that way.
    """
    module: nn.Module = torch.compile(live, dynamic=False)  # type: ignore[assignment]
    return module


def compiled_whole(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function that is compiled into one graph; on GPUs that is a CUDA graph, where torch can capture it."""
    mode = GRAPHS_MODE if devices.has_graphs(device) else None
    return torch.compile(function, dynamic=False, fullgraph=True, mode=mode)


def expect_compiler(device: torch.device) -> None:
    """Compile a small function for a device.

    Raises:
        OptionError: the compiler does not work; says why.
    """
    try:
        torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:  # whatever torch's compiler and the programs that it calls raise
        raise cannot_compile(device, error) from error


def cannot_compile(device: torch.device, error: Exception) -> OptionError:
    """Return an error of the compiler as one line for the user."""
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return OptionError(
        f"--compile: torch.compile does not work for {device} here ({reason}): mend that, or take --no-compile"
    )
