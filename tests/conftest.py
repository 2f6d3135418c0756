"""What every test gets, fixtures for tests of several devices, and the rows of docs/behaviour.md as markers."""

import contextlib
import faulthandler
import gc
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from platforms import simulated

# On Linux, the suite can run with what macOS or Windows lacks taken away: platforms/simulated.py. This is done before
# all else, and in the programs that tests start.
if simulated.VARIABLE in os.environ:
    simulated.begin()
    os.environ.update(simulated.environment())

# Where pytest runs in several processes (-n), each has its part of the cores: with all of them, torch's intra-op
# threads, which spin while they wait, would take the processor from the tests in the other processes; and the second
# replica of every process would be bound to the same cores. This is set before torch is imported, and holds for
# the programs that tests start, too. Tests of intra-op threads and of cores set their own.
if num_processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    if num_processes > 1:
        os.environ.setdefault("UNISONO_BIND_CORES", "0")

# The suite runs as on a machine without accelerators, unless UNISONO_TEST_DEVICES names some: ranks, examples and
# commands take what they find, and their tests expect the CPU. `make gpu-check` names the GPUs. This is set before
# torch is imported, and holds for the programs that tests start.
if {name.split(":")[0] for name in os.environ.get("UNISONO_TEST_DEVICES", "cpu").split(",")} <= {"cpu", "queued"}:
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")

# Programs that tests start in other folders find what this process finds: PYTHONPATH may be relative.
if path := os.environ.get("PYTHONPATH"):
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in path.split(os.pathsep))

# Where it is set, print writes a line and its end apart, and what another process prints may go between them.
os.environ.pop("PYTHONUNBUFFERED", None)

import torch

# One kind of device that does not exist is all that a process can have: this one, or `unisono.testing`'s.
QUEUED = "queued" in os.environ.get("UNISONO_TEST_DEVICES", "")
collect_ignore = [] if QUEUED else ["async_device"]  # to collect it would import it, and so make its devices
if QUEUED:
    import async_device  # of tests/async_device

    os.environ.update(async_device.environment())  # the programs that tests start have it too

from helpers.rows import find_tests_by_row, rows_named, rows_of_behaviour  # noqa: E402
from unisono import testing  # noqa: E402
from unisono.runtime import errors  # noqa: E402
from unisono.runtime.model_warnings import of_process  # noqa: E402

# A shell that runs a script starts what goes to the background with Ctrl-C ignored, and unisono leaves an ignored
# signal ignored. Tests that send themselves one expect it to act.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How many examples the property tests draw: 200 in `make test`, and with --hypothesis-profile=thorough, as in `make
# test-all`, 1,000. They are drawn from a fixed seed, one a test: a commit that passed still passes, and the same
# command finds the same counterexample. To look further, raise the number. Nothing depends on the time that an example
# takes.
if importlib.util.find_spec("hypothesis"):  # `make gpu-check` runs without it, and without the tests that need it
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "default", max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
    settings.load_profile("default")  # the option is read later, and then its profile holds


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Say where a process of pytest-xdist was interrupted: it says that it was, and no more."""
    print(f"interrupted in process {os.getpid()}:\n{excinfo.getrepr(style='short')}", file=sys.__stderr__)
    faulthandler.dump_traceback(file=sys.__stderr__)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n auto`, half as many processes again as there are cores: a third of the time, tests wait for others."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # pytest-xdist reads it
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (3 * num_cores + 1) // 2


def pytest_report_header() -> list[str]:
    return [f"simulated: {simulated.SYSTEM}"] if simulated.VARIABLE in os.environ else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", action="store_true", help="list the tests of each row of docs/behaviour.md; run none")


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if not config.getoption("rows"):
        return None
    tests = find_tests_by_row()
    for row in rows_of_behaviour():
        print(row, *tests[row], sep="\n    ")
    return 0


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test with the rows that its docstring begins with, so that `pytest -m "row(name='S5')"` runs a row's."""
    for row in rows_named(inspect.getdoc(getattr(item, "function", None)) or ""):
        item.add_marker(pytest.mark.row(name=row))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of what this system lacks."""
    for item in items:
        for marker in item.iter_markers("only_on"):
            if simulated.SYSTEM not in marker.args:
                why = f"only on {' and '.join(marker.args)}: {marker.kwargs['because']}"
                item.add_marker(pytest.mark.skip(reason=why))
        for name, why in simulated.DISTURBED.items() if simulated.VARIABLE in os.environ else ():
            if item.nodeid.endswith(name):
                item.add_marker(pytest.mark.skip(reason=f"not with a simulated system: {why}"))


def pytest_collection_finish() -> None:
    """Have the garbage collector ignore the objects that exist before the first test.

    There are half a million, torch's and pytest's own, and each collection that a test asks for would take half a
    second for them. The objects that tests make are collected, and counted, as usual.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _ignore_older_objects() -> None:
    """Have the garbage collector look at what the tests of a file make, not at what earlier ones have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def collector_off() -> Iterator[None]:
    """Have no garbage, such as an earlier test's, collected during the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _nothing_logged_yet() -> None:
    """Let each test see the messages that are given once in a process."""
    errors.forget_logged()
    of_process.forget()


@pytest.fixture(autouse=QUEUED)
def _kernels_errors_are_seen() -> Iterator[None]:
    """Raise, in the test whose kernel it was, an error that no synchronisation has raised there."""
    yield
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


@pytest.fixture
def float64() -> Iterator[None]:
    """Everything in double precision, and from the same random numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The current folder is the test's own, and what a command sets for its process is undone."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package look as if it was not installed."""
    find_spec = importlib.util.find_spec

    def hide(package: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))

    return hide


@pytest.fixture
def one_intra_op_thread() -> Iterator[None]:
    """As many in the caller's thread as in each replica's; where a model is small, several mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without accelerators, whatever this one has."""
    monkeypatch.setattr("unisono.runtime.devices.accelerators", list)


@pytest.fixture
def simulated_accelerators() -> Callable[[int], contextlib.AbstractContextManager[list[torch.device]]]:
    """`unisono.testing.simulated_accelerators`. The first one hides the machine's accelerators from the process."""
    if "async_device" in sys.modules:
        pytest.skip("a process has simulated devices or the asynchronous one, not both")
    return testing.simulated_accelerators


@pytest.fixture
def sim(simulated_accelerators: Callable[[int], contextlib.AbstractContextManager[list[torch.device]]]):
    """A machine with four accelerators, `sim:0` to `sim:3`."""
    with simulated_accelerators(4) as devices:
        yield devices
