"""The documentation site: its source is made from the repository's pages and the tests (docs/site.py)."""

import contextlib
import importlib
import inspect
import json
import pkgutil
import posixpath
import re
import shlex
import statistics
import threading
import typing
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._utils import ExceptionWrapper

import unisono
import unisono.testing
from helpers import page_tables
from helpers.benchmarks import import_file
from helpers.forked import forked
from helpers.modules import Calls
from helpers.page_tables import read_table
from helpers.programs import run_scripts
from helpers.ranks import free_port
from helpers.rows import BEHAVIOUR, find_tests_by_row, rows_of_behaviour
from unisono.cli import parsers
from unisono.primitives.measured_shares import lower_quartile
from unisono.runtime.timeline import StepRecording, Track

ROOT = Path(__file__).parent.parent


site = import_file(ROOT / "docs" / "site.py", "docs_site")


@pytest.fixture(scope="module")
def built():
    result = site.Site()
    result.build()  # raises BrokenLinkError for a link that leads nowhere
    return result


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page(built):
    """Sources, and pages that only other pages lead to, are left out."""
    entries = [page for _, page in navigation()]
    assert len(entries) == len(set(entries))
    assert [entry for entry in entries if entry not in built.pages] == []
    led_to = {"license.md", "test-records.md"} | {
        page for page in built.pages if page.startswith(("source/", "behaviour/", "benchmarks/"))
    }
    assert built.pages.keys() - set(entries) - led_to == set()


# The most words on a page, without code. Pages that are made, and lists that only grow, have no limit.
MOST_WORDS = {
    "index.md": 200,
    "install.md": 250,
    "two-devices.md": 500,
    "from-data-parallel.md": 650,
    "from-ddp.md": 450,
    "notebook.md": 300,
    "run.md": 450,
    "trainer.md": 300,
    "batch-dimension.md": 500,
    "batch-norm-and-dropout.md": 350,
    "state-in-forward.md": 400,
    "shares.md": 400,
    "out-of-memory.md": 350,
    "graphs.md": 450,
    "save-and-resume.md": 250,
    "inference.md": 300,
    "verify.md": 400,
    "testing.md": 400,
    "profile.md": 600,
    "free-threading.md": 400,
    "clusters.md": 500,
    "torchrun.md": 250,
    "machines.md": 250,
    "slurm.md": 150,
    "mpi.md": 100,
    "ray.md": 150,
    "other-launchers.md": 100,
    "ranks.md": 200,
    "examples.md": 250,
    "differences.md": 650,
    "errors.md": 900,
    "command-line.md": 200,
    "command-run.md": 350,
    "command-verify.md": 350,
    "command-devices.md": 150,
    "command-watch.md": 100,
    "command-bench.md": 200,
    "command-plan.md": 250,
    "command-train.md": 400,
    "compatibility.md": 500,
    "what-has-run.md": 950,
    "launchers.md": 700,
    "libraries.md": 850,
    "benchmark.md": 400,
    "boundaries.md": 450,
    "stability.md": 300,
    "training-step.md": 600,
    "same-numbers.md": 500,
    "gpus.md": 500,
    "failures.md": 500,
    "plan.md": 500,
    "architecture.md": 700,
    "rules.md": 900,
    "adding.md": 200,
    "contributing.md": 650,
}
NO_LIMIT = {
    "api-data-parallel.md",
    "api-primitives.md",
    "api-batches.md",
    "api-checks.md",
    "behaviour.md",
    "asynchronous-device.md",
    "security.md",
    "changelog.md",
    "terms.md",
}


EVERYTHING = {"behaviour.md", "changelog.md"}  # looked things up in, not read


def test_a_page_is_short_enough_to_be_read(built) -> None:
    """Chinese pages do not put spaces between words, so they are not counted."""
    entries = [page for _, page in navigation() if not page.startswith("zh/")]
    assert set(entries) == MOST_WORDS.keys() | NO_LIMIT
    words = {page: num_words(built.pages[page]) for page in entries}
    assert {page: words[page] for page, most in MOST_WORDS.items() if words[page] > most} == {}
    assert statistics.median(words.values()) <= 360
    readable = [page for page in built.pages if not page.startswith(("zh/", "source/")) and page not in EVERYTHING]
    assert {page: num for page in readable if (num := num_words(built.pages[page])) > 1500} == {}


def test_a_page_has_one_name(built) -> None:
    """The title is the name in the navigation; the first pages of the two languages are called after the project."""
    titles = {page: built.pages[page].partition("\n")[0].removeprefix("# ") for _, page in navigation()}
    assert {page: titles[page] for name, page in navigation() if titles[page] != name} == dict.fromkeys(
        ["index.md", "zh/index.md"], "unisono"
    )


def navigation() -> list[tuple[str, str]]:
    """Return the name and the page of each entry, in both languages."""
    entries = []
    for configuration, folder in (("mkdocs.yml", ""), ("mkdocs.zh-CN.yml", "zh/")):
        text = (ROOT / configuration).read_text(encoding="utf-8").partition("\nnav:")[2]
        pairs = re.findall(r'^ *- "?(.+?)"?: ([\w./-]+\.md)$', text, re.MULTILINE)
        entries += [(name, f"{folder}{page}") for name, page in pairs]
    return entries


def num_words(page: str) -> int:
    """Return how many words a page has, without code, link targets and pictures."""
    text = re.sub(r"^```.*?^```$|^    .*?$", "", page, flags=re.MULTILINE | re.DOTALL)
    return len(re.findall(r"\S*\w\S*", re.sub(r"!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)", "", text)))


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


def test_the_table_of_behaviour_has_every_row_and_no_names_of_tests(built) -> None:
    """With a filter, which is in the page, as are the notes on a row; the tests are on the page that a row leads to."""
    page = built.pages["behaviour.md"]
    rows = re.findall(r"^\| \[([A-Z]\d+)\]\((behaviour/[\w-]+\.md)#([a-z]\d+)\) \|", page, re.MULTILINE)
    assert [row for row, _, _ in rows] == rows_of_behaviour()
    assert all(row.lower() == anchor and f"{{ #{anchor} }}" in built.pages[place] for row, place, anchor in rows)
    assert "test_" not in re.sub(r"`[^`]*`", "", page)
    assert 'id="behaviour-filter"' in page
    assert (ROOT / "docs" / "behaviour.js").read_text(encoding="utf-8") in page
    for note in re.findall(
        r"^\*\*[A-Z]\d+\.\*\* (.+?)\n\n", BEHAVIOUR.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        assert plain(note).replace("|", "\\|") in plain(page), note


def test_the_behaviour_pages_lose_no_text(built):
    """Every cell of the tables, and every paragraph between them and under them, is on a page."""
    everything = plain("\n".join(text for path, text in built.pages.items() if path.startswith("behaviour")))
    for line in BEHAVIOUR.read_text(encoding="utf-8").splitlines():
        line = re.sub(r"^\*\*[A-Z]\d+\.\*\* |^</?details>.*", "", line)  # on its row's part of a page
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


def test_links_between_the_english_and_the_chinese_pages_lead_to_built_ones(built, tmp_path):
    """They are two sites, and a builder knows its own source only."""
    built.write(tmp_path / "source")
    english, chinese = tmp_path / "source", tmp_path / "source-zh"
    assert not (english / "zh").exists()
    assert {page.name for page in chinese.glob("*.md")} == {
        path.removeprefix("zh/") for path in built.pages if path.startswith("zh/")
    }
    crossed = 0
    for folder, place in ((english, ""), (chinese, "zh/")):
        for page in folder.rglob("*.md"):
            for link in re.findall(r"\]\((?![a-z]+:)([^()\s#]+)", page.read_text(encoding="utf-8")):
                target = posixpath.normpath(posixpath.join(place, posixpath.dirname(page.relative_to(folder)), link))
                crosses = target.startswith("zh/") != (place == "zh/")
                crossed += crosses and target.endswith(".html")
                assert not (crosses and target.endswith(".md")), (page, link)
                if crosses and target.endswith(".html"):
                    assert f"{target.removesuffix('.html')}.md" in built.pages, (page, link)
    assert crossed > 10


def test_a_bar_in_code_in_a_table_is_written_for_the_builder():
    row = r"| `--data NAME\|DIR` | a name \| a folder |"
    assert site.with_plain_bars(f"{row}\n\n`a\\|b`") == "| `--data NAME|DIR` | a name \\| a folder |\n\n`a\\|b`"


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


def test_the_title_of_a_source_breaks_between_words(built):
    """On a phone; and no underscore is a mark of Markdown."""
    assert built.pages["source/examples/same_numbers.py.md"].startswith("# examples/<wbr>same_<wbr>numbers.py\n")


def test_the_site_asks_no_other_host(built):
    """The theme would load fonts; a page, pictures."""
    assert "\n  font: false" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    shown = {path: re.findall(r"!\[[^\]]*\]\((?!data:)([^)]*)\)", text) for path, text in built.pages.items()}
    assert sum(map(len, shown.values())) > 5
    assert [path for path, links in shown.items() if any("//" in link for link in links)] == []


# README


def test_the_first_script_is_the_example():
    """tests/test_examples.py runs it."""
    text, example = (ROOT / "docs" / "two-devices.md").read_text(encoding="utf-8"), ROOT / "examples" / "first_steps.py"
    script = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    assert script.strip() == example.read_text().rpartition('"""')[2].strip()
    assert "    same: 20 comparisons, in training and eval\n" in text


@pytest.mark.parametrize(("path", "most_words"), [("README.md", 500), ("README.zh-CN.md", 500)])
def test_the_readme_is_short(path: str, most_words: int) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert len(text.split()) <= most_words
    assert len(text.splitlines()) <= 90


def test_the_home_page_claims_what_the_readme_does() -> None:
    readme, home = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "docs" / "index.md"))
    for block in (r"^```diff\n.*?^```$", r"^```python\n.*?^With .*?$", r"^\| on four devices.*?\n\n"):
        assert re.findall(block, home, re.MULTILINE | re.DOTALL) == re.findall(block, readme, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", ["README.md", "README.zh-CN.md"])
def test_the_code_of_the_readme_runs(path, tmp_path, capsys):
    """With the names that it takes as given."""
    torch.manual_seed(0)
    given = {"unisono": unisono, "net": nn.Linear(5, 2), "criterion": nn.functional.cross_entropy}
    given |= {"inputs": torch.randn(30, 5), "labels": torch.randint(2, (30,))}
    given |= {"torch": torch, "nn": nn}
    exec(compile(program_of((ROOT / path).read_text(encoding="utf-8")), path, "exec"), given)
    assert isinstance(given["model"], unisono.DataParallel)
    assert "differs: 9 of 27 comparisons" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["README.md", "README.zh-CN.md"])
def test_the_readme_shows_what_its_four_lines_print(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are those of the example; and what the argument that they name changes is shown, too."""
    text = (ROOT / path).read_text(encoding="utf-8")
    example = (ROOT / "examples" / "four_lines.py").read_text(encoding="utf-8")
    lines, shown = re.search(r"^```python\n(.*?)^```\n.*?((?:^    [^\n]*\n)+)", text, re.MULTILINE | re.DOTALL).groups()
    assert len(lines.splitlines()) == 4
    assert example.endswith(lines)
    for program in (example, example.replace('["cpu", "cpu"]', '["cpu", "cpu"], sync_batch_norm=True')):
        with torch.random.fork_rng(devices=[]):
            exec(compile(program, "four_lines.py", "exec"), {})
    printed = capsys.readouterr().out
    assert "".join(f"{line[4:]}\n" for line in shown.splitlines()) in printed
    assert printed.splitlines()[-1] == "same: 38 comparisons, in training and eval"
    assert f"`{printed.splitlines()[-1]}`" in text


what_has_run = import_file(ROOT / "docs" / "what_has_run.py", "docs_what_has_run")


@pytest.mark.parametrize("path", what_has_run.pages())
def test_the_tables_of_what_has_run_are_those_of_the_records(path: str) -> None:
    """`python docs/what_has_run.py` writes them."""
    assert read_table(ROOT / path, what_has_run.COMMAND) == what_has_run.pages()[path]


def test_every_record_of_a_run_names_its_commit_python_and_torch() -> None:
    """Or says that the record does not name it, and which commit brought the record."""
    runs = what_has_run.runs()
    assert len(runs) > 10
    for run in runs:
        assert re.search(r"\b[0-9a-f]{8}\b", run.commit), run
        assert re.fullmatch(r"\d+\.\d+\.\d+", run.torch), run
        assert re.match(r"\d+\.\d+|not recorded", run.python), run
    failed_or_skipped = re.compile(r"[\d,]+|not noted")
    assert all(failed_or_skipped.match(cell) for run in runs for cell in (run.passed, run.failed, run.not_run))


def test_a_line_of_a_run_is_read_as_it_is_written() -> None:
    line = page_tables.run_line()
    assert what_has_run._RUN.search(line), line
    assert re.fullmatch(r"[0-9a-f]{8,}( with changes)?|not recorded", page_tables.commit())


pictures = import_file(ROOT / "docs" / "pictures.py", "docs_pictures")


@pytest.mark.parametrize("name", pictures.FILES)
def test_a_picture_is_that_of_the_script(name: str) -> None:
    """`python docs/pictures.py` writes all."""
    assert (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8") == pictures.FILES[name]()


def test_every_picture_is_on_a_page_and_each_svg_is_drawn_by_the_script() -> None:
    assert {path.stem for path in (ROOT / "docs").glob("*.svg")} == set(pictures.FILES)
    paths = [*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")]
    pages = "".join(path.read_text(encoding="utf-8") for path in paths)
    drawn = [path.name for path in (ROOT / "docs").glob("*.*") if path.suffix in (".svg", ".png")]
    assert [name for name in drawn if f"]({name})" not in pages and f"/{name})" not in pages] == []


@pytest.mark.parametrize("name", pictures.FILES)
def test_a_picture_has_a_title_and_needs_no_network(name: str) -> None:
    drawn = pictures.FILES[name]()
    assert 'role="img">\n  <title>' in drawn
    assert "http" not in drawn.replace('xmlns="http://www.w3.org/2000/svg"', "")


@pytest.mark.parametrize("name", pictures.FILES)
def test_a_picture_is_readable_in_the_light_and_in_the_dark(name: str) -> None:
    """Text has a contrast of 4.5 with what is behind it: the page, or for the class "in" one of the filled shapes."""
    style = re.search(r"<style>(.*)</style>", pictures.FILES[name](), re.DOTALL)[1]
    light, dark, _ = re.split(r"@media \(prefers-color-scheme: dark\) \{(.*?\}\s*)\}", style, flags=re.DOTALL)
    for rules, page in ((light, "#ffffff"), (light + dark, "#0d1117")):
        fills = {
            name: colour
            for names, colour in re.findall(r"([\w ,.]+) \{[^}]*?fill: (#\w+)[^}]*\}", rules)
            for name in re.split(r", ", names.strip())
        }
        shapes = [fills[each] for each in (".d0", ".d1", ".all") if each in fills]
        texts = [(fills[each], page) for each in ("text", ".small", ".dim") if each in fills]
        assert {pair: contrast(*pair) for pair in texts if contrast(*pair) < 4.5} == {}
        assert {shape: contrast(fills[".in"], shape) for shape in shapes if contrast(fills[".in"], shape) < 4.5} == {}
        assert {shape: contrast(shape, page) for shape in shapes if contrast(shape, page) < 3} == {}


def contrast(*colours: str) -> float:
    """Return the contrast of two colours, by the formula of WCAG 2."""
    lighter, darker = sorted(map(luminance, colours), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour: #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_option_says_what_it_means() -> None:
    """A default alone does not."""
    actions = [(name, each) for name, parser in parsers()[1].items() for each in parser._actions]
    assert len(actions) > 50
    assert [(name, each.dest) for name, each in actions if not each.help or each.help.startswith("(")] == []


def test_the_pages_of_commands_are_those_of_the_parsers() -> None:
    """`python docs/command_line.py` writes them."""
    module = import_file(ROOT / "docs" / "command_line.py", "docs_command_line")
    assert {path: path.read_text(encoding="utf-8") for path in module.pages()} == module.pages()
    assert {path.name for path in (ROOT / "docs").glob("command-*.md")} == {path.name for path in module.pages()}


def of_replicas(forward, module=None, **options):
    """Return a model on two CPU replicas: the module, or one with such a forward."""
    module = Calls(forward, layer=nn.Linear(3, 2)) if module is None else module
    return unisono.DataParallel(module, ["cpu"] * 2, **options)


def write_of_rows(net, x):
    with torch.no_grad():
        net.layer.weight.mul_(len(x))
    return net.layer(x)


X = torch.ones(5, 3)
# Of each message of ours that the page has: what causes it.
CAUSES = {
    "module must have its parameters and buffers on device cuda:0": lambda: of_replicas(
        None, nn.Linear(3, 2).to("meta")
    )(X),
    "cannot gather output along dimension 0": lambda: of_replicas(lambda net, x: x.new_ones(len(x), len(x)))(X),
    "cannot gather output: replicas returned different ...": lambda: of_replicas(lambda net, x: {len(x): x})(X),
    "cannot scatter tensors with different numbers of rows": lambda: of_replicas(None, nn.Bilinear(3, 3, 2))(X, X[:4]),
    "output of shape ... comes from ... rows": lambda: of_replicas(lambda net, x: x.sum(0, keepdim=True))(X),
    "output is a list with as many entries as each replica has rows": lambda: of_replicas(
        lambda net, x: [float(row.sum()) for row in x]
    )(X[:4]),
    "each replica normalises its own rows": lambda: of_replicas(None, nn.BatchNorm1d(3))(X),
    "there is no accelerator ...": lambda: unisono.scatter(X, [99]),
    "DataParallel has no argument": lambda: of_replicas(None, nn.Linear(3, 2), find_unused_parameters=True),
    "has the batch of its hidden state on dimension 1": lambda: of_replicas(None, nn.LSTM(3, 2, batch_first=True)),
    "Trying to backward through the replicas a second time": lambda: [
        loss.backward() for loss in [of_replicas(None, nn.Linear(3, 2))(X).sum()] * 2
    ],
    "batch of ... gives ... rows to the ... devices": lambda: unisono.DataParallel(nn.Linear(3, 2), ["cpu"] * 17)(X),
    "forward has written into parameter": lambda: of_replicas(write_of_rows)(X),
    "forward of ... assigns ...": lambda: of_replicas(lambda net, x: setattr(net, "last", x) or net.layer(x))(X),
    "ReplicaTimeout: no progress": lambda: of_replicas(
        lambda net, x: net.layer(x) if len(x) == 3 else threading.Event().wait(2), timeout=0.1
    )(X),
}


def hidden_state_of_all_rows():
    nn.LSTM(3, 2)(torch.ones(4, 2, 3), (torch.ones(1, 4, 2), torch.ones(1, 4, 2)))


def on_accelerators_only():
    """Say all that torch's sources have, because they say it on accelerators only."""
    names = ("data_parallel", "_functions")
    sources = "".join(inspect.getsource(importlib.import_module(f"torch.nn.parallel.{name}")) for name in names)
    raise RuntimeError(re.sub(r'"\s+"', "", sources))


# Of each message of torch's that the page has: what causes it; None where only a GPU does.
OF_TORCH = {
    "Expected all tensors to be on the same device": None,
    "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same": None,
    "CUDA out of memory": None,
    "Caught RuntimeError in replica 0 on device 0": lambda: ExceptionWrapper(
        (RuntimeError, RuntimeError("no"), None), "in replica 0 on device 0"
    ).reraise(),
    "There is an imbalance between your GPUs": on_accelerators_only,
    "Was asked to gather along dimension 0, but all input tensors were scalars": on_accelerators_only,
    "'DataParallel' object has no attribute": lambda: nn.DataParallel(nn.Linear(3, 2)).classes,
    "Expected hidden[0] size": hidden_state_of_all_rows,
    "Expected more than 1 value per channel when training": lambda: nn.BatchNorm1d(3)(X[:1]),
    "Missing key(s) in state_dict, Unexpected key(s): module.": lambda: nn.Linear(3, 2).load_state_dict(
        nn.DataParallel(nn.Linear(3, 2)).state_dict()
    ),
    "chunk expects at least a 1-dimensional tensor": lambda: torch.tensor(1.0).chunk(2),
    "grad can be implicitly created only for scalar outputs": lambda: nn.Linear(3, 2)(X).backward(),
}


def test_the_page_of_error_messages_has_what_is_said() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted([*CAUSES, *OF_TORCH])


@pytest.mark.parametrize("heading", [heading for heading, cause in OF_TORCH.items() if cause])
def test_a_message_of_the_page_is_torchs(heading: str) -> None:
    """As the torch that is installed has it."""
    with pytest.raises((RuntimeError, ValueError, AttributeError)) as raised:
        OF_TORCH[heading]()
    said = " ".join(str(raised.value).split())
    for part in heading.split(", Unexpected key(s): "):
        assert part in said
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    whole = re.search(rf"^## {re.escape(heading)}\n\n((?:    .*\n)*)", page, re.MULTILINE)[1]
    assert re.sub(r"GPU \d", "GPU {}", " ".join(whole.split()).partition(": ")[2]) in said


@pytest.mark.parametrize("heading", CAUSES)
def test_a_message_of_the_page_is_said(heading: str, caplog: pytest.LogCaptureFixture) -> None:
    """With values in the place of "..."."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            CAUSES[heading]()
            said = [*caplog.messages, *(str(each.message) for each in warned)]
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
    "docs/graphs.md",
    "docs/save-and-resume.md",
    "docs/inference.md",
    "docs/profile.md",
    "docs/training-step.md",
    "docs/install.zh-CN.md",
    "docs/from-data-parallel.zh-CN.md",
    "docs/processes-and-errors.zh-CN.md",
    "docs/verify.zh-CN.md",
]
# Of the whole process: names that are replaced, simulated devices.
RUN_AS_PROGRAMS = ["docs/run.md", "docs/run.zh-CN.md", "docs/trainer.md", "docs/testing.md"]
# Run by other means, or not at all.
RUN_ELSEWHERE = {
    "docs/index.md": "README's, as a test above says",
    "docs/verify.md": "by the test that looks at what it prints",
    "docs/clusters.md": "make clusters",
    "docs/ray.md": "make clusters",
    "docs/other-launchers.md": "make clusters",
    "docs/gpus.md": "CUDA graphs need a GPU",
}


def test_every_page_with_code_is_run() -> None:
    with_code = {
        f"docs/{path.name}"
        for path in (ROOT / "docs").glob("*.md")
        if re.search(r"^```(python|diff)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert with_code == {*RUN, *RUN_AS_PROGRAMS, *RUN_ELSEWHERE}


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


def test_the_speeds_on_pages_are_those_that_were_measured() -> None:
    """`make bench` writes them. What it calls no verdict, or lost in noise, is no figure on a page."""
    measured = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    sections = re.split(r"^## ", (ROOT / "benchmarks" / "results.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    no_verdict = {section.split()[0] for section in sections if "**No verdict**" in section}
    goals = (ROOT / "benchmarks" / "goals.md").read_text(encoding="utf-8")
    in_noise = set(re.findall(r"^\| torchrun on (\w+):.*lost in noise", goals, re.MULTILINE))
    speeds = {}
    for each in measured["workloads"]:
        turns = {line["contender"]: sorted(line["turns_s"]) for line in each["lines"]}
        seconds, name = {name: lower_quartile(values) for name, values in turns.items()}, each["name"]
        of_ddp, ranks, of_plain = (
            f"{seconds[other] / seconds[own]:.2f}"
            for other, own in (("ddp", "threads"), ("ddp", "torchrun"), ("plain", "threads"))
        )
        threads = ("no verdict", "no verdict") if name in no_verdict else (of_ddp, of_plain)
        speeds[name] = (threads[0], ranks + ", within noise" * (name in in_noise), threads[1])
    cell = r" ([^|]+) \|"
    page = (ROOT / "docs" / "benchmark.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| (.*?) \((\w+)\) \|{3 * cell}$", page, re.MULTILINE)
    assert {name: tuple(cells) for _, name, *cells in rows} == speeds
    shown = (ROOT / "docs" / "from-ddp.md").read_text(encoding="utf-8").partition("## How fast?")[2]
    assert re.findall(rf"^\| (.*?) \|{2 * cell}$", shown.partition("\n## ")[0], re.MULTILINE)[1:] == [
        (model, *speeds[name][:2]) for model, name, *_ in rows
    ]


def test_the_figures_of_free_threading_are_those_that_were_measured() -> None:
    """`python benchmarks/free_threading.py` writes them."""
    measured = (ROOT / "benchmarks" / "free_threading.md").read_text(encoding="utf-8")
    table = [line for line in measured.splitlines() if line.startswith("|")]
    assert len(table) > 3
    assert "\n".join(table) in (ROOT / "docs" / "free-threading.md").read_text(encoding="utf-8")


def test_the_page_names_the_libraries_that_were_run():
    """`make clients` writes their table."""
    records, page = ((ROOT / "docs" / name).read_text() for name in ("libraries.md", "compatibility.md"))
    table = records.partition("<!-- written by make clients -->\n")[2].partition("<!-- end -->")[0]
    libraries = set(re.findall(r"^\| ([\w.-]+) \d[\w.]* \|", table, re.MULTILINE))
    listed = re.findall(r"^- \*\*\w+\*\*: (.+?)[;.]$", page, re.MULTILINE | re.DOTALL)
    assert len(libraries) > 15
    assert {name for line in listed for name in re.split(r",\s+", line)} == libraries


def test_the_program_for_torchrun_runs_in_two_processes(tmp_path):
    """With what torchrun sets; the ranks read samples of their own, and rank 0 saves."""
    page = (ROOT / "docs" / "processes-and-errors.zh-CN.md").read_text(encoding="utf-8")
    names, program, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    with contextlib.chdir(tmp_path):
        ended = run_scripts(
            [(f"{names}{program}print(num_processes)", {**given, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
        )
    # torch 2.9 prints lines of gloo's.
    lines = [[line for line in end.stdout.splitlines() if not line.startswith("[Gloo]")] for end in ended]
    assert ([end.returncode for end in ended], lines) == ([0, 0], [["2"]] * 2), ended
    assert (tmp_path / "weights.pt").exists()


# API


def test_the_api_pages_have_every_public_name_and_every_type() -> None:
    """Each once, with the classes of unisono in annotations of public functions, and their own annotations."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("api-*.md")]
    shown = [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)]
    assert len(shown) == len(set(shown))
    for name in {name.rpartition(".")[0] for name in shown} & set(shown):  # its members have entries of their own
        assert any(f"::: {name}\n    options: {{ members: false }}\n" in page for page in pages)
    objects = [pkgutil.resolve_name(name) for name in shown]
    for package in (unisono, unisono.testing):
        assert [name for name in package.__all__ if not any(getattr(package, name) is each for each in objects)] == []
    public = [name for name in vars(unisono.DataParallel) if not name.startswith("_") and name != "extra_repr"]
    assert [name for name in public if f"unisono.DataParallel.{name}" not in shown] == []
    functions = [each.fget if isinstance(each, property) else each for each in objects]
    functions += [each for cls in objects if isinstance(cls, type) for each in public_functions(cls)]
    hints = [pair for each in functions if callable(each) for pair in typing.get_type_hints(each).items()]
    types = {cls for name, hint in hints if not name.startswith("_") for cls in classes_in(hint)}
    shown_types = {each for each in objects if isinstance(each, type)} | {StepRecording, Track}  # of what records
    assert {cls for cls in types - shown_types if cls.__module__.startswith("unisono")} == set()


def test_the_page_of_what_will_not_change_has_every_public_name() -> None:
    """Those of torch are in its table."""
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    of_torch, names = (set(re.findall(r"`(\w+)`", part)) for part in page.split("\n## Names and options\n"))
    assert [name for name in (*unisono.__all__, *unisono.testing.__all__) if name not in names] == []
    options = inspect.signature(unisono.DataParallel).parameters
    assert [name for name in list(options)[4:] if name != "unknown" and name not in names] == []
    public = {name for name in vars(unisono.DataParallel) if not name.startswith("_")} - {"forward", "extra_repr"}
    assert public - names - of_torch == set()
    assert set(parsers()[1]) <= names


def test_the_form_of_reports_and_the_page_of_security() -> None:
    """A vulnerability has no public first contact; what the form asks to run is there."""
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "report.yml").read_text(encoding="utf-8")
    assert "SECURITY.md" in form
    for command in re.findall(r"`unisono ([^`]*)`", form):
        parsers()[0].parse_args(shlex.split(command))
    assert "Do not open a public issue." in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_field_on_the_api_pages_has_an_entry_of_its_own_with_a_type() -> None:
    """The builder reads "a, b: text" as a field a of the type b."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("api-*.md")]
    names = [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)]
    classes = [each for each in map(pkgutil.resolve_name, names) if isinstance(each, type)]
    num_fields = 0
    for cls in classes:
        _, _, fields = inspect.getdoc(cls).partition("\nAttributes:\n")
        for entry in re.findall(r"^    (\S.*?): ", re.split(r"^\S", fields, flags=re.MULTILINE)[0], re.MULTILINE):
            num_fields += 1
            name, _, own_type = entry.partition(" ")
            assert re.fullmatch(r"\w+", name), (cls, entry)
            is_typed = name in inspect.get_annotations(cls) or isinstance(getattr(cls, name, None), property)
            assert own_type or is_typed, (cls, entry)
    assert num_fields > 40


def public_functions(cls: type) -> list[object]:
    """Return the methods and getters that a class of ours defines; torch's and Python's are theirs."""
    values = [value for name, value in vars(cls).items() if not name.startswith("_")]
    return [value.fget if isinstance(value, property) else inspect.unwrap(value) for value in values if ours(value)]


def ours(value: object) -> bool:
    return isinstance(value, property) or inspect.isfunction(value)


def classes_in(hint: object) -> set[type]:
    if isinstance(hint, type) and not typing.get_args(hint):
        return {hint}
    return {cls for part in typing.get_args(hint) for cls in classes_in(part)}


# Chinese


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("安装", "install"),
        ("镜像", "install"),
        ("数据并行", "from-data-parallel"),
        ("梯度", "from-data-parallel"),
        ("显存", "from-data-parallel"),
        ("主卡", "from-data-parallel"),
        ("负载不均衡", "from-data-parallel"),
        ("学习率", "from-data-parallel"),
        ("多卡", "processes-and-errors"),
        ("断点续训", "processes-and-errors"),
        ("多进程", "processes-and-errors"),
        ("报错", "processes-and-errors"),
        ("验证", "verify"),
        ("不改代码", "run"),
        ("不同", "differences"),
    ],
)
def test_a_word_of_the_field_is_on_its_chinese_page(built, words, page):
    """In a heading, or several times: the search of the Chinese site divides words, in the browser."""
    text = built.pages[f"zh/{page}.md"]
    headings = " ".join(re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    assert words in headings or text.count(words) >= 3


def test_the_chinese_site_has_its_language():
    """With it the page of search divides words: it asks for a language among zh, ja and ko."""
    configuration = (ROOT / "mkdocs.zh-CN.yml").read_text(encoding="utf-8")
    assert "\nINHERIT: mkdocs.yml\n" in configuration
    assert "\n  language: zh\n" in configuration


CHINESE = ["README.zh-CN.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.zh-CN.md")))]


@pytest.mark.parametrize("path", CHINESE)
def test_a_chinese_page_has_chinese_punctuation_and_the_terms_of_the_field(path):
    """docs/terms.md has the terms; beside a Chinese character no ASCII comma, colon, question mark or semicolon."""
    text = (ROOT / path).read_text(encoding="utf-8")
    prose = re.sub(r"`[^`\n]*`", "", text)
    wrong = re.findall(r".{0,9}(?:[\u4e00-\u9fff][,;:?!]|[,;:?!][\u4e00-\u9fff]).{0,9}", prose)
    assert wrong == []
    assert [word for word in ("轴", "包装器", "反传", "求和") if word in text] == []


def test_the_chinese_table_of_errors_has_those_of_the_page_of_error_messages():
    chinese = (ROOT / "docs" / "processes-and-errors.zh-CN.md").read_text(encoding="utf-8")
    table = chinese.partition("\n## 常见报错\n")[2]
    keys = [key for keys in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for key in keys.split("、")]
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [heading for heading in headings if not any(key in heading or heading in key for key in keys)] == []
