"""What every test gets, and fixtures for tests of several devices."""

import contextlib
import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator

import pytest

# Where pytest runs in several processes (-n), each has its part of the cores: with all of them, torch's intra-op
# threads, which spin while they wait, would take the processor from the tests in the other processes; and the second
# replica of every process would be bound to the same cores. This has to be said before torch is imported, and holds for
# the programs that tests start, too. Tests of either (test_workers.py, test_processes.py, test_cores.py) set their own.
if num_processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    if num_processes > 1:
        os.environ.setdefault("MANYHANDS_BIND_CORES", "0")

import torch

from manyhands.runtime import errors

# A shell that runs a script starts what goes to the background with Ctrl-C ignored, and manyhands leaves an ignored
# signal ignored. Tests that send themselves one expect it to act.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How many examples the property tests draw: 200 in `make test`, and with --hypothesis-profile=thorough, as in `make
# test-all`, 2,000. They are drawn from a fixed seed, one a test: a commit that was green stays green, and whoever runs
# the same command meets the same counterexample. To look further, raise the number. Nothing depends on the time that
# an example takes.
if importlib.util.find_spec("hypothesis"):  # `make gpu-check` runs without it, and without the tests that need it
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "default", max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
    settings.load_profile("default")  # the option is read later, and then its profile holds


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what is there before the first test.

    That is half a million objects, torch's and pytest's own, for which every collection that a test asks for would take
    half a second. What tests make is collected, and counted, as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_has_been_said() -> None:
    """Let each test see the messages that are given once in a process."""
    errors.forget_logged()


@pytest.fixture
def float64() -> Iterator[None]:
    """Everything in double precision, and from the same random numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without accelerators, whatever this one has."""
    monkeypatch.setattr("manyhands.runtime.devices.accelerators", list)


@pytest.fixture
def simulated_accelerators() -> Callable[[int], contextlib.AbstractContextManager[list[torch.device]]]:
    """`manyhands.testing.simulated_accelerators`, imported by the tests that use it only: the import is for good."""
    from manyhands import testing

    return testing.simulated_accelerators


@pytest.fixture
def sim(simulated_accelerators: Callable[[int], contextlib.AbstractContextManager[list[torch.device]]]):
    """A machine with four accelerators, `sim:0` to `sim:3`."""
    with simulated_accelerators(4) as devices:
        yield devices
