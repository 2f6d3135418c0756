"""This process's device under a launcher, and the default process group that follows from what the launcher says."""

import atexit
import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch

from unisono.distributed import launchers
from unisono.distributed.failure_store import STORE_ERRORS, host_id
from unisono.distributed.launchers import Launch, launch
from unisono.runtime import devices as _devices
from unisono.runtime.errors import log_once
from unisono.runtime.forks import in_forked_child
from unisono.runtime.interrupts import critical, deliver

FIRST_NAP_S = 0.00005  # of a wait, whose naps get longer
_CONNECT_S = 1.0  # for how long one attempt to connect may take: Ctrl-C is seen after it
SAID_AFTER_S = 10.0  # that a rank waits for others to wrap a model
RENDEZVOUS_S = 300.0  # for how long it waits unless the user has said it, as torch's stores do
WRAPPING = "a DataParallel that spans processes"
NOT_THERE = (
    "rank {rank} has waited {waited_s:g} s at {doing}, and {missing}. Every process has to wrap the model; for a model "
    "of this process alone pass process_group=False. To wait longer than {limit_s:g} s for slow processes, give the "
    "process group a longer timeout: timeout= of DataParallel, or of torch.distributed.init_process_group."
)
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


def devices_of_process(device_ids: _devices.DeviceIds | None) -> list[torch.device]:
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
    _make_default_group(process, timeout_s)
    atexit.register(_end_default_group)
    return True


def _make_default_group(process: Launch, timeout_s: float | None) -> None:
    global _counted_local_rank, _num_made  # noqa: PLW0603 - the process has one
    distributed: Any = torch.distributed
    limit_s = RENDEZVOUS_S if timeout_s is None else timeout_s
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _store_of_this_restart(process, limit_s)
    else:
        # Multi-tenant: the store of an earlier group of this program may still listen.
        store = _connected_store(process, limit_s, is_master=process.rank == 0, multi_tenant=True)
        _num_made += 1  # what an earlier group has written is in the store
        store = distributed.PrefixStore(f"unisono {process.job} {_num_made}", store)
    # The backends of the devices that are there, so that `get_backend()` names them.
    kinds = {device.type for device in _devices.accelerators()}
    backends = [f"{kind}:{name}" for kind in sorted(kinds) if (name := _backend_for(kind)) not in (None, "gloo")]
    backend = ",".join(["cpu:gloo", *backends]) if backends else "gloo"
    all_hosts = [_host_of(rank) for rank in range(process.world_size)]

    def missing() -> str:
        ranks = [rank for rank, host in enumerate(all_hosts) if not store.check([host])]
        return f"{ranks_of(ranks)} did not connect at {process.address}:{process.port}" if ranks else ""

    store.set(_host_of(process.rank), host_id())
    _wait_until(lambda: bool(store.check(all_hosts)), missing, process, limit_s)
    if launchers.local_rank() is None:
        _counted_local_rank = _count_local_rank(store, process)
    timeout = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    try:
        distributed.init_process_group(
            backend, store=store, rank=process.rank, world_size=process.world_size, **timeout
        )
    except (*STORE_ERRORS, RuntimeError) as error:
        raise _not_connected(process, error) from error


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


def ranks_of(ranks: Iterable[int]) -> str:
    """Return 'rank 3' or 'ranks 0, 3'."""
    ranks = list(ranks)
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _wait_until(is_done: Callable[[], bool], missing: Callable[[], str], process: Launch, limit_s: float) -> None:
    """Wait for the ranks at the first DataParallel, where no process group says yet which one has failed.

    Args:
        missing: says which ranks are missing; "" if all have come meanwhile.

    Raises:
        RuntimeError: some are missing after `limit_s`, or the store is lost.
    """
    started, is_said = time.monotonic(), False
    nap_s, longest_nap_s = FIRST_NAP_S, max(0.05, process.world_size / 2000)  # all ranks ask one store
    text = {"rank": process.rank, "doing": WRAPPING, "limit_s": limit_s}
    try:
        while not is_done():
            waited_s = time.monotonic() - started
            if waited_s > limit_s and (who := missing()):
                raise RuntimeError(NOT_THERE.format(waited_s=limit_s, missing=who, **text))
            if not is_said and waited_s > SAID_AFTER_S and (who := missing()):
                is_said = True
                log_once(NOT_THERE.format(waited_s=SAID_AFTER_S, missing=who, **text))
            time.sleep(nap_s)
            deliver()
            nap_s = min(nap_s * 1.5, longest_nap_s)
    except STORE_ERRORS as error:
        raise _not_connected(process, error) from error


def _not_connected(process: Launch, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"rank {process.rank} of {process.world_size} could not connect to the others at "
        f"{process.address}:{process.port}, the address of rank 0: {error}"
    )


def _connected_store(process: Launch, limit_s: float, *, is_master: bool = False, multi_tenant: bool = False) -> Any:
    """Return the store at the address of rank 0.

    torch's own client waits in C++, where Ctrl-C does not reach it, and prints pages. So it begins when the store is
    there.
    """
    why: list[OSError] = []

    @critical  # Ctrl-C ends in the user's line, and not in Python's socket
    def is_there() -> bool:
        try:
            socket.create_connection((process.address, process.port), _CONNECT_S).close()
        except OSError as error:  # also where the name is not known yet
            why[:] = [error]
            return False
        return True

    def missing() -> str:
        return (
            f"rank 0 does not listen at {process.address}:{process.port} ({why[0]}), the address in MASTER_ADDR and "
            "MASTER_PORT"
        )

    if not is_master:
        _wait_until(is_there, missing, process, limit_s)
    try:
        return torch.distributed.TCPStore(
            process.address,
            process.port,
            is_master=is_master,
            wait_for_workers=False,
            multi_tenant=multi_tenant,
            timeout=timedelta(seconds=limit_s),
        )
    except (*STORE_ERRORS, RuntimeError) as error:
        raise RuntimeError(
            f"rank {process.rank} of {process.world_size} cannot {'listen' if is_master else 'connect'} at "
            f"{process.address}:{process.port}, the address of rank 0 (set MASTER_ADDR and MASTER_PORT for another "
            f"one): {error}"
        ) from error


def _store_of_this_restart(process: Launch, limit_s: float = RENDEZVOUS_S) -> Any:
    """Return the launcher's store, under a prefix that no earlier start of the processes has used.

    torchrun keeps its store across restarts, so stale keys remain, such as addresses of processes that have ended. The
    ranks have no common restart count: each host counts for itself. So rank 0 publishes a fresh prefix; the other ranks
    verify it by a challenge that rank 0 must acknowledge.
    """
    distributed: Any = torch.distributed
    store = distributed.PrefixStore("unisono", _connected_store(process, limit_s))
    prefix = own = uuid.uuid4().hex
    waits_for = {*range(1, process.world_size)} if process.rank == 0 else {0}

    def challenge_of(rank: int) -> str:
        return f"{prefix}/challenge of {rank}"

    def acknowledges_all() -> bool:
        for rank in [rank for rank in waits_for if store.check([challenge_of(rank)])]:
            store.set(f"{prefix}/acknowledged {store.get(challenge_of(rank)).decode()}", "")
            waits_for.remove(rank)
        return not waits_for

    def is_acknowledged() -> bool:
        nonlocal prefix
        if store.check(["prefix"]) and (latest := store.get("prefix").decode()) != prefix:
            prefix = latest
            store.set(challenge_of(process.rank), own)
        return bool(store.check([f"{prefix}/acknowledged {own}"]))

    def missing() -> str:
        return f"{ranks_of(sorted(waits_for))} did not connect at {process.address}:{process.port}"

    if process.rank == 0:
        store.set("prefix", prefix)
    _wait_until(acknowledges_all if process.rank == 0 else is_acknowledged, missing, process, limit_s)
    return distributed.PrefixStore(prefix, store)


def _end_default_group() -> None:
    """Destroy the default group, unless a failure has left collectives that another rank will never join.

    To destroy it would wait for them. The operating system closes the connections.
    """
    distributed: Any = torch.distributed
    if distributed.is_initialized() and not failed.is_set():
        distributed.destroy_process_group()


in_forked_child(lambda: atexit.unregister(_end_default_group))  # it is the parent's
