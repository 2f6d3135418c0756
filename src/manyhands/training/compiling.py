"""`--compile`: the model compiled by torch.compile, and the errors of the compiler.

torch.compile wraps the module that is trained, so parameters, checkpoints and weights are those of a run without it.
It compiles for one input size at a time (`dynamic=False`: code for a known size is the fastest). An epoch's steps have
at most two sizes, one row apart (schedule.py), and so have the replicas' shards; each size is compiled once, at its
first step. Evaluation is not compiled: compiling it would take longer than it could save.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from manyhands.console.errors import OptionError


def compiled(live: nn.Module) -> nn.Module:
    """Return a module that computes what `live` does, with its parameters, and is compiled at its first calls."""
    module: nn.Module = torch.compile(live, dynamic=False)  # type: ignore[assignment]
    return module


def expect_compiler(device: torch.device) -> None:
    """Compile a small function for a device, to check that the compiler works.

    Raises:
        OptionError: it does not; says why.
    """
    try:
        torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:  # whatever torch's compiler and the programs that it calls raise
        raise cannot_compile(device, error) from error


def cannot_compile(device: torch.device, error: Exception) -> OptionError:
    """Return an error of the compiler as one line for the user."""
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return OptionError(
        f"--compile: torch.compile does not work for {device} here ({reason}): mend that, or leave out --compile"
    )


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules uncompiled while the context lasts."""
    with torch.compiler.set_stance("force_eager"):
        yield
