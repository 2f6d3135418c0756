"""Memory that must be free without the garbage collector."""

import contextlib
import gc
import sys
import types
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from unisono.runtime import thread_pool

_OF_OTHERS: tuple[str, ...] = ("_pytest", "execnet", "pluggy", "xdist")
if "async_device" in sys.modules:
    # Functions of torch.utils._pytree that call themselves, with their annotations. Torch's meta kernels in Python, by
    # which the asynchronous device finds sizes, leave some.
    _OF_OTHERS += ("torch.utils._pytree", "types")


def wait_for_workers() -> None:
    """Wait until idle workers have freed what they made and others dropped: Python without the lock leaves it to them.

    Where that refers to what another worker made, that one frees it the next time.
    """
    if thread_pool.OBJECTS_HAVE_THREADS:
        for _ in range(4):
            done: SimpleQueue[Any] = SimpleQueue()
            for _ in range(thread_pool.pool.run_idle(done)):
                done.get(timeout=60)


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Switch the garbage collector off for the block, and assert that it then finds nothing of ours to collect."""
    gc.collect()
    gc.disable()
    try:
        yield
        found = collected()
        assert not found, f"only the garbage collector frees {found}"
    finally:
        gc.enable()


def collected() -> list[str]:
    """Collect the garbage; return a description of each tensor, module, frame, function and object of a class in it.

    What the test runner's own threads leave at any time does not count, nor do containers: in a cycle of a program's
    there is something else.
    """
    wait_for_workers()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [f"{type(thing).__name__} of {module_of(thing)}" for thing in gc.garbage if _counts(thing)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def live_tensors() -> tuple[int, int]:
    """Return how many tensors Python can see, and how many bytes they have together."""
    wait_for_workers()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    sizes = {}
    for tensor in tensors:
        with contextlib.suppress(NotImplementedError):  # one that torch 2.9 has not defined yet, or no more
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return len(tensors), sum(sizes.values())


def _counts(thing: object) -> bool:
    if type(thing) in weakref.ProxyTypes:  # of what may be gone
        return False
    if isinstance(thing, torch.Tensor | nn.Module):
        return True
    module = module_of(thing)
    return module != "builtins" and not module.startswith(_OF_OTHERS)


def module_of(thing: object) -> str:
    """Return the name of the module to which a frame, a function or the class of an object belongs."""
    if isinstance(thing, types.FrameType):
        return str(thing.f_globals.get("__name__"))
    if isinstance(thing, types.MethodType | types.FunctionType | type):
        return str(thing.__module__)
    return type(thing).__module__
