"""parallel_apply: call replica i with shard i, all at once, each in a thread of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.primitives import pytree
from unisono.primitives.checks import check_kwargs
from unisono.runtime import devices as _devices
from unisono.runtime.devices import DeviceIds
from unisono.runtime.errors import shown
from unisono.runtime.interrupts import critical, interruptibly
from unisono.runtime.rng import own_streams
from unisono.runtime.thread_pool import OBJECTS_HAVE_THREADS, free_in_workers, run_together, values_or_raise
from unisono.runtime.thread_state import modes_that_stay
from unisono.runtime.tracebacks import without_own_frames


@without_own_frames
@critical
def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any] | None] | None = None,
    devices: DeviceIds | None = None,
) -> list[Any]:
    """Call `modules[i](*inputs[i], **kwargs_tup[i])` for every i, all at once; return the outputs in order.

        >>> double, negate = torch.nn.Threshold(-1, 0), lambda x: -x
        >>> unisono.parallel_apply([double, negate], [torch.ones(2), torch.ones(3)])
        [tensor([1., 1.]), tensor([-1., -1., -1.])]

    Every call sees the caller's thread state: grad mode, autocast, default device and the rest. Several calls on the
    CPU draw from random streams of their own, seeded from torch's random state: equal seeds, equal runs.

    Args:
        modules: one module (or any callable) a call.
        inputs: one tuple of positional inputs a call; anything else is the only input.
        kwargs_tup: one dict of keyword inputs a call, or None for none.
        devices: the device that is current during each call; left out, that of the call's first tensor.

    Raises:
        TypeError: arguments that are no sequence; an entry that is no callable, or no dict of keyword inputs.
        ValueError: sequences of different lengths, or none at all.
        BaseException: what a call raised, the same object, with a note that names the replica and its device; of
            several the lowest replica's, the others named in the note.
    """
    for name, sequence in (("modules", modules), ("inputs", inputs), ("kwargs_tup", kwargs_tup)):
        if name == "kwargs_tup" and sequence is None:
            continue
        if isinstance(sequence, str) or not isinstance(sequence, Sequence | torch.nn.ModuleList):
            raise TypeError(f"{name}: expected a list with one entry for each call, got {shown(sequence)}")
    calls = len(modules)
    if not calls:
        raise ValueError("no modules to apply: expected at least one")
    used = None if devices is None else _devices.resolve_each(devices, "devices")
    for name, given in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", used)):
        if given is not None and len(given) != calls:
            raise ValueError(f"{calls} modules but {len(given)} {name}: expected one for each module")
    for i, module in enumerate(modules):
        if not callable(module):
            raise TypeError(f"modules[{i}]: expected a module or a function, got {shown(module)}")
    all_kwargs = [check_kwargs(kwargs, f"kwargs_tup[{i}]") for i, kwargs in enumerate(kwargs_tup or [{}] * calls)]
    all_inputs = [given if isinstance(given, tuple | list) else (given,) for given in inputs]
    if used is None:
        used = [_device_of(args, kwargs) for args, kwargs in zip(all_inputs, all_kwargs, strict=True)]

    where = [f"replica {i} on {device}" for i, device in enumerate(used)]
    with own_streams(type(modules[0]).__name__, used[:1] if modes_that_stay() else used) as streams:

        def task(index: int) -> Callable[[], Any]:
            def run() -> Any:
                with streams(index):
                    return interruptibly(modules[index], *all_inputs[index], **all_kwargs[index])

            return run

        try:
            return values_or_raise(run_together([task(i) for i in range(calls)], used), where)
        finally:
            if OBJECTS_HAVE_THREADS:
                free_in_workers()


def _device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    found = next(pytree.tensors([list(args), kwargs]), None)
    return found[1].device if found else torch.device("cpu")
