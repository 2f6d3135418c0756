"""The blocks of code of docs/clusters.md and of the page of each launcher, and scripts made of them."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "launchers.md"  # has the table of what was run


def block(page: str, heading: str = "", number: int = 0) -> str:
    """Return a block of code below a heading ("" is the head of the page), fenced or indented, as it is typed."""
    blocks = _blocks((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    if number >= len(blocks.get(heading, [])):
        raise AssertionError(f"docs/{page}.md has no block {number + 1} of code below {heading!r}")
    return blocks[heading][number]


def changed(code: str, changes: Mapping[str, str]) -> str:
    """Return code of a page with some words replaced, all of which must be in it."""
    for old, new in changes.items():
        if old not in code:
            raise AssertionError(f"the page no longer has {old!r} in\n{code}")
        code = code.replace(old, new)
    return code


def training_script() -> str:
    """Return the script of clusters.md, with what it calls `model` and `loader`: the training of uneven_rows.py."""
    return (
        "import torch\nimport unisono\n"
        "from clusters.uneven_rows import keep, loader, new_model\n\n"
        f"model = new_model()\n{block('clusters')}keep(model)\n"
    )


def with_training(code: str) -> str:
    """Return a function of a page whose `...` is the loop of docs/clusters.md, on the model of uneven_rows.py."""
    line = next(line for line in code.splitlines() if line.strip() == "...")
    indent = line.removesuffix("...")
    loop = block("clusters").partition("model = unisono.DataParallel(model)\n")[2]
    body = textwrap.indent(f"from clusters.uneven_rows import keep, loader\n{loop}keep(model)", indent)
    code = code.replace(line, body)
    return changed(code, {"torch.nn.Linear(5, 2)": '__import__("clusters.uneven_rows").uneven_rows.new_model()'})


def _blocks(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"": []}
    heading, lines, fenced = "", list[str](), False
    for line in [*text.splitlines(), ""]:
        if line.startswith("```"):
            fenced = not fenced
            if fenced:
                lines = []
            else:
                found[heading].append("\n".join(lines) + "\n")
                lines = []
        elif fenced or line.startswith("    "):
            lines.append(line if fenced else line[4:])
        elif lines and not line:
            lines.append(line)  # perhaps within an indented block
        else:
            if lines:
                found[heading].append("\n".join(lines).rstrip() + "\n")
                lines = []
            if line.startswith("## "):
                heading = line[3:]
                found[heading] = []
    if lines:
        found[heading].append("\n".join(lines).rstrip() + "\n")
    return found
