"""The table of what was run, for docs/launchers.md, and the log beside it."""

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from helpers.page_tables import run_line, write_table

_HEAD = "| launcher | what was run | outcome | seconds |\n|---|---|---|---|\n"
FAILED = "FAILED: "


class Row(NamedTuple):
    """One line of the table; `seconds` is None for what was not run."""

    launcher: str
    what: str
    outcome: str
    seconds: float | None

    def __str__(self) -> str:
        """Return the row in Markdown."""
        took = "-" if self.seconds is None else f"{self.seconds:.0f}"
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in (self.launcher, self.what, self.outcome, took))
        return f"| {' | '.join(cells)} |\n"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    return _HEAD + "".join(map(str, rows))


def write_results(path: Path, rows: Sequence[Row], logs: Mapping[str, Sequence[str]]) -> None:
    """Write table and log as a page of Markdown."""
    machine = f"Python {sys.version.split()[0]}, torch {torch.__version__}, {platform.platform()}"
    parts = [f"## {title}\n\n~~~text\n" + "\n".join(lines) + "\n~~~\n" for title, lines in logs.items()]
    text = f"# What make clusters has run\n\n{machine}. `/site` is the folder of each launcher's checks.\n\n"
    path.write_text(text + table(rows) + "\n" + "\n".join(parts), encoding="utf-8")


def write_into_page(page: Path, rows: Sequence[Row]) -> None:
    """Replace the table in a page."""
    write_table(page, "make clusters", table(rows) + run_line())
