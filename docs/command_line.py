"""Write docs/command-line.md: each command with its options, from the parsers themselves.

    python docs/command_line.py

tests/test_docs.py compares the page with what this would write.
"""

import argparse
import re
import textwrap
from pathlib import Path

from unisono.cli import parsers

PATH = Path(__file__).parent / "command-line.md"
_HEAD = """\
# Command line

<!-- python docs/command_line.py writes this page -->

`unisono COMMAND --help` says the same in a terminal.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD, *(section(name, parser) for name, parser in parsers()[1].items())]
    return "\n".join(parts)


def section(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the section of a command: what it does, its options, examples and exit status."""
    rows = [f"| {named(action)} | {cell(action.help or '')} |" for action in parser._actions if action.dest != "help"]
    table = ["| argument | meaning |", "|---|---|", *rows] if rows else ["It has no options."]
    head = [f"## unisono {name}", "", prose(parser.description or ""), ""]
    return "\n".join([*head, *table, "", "```text", (parser.epilog or "").strip(), "```", ""])


def named(action: argparse.Action) -> str:
    """Return an option as it is typed, or what stands for a positional argument."""
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    takes_value = not isinstance(action, argparse.BooleanOptionalAction) and action.nargs != 0
    optional = {"?": f"[{value}]", "*": f"[{value} ...]"}.get(str(action.nargs), value)
    names = [f"`{name}{f' {optional}' if value and takes_value else ''}`" for name in action.option_strings]
    return cell(", ".join(names) or f"`{optional or action.dest}`")


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return plain(text).replace("|", r"\|")


def prose(text: str) -> str:
    """Return paragraphs, in lines of the page's width."""
    return "\n\n".join(textwrap.fill(plain(each), 120, break_on_hyphens=False) for each in text.strip().split("\n\n"))


def plain(text: str) -> str:
    """Return a text of a parser as one line in which Markdown sees no marks of its own."""
    return re.sub(r"\s+", " ", text).strip().replace("%%", "%").replace("*", r"\*").replace("__", r"\_\_")


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
