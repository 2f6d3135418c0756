"""The documentation site: its source is made from the repository's pages and the tests (docs/site.py)."""

import contextlib
import re
import shlex
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono
from helpers.benchmarks import import_file
from helpers.forked import forked
from helpers.modules import Calls
from helpers.rows import BEHAVIOUR, find_tests_by_row, rows_of_behaviour
from unisono.cli import parsers

ROOT = Path(__file__).parent.parent


site = import_file(ROOT / "docs" / "site.py", "docs_site")


@pytest.fixture(scope="module")
def built():
    result = site.Site()
    result.build()  # raises BrokenLinkError for a link that leads nowhere
    return result


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page(built):
    """Sources, and pages that only other pages lead to, are left out."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    entries = re.findall(r"([\w./-]+\.md)$", navigation, re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert [entry for entry in entries if entry not in built.pages] == []
    led_to = {"license.md", "test-records.md"} | {
        page for page in built.pages if page.startswith(("source/", "benchmarks/"))
    }
    assert built.pages.keys() - set(entries) - led_to == set()


def test_the_behaviour_pages_have_every_row_and_every_test(built):
    """What is shown beside a row comes from the tests, whole."""
    pages = {path: text for path, text in built.pages.items() if path.startswith("behaviour/")}
    everything = "\n".join(pages.values())
    headings = re.findall(r"^## ([A-Z]\d+): ", everything, re.MULTILINE)
    assert sorted(headings) == sorted(rows_of_behaviour())
    shown = site.docstrings_by_row()
    assert {row: [f"{path}::{name}" for path, name, _ in tests] for row, tests in shown.items()} == find_tests_by_row()
    for row, tests in shown.items():
        part = re.search(rf"^## {row}: .*?(?=^## |\Z)", everything, re.MULTILINE | re.DOTALL)[0]
        for path, _, said in tests:
            assert said in part
            assert path in part


def test_the_behaviour_pages_lose_no_text(built):
    """Every cell of the tables, and every paragraph between them and under them, is on a page."""
    everything = plain("\n".join(text for path, text in built.pages.items() if path.startswith("behaviour")))
    for line in BEHAVIOUR.read_text(encoding="utf-8").splitlines():
        line = re.sub(r"^\*\*[A-Z]\d+\.\*\* ", "", line)  # on its row's part of a page
        for cell in re.split(r"(?<!\\) \| ", line.strip("| ")) if re.match(r"\| [A-Z]\d+ \|", line) else [line]:
            if not cell.startswith(("|--", "| # |", "#")):
                assert plain(cell) in everything, cell


def test_the_behaviour_tables_can_be_read() -> None:
    """A cell has 40 words at most; what is longer is a paragraph under its table, which names its row."""
    text = BEHAVIOUR.read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        rows = re.findall(r"^\| ([A-Z]\d+) \| (.*) \|$", section, re.MULTILINE)
        cells = [(row, cell) for row, line in rows for cell in re.split(r"(?<!\\) \| ", line)]
        assert [(row, cell) for row, cell in cells if len(cell.split()) > 40] == []
        assert set(re.findall(r"^\*\*([A-Z]\d+)\.\*\*", section, re.MULTILINE)) <= {row for row, _ in rows}


def plain(text):
    return re.sub(r"\s+", " ", re.sub(r"\]\([^)]*\)", "]", text)).strip()


@pytest.mark.parametrize("link", ["nowhere.md", "#nothing", "verify.md#nothing"])
def test_a_link_that_leads_nowhere_is_an_error(link, tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs").mkdir()
    for name, text in (("behaviour", ""), ("verify", ""), ("page", f"[it]({link})")):
        (tmp_path / "docs" / f"{name}.md").write_text(f"# {name.title()}\n\n{text}\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(site.BrokenLinkError, match=re.escape(link)):
        site.Site().build()


def test_links_in_code_are_left_alone(built):
    code = "```python\nx = [1](nowhere.md)\n```\n"
    assert built._relinked(code, "docs/page.md", "page.md") == code


# README


def test_the_first_script_is_the_example():
    """tests/test_examples.py runs it."""
    text, example = (ROOT / "docs" / "two-devices.md").read_text(encoding="utf-8"), ROOT / "examples" / "first_steps.py"
    script = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    assert script.strip() == example.read_text().rpartition('"""')[2].strip()
    assert "    same: 12 comparisons, in training and eval\n" in text


@pytest.mark.parametrize(("path", "most_words"), [("README.md", 500), ("README.zh-CN.md", 500)])
def test_the_readme_is_short(path: str, most_words: int) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert len(text.split()) <= most_words
    assert len(text.splitlines()) <= 90


def test_the_picture_is_that_of_the_script():
    """`python docs/picture.py` writes it."""
    module = import_file(ROOT / "docs" / "picture.py", "docs_picture")
    assert module.PATH.read_text(encoding="utf-8") == module.picture()


def test_the_page_of_commands_is_that_of_the_parsers() -> None:
    """`python docs/command_line.py` writes it."""
    module = import_file(ROOT / "docs" / "command_line.py", "docs_command_line")
    assert module.PATH.read_text(encoding="utf-8") == module.page()


def of_replicas(forward, module=None, **options):
    """Return a model on two CPU replicas: the module, or one with such a forward."""
    module = Calls(forward, layer=nn.Linear(3, 2)) if module is None else module
    return unisono.DataParallel(module, ["cpu"] * 2, **options)


def decay(net, x):
    with torch.no_grad():
        net.layer.weight.mul_(0.9)
    return net.layer(x)


X = torch.ones(5, 3)
# Of each message of ours that the page has: what causes it.
CAUSES = {
    "module must have its parameters and buffers on device cuda:0": lambda: of_replicas(
        None, nn.Linear(3, 2).to("meta")
    )(X),
    "cannot gather output: replicas returned different sizes off the joined axis": lambda: of_replicas(
        lambda net, x: x.new_ones(len(x), len(x))
    )(X),
    "cannot scatter tensors with different numbers of rows": lambda: of_replicas(None, nn.Bilinear(3, 3, 2))(X, X[:4]),
    "output of shape ... comes from ... rows": lambda: of_replicas(lambda net, x: x.sum(0, keepdim=True))(X),
    "output is a list with as many entries as each replica has rows": lambda: of_replicas(
        lambda net, x: [float(row.sum()) for row in x]
    )(X[:4]),
    "each replica normalises its own rows in training": lambda: of_replicas(None, nn.BatchNorm1d(3))(X),
    "forward has written into parameter": lambda: of_replicas(decay)(X),
    "forward of ... assigns ...": lambda: of_replicas(lambda net, x: setattr(net, "last", x) or net.layer(x))(X),
    "ReplicaTimeout: no progress": lambda: of_replicas(
        lambda net, x: net.layer(x) if len(x) == 3 else threading.Event().wait(2), timeout=0.1
    )(X),
}
OF_TORCH = [
    "Expected all tensors to be on the same device",
    "Was asked to gather along dimension 0, but all input tensors were scalars",
    "Missing key(s) in state_dict, Unexpected key(s): module.",
    "Expected more than 1 value per channel when training",
    "There is an imbalance between your GPUs",
    "CUDA out of memory",
]


def test_the_page_of_error_messages_has_what_is_said() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted([*CAUSES, *OF_TORCH])


@pytest.mark.parametrize("heading", CAUSES)
def test_a_message_of_the_page_is_said(heading: str) -> None:
    """With values in the place of "..."."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            CAUSES[heading]()
            said = [str(each.message) for each in warned]
        except Exception as error:  # noqa: BLE001 - of any class
            said = [f"{type(error).__name__}: {error}"]
    parts = map(re.escape, re.split(r"\.\.\.|cuda:0|(?<=ReplicaTimeout: )", heading))
    assert any(re.search(".*".join(parts), each) for each in said), said


# Code on pages

RUN = [
    "docs/two-devices.md",
    "docs/from-data-parallel.md",
    "docs/from-ddp.md",
    "docs/batch-dimension.md",
    "docs/batch-norm-and-dropout.md",
    "docs/state-in-forward.md",
    "docs/shares.md",
    "docs/out-of-memory.md",
    "docs/save-and-resume.md",
    "docs/inference.md",
    "docs/verify.md",
    "docs/profile.md",
    "docs/training-step.md",
    "docs/from-data-parallel.zh-CN.md",
]
# Of the whole process: names that are replaced, simulated devices.
RUN_AS_PROGRAMS = ["docs/run.md", "docs/trainer.md", "docs/testing.md"]


def program_of(page):
    """Return a page's blocks of code one after the other, each on its own line of the page; of a diff what is new."""
    lines, kind, skip = [], "", False
    for line in page.splitlines():
        code = ""
        if line.startswith("```"):
            kind, skip = ("", False) if kind else (line.removeprefix("```") or "text", skip)
        elif not kind and line == "<!-- not run by make test -->":
            skip = True
        elif kind == "python" and not skip:
            code = line
        elif kind == "diff" and not skip and not line.startswith("-"):
            code = line[1:]
        lines.append(code)
    return "\n".join(lines)


def run_page(path: str) -> None:
    """Run its code from top to bottom, as a reader would type it; an error names the page and the line."""
    program = program_of((ROOT / path).read_text(encoding="utf-8"))
    assert "unisono." in program
    torch.manual_seed(0)
    exec(compile(program, str(ROOT / path), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("path", RUN)
def test_code_on_a_page_runs(path: str, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path), torch.random.fork_rng(devices=[]):
        run_page(path)


def test_the_page_of_verify_shows_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but the figures."""
    page = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    conclusion = re.search(r"^    training: differs.*?in training$", page, re.MULTILINE | re.DOTALL)
    assert conclusion
    test_code_on_a_page_runs("docs/verify.md", tmp_path)
    without_notes = re.sub(r"^random draws.*\n", "", capsys.readouterr().out, flags=re.MULTILINE)
    assert plain(conclusion[0]) in plain(without_notes)


@pytest.mark.parametrize("path", RUN_AS_PROGRAMS)
def test_code_on_a_page_runs_as_a_program(path: str, tmp_path: Path) -> None:
    with forked(run_page, path, cwd=tmp_path) as program:
        assert program.wait() == 0, program.err


COMMANDS = [
    (path.name, re.split(r"\s{2,}|\s[#|]\s", line)[0])
    for path in [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]
    for line in re.findall(r"^ +(unisono [a-z]+(?: .*)?)$", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_on_a_page_is_understood(page: str, command: str, tmp_path: Path) -> None:
    """An argument that cannot be used is an error."""
    (tmp_path / "path/to/idx/files").mkdir(parents=True)
    with contextlib.chdir(tmp_path):
        parsers()[0].parse_args(shlex.split(command)[1:])


def test_the_test_on_the_page_is_the_example() -> None:
    """tests/test_pytest_plugin.py runs it."""
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "two_device_tests" / "test_pooling.py").read_text(encoding="utf-8")
    shown = re.search(r"^```python\n(def test_.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown
    assert shown[1] in example


def test_the_page_names_the_libraries_that_were_run():
    """`make clients` writes their table."""
    records, page = ((ROOT / "docs" / name).read_text() for name in ("test-records.md", "compatibility.md"))
    table = records.partition("<!-- written by make clients -->\n")[2].partition("<!-- end -->")[0]
    libraries = set(re.findall(r"^\| ([\w.-]+) \d[\w.]* \|", table, re.MULTILINE))
    listed = re.findall(r"^- \*\*\w+\*\*: (.+?)[;.]$", page, re.MULTILINE | re.DOTALL)
    assert len(libraries) > 15
    assert {name for line in listed for name in re.split(r",\s+", line)} == libraries


def test_the_api_page_has_every_public_name():
    shown = re.findall(r"^::: unisono\.(?:[\w.]+\.)?(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert set(unisono.__all__) <= set(shown)
    assert len(shown) == len(set(shown))


# Search


def sections_of(pages: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return the page, the heading and the text of each section that the site's search has."""
    found = []
    for path, text in pages.items():
        if not path.startswith(site.NOT_SEARCHED) and "zh-CN" not in path:
            title = text.partition("\n")[0].removeprefix("# ")
            for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
                heading, _, body = part.partition("\n")
                found.append((path, f"{title} {heading}".lower(), body.lower()))
    return found


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("batch norm", "batch-norm-and-dropout.md"),
        ("resume", "save-and-resume.md"),
        ("checkpoint", "save-and-resume.md"),
        ("learning rate", "two-devices.md"),
        ("mixed precision", "two-devices.md"),
        ("gradient accumulation", "two-devices.md"),
        ("out of memory", "out-of-memory.md"),
        ("kaggle", "notebook.md"),
        ("slurm", "clusters.md"),
        ("uneven gpus", "shares.md"),
        ("lstm hidden state", "batch-dimension.md"),
        ("gather scalar", "errors.md"),
    ],
)
def test_what_people_search_for_is_found(built, words, page):
    """Among the first three pages, where sections with the words in their headings come first, as in an index."""
    ranks = {}
    for path, heading, body in sections_of(built.pages):
        score = sum(10 * (word in heading) + min(3, body.count(word)) for word in words.split())
        if all(word in heading + body for word in words.split()):
            ranks[path] = max(score, ranks.get(path, 0))
    first = sorted(ranks, key=lambda path: -ranks[path])[:3]
    assert page in first
