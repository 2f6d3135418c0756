"""Let a script believe that it has GPUs, as far as counting goes.

Many scripts wrap their model only `if torch.cuda.device_count() > 1:`. To try these on the CPU, the count that a script
reads can be that of the replicas. `torch.cuda.is_available()` stays true to the machine, and torch itself and unisono
get the true count.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def counted_as_gpus(count: int) -> Iterator[None]:
    """Let `device_count()` of torch.cuda and torch.accelerator be `count` for all but torch and unisono."""
    true_counts = [(module, module.device_count) for module in (torch.cuda, torch.accelerator)]
    for module, device_count in true_counts:
        module.device_count = _answering(device_count, count)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, device_count in true_counts:
            module.device_count = device_count  # type: ignore[attr-defined]


def _answering(device_count: Callable[[], int], count: int) -> Callable[[], int]:
    @functools.wraps(device_count)
    def answer() -> int:
        asker = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        return device_count() if asker in ("torch", "unisono") else count

    return answer
