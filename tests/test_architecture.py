"""What can be read off the sources: the public names, their examples, and the direction of imports."""

import ast
import contextlib
import doctest
import functools
import importlib
import re
import sys
import tempfile
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unisono
from helpers.programs import run_script
from helpers.rows import find_tests_by_row, rows_of_behaviour

PACKAGE = Path(unisono.__file__).parent
DOCS = Path(__file__).parent.parent / "docs"
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]

# The packages, lowest first, as the page names them: each imports only from those before it. `unisono` is what a user
# imports; `pytest_unisono` is a distribution's file beside it.
_CELLS = re.findall(r"^\| (`.+?) \|", (DOCS / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
PACKAGES = [*re.findall(r"`(\w+)/?`", " ".join(_CELLS)), "__main__"]
PACKAGES.insert(PACKAGES.index("scripts") + 1, "unisono")
PACKAGES.remove("pytest_unisono")


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(module: str) -> str:
    """Return the package or the file at the root that a module belongs to: `unisono.runtime.rng` -> "runtime"."""
    return module.split(".")[min(1, module.count("."))]


# What `import unisono` can lead to; the commands need more than torch.
COMMANDS = ("console", "training", "bench", "plan", "monitor", "cli", "__main__")
OF_COMMANDS = ("unisono.verification.command", "unisono.profiling.picture")  # the latter needs matplotlib
LIBRARY = [name for name in SOURCES if package_of(name) not in COMMANDS and name not in OF_COMMANDS]


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def names_imported(node: ast.AST) -> list[str]:
    """Return what an import statement imports, as `package.module.name`; of other nodes nothing."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def imported_by(module: str) -> Iterator[tuple[str, int]]:
    """Yield every file of the package that a file imports, and the line; imports in functions too."""
    for node in ast.walk(tree_of(module)):
        assert not getattr(node, "level", 0), f"{module}:{node.lineno}: a relative import"
        for name in names_imported(node):
            if name.split(".")[0] == "unisono":
                yield (name if name in SOURCES else name.rpartition(".")[0]), node.lineno


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for an expression that reads like this, else ''."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


# Public names


def test_public_names():
    assert unisono.__all__ == [
        "DataParallel",
        "DeviceLike",
        "Profile",
        "ReplicaTimeout",
        "ReplicaTiming",
        "Report",
        "SampleList",
        "data_parallel",
        "gather",
        "install",
        "keep_freed_memory",
        "pad",
        "parallel_apply",
        "register_batch_type",
        "replicate",
        "scatter",
        "scatter_kwargs",
        "verify",
    ]
    assert all(hasattr(unisono, name) for name in unisono.__all__)


def run_examples(found: list[doctest.DocTest]) -> int:
    """Run the examples; return how many there are."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # some write files
        for test in found:
            runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
    return runner.tries


@pytest.mark.parametrize("name", [name for name in unisono.__all__ if name != "DeviceLike"])  # which is a union
def test_every_public_name_has_an_example_that_runs(name):
    """With nothing imported but torch and unisono, as a reader would try it."""
    globs = {"torch": torch, "unisono": unisono}
    found = doctest.DocTestFinder(recurse=False).find(getattr(unisono, name), name, globs=globs)
    assert run_examples(found) > 0


PUBLIC = [name for name in vars(unisono.DataParallel) if not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_on_a_wrapper_has_an_example(name):
    """It runs with those of its file."""
    assert ">>>" in (vars(unisono.DataParallel)[name].__doc__ or "")


@pytest.mark.parametrize("module", [name for name in SOURCES if ">>>" in SOURCES[name].read_text(encoding="utf-8")])
def test_examples_in_the_sources_run(module):
    found = doctest.DocTestFinder().find(
        importlib.import_module(module), extraglobs={"torch": torch, "unisono": unisono}
    )
    assert run_examples(found) > 0


# Imports


def test_packages_import_from_lower_packages():
    assert {package_of(module) for module in SOURCES} == set(PACKAGES)
    for module in SOURCES:
        own = PACKAGES.index(package_of(module))
        for imported, line in imported_by(module):
            other = PACKAGES.index(package_of(imported))
            assert other <= own, f"{module}:{line} imports {imported}, which is above it"


@pytest.mark.parametrize("package", PACKAGES)
def test_files_of_a_package_have_no_import_cycle(package):
    waiting = {name: {imported for imported, _ in imported_by(name)} for name in SOURCES if package_of(name) == package}
    while waiting:
        done = [name for name, needs in waiting.items() if not (needs - {name}) & waiting.keys()]
        assert done, f"these import each other: {sorted(waiting)}"
        for name in done:
            del waiting[name]


NEEDED = {"torch"}
BROUGHT = NEEDED | {"typing_extensions"}  # which torch needs


def test_the_library_needs_nothing_but_what_pip_install_brings():
    """Imports in functions too, and numpy, which torch does not bring either, by way of a tensor."""
    for module in LIBRARY:
        for node in ast.walk(tree_of(module)):
            names = names_imported(node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "numpy":
                names = ["numpy"] * (module != "unisono.testing")  # there it is the tensor's own method
            other = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - BROUGHT - {"unisono"}
            assert not other, f"{module}:{node.lineno} needs {other}"


def test_what_the_library_needs_is_what_the_package_asks_for():
    required = PROJECT["dependencies"]
    assert {re.split(r"[^\w.-]", requirement)[0] for requirement in required} == NEEDED


PRIVATE = "unisono.runtime.torch_private"
OF_TORCH = {module for module in SOURCES if module.startswith(f"{PRIVATE}.")}


def test_private_calls_of_torch_are_in_one_package():
    """But those of testing.py: a device of its own needs torch's device registry, which is private in parts."""
    for module in SOURCES.keys() - OF_TORCH - {"unisono.testing"}:
        for node in ast.walk(tree_of(module)):
            names = [dotted(node)] if isinstance(node, ast.Attribute) else names_imported(node)
            private = [name for name in names if f"{name}.".startswith("torch._C.")]
            assert not private, f"{module}:{node.lineno}: {private} belongs in {PRIVATE}"


def test_each_subject_of_private_names_has_a_file_of_tests_with_its_name():
    folder = Path(__file__).parent / "runtime" / "torch_private"
    assert {path.stem for path in folder.glob("*.py")} == {f"test_{module.split('.')[-1]}" for module in OF_TORCH}


def test_signposts_lead_somewhere():
    """Of comments and docstrings: the files that they name, methods of our classes, functions of our files."""
    in_class: dict[str, set[str]] = {}
    in_file: dict[str, set[str]] = {}
    for module, path in SOURCES.items():
        in_file.setdefault(path.stem, set()).update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef):
                in_class.setdefault(node.name, set()).update(re.findall(r"\w+", ast.unparse(node)))
    paths = ["/" + path.relative_to(PACKAGE.parent).as_posix() for path in SOURCES.values()]
    beside = ("tests", "benchmarks", "examples")
    paths += [
        f"/{path.relative_to(DOCS.parent).as_posix()}" for each in beside for path in (DOCS.parent / each).rglob("*.py")
    ]
    of_users = {"script.py", "train.py", "trackers.py", "/package/train.py"}  # in examples
    for module in SOURCES:
        for line, text in comments_and_docstrings(module):
            for file in set(re.findall(r"[\w/]+\.py\b", text)) - of_users:
                assert any(path.endswith("/" + file) for path in paths), f"{module}:{line}: there is no {file}"
            for owner, name in re.findall(r"`(\w+)\.(?!py\b)(\w+)", text):
                known = in_class.get(owner, in_file.get(owner))
                assert known is None or name in known, f"{module}:{line}: {owner} has no {name}"


def comments_and_docstrings(module: str) -> Iterator[tuple[int, str]]:
    """Yield them, each with its line."""
    with SOURCES[module].open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def test_context_managers_leave_exceptions_as_they_are():
    """F1: contextlib's set an attribute of what comes through them."""
    named = {(name, getattr(node, "attr", "")) for name in SOURCES for node in ast.walk(tree_of(name))}
    assert [name for name, attribute in named if attribute == "contextmanager"] == []


def test_notes_are_added_to_exceptions_in_one_place():
    """F1: past the class of the exception, of which `add_note` may raise."""
    calls = [node.func for name in SOURCES for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call)]
    assert [func for func in calls if getattr(func, "attr", "") == "add_note"] == []


def test_nothing_of_torchs_data_parallel_is_used_but_its_name():
    """`DataParallel` is a subclass of torch's for isinstance; all that it does is this project's own.

    The benchmark is left out: it measures torch's beside this one.
    """
    for module in SOURCES.keys() - {"unisono.bench.contenders"}:
        bases, asked = [], []
        for node in ast.walk(tree_of(module)):
            torchs = [name for name in names_imported(node) if "unisono" not in name]
            assert not any("nn.parallel" in name or "DataParallel" in name for name in torchs), module
            if isinstance(node, ast.ClassDef):
                bases += [part for base in node.bases for part in ast.walk(base)]
            elif isinstance(node, ast.Call) and dotted(node.func) == "isinstance":
                asked += [part for each in node.args[1:] for part in ast.walk(each)]
            elif isinstance(node, ast.Attribute):
                name = dotted(node)
                is_allowed = node in asked or module in OF_TORCH
                assert is_allowed or not name.endswith("nn.parallel"), f"{module}:{node.lineno}: {name}"
                if name.endswith("nn.DataParallel") and node not in asked:
                    assert module == "unisono.data_parallel"
                    assert node in bases, f"{module}:{node.lineno}: {name} is used otherwise than as a base class"


def test_nothing_is_inherited_from_torchs_data_parallel():
    defined = {name for name, value in vars(torch.nn.DataParallel).items() if callable(value)}
    assert defined >= {"__init__", "forward", "scatter", "replicate", "parallel_apply", "gather"}
    assert defined - vars(unisono.DataParallel).keys() == set()
    supers = [node for node in ast.walk(tree_of("unisono.data_parallel")) if dotted(node) == "super"]
    assert supers == []


def test_import_loads_torch_and_nothing_slow():
    """Beyond what torch loads: the standard library and the package's own files, without testing, training, command."""
    done = run_script("""
        import sys, threading, torch
        before, threads = set(sys.modules), torch.get_num_threads()
        import unisono
        assert threading.active_count() == 1
        assert torch.get_num_threads() == threads
        assert not torch.cuda.is_initialized()
        print(*sorted(set(sys.modules) - before))
    """)
    assert done.returncode == 0, done.stderr
    # sysconfig's data are a file of the standard library whose name has the platform's
    loaded = [name for name in done.stdout.split() if not name.startswith("_sysconfigdata")]
    assert {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names) == {"unisono"}
    own = [name for name in loaded if name.startswith("unisono")]
    assert {package_of(name) for name in own} <= set(PACKAGES[: PACKAGES.index("unisono") + 1])


def test_the_package_tells_type_checkers_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_every_row_of_the_behaviour_table_has_its_tests():
    """Outside tests/gpu, which needs a GPU."""
    rows, tests = rows_of_behaviour(), find_tests_by_row()
    assert len(rows) == len(set(rows)) > 60
    assert [row for row in rows if all(test.startswith("tests/gpu/") for test in tests[row])] == []
    assert set(tests) - set(rows) == set(), "a test names a row that is not there"


# The map of CONTRIBUTING.md

MAP = "## Edit this file, run those tests"
FACADE = ("data_parallel", "options", "ways", "wrapper")
CORE = ("runtime", "primitives", "leftovers", "distributed", "autograd", "sync_batch_norm", "engines", "inference")


def test_each_file_of_the_core_is_on_the_map_with_its_tests():
    """Each path of the map exists; one with stars stands for at least one file."""
    page = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (`.+) \| (`.+) \|$", page.partition(MAP)[2].partition("\n## ")[0], re.MULTILINE)
    edited, run = (" ".join(cells) for cells in zip(*lines, strict=True))
    files, _ = found_on_map(PACKAGE, edited), found_on_map(Path(__file__).parent, run)
    core = {
        path for name, path in SOURCES.items() if package_of(name) in {*CORE, *FACADE} and path.name != "__init__.py"
    }
    assert [path.relative_to(PACKAGE).as_posix() for path in sorted(core - files)] == [], "files without a line"


def found_on_map(folder: Path, cells: str) -> set[Path]:
    """Return the files and folders that cells of the map name, below the folder."""
    found = {name: set(folder.glob(name)) for name in re.findall(r"`([^` ]+)`", cells)}
    assert [name for name, paths in found.items() if not paths] == [], f"on the map, but not below {folder}"
    return set().union(*found.values())
