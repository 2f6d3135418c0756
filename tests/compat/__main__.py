"""Run the test suite with each of a list of Pythons and releases of torch; write a table into docs/compatibility.md.

    python -m compat                                             # all pairs of PAIRS: hours, some 3 GB to download each
    python -m compat --python python3.14t --torch 2.14.1         # one pair; only its row is written
    python -m compat --torch 2.9.1                               # with the Python that runs this
    python -m compat --python python3.13                         # with the newest torch that pip finds
    python -m compat --torch 2.9.1 -- tests/runtime -k malloc    # a part of the suite: the page stays as it is
    python -m compat --list                                      # the pairs, and where their Pythons are

With make: make compat TORCH=2.9.1 PYTHON=python3.12 KEEP=1 OPTIONS="tests/runtime". By hand, from the checkout, with
any Python from 3.11 on: PYTHONPATH=tests python -m compat.

Each pair has an environment of its own, `.venv-compat-PYTHON-TORCH`: up to 6 GB, because most releases of torch come
with CUDA. It is removed after the run, or kept with --keep, and used again if it is there. It has the pins of
constraints.txt but for torch. unisono itself is installed without its requirements, so that a torch below the one that
pyproject.toml asks for can be tried. Packages that have no wheel for a Python and are not needed by most tests are left
out there; the tests that need them are skipped, and the row says so. A free-threaded Python runs with PYTHON_GIL=0.

A Python is looked for on PATH, below ~/.pyenv/versions and in /opt/python*. A pair whose Python is not there, or whose
torch cannot be installed, is not run, and its row stays as it is. What pytest writes goes to runs/compat too. The exit
status is 0 if all has been run and nothing has failed, 1 otherwise, and 130 after Ctrl-C.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from compat import environment
from compat.pythons import Python, find
from compat.suite import run_suite
from compat.table import Row, updated
from helpers.docstring_parser import Parser
from helpers.page_tables import read_table, write_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
LOGS = ROOT / "runs" / "compat"
COMMAND = "make compat"

# The oldest torch that pyproject.toml allows, the one of constraints.txt, and the newest on the index, with the oldest
# Python; the other Pythons with the torch of constraints.txt; the newest with the newest, also without its lock.
PAIRS = (
    ("3.11", "2.9.1"),
    ("3.11", "2.13.0"),
    ("3.11", environment.NEWEST),
    ("3.12", "2.13.0"),
    ("3.13", "2.13.0"),
    ("3.14", "2.13.0"),
    ("3.14", environment.NEWEST),
    ("3.14t", environment.NEWEST),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    one = options.python or options.torch
    pairs = [(options.python or sys.executable, options.torch or environment.NEWEST)] if one else PAIRS
    pythons = {name: find(name) for name, _ in pairs}
    if options.list:
        for name, torch in pairs:
            print(f"Python {name:8}torch {torch:8}{pythons[name] or 'not found'}")
        return 0
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix=".venv-compat-downloads-", dir=ROOT) as downloads:
        for name, torch in pairs:
            row = _run(name, pythons[name], torch, options, Path(downloads))
            if row is not None:
                rows.append(row)
                if not options.pytest:  # at once: a later pair may end this run
                    write_table(PAGE, COMMAND, updated(read_table(PAGE, COMMAND), [row]))
    return int(len(rows) < len(pairs) or any(row.failed or row.how for row in rows))


def _run(name: str, python: Python | None, torch: str, options: argparse.Namespace, downloads: Path) -> Row | None:
    """Run a pair; return its row, None if it could not be run, which is said."""
    print(f"==== Python {name}, torch {torch}", flush=True)
    why_not = ""
    if python is None:
        why_not = f"no {name} here: name it by its path, or put it on PATH"
    elif python.release < (3, 11):
        why_not = f"unisono needs Python 3.11 or newer, and {python.path} is {python}"
    else:
        folder = ROOT / f".venv-compat-{python.version}{'t' * python.free_threaded}-{torch}"
        try:
            left_out = environment.set_up(folder, python, torch, downloads)
            return run_suite(folder, python, left_out, options.pytest, LOGS)
        except environment.NotInstalledError:
            why_not = f"torch {torch} cannot be installed with {python.path}: the reason is above"
        finally:
            if not options.keep:
                print(f"Removing {folder.name}", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
    print(f"not run: {why_not}", file=sys.stderr, flush=True)
    return None


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="compat", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", metavar="PYTHON", help="a Python by its path or name: one pair instead of all")
    parser.add_argument("--torch", metavar="RELEASE", type=_release, help="such as 2.9.1, or newest: one pair")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--list", action="store_true", help="show the pairs; run none")
    parser.add_argument("pytest", nargs="*", help="options for pytest, after --; the page then stays as it is")
    options = parser.parse_args(arguments)
    options.pytest = options.pytest[1:] if options.pytest[:1] == ["--"] else options.pytest
    return options


def _release(text: str) -> str:
    parts = text.split(".")
    if text != environment.NEWEST and not (len(parts) == 3 and all(part.isdigit() for part in parts)):
        raise argparse.ArgumentTypeError(f"a release of torch, such as 2.9.1, or newest; not {text!r}")
    return text


if __name__ == "__main__":
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
