"""What the engines' contract (tests/contract) shares: engines, devices, threads, and limits of time."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from helpers.in_time import WAIT_S
from helpers.in_time import in_time as _in_time
from helpers.kept_workers import KeptWorkers
from helpers.late_copies import send_late
from unisono import DataParallel
from unisono.autograd import broadcast
from unisono.engines.threads import Threads
from unisono.runtime.buckets import buckets_of

Wrap = Callable[..., DataParallel]
EngineFor = Callable[[str, list[str]], Any]  # the argument `engine` for its name and the replicas' devices

# Replica i is on DEVICES[i % len(DEVICES)].
DEVICES = os.environ.get("UNISONO_TEST_DEVICES", "cpu").split(",")
ON_CPU = DEVICES == ["cpu"]
on_the_cpu = pytest.mark.skipif(not ON_CPU, reason="about random numbers that are drawn on the CPU")
in_one_memory = pytest.mark.skipif(len(set(DEVICES)) > 1, reason="several devices cannot share a tensor")

# ---- engines -------------------------------------------------------------------------------------


def threads_with_separate_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As on several GPUs: parameters are copied to the replicas, late, and gradients come back in several buckets."""
    if ON_CPU:
        send_late(monkeypatch)
    monkeypatch.setattr(broadcast, "buckets_of", functools.partial(buckets_of, full_bytes=300))
    return Threads(separate_memory=True)


# Name of an engine -> the argument `engine` of DataParallel, for replicas on these devices.
ENGINE_ARGUMENTS: dict[str, Callable[[list[str], KeptWorkers, pytest.MonkeyPatch], Any]] = {
    "threads": lambda *_: "threads",
    "threads with separate memory": lambda _, workers, monkeypatch: threads_with_separate_memory(monkeypatch),
    "processes": lambda devices, workers, _: workers.engine(devices),
    # As on several GPUs: parameters are sent to the processes, and gradients are all-reduced by gloo.
    "processes over gloo": lambda devices, workers, _: workers.engine(devices, share_memory=False),
}
# The two engines that imitate several GPUs are for `make test-all`, and in `make test` where a test asks for them.
ENGINES: list[Any] = [
    pytest.param(name, marks=[] if name in ("threads", "processes") else pytest.mark.slow) for name in ENGINE_ARGUMENTS
]
WITH_GLOO: list[Any] = [
    name if name == "processes over gloo" else param for name, param in zip(ENGINE_ARGUMENTS, ENGINES, strict=True)
]
if not ON_CPU:  # processes have tests of their own there: to start one takes seconds
    ENGINES = WITH_GLOO = ["threads", "threads with separate memory"]


def on_engines(names: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test on these engines instead of ENGINES."""
    return pytest.mark.parametrize("engine", names, indirect=True)


over_gloo_too = on_engines(WITH_GLOO)
on_threads = on_engines(["threads"])  # where the engine cannot matter


def over_engines(
    names: str,
    threads: Iterable[tuple[Any, ...]],
    *,
    processes: Iterable[tuple[Any, ...]],
    gloo: Iterable[tuple[Any, ...]],
) -> pytest.MarkDecorator:
    """Parametrise a test whose axes multiply: with all cases on threads, with fewer on the other engines.

    What a module computes, and which rows a replica has, do not depend on how they are sent to another process. So each
    value of an axis that matters there is tested there, but not each with each.

    Args:
        names: the arguments of a case.
        threads: the cases on threads.
        processes: the cases on processes.
        gloo: the cases, in `make test-all`, on processes over gloo and on threads with separate memory.
    """
    gloo, slow = list(gloo), [pytest.mark.slow]
    product = [pytest.param("threads", *case) for case in threads]
    if ON_CPU:
        product += [pytest.param("processes", *case) for case in processes]
        product += [pytest.param("processes over gloo", *case, marks=slow) for case in gloo]
    product += [pytest.param("threads with separate memory", *case, marks=slow if ON_CPU else ()) for case in gloo]
    return pytest.mark.parametrize(f"engine, {names}", product, indirect=["engine"], ids=label)


def label(value: Any) -> str | None:
    """Return what a value is called in the name of a test, where pytest would give it a number."""
    return type(value).__name__ if isinstance(value, BaseException) else str(value) if isinstance(value, list) else None


def each_with(values: Iterable[Any], cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(value, *case) for value in values for case in cases]


def in_processes(engine: str) -> bool:
    return engine.startswith("processes")


def num_here(engine: str, num_replicas: int) -> int:
    """Return how many of the replicas are in this process, and so share Python objects with the caller."""
    return 1 if in_processes(engine) else num_replicas


# ---- devices, threads, time ----------------------------------------------------------------------


@contextlib.contextmanager
def on_first_device() -> Iterator[None]:
    """Let this thread make its tensors on the first device."""
    with contextlib.nullcontext() if ON_CPU else torch.device(DEVICES[0]):
        yield


def in_turn(num_replicas: int) -> list[str]:
    """Return the device of each replica."""
    return [DEVICES[i % len(DEVICES)] for i in range(num_replicas)]


in_time = functools.partial(_in_time, within=on_first_device)


def in_threads(num_threads: int, call: Callable[[int], None]) -> None:
    """Run `call(0)` to `call(num_threads - 1)` in threads that start together; raise what one of them raises."""
    together = threading.Barrier(num_threads)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            together.wait(WAIT_S)
            with on_first_device():  # which a thread does not inherit
                call(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
