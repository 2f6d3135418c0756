"""The rows of docs/behaviour.md, and the tests that name them: a test's docstring begins with its rows."""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent.parent
BEHAVIOUR = TESTS.parent / "docs" / "behaviour.md"
_ROW = r"[ASRGNFCITXMP]\d+"


def rows_of_behaviour() -> list[str]:
    """Return the rows of the document's tables, in order."""
    return re.findall(rf"^\| ({_ROW}) \|", BEHAVIOUR.read_text(encoding="utf-8"), flags=re.MULTILINE)


def rows_named(docstring: str) -> list[str]:
    """Return the rows that a docstring begins with: "S5: ...", "N10." or "R7, A12 with A10: ..."."""
    start = re.match(rf"({_ROW})((, | and | with )({_ROW}))*(?=[:., ;]|$)", docstring)
    return re.findall(_ROW, start[0]) if start else []


def find_tests_by_row() -> dict[str, list[str]]:
    """Return row -> its tests, as `tests/test_cli.py::test_help`."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for row in rows_named(ast.get_docstring(node) or ""):
                    found[row].append(f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}")
    return found
