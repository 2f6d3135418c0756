"""The tables on pages that a command writes: each stands between two comments, of which the first names the command."""

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


def _parts(page: Path, command: str) -> tuple[str, str, str]:
    """Return what comes before the table, with its comment, the table, and the rest of the page."""
    begin = f"<!-- written by {command} -->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    table, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{page}: the table of {command} has no end: {_END.strip()}")
    return before + begin, table, end + after
