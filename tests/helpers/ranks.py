"""Run a function in several processes, as a launcher's, connected by gloo over the loopback device.

They are programs of helpers/forked.py, on the devices that UNISONO_TEST_DEVICES names, shared out: each has its own if
there are enough. What a rank raises is raised here, with its traceback; a rank that is still running at the
limit is killed, and the test fails.
"""

import contextlib
import importlib
import pickle
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from helpers.contract import DEVICES, ON_CPU
from helpers.forked import forked


class Ended(NamedTuple):
    """How a rank has ended: what it returned, or its traceback; neither if it was killed."""

    value: Any
    error: str | None
    exit_code: int


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call `function(rank, *args)` in each of `world_size` processes; return what they return, in rank order.

    The options are those of `end_ranks`. Raises AssertionError with the traceback of each rank that has failed.
    """
    ended = end_ranks(world_size, function, *args, **options)
    failed = [f"rank {rank}: {end.error or end.exit_code}" for rank, end in enumerate(ended) if end.exit_code]
    assert not failed, "\n".join(failed)
    return [end.value for end in ended]


def end_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 240,
    init: bool = True,
    env: Mapping[str, str] = {},
) -> list[Ended]:
    """Call `function(rank, *args)`, a function of a module, in each process; return how each has ended.

    Args:
        timeout_s: that of the process group.
        init: whether to make the default process group, by way of a file; else the function has to.
        env: variables of their environment.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        store = str(folder / "store") if init else None
        programs = []
        for rank in range(world_size):
            own = {} if init else {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
            job = _run, function, args, rank, world_size, store, timeout_s, str(folder / f"rank {rank}")
            programs.append(stack.enter_context(forked(*job, env={**own, **env})))
        exit_codes = [program.wait() for program in programs]
        return [Ended(*_written(folder / f"rank {rank}"), code) for rank, code in enumerate(exit_codes)]


def run_on_devices(
    world_size: int, function: Callable[..., Any], *args: Any, num_replicas: int = 1, **options: Any
) -> list[Any]:
    """As `run_ranks`, with the wrapper's option for the devices of a rank: `function(rank, *args, device_ids=...)`."""
    return run_ranks(world_size, on_its_devices, function, num_replicas, *args, **options)


def on_its_devices(rank: int, function: Callable[..., Any], num_replicas: int, *args: Any) -> Any:
    with on_own_devices(rank, num_replicas) as options:
        return function(rank, *args, **options)


_functions: dict[tuple[str, str], Callable[..., Any]] = {}  # those that are tests, by module and name


def in_ranks(world_size: int, **options: Any) -> Callable[[Callable[[int], None]], Callable[[], None]]:
    """Make a function of a rank a test, which runs it in ranks. The options are those of `end_ranks`."""

    def take(function: Callable[[int], None]) -> Callable[[], None]:
        _functions[function.__module__, function.__name__] = function

        def test() -> None:
            run_ranks(world_size, _call, function.__module__, function.__name__, **options)

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return take


def on_two_ranks(*replicas: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a test: `function(rank, {"device_ids": ...})`, in two ranks, for each number of replicas a rank.

    Args:
        replicas: these numbers; 1 and 2 if none is given.
        options: those of `end_ranks`.
    """

    def take(function: Callable[..., None]) -> Callable[..., None]:
        _functions[function.__module__, function.__name__] = function

        @pytest.mark.parametrize(
            "num_replicas", replicas or (1, 2), ids=["", "one replica", "two replicas"].__getitem__
        )
        def test(num_replicas: int) -> None:
            job = _call, function.__module__, function.__name__
            run_on_devices(2, *job, num_replicas=num_replicas, **options)

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return take


def _call(rank: int, module: str, name: str, **options: Any) -> None:
    importlib.import_module(module)
    _functions[module, name](rank, *([options] if options else []))


def own_devices(rank: int, num_replicas: int = 1) -> list[str]:
    """Return the devices of a rank's replicas; no other rank has them, if there are enough."""
    return [DEVICES[(rank * num_replicas + i) % len(DEVICES)] for i in range(num_replicas)]


@contextlib.contextmanager
def on_own_devices(rank: int, num_replicas: int = 1) -> Iterator[dict[str, list[str]]]:
    """Let a rank make its tensors on its first device; yield the wrapper's option for its replicas."""
    devices = own_devices(rank, num_replicas)
    with contextlib.nullcontext() if ON_CPU else torch.device(devices[0]):
        yield {"device_ids": devices}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers in double precision, the same on all ranks and all devices."""
    return drawn_by(torch.Generator().manual_seed(seed), *shape)


def drawn_by(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return the next random numbers of a generator of the CPU, on the device where tensors are made."""
    return torch.randn(*shape, generator=generator, device="cpu").double().to(torch.get_default_device())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _written(path: Path) -> tuple[Any, str | None]:
    return pickle.loads(path.read_bytes()) if path.exists() else (None, None)


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: str | None,
    timeout_s: float,
    path: str,
) -> int:
    warnings.simplefilter("default")  # torch has some about what a plain module does, too
    torch.manual_seed(rank)  # unequal on purpose: the library has to make equal what must be
    try:
        if store is not None:
            torch.distributed.init_process_group(
                "gloo" if ON_CPU else None,  # the devices' own, beside gloo
                store=torch.distributed.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        outcome = function(rank, *args), None
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the test gets it
        Path(path).write_bytes(pickle.dumps((None, traceback.format_exc())))
        sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter would
        return 1
    Path(path).write_bytes(pickle.dumps(outcome))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0
