"""The tables on pages that a command writes: each stands between two comments, of which the first names the command."""

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

_END = "<!-- end -->\n"


def read_table(page: Path, command: str) -> str:
    """Return the table that a command, such as "make clients", has written into a page."""
    _, table, _ = _parts(page, command)
    return table


def write_table(page: Path, command: str, table: str) -> None:
    """Replace the table that a command has written into a page."""
    before, _, after = _parts(page, command)
    page.write_text(before + table + after, encoding="utf-8")


def run_line() -> str:
    """Return a line to stand below a table: the day, the commit, Python and torch of the run that it shows."""
    today = datetime.datetime.now(datetime.UTC).date()
    return f"\nRun: {today}, commit {commit()}, Python {platform.python_version()}, torch {_torch()}.\n"


def commit() -> str:
    """Return the commit of the checkout, and whether its files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
        status = [*git, "status", "--porcelain", "--", ":/src", ":/tests"]  # pages change while a command runs
        changed = subprocess.run(status, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not recorded"
    return name.stdout.strip() + " with changes" * bool(changed.stdout.strip())


def _torch() -> str:
    return importlib.metadata.version("torch").partition("+")[0]


def _parts(page: Path, command: str) -> tuple[str, str, str]:
    """Return what comes before the table, with its comment, the table, and the rest of the page."""
    begin = f"<!-- written by {command} -->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    table, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{page}: the table of {command} has no end: {_END.strip()}")
    return before + begin, table, end + after
