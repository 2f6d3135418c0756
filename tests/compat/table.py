"""The table of docs/compatibility.md: a row for each Python and torch."""

import datetime
import re
from collections.abc import Sequence
from typing import NamedTuple

_HEAD = "| Python | torch | passed | failed | skipped | date | commit |\n|---|---|---|---|---|---|---|\n"


class Row(NamedTuple):
    """What a run of the suite has shown. `how` is why its numbers are not those of the whole suite, if they are not."""

    python: str
    torch: str
    passed: int
    failed: int
    skipped: int
    left_out: Sequence[str]
    date: datetime.date
    how: str = ""
    commit: str = "not recorded"

    def __str__(self) -> str:
        run = f"{self.date} | {self.commit}"
        failed = f"{self.failed:,}" + f"; {self.how}" * bool(self.how)
        skipped = f"{self.skipped:,}" + f"; without {', '.join(self.left_out)}" * bool(self.left_out)
        return f"| {self.python} | {self.torch} | {self.passed:,} | {failed} | {skipped} | {run} |"


def updated(table: str, rows: Sequence[Row]) -> str:
    """Return a table in which rows replace those of the same release of Python and of torch, or are added in order."""
    lines = {key(line): line for line in [*table.splitlines()[2:], *map(str, rows)]}
    return _HEAD + "".join(f"{lines[each]}\n" for each in sorted(lines))


def key(line: str) -> tuple[tuple[int, ...], bool, tuple[int, ...]]:
    """Return release of Python, whether it is free-threaded, and release of torch of a row, as numbers.

    Releases of Python that differ in the last number only are one row: ((3, 14), True, (2, 14, 1)).
    """
    python, torch = (cell.strip() for cell in line.split("|")[1:3])
    return _numbers(python)[:2], "free-threaded" in python, _numbers(torch)


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)+", text)
    assert found is not None, f"no release: {text!r}"
    return tuple(map(int, found[0].split(".")))
