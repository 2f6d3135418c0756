"""`--compile`: the model compiled by torch.compile, and what the user is told about it.

What is compiled is a shell around the module that is trained, so parameters, checkpoints and weights are those of a run
without it. torch compiles for one size of input at a time (`dynamic=False`: code for a known size is the fastest). An
epoch's steps have at most two sizes, one row apart (schedule.py), and so have the replicas' parts of them; each is
compiled when it is first met, and never again. Evaluation is not compiled: it would take longer to compile than it
could ever save.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from manyhands.console.errors import OptionError


def compiled(live: nn.Module) -> nn.Module:
    """Return a module that computes what `live` does, with its parameters, in code that is made at its first calls."""
    shell: nn.Module = torch.compile(live, dynamic=False)  # type: ignore[assignment]
    return shell


def expect_compiler(device: torch.device) -> None:
    """Compile something small for a device, to see whether that can be done at all.

    Raises:
        OptionError: it cannot; says what torch misses.
    """
    try:
        torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(2, device=device))
    except Exception as error:  # whatever torch's compiler and the programs that it calls raise
        raise cannot_compile(device, error) from error


def cannot_compile(device: torch.device, error: Exception) -> OptionError:
    """Return what to tell the user of an error of the compiler."""
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return OptionError(
        f"--compile: torch.compile does not work for {device} here ({reason}): mend that, or leave out --compile"
    )


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules as they were written, for as long as the context lasts."""
    with torch.compiler.set_stance("force_eager"):
        yield
