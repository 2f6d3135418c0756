"""Write the last section of behaviour.md: the tests of each row, found by the rows that their docstrings begin with.

python docs/list_tests.py          # rewrite it
python docs/list_tests.py --check  # say whether it is up to date
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

DOCUMENT = Path(__file__).parent / "behaviour.md"
TESTS = Path(__file__).parent.parent / "tests"
HEADING = "## Tests, row by row"
_ROW = r"[ASRGNFC]\d+"


def main() -> int:
    written = DOCUMENT.read_text(encoding="utf-8")
    wanted = with_tests(written)
    if "--check" in sys.argv[1:]:
        return int(written != wanted)
    DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0


def with_tests(document: str) -> str:
    """Return the document with its last section made anew."""
    tests = tests_by_row()
    lines = [HEADING, "", "Written by `python docs/list_tests.py`.", ""]
    for row in rows_of(document):
        files = [f"[{file}](../tests/{file}.py): {', '.join(names)}" for file, names in sorted(tests[row].items())]
        lines.append(f"- **{row}** {'; '.join(files) or 'none'}")
    return document.split(HEADING)[0].rstrip() + "\n\n" + "\n".join(lines) + "\n"


def rows_of(document: str) -> list[str]:
    """Return the rows of the document's tables, in order."""
    return re.findall(rf"^\| ({_ROW}) \|", document, flags=re.MULTILINE)


def tests_by_row() -> dict[str, dict[str, list[str]]]:
    """Return row -> test file -> names of the tests that it belongs to."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for row in rows_named(ast.get_docstring(node) or ""):
                    found[row][path.stem].append(node.name.removeprefix("test_"))
    return found


def rows_named(docstring: str) -> list[str]:
    """Return the rows that a docstring begins with: "S5: ...", "N10." or "R7, A12 with A10: ..."."""
    start = re.match(rf"({_ROW})((, | and | with )({_ROW}))*(?=[:., ;]|$)", docstring)
    return re.findall(_ROW, start[0]) if start else []


if __name__ == "__main__":
    sys.exit(main())
