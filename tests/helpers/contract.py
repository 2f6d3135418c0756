"""What the contract of the replicas (tests/contract) shares: places, devices, threads, and limits of time."""

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from helpers.in_time import WAIT_S
from helpers.in_time import in_time as _in_time
from helpers.late_copies import send_late
from helpers.small_buckets import use_small_buckets
from unisono import DataParallel
from unisono.runtime.contexts import contextmanager
from unisono.testing import separate_memory

Wrap = Callable[..., DataParallel]

# Replica i is on DEVICES[i % len(DEVICES)].
DEVICES = os.environ.get("UNISONO_TEST_DEVICES", "cpu").split(",")
KIND = torch.device(DEVICES[0]).type
ON_CPU = KIND == "cpu"
on_the_cpu = pytest.mark.skipif(not ON_CPU, reason="about the host: its random numbers, threads, clock")
at_the_same_time = pytest.mark.skipif(
    not ON_CPU and len(set(DEVICES)) == 1, reason="replicas of one accelerator take turns (A12)"
)
REFUSES_CHECKPOINTS = not ON_CPU and len(set(DEVICES)) > 1  # around the wrapper, those that are not reentrant
in_one_memory = pytest.mark.skipif(len(set(DEVICES)) > 1, reason="several devices cannot share a tensor")

# ---- places --------------------------------------------------------------------------------------

PLACES = ["one memory", "separate memory"]


@contextlib.contextmanager
def at(place: str) -> Iterator[None]:
    """Have replicas share the module's memory, or, as on several GPUs, have memory of their own.

    In memory of their own, parameters are copied to the replicas, late, and gradients come back in several buckets.
    """
    if place == "one memory":
        yield
        return
    with separate_memory(), pytest.MonkeyPatch.context() as patch:
        if ON_CPU:
            send_late(patch)
        use_small_buckets(patch, 300)
        yield


at_one_place = pytest.mark.parametrize("place", PLACES[:1], indirect=True)  # where the place cannot matter


def over_places(
    names: str, cases: Iterable[tuple[Any, ...]], *, separate: Iterable[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    """Parametrise a test whose axes multiply: all cases in one memory, and fewer in separate memory.

    What a module computes, and which rows a replica has, do not depend on where its memory is. So each value of an axis
    that matters there is tested there, but not each with each.
    """
    product = [(place, *case) for place, some in zip(PLACES, (cases, separate), strict=True) for case in some]
    return pytest.mark.parametrize(f"place, {names}", product, indirect=["place"], ids=label)


def label(value: Any) -> str | None:
    """Return what a value is called in the name of a test, where pytest would give it a number."""
    return type(value).__name__ if isinstance(value, BaseException) else str(value) if isinstance(value, list) else None


def each_with(values: Iterable[Any], cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(value, *case) for value in values for case in cases]


# ---- devices, threads, time, warnings ----------------------------------------------------------------------


@contextmanager
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


def said_by(call: Callable[[], object], times: int = 3) -> list[warnings.WarningMessage]:
    """Return the warnings of some calls."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [*said]
