"""pytest --unisono N: tests of code for several devices, on a machine that has none.

    pytest --unisono 2

Every test then runs as on a machine with N accelerators. They are simulated (`unisono.testing`): an operation on
tensors of two devices is an error, as on GPUs. `torch.nn.DataParallel` is unisono's, and uses all of them. After a test
that has passed, each wrapper that it called is compared with one device by `unisono.verify`, from the inputs of its
first call that raised no error; a difference fails the test, and the message says where numbers differ first, why, and
what to do. The summary counts all of these. docs/testing.md shows it.

Without the option nothing is imported but this file: it is a module of its own, because `import unisono` loads torch.
"""

import contextlib
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from unisono import DataParallel
    from unisono.verification.first_call import FirstCall

_NAME = "unisono-simulated-devices"  # of the plugin while the option is given
_PROPERTY = "unisono"  # of a test's report: what the comparison of each of its wrappers said
_SAME, _AS_TORCH, _DIFFERS, _NOT_COMPARED = "the numbers of one device", "as in torch", "differs", "not compared"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("unisono", "several devices, simulated")
    group.addoption(
        "--unisono",
        type=int,
        choices=range(2, 9),
        metavar="N",
        help=(
            "run the tests as if this machine had N simulated accelerators (2 to 8); torch.nn.DataParallel uses "
            "all of them, and is compared with one device: pytest --unisono 2"
        ),
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before the first conftest.py: what it imports may define subclasses of torch.nn.DataParallel."""
    _begin(early_config, early_config.known_args_namespace.unisono)


def pytest_configure(config: pytest.Config) -> None:
    _begin(config, config.getoption("unisono"))  # where conftests were loaded before this plugin: `-p` with xdist


def _begin(config: pytest.Config, count: int | None) -> None:
    if count is not None and not config.pluginmanager.has_plugin(_NAME):
        config.pluginmanager.register(_SimulatedDevices(config, count), _NAME)


@pytest.fixture
def devices() -> list["torch.device"]:
    """The devices to use: the simulated ones under `pytest --unisono N`, else the machine's accelerators.

    def test_it_trains_on_all_devices(devices):
        model = torch.nn.DataParallel(Net().to(devices[0]), devices)

    On a machine with fewer than two accelerators a test that asks for it is skipped.
    """
    from unisono.runtime.devices import accelerators

    present = accelerators()
    if len(present) < 2:
        pytest.skip("this machine has fewer than two accelerators; pytest --unisono 2 simulates them")
    return present


class _SimulatedDevices:
    """The plugin while the option is given: opens the simulated devices, and compares what each test wraps."""

    def __init__(self, config: pytest.Config, count: int) -> None:
        from unisono import install
        from unisono.testing import shown_by_torch, simulated_accelerators

        self._count = count
        # Of the running test, by the wrapper's id.
        self._first_calls: dict[int, FirstCall] | None = None
        opened = contextlib.ExitStack()
        config.add_cleanup(opened.close)
        try:
            opened.enter_context(simulated_accelerators(self._count))
        except RuntimeError as error:
            raise pytest.UsageError(f"--unisono {count}: {error}") from None
        opened.enter_context(shown_by_torch())
        opened.enter_context(install(sync_batch_norm=False))  # the summary says what a warning would say in each test
        opened.enter_context(self._recording())

    def pytest_report_header(self) -> str:
        return f"unisono: {self._count} simulated accelerators, sim:0 to sim:{self._count - 1}"

    def _recording(self) -> contextlib.AbstractContextManager[None]:
        """Keep the inputs of each wrapper's first call in a test that raised no error."""
        from unisono.runtime.thread_pool import inside_replica
        from unisono.verification.first_call import FirstCall, forwards_through

        plugin = weakref.proxy(self)

        def recorded(forward: Any, model: "DataParallel", inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            calls = plugin._first_calls
            if calls is None or id(model) in calls or len(model.devices) < 2 or inside_replica():
                return forward(model, *inputs, **kwargs)
            before = FirstCall(model, inputs, kwargs)
            output = forward(model, *inputs, **kwargs)
            calls[id(model)] = before
            return output

        return forwards_through(recorded)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        calls = self._first_calls = {}
        try:
            yield
        finally:
            self._first_calls = None
        if getattr(item, "_excinfo", None):  # a unittest.TestCase's test that has failed
            return
        said = [_compared(call) for call in calls.values()]
        item.user_properties += [(_PROPERTY, outcome) for outcome, _ in said]
        reports = [report for _, report in said if report]
        if reports:
            pytest.fail("\n\n".join(reports), pytrace=False)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        reports = [each for of_kind in terminalreporter.stats.values() for each in of_kind if hasattr(each, "when")]
        said = [
            (report.nodeid, outcome)
            for report in reports
            if report.when == "call"
            for name, outcome in report.user_properties
            if name == _PROPERTY
        ]
        tests = len({nodeid for nodeid, _ in said})
        terminalreporter.section(f"{self._count} simulated devices")
        terminalreporter.line(
            f"{tests} test{'s' * (tests != 1)} called a wrapped model: {len(said)} wrapper{'s' * (len(said) != 1)}, "
            f"{sum(outcome == _SAME for _, outcome in said)} with {_SAME}"
        )
        for nodeid, outcome in said:
            if outcome != _SAME:
                terminalreporter.line(f"{nodeid}: {outcome}")


def _compared(call: "FirstCall") -> tuple[str, str]:
    """Return what the comparison with one device says: the outcome in a line, and the report if that fails the test."""
    from unisono.verification.report import Cause

    # torch.nn.DataParallel is documented to do these on several devices.
    as_torch = {Cause.PER_SHARD_BATCH_NORM, Cause.ONE_NUMBER_A_SHARD, Cause.FIRST_REPLICAS_BUFFERS}
    try:
        report = call.verify()
    except Exception as error:  # noqa: BLE001  verify calls with gradients; the test may not have
        return f"{_NOT_COMPARED}: {type(error).__name__}: {error}".splitlines()[0], ""
    findings = report.findings
    if report.same:
        return _SAME, ""
    if not_compared := [finding for finding in findings if not finding.compared]:
        return f"{_NOT_COMPARED}: {not_compared[0].cause}, in {not_compared[0].module or 'the model itself'}", ""
    if report.not_judged and not report.differs:
        return f"{_NOT_COMPARED}: rounding decides {len(report.not_judged)} values", ""
    unexplained = [finding for finding in findings if not finding.explained and finding.cause not in as_torch]
    if findings and not unexplained:
        return f"{_AS_TORCH}: {findings[0].cause}", ""
    first = [f"{each.cause}, first at {each.module or 'the model itself'}" for each in unexplained] or ["unknown cause"]
    return f"{_DIFFERS}: {first[0]}", str(report)
