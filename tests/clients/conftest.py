"""Other people's libraries, unmodified, on two CPU replicas; what `make clients` writes into docs/libraries.md.

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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from helpers.page_tables import run_line, write_table
from unisono.scripts.install import Installation

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

CPUS = ["cpu", "cpu"]
_FOLDER = Path(__file__).parent
_HEAD = "| library | what was run | outcome |\n|---|---|---|\n"
_OUTCOMES = {
    "passed": "passed", "failed": "FAILED", "error": "FAILED", "skipped": "not run", "xfailed": "fails, known"
}  # fmt: skip

Wrap = Callable[..., unisono.DataParallel]


@pytest.fixture(autouse=True)
def _small_models(one_intra_op_thread: None) -> None:
    """These models are so small that several threads would mostly wait for each other."""


@pytest.fixture
def wrap() -> Wrap:
    """Wrap a module for two CPU replicas."""
    return functools.partial(unisono.DataParallel, device_ids=CPUS)


@pytest.fixture
def installed() -> Iterator[Installation]:
    """unisono in the place of torch's names, as `unisono run --devices 'cpu*2'` has it."""
    with unisono.install(CPUS) as installation:
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

_ITEMS = pytest.StashKey[list[pytest.Item]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", type=Path, metavar="FILE", help="write the outcomes of tests/clients into this page")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_ITEMS] = [item for item in items if item.path.parent == _FOLDER]
    for item in config.stash[_ITEMS]:
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # what the libraries warn of is theirs


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    page: Path | None = config.getoption("--table", None)
    if page is not None and (items := config.stash.get(_ITEMS, [])):
        write_table(page, "make clients", _table(items, terminalreporter.stats) + run_line())


def _table(items: Sequence[pytest.Item], stats: Mapping[str, Sequence[Any]]) -> str:
    """Return a row for each test function, over all its parameters, and for each library that is not installed."""
    shown = {item.nodeid: _row(item) for item in items}
    outcomes: dict[tuple[str, ...], Counter[str]] = {row: Counter() for row in shown.values()}
    reasons: dict[tuple[str, ...], set[str]] = defaultdict(set)
    rows: list[tuple[str, str, str]] = []
    for outcome, word in _OUTCOMES.items():
        for report in stats.get(outcome, ()):
            if isinstance(report, pytest.TestReport) and report.nodeid in shown:
                row = shown[report.nodeid]
                outcomes[row][word] += 1
                if outcome == "xfailed":
                    reasons[row].add(_one_line(report.wasxfail))
            elif outcome == "skipped":
                module = Path(report.nodeid).stem.removeprefix("test_")
                rows.append((_library(module), "-", f"not run: {report.longrepr[2].removeprefix('Skipped: ')}"))
    for row, counts in outcomes.items():
        module, run, found = row
        words = [found or word if word == "passed" else word for word in counts]
        if counts.total() > 1:
            words = [f"{count} x {word}" for word, count in zip(words, counts.values(), strict=True)]
        if counts:  # the slow ones have none
            rows.append((_library(module), run, "; ".join([", ".join(words), *sorted(reasons[row])])))
    rows.sort(key=lambda row: row[0].lower())
    return _HEAD + "".join(f"| {library} | {run} | {outcome} |\n" for library, run, outcome in rows)


def _row(item: pytest.Item) -> tuple[str, str, str]:
    """Return the module of the library that a test is about, what was run, and what a test that passed has found."""
    if client := item.callspec.params.get("client") if hasattr(item, "callspec") else None:  # of test_models.py
        return client.module, _one_line(client.run), _one_line(client.found)
    run, _, found = (inspect.getdoc(item.function) or "").partition("\n\n")
    run = re.sub(r"^[A-Z]\d+[^:.]*[:.]\s*", "", run) or item.originalname.removeprefix("test_").replace("_", " ")
    return item.path.stem.removeprefix("test_"), _one_line(run), _one_line(found)


def _one_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").replace("|", "\\|")


def _library(module: str) -> str:
    """Return the library of a module, with its version: `ignite` -> "pytorch-ignite 0.5.5"."""
    names = importlib.metadata.packages_distributions().get(module)
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else module
