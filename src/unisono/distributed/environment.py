"""This process's device under a launcher, and the default process group that follows from what the launcher says."""

import atexit
import contextlib
import os
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from unisono.distributed import launchers
from unisono.distributed.failure_store import STORE_ERRORS, host_id
from unisono.distributed.launchers import Launch, launch
from unisono.runtime import devices as _devices
from unisono.runtime.errors import log_once
from unisono.runtime.forks import in_forked_child

_POLL_S = 0.02
_NO_RANK = (
    "waited {waited_s:g} s for rank {rank}, which has not come to a DataParallel. Every process has to wrap the model; "
    "for a model of this process alone pass process_group=False."
)
RENDEZVOUS_S = 300.0  # for how long processes wait for each other at first, as torch's stores do
failed = threading.Event()  # set when the processes no longer agree on what comes next
_counted_local_rank: int | None = None  # where the launcher does not say it: by the hosts of the ranks
_num_made = 0  # groups that this process has made, as has every other that it has met


def local_device() -> torch.device:
    """Return this process's device: the accelerator of its local rank's number; the CPU if there is no accelerator.

    If only one is visible, it is that one: Slurm's --gpus-per-task, and launchers that set CUDA_VISIBLE_DEVICES for
    each process, number each process's own from 0.

    Without a local rank (the program has made its process group by itself) it is the current accelerator.

    Raises:
        ValueError: this machine has more processes than accelerators.
    """
    present = _devices.accelerators()
    if not present:
        return torch.device("cpu")
    number = local_rank()
    if number is None:
        return _devices.resolve_one(present[0].type, "device")  # the current one
    if len(present) == 1:
        number = 0
    if number >= len(present):
        raise ValueError(
            f"LOCAL_RANK={number}, but this machine has only {len(present)} "
            f"accelerator{'s' * (len(present) > 1)}: start at most {len(present)} processes here (torchrun "
            f"--nproc-per-node={len(present)}), or name this process's device with device_ids."
        )
    return present[number]


def local_rank() -> int | None:
    """Return this process's rank among those of its host; None if nothing says it."""
    number = launchers.local_rank()
    return _counted_local_rank if number is None else number


def devices_of_process(device_ids: Sequence[_devices.DeviceLike] | None) -> list[torch.device]:
    """Return the devices of a process that a launcher has started: `device_ids`, or `local_device()`.

    The first becomes the current one.

    Raises:
        TypeError, ValueError: as `devices.resolve` and `local_device`.
    """
    devices = (_devices.resolve(device_ids) if device_ids is not None else []) or [local_device()]
    _devices.make_current(devices[0])
    return devices


def start_default_group(timeout_s: float | None = None) -> bool:
    """Make the default process group if a launcher has started this process; return whether there is one now.

    It is destroyed when the program ends.

    Args:
        timeout_s: that of the group; None: torch's default.

    Raises:
        RuntimeError: as `launch`; or there are other processes, and this torch has no torch.distributed.
    """
    distributed: Any = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return True
    process = launch()
    if process is None:
        if (message := launchers.unnoticed()) is not None:
            log_once(message)
        return False
    if not distributed.is_available():
        if process.world_size > 1:
            raise RuntimeError(
                f"WORLD_SIZE={process.world_size}, but this torch is built without torch.distributed. Install "
                "a torch that has it; or train in this process alone, with process_group=False."
            )
        return False
    _make_default_group(process, {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)})
    atexit.register(_end_default_group)
    return True


def _make_default_group(process: Launch, timeout: dict[str, timedelta]) -> None:
    global _counted_local_rank, _num_made  # noqa: PLW0603 - the process has one
    distributed: Any = torch.distributed
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _store_of_this_restart(process, **timeout)
    else:
        try:
            store = distributed.TCPStore(
                process.address,
                process.port,
                is_master=process.rank == 0,
                wait_for_workers=False,
                multi_tenant=True,  # the store of an earlier group of this program may still listen
                **timeout,
            )
        except (*STORE_ERRORS, RuntimeError) as error:
            raise RuntimeError(
                f"rank {process.rank} of {process.world_size} cannot "
                f"{'listen' if process.rank == 0 else 'connect'} at {process.address}:{process.port}, the "
                f"address of rank 0 (set MASTER_ADDR and MASTER_PORT for another one): {error}"
            ) from error
        _num_made += 1  # what an earlier group has written is in the store
        store = distributed.PrefixStore(f"unisono {process.job} {_num_made}", store)
    # The backends of the devices that are there, so that `get_backend()` names them.
    kinds = {device.type for device in _devices.accelerators()}
    backends = [f"{kind}:{name}" for kind in sorted(kinds) if (name := _backend_for(kind)) not in (None, "gloo")]
    backend = ",".join(["cpu:gloo", *backends]) if backends else "gloo"
    try:
        store.set(_host_of(process.rank), host_id())
        all_hosts = [_host_of(rank) for rank in range(process.world_size)]
        store.wait(all_hosts, timeout.get("timeout", timedelta(seconds=RENDEZVOUS_S)))
        if launchers.local_rank() is None:
            _counted_local_rank = _count_local_rank(store, process)
        distributed.init_process_group(
            backend, store=store, rank=process.rank, world_size=process.world_size, **timeout
        )
    except (*STORE_ERRORS, RuntimeError) as error:
        raise RuntimeError(_not_met(store, process, error)) from error


def _backend_for(kind: str) -> str | None:
    """Return the backend that torch has for a kind of device; None if it has none."""
    with contextlib.suppress(ValueError, RuntimeError):
        return str(torch.distributed.get_default_backend_for_device(kind))
    return None


def _count_local_rank(store: Any, process: Launch) -> int:
    """Return how many lower ranks run on this host. A collective, through the store."""
    hosts = [store.get(_host_of(rank)).decode() for rank in range(process.rank)]
    return hosts.count(host_id())


def _host_of(rank: int) -> str:
    return f"host of {rank}"


def _not_met(store: Any, process: Launch, error: Exception) -> str:
    """Return the message of a rank that could not be connected with all others."""
    where = f"{process.address}:{process.port}, the address of rank 0"
    with contextlib.suppress(*STORE_ERRORS, RuntimeError):
        missing = [str(rank) for rank in range(process.world_size) if not store.check([_host_of(rank)])]
        if missing:
            ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(missing[:8])}{', ...' * (len(missing) > 8)}"
            return (
                f"rank {process.rank} of {process.world_size} waited at {where}, but {ranks} did not connect: {error}"
            )
    return f"rank {process.rank} of {process.world_size} could not connect to the others at {where}: {error}"


def _text_of(rank: int, key: str, store: Any) -> str:
    """Return a text that a rank writes when it comes to its first DataParallel; raise RuntimeError if it does not."""
    try:
        return str(store.get(key).decode())
    except STORE_ERRORS as error:
        raise RuntimeError(_NO_RANK.format(waited_s=store.timeout.total_seconds(), rank=rank)) from error


def _store_of_this_restart(process: Launch, **timeout: timedelta) -> Any:
    """Return the launcher's store, under a prefix that no earlier start of the processes has used.

    torchrun keeps its store across restarts, so stale keys remain, such as addresses of processes that have ended. The
    ranks have no common restart count: each host counts for itself. So rank 0 publishes a fresh prefix; the other ranks
    verify it by a challenge that rank 0 must acknowledge.
    """
    distributed: Any = torch.distributed
    rank, world_size = process.rank, process.world_size
    store = distributed.TCPStore(process.address, process.port, is_master=False, **timeout)
    store = distributed.PrefixStore("unisono", store)
    if rank == 0:
        prefix = uuid.uuid4().hex
        store.set("prefix", prefix)
        for other in range(1, world_size):
            challenge = _text_of(other, f"{prefix}/challenge of {other}", store)
            store.set(f"{prefix}/acknowledged {challenge}", "")
        return distributed.PrefixStore(prefix, store)
    challenge, prefix = uuid.uuid4().hex, ""
    deadline = time.monotonic() + store.timeout.total_seconds()
    while not prefix or not store.check([f"{prefix}/acknowledged {challenge}"]):
        latest = _text_of(0, "prefix", store)
        if latest != prefix:
            prefix = latest
            store.set(f"{prefix}/challenge of {rank}", challenge)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"waited {store.timeout.total_seconds():g} s for rank 0, which itself waits for another rank"
            )
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
