"""The launcher's environment variables, and the default process group that follows from them.

torchrun, `python -m torch.distributed.launch` and similar launchers start one process a device, on one host or several,
and set environment variables in each: RANK and WORLD_SIZE among all processes, LOCAL_RANK among those of its host, and
MASTER_ADDR and MASTER_PORT, where the ranks connect. torch.distributed does everything else.
"""

import atexit
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from unisono.runtime import devices as _devices
from unisono.runtime.forks import in_forked_child

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_POLL_S = 0.02
failed = threading.Event()  # set when the processes no longer agree on what comes next
_REMEDY = (
    "Start the program with torchrun, which sets all of them; or unset the others; or keep the model to this process "
    "with DataParallel(..., process_group=False)."
)


def started_by_launcher() -> bool:
    """Return whether a launcher has started this process.

    Raises:
        RuntimeError: some of the variables are missing, or a value is invalid.
    """
    given = [name for name in _RANK_VARIABLES if name in os.environ]
    if not given:
        return False
    missing = [name for name in (*_RANK_VARIABLES, *_MASTER_VARIABLES) if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, as by a launcher of several processes, "
            f"but not {', '.join(missing)}. {_REMEDY}"
        )
    rank, world_size, local_rank = (_number(name) for name in _RANK_VARIABLES)
    if not (0 <= rank < world_size and local_rank >= 0):
        raise RuntimeError(
            f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank}: expected 0 <= RANK < WORLD_SIZE and "
            f"0 <= LOCAL_RANK. {_REMEDY}"
        )
    return True


def local_device() -> torch.device:
    """Return this process's device: the accelerator with the number LOCAL_RANK; the CPU if there is no accelerator.

    If only one is visible, it is that one: Slurm's --gpus-per-task, and launchers that set CUDA_VISIBLE_DEVICES for
    each process, number each process's own from 0.

    Without LOCAL_RANK (the program has made its process group by itself) it is the current accelerator.

    Raises:
        ValueError: this machine has more processes than accelerators.
    """
    present = _devices.accelerators()
    if not present:
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        return _devices.resolve_one(present[0].type, "device")  # the current one
    local_rank = _number("LOCAL_RANK") if len(present) > 1 else 0
    if local_rank >= len(present):
        raise ValueError(
            f"LOCAL_RANK={local_rank}, and this machine has {len(present)} accelerator{'s' * (len(present) > 1)}: "
            f"start at most {len(present)} processes here (torchrun --nproc-per-node={len(present)}), or say with "
            "device_ids which one this process uses."
        )
    return present[local_rank]


def devices_of_process(device_ids: Sequence[_devices.DeviceLike] | None) -> list[torch.device]:
    """Return the devices of a process that a launcher has started: `device_ids`, or `local_device()`.

    The first becomes the current one.

    Raises:
        TypeError, ValueError: as `devices.resolve` and `local_device`.
    """
    devices = (_devices.resolve(device_ids) if device_ids is not None else []) or [local_device()]
    _devices.make_current(devices[0])
    return devices


def start_default_group() -> bool:
    """Make the default process group if a launcher has started this process; return whether there is one now.

    It is destroyed when the program ends.

    Raises:
        RuntimeError: as `started_by_launcher`; or there are other processes, and this torch has no torch.distributed.
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
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            rank, world_size = _number("RANK"), _number("WORLD_SIZE")
            distributed.init_process_group(
                store=_store_of_this_restart(rank, world_size), rank=rank, world_size=world_size
            )
        else:
            distributed.init_process_group()
        atexit.register(_end_default_group)
    return True


def _store_of_this_restart(rank: int, world_size: int) -> Any:
    """Return the launcher's store, under a prefix that no earlier start of the processes has used.

    torchrun keeps its store across restarts, so stale keys remain, such as addresses of processes that have ended. The
    ranks have no common restart count: each host counts for itself. So rank 0 publishes a fresh prefix; the other ranks
    verify it by a challenge that rank 0 must acknowledge.
    """
    distributed: Any = torch.distributed
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    store = distributed.PrefixStore("unisono", distributed.TCPStore(address, port, is_master=False))
    if rank == 0:
        prefix = uuid.uuid4().hex
        store.set("prefix", prefix)
        for other in range(1, world_size):
            challenge = store.get(f"{prefix}/challenge of {other}").decode()
            store.set(f"{prefix}/acknowledged {challenge}", "")
        return distributed.PrefixStore(prefix, store)
    challenge, prefix = uuid.uuid4().hex, ""
    deadline = time.monotonic() + store.timeout.total_seconds()
    while not prefix or not store.check([f"{prefix}/acknowledged {challenge}"]):
        latest = store.get("prefix").decode()
        if latest != prefix:
            prefix = latest
            store.set(f"{prefix}/challenge of {rank}", challenge)
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {rank} has waited {store.timeout.total_seconds():g} s for rank 0 to start")
        time.sleep(_POLL_S)
    return distributed.PrefixStore(prefix, store)


def _end_default_group() -> None:
    """Destroy the default group, unless a failure has left collectives that another rank will never join.

    To destroy it would wait for them. The operating system closes the connections.
    """
    distributed: Any = torch.distributed
    if distributed.is_initialized() and not failed.is_set():
        distributed.destroy_process_group()


in_forked_child(lambda: atexit.unregister(_end_default_group))  # it is the parent's


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise RuntimeError(f"{name}={os.environ[name]!r}: expected a whole number. {_REMEDY}") from None
