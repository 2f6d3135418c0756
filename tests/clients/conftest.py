"""Other people's libraries, unmodified, on two CPU replicas; what `make clients` writes into docs/compatibility.md.

Each file is about the library in its name, and is skipped where that is not installed. Models are small and random, and
data is invented: nothing is downloaded. The oracle is the same library's code with the plain module. With `--table
FILE` the outcomes replace the table in FILE: a row for each library, from the installed version, the docstrings of the
tests and their outcomes. The second paragraph of a docstring says what was found.
"""

import functools
import importlib.metadata
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from unisono.scripts.install import Installation

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

CPUS = ["cpu", "cpu"]
_FOLDER = Path(__file__).parent
_BETWEEN = "<!-- written by make clients -->\n", "<!-- end -->\n"
_HEAD = "| library | what was run | outcome |\n|---|---|---|\n"
_OUTCOMES = {"passed": "passed", "failed": "FAILED", "skipped": "not run", "xfailed": "fails, known"}

Wrap = Callable[..., unisono.DataParallel]


@pytest.fixture(params=["threads", "processes"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def one_intra_op_thread() -> Iterator[None]:
    """These models are so small that several threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def wrap(engine: str) -> Wrap:
    """Wrap a module for two CPU replicas on the engine under test."""
    return functools.partial(unisono.DataParallel, device_ids=CPUS, engine=engine)


@pytest.fixture
def installed(engine: str) -> Iterator[Installation]:
    """unisono in the place of torch's names, as `unisono run --devices 'cpu*2'` has it."""
    with unisono.install(CPUS, engine=engine) as installation:
        yield installation


@pytest.fixture
def net(float64: None) -> nn.Module:
    """A classifier of rows of five numbers, in double precision."""
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.fixture
def data(float64: None) -> torch.utils.data.TensorDataset:
    """37 rows and their classes: the last batch of eight is short, and has a replica with fewer rows."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, 5, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, :3]).argmax(1))


# ---- the table -----------------------------------------------------------------------------------


@dataclass
class _Case:
    """A test function of a library, over all its parameters."""

    run: str
    found: str
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: set[str] = field(default_factory=set)

    def outcome(self) -> str:
        """Return what became of the test; of one that passed, what it says that it has found."""
        texts = []
        for outcome, count in self.outcomes.items():
            text = _OUTCOMES[outcome] if outcome != "passed" or not self.found else self.found
            texts.append(f"{count} x {text}" if self.outcomes.total() > 1 else text)
        return "; ".join([", ".join(texts), *sorted(self.reasons)])


class _Table:
    def __init__(self) -> None:
        self._cases: dict[str, dict[str, _Case]] = {}  # by the library's module and the name of the test
        self._skipped: dict[str, str] = {}  # by file, why

    def add(self, item: pytest.Item) -> None:
        module, name = _key(item)
        if client := _client(item):
            run, found = client.run, client.found
        else:
            run, _, found = (inspect.getdoc(getattr(item, "function", None)) or "").partition("\n\n")
            run = re.sub(r"^[A-Z]\d+[^:.]*[:.]\s*", "", run) or name.removeprefix("test_").replace("_", " ")
        self._cases.setdefault(module, {}).setdefault(name, _Case(_one_line(run), _one_line(found)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        if _is_client(item.path) and (report.when == "call" or outcome != "passed"):
            module, name = _key(item)
            case = self._cases[module][name]
            case.outcomes[outcome] += 1
            if outcome == "xfailed":
                case.reasons.add(_one_line(report.wasxfail))
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[Path(report.nodeid).stem.removeprefix("test_")] = report.longrepr[2].removeprefix("Skipped: ")

    def text(self) -> str:
        rows: dict[str, list[tuple[str, str]]] = {}
        for module, cases in self._cases.items():
            for case in filter(lambda case: case.outcomes, cases.values()):  # without the slow ones
                rows.setdefault(_library(module), []).append((case.run, case.outcome()))
        for module, reason in self._skipped.items():
            rows[_library(module)] = [("-", f"not run: {reason}")]
        return _HEAD + "".join(
            f"| {library} | {run} | {outcome} |\n"
            for library in sorted(rows, key=str.lower)
            for run, outcome in rows[library]
        )


def _is_client(path: Path) -> bool:
    return path.parent == _FOLDER


def _key(item: pytest.Item) -> tuple[str, str]:
    """Return the module of the library that a test is about, and the test's name."""
    if client := _client(item):
        return client.module, client.run
    return item.path.stem.removeprefix("test_"), item.nodeid.rpartition("::")[2].partition("[")[0]


def _client(item: pytest.Item) -> Any:
    """Return the case of test_models.py that a test is about, if it is about one."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("client")


def _one_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").replace("|", "\\|")


def _library(module: str) -> str:
    """Return the library of a module, with its version: `ignite` -> "pytorch-ignite 0.5.5"."""
    names = importlib.metadata.packages_distributions().get(module)
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else module


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", type=Path, metavar="FILE", help="write the outcomes of tests/clients into this page")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--table", None) is not None:
        config.pluginmanager.register(_Table(), "clients-table")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    table = config.pluginmanager.getplugin("clients-table")
    for item in items:
        if _is_client(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # what the libraries warn of is theirs
            if table is not None:
                table.add(item)


def pytest_sessionfinish(session: pytest.Session) -> None:
    table = session.config.pluginmanager.getplugin("clients-table")
    if table is not None and session.testscollected:
        page: Path = session.config.getoption("--table")
        begin, end = _BETWEEN
        before, rest = page.read_text(encoding="utf-8").split(begin)
        _, after = rest.split(end)
        page.write_text(before + begin + table.text() + end + after, encoding="utf-8")
