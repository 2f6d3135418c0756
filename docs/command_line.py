"""Write docs/command-line.md, which lists the commands, and a page of each command, from the parsers themselves.

    python docs/command_line.py

tests/test_docs.py compares the pages with what this would write.
"""

import argparse
import re
import textwrap
from pathlib import Path

from unisono.cli import parsers

FOLDER = Path(__file__).parent
_MADE = "<!-- python docs/command_line.py writes this page -->\n"
_LIST = f"""\
# Command line

{_MADE}
`unisono COMMAND --help` says in a terminal what the page of a command says.

| command | what it does |
|---|---|
"""


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    commands = parsers()[1]
    rows = [
        f"| [unisono {name}](command-{name}.md) | {cell(first_sentence(parser.description or ''))} |\n"
        for name, parser in commands.items()
    ]
    made = {FOLDER / f"command-{name}.md": page(name, parser) for name, parser in commands.items()}
    return {FOLDER / "command-line.md": _LIST + "".join(rows), **made}


def page(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the page of a command: what it does, its options, examples and exit status."""
    rows = [f"| {named(action)} | {cell(action.help or '')} |" for action in parser._actions if action.dest != "help"]
    table = ["| argument | meaning |", "|---|---|", *rows] if rows else ["It has no options."]
    head = [f"# unisono {name}", "", _MADE, prose(parser.description or ""), ""]
    return "\n".join([*head, *table, "", "```text", (parser.epilog or "").strip(), "```", ""])


def first_sentence(text: str) -> str:
    """Return the first sentence of a description."""
    return re.split(r"(?<=[.:]) ", " ".join(text.split()))[0].rstrip(":")


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
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
