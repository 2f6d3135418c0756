"""What a launcher says in the environment, and the default process group that follows from it.

torchrun, `python -m torch.distributed.launch` and their like start one process a device, or several a machine, and tell
each who it is by environment variables: RANK and WORLD_SIZE among all processes, LOCAL_RANK among those of its machine,
and MASTER_ADDR and MASTER_PORT, where they find each other. Everything else is torch.distributed's.
"""

import atexit
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from manyhands import devices as _devices

_WHO = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_WHERE = ("MASTER_ADDR", "MASTER_PORT")
_LOOK_EVERY_S = 0.02
_REMEDY = (
    "Start the program with torchrun, which sets all of them; or unset the others; or keep the model to this process "
    "with DataParallel(..., process_group=False)."
)


def started_by_launcher() -> bool:
    """Return whether a launcher has started this process.

    Raises:
        RuntimeError: the environment says so in part only, or with values that cannot be.
    """
    given = [name for name in _WHO if name in os.environ]
    if not given:
        return False
    missing = [name for name in (*_WHO, *_WHERE) if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, as by a launcher of several processes, "
            f"but not {', '.join(missing)}. {_REMEDY}"
        )
    rank, world_size, local_rank = (_number(name) for name in _WHO)
    if not (0 <= rank < world_size and local_rank >= 0):
        raise RuntimeError(
            f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank}: expected 0 <= RANK < WORLD_SIZE and "
            f"0 <= LOCAL_RANK. {_REMEDY}"
        )
    return True


def local_device() -> torch.device:
    """Return the device that is meant for this process: the accelerator of its LOCAL_RANK; the CPU where there is none.

    Without LOCAL_RANK (a program that has made its process group by itself) it is the current accelerator.

    Raises:
        ValueError: this machine has more processes than accelerators.
    """
    present = _devices.accelerators()
    if not present:
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        return _devices.resolve_one(present[0].type, "device")  # the current one
    local_rank = _number("LOCAL_RANK")
    if local_rank >= len(present):
        raise ValueError(
            f"LOCAL_RANK={local_rank}, and this machine has {len(present)} accelerator{'s' * (len(present) > 1)}: "
            f"start at most {len(present)} processes here (torchrun --nproc-per-node={len(present)}), or say with "
            "device_ids which one this process uses."
        )
    return present[local_rank]


def devices_of_process(device_ids: Sequence[_devices.DeviceLike] | None) -> list[torch.device]:
    """Return the devices of a process that a launcher has started: those that are named, or its own one.

    Raises:
        TypeError, ValueError: as `devices.resolve` and `local_device`.
    """
    return (_devices.resolve(device_ids) if device_ids is not None else []) or [local_device()]


def start_default_group() -> bool:
    """Start the default process group if a launcher has started this process; return whether there is one now.

    It is ended when the program ends.

    Raises:
        RuntimeError: as `started_by_launcher`; or there are other processes, and this torch cannot talk to them.
    """
    distributed: Any = torch.distributed
    if not distributed.is_available():
        if started_by_launcher() and _number("WORLD_SIZE") > 1:
            raise RuntimeError(
                f"WORLD_SIZE={_number('WORLD_SIZE')}, and this torch has no torch.distributed, by which processes "
                "train together. Install one that has; or keep the model to this process with process_group=False."
            )
        return False
    if not distributed.is_initialized():
        if not started_by_launcher():
            return False
        own = _devices.accelerators()[_number("LOCAL_RANK") :][:1]
        if own and not _devices.computes_on_host(own[0]):
            torch.accelerator.set_device_index(own[0].index)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            rank, world_size = _number("RANK"), _number("WORLD_SIZE")
            distributed.init_process_group(
                store=_store_of_this_start(rank, world_size), rank=rank, world_size=world_size
            )
        else:
            distributed.init_process_group()
        atexit.register(_end_default_group)
    return True


def _store_of_this_start(rank: int, world_size: int) -> Any:
    """Return the launcher's store, with names of this start's own.

    torchrun keeps one store from one start of its processes to the next, and in it what the earlier ones have written:
    where they listened, for one, so that processes would call those that have gone. How often they have been started,
    they cannot know: each machine counts for itself. So the first process makes up a name for this start. The others
    cannot tell it from an earlier one, but by an answer to a word that they have just made up themselves.
    """
    distributed: Any = torch.distributed
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    store = distributed.PrefixStore("manyhands", distributed.TCPStore(address, port, is_master=False))
    word = uuid.uuid4().hex
    if rank == 0:
        store.set("start", word)
        for other in range(1, world_size):
            theirs = store.get(f"{word}/{other}").decode()
            store.set(f"{word}/answer to {theirs}", "")
        return distributed.PrefixStore(word, store)
    start = ""
    deadline = time.monotonic() + store.timeout.total_seconds()
    while not start or not store.check([f"{start}/answer to {word}"]):
        latest = store.get("start").decode()
        if latest != start:
            start = latest
            store.set(f"{start}/{rank}", word)
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {rank} has waited {store.timeout.total_seconds():g} s for rank 0 to start")
        time.sleep(_LOOK_EVERY_S)
    return distributed.PrefixStore(start, store)


def _end_default_group() -> None:
    distributed: Any = torch.distributed
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise RuntimeError(f"{name}={os.environ[name]!r}: expected a whole number. {_REMEDY}") from None
