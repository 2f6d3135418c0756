"""What do torch's process groups, and its own wrappers around modules, FSDP and DDP, keep to themselves?"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from unisono.runtime.contexts import contextmanager

# ---- groups --------------------------------------------------------------------------------------


@contextmanager
def default_group_unbound() -> Iterator[None]:
    """Let some ranks of the default group make a process group of their own, without the others.

    Where the default group is bound to a device (`init_process_group(device_id=...)`), torch splits the new group's
    NCCL communicator off that of the default group. All ranks of the default group have to take part in the split, so
    those of the new group would wait for ever. Unbound, the new group connects when it is first used.
    """
    default: Any = torch.distributed.group.WORLD
    device = None if default is None else default.bound_device_id
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


@contextmanager
def group_named(name: str) -> Iterator[None]:
    """Give this name to the process group that this thread makes with `use_local_synchronization=True`.

    The keys of a group in the store begin with its name. torch's own name follows from how many groups this process
    has: so it comes back after a group has been destroyed, with the addresses of the old one in the store; and ranks
    that have ended other groups, or later, look for each other under different names.
    """
    module: Any = torch.distributed.distributed_c10d
    original = module._process_group_name
    thread = threading.get_ident()

    def name_of(*args: Any, **kwargs: Any) -> Any:
        return name if threading.get_ident() == thread else original(*args, **kwargs)

    module._process_group_name = name_of
    try:
        yield
    finally:
        module._process_group_name = original


def timeout_of_group(group: Any) -> timedelta:
    """Return the timeout of a process group. Fallback, for a backend that says none: 30 minutes, gloo's default."""
    default = timedelta(minutes=30)
    for kind in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            timeout = group._get_backend(kind).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return default


def abort_group(group: Any) -> None:
    """End the collectives of a group of torch.distributed that wait on an accelerator; gloo's end by themselves.

    It does not wait: a thread of its own does, because a driver may take its time to end a kernel. Fallback, for a
    backend that cannot end them: nothing.
    """
    gloo: Any = getattr(torch.distributed, "ProcessGroupGloo", ())  # a build of torch may be without it
    backends: dict[int, Any] = {}
    for kind in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(kind)
            backends[id(backend)] = backend
    abort = [each.abort for each in backends.values() if hasattr(each, "abort") and not isinstance(each, gloo)]
    if abort:
        threading.Thread(target=lambda: [each() for each in abort], name="unisono-abort", daemon=True).start()


# ---- torch's own wrappers ------------------------------------------------------------------------


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether FSDP, of either kind, has the parameters of a module, without those of its children."""
    return bool(module.__dict__.get("_is_fsdp_managed_module"))


def sharded_tensor_types() -> tuple[type, ...]:
    """Return the classes of tensors of which each process has a part; one that is not imported has no tensors."""
    places = ("torch.distributed.tensor", "DTensor"), ("torch.distributed._shard.sharded_tensor", "ShardedTensor")
    return tuple([getattr(sys.modules[module], name) for module, name in places if module in sys.modules])


def runs_in_ddp() -> bool:
    """Return whether the forward that is running is one of a DistributedDataParallel."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None
