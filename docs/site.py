"""Make the source of the documentation site from the pages of the repository: `make docs` runs it, then the builder.

The pages are written to be read in the repository too, and link to files anywhere in it. A site has only its own pages.
So this copies docs/*.md, and each page or source file that they link to, and rewrites every link. What it makes of

    CONTRIBUTING.md, SECURITY.md ...   pages beside those of docs/
    README.md                          nothing: docs/index.md is the home page, and links to the README lead there
    docs/behaviour.md                  one table of all rows, with a filter (docs/behaviour.js), and a page for each
                                       section: its rows, with the docstrings of their tests below a fold
    src/unisono/training/loop.py       a page with the source, if something links to it

The rows of docs/behaviour.md are written by hand, the evidence beside them comes from the tests: a row without a test,
or a test of a row that is not there, is an error in tests/test_architecture.py. Nothing that is made here is committed,
so it cannot be older than the tests.

Needs the standard library only. A link that leads nowhere is an error, so `make test` checks links without a builder.
"""

import ast
import html
import json
import os
import posixpath
import re
import shutil
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.rows import rows_named  # noqa: E402 - the tests' own reading of docstrings

# Pages outside docs/, and where the site has them; all others are added when a page links to them.
PLACES = {
    "README.zh-CN.md": "zh/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "examples/README.md": "examples.md",
    "examples/two_devices.ipynb": "notebook.md",
    "tests/async_device/README.md": "asynchronous-device.md",
}
HOME = {"README.md": "index.md"}  # what the repository shows first, and what the site does
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^()\s]+)(\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| ([A-Z]\d+) \| (.*) \|$")
_MORE_OF_ROW = re.compile(r"^\*\*([A-Z]\d+)\.\*\* (.+?)\n$", re.MULTILINE | re.DOTALL)  # a paragraph under a table
_CHINESE = ".zh-CN.md"
# Sources, single cases and records would come before the guides, because they are most of the text.
NOT_SEARCHED = (
    "source/",
    "behaviour",
    "benchmarks/",
    "test-records.md",
    "what-has-run.md",
    "launchers.md",
    "libraries.md",
    "terms.md",
    "architecture.md",
    "rules.md",
    "adding.md",
    "asynchronous-device.md",
)
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".ini": "ini", ".txt": "text", "": "text"}


class BrokenLinkError(Exception):
    """A link of a page that leads nowhere: the page, and the link."""


class Site:
    """The pages of the site, by their paths in it."""

    def __init__(self) -> None:
        self.pages: dict[str, str] = {}
        self.files: dict[str, Path] = {}  # pictures and the like: site path -> source
        self._places = PLACES | HOME  # repository path -> site path
        self._anchors: dict[str, str] = {}  # "docs/behaviour.md#failure" -> "behaviour/failure.md"
        self._waiting: list[str] = []

    def build(self) -> None:
        """Collect all pages and files."""
        for path in sorted((ROOT / "docs").glob("*.md")):
            self._place(f"docs/{path.name}")
        for path in PLACES:
            if (ROOT / path).exists():
                self._waiting.append(path)
        for path in sorted((ROOT / "docs").glob("*.css")):
            self.files[path.name] = path
        self._add_behaviour()
        checked = [  # what they link to is added
            (place, self._relinked((ROOT / path).read_text(encoding="utf-8"), path, place))
            for path, place in HOME.items()
            if (ROOT / path).exists()
        ]
        while self._waiting:
            self._add(self._waiting.pop())
        for path, text in [*self.pages.items(), *checked]:
            self._check_anchors(path, text)

    def _place(self, repository_path: str) -> str:
        """Return where the site has a file; one that is new waits to be added."""
        if repository_path not in self._places:
            path = Path(repository_path)
            if path.name.endswith(_CHINESE):
                place = f"zh/{path.name.removesuffix(_CHINESE)}.md"
            elif path.suffix == ".md" or path.suffix in (".png", ".svg"):
                place = repository_path.removeprefix("docs/")
            elif (ROOT / path).is_dir():
                place = f"source/{repository_path}/index.md"
            else:
                place = f"source/{repository_path}.md"
            self._places[repository_path] = place
            self._waiting.append(repository_path)
        return self._places[repository_path]

    def _add(self, path: str) -> None:
        source, place = ROOT / path, self._places[path]
        if source.suffix in (".png", ".svg"):
            self.files[place] = source
        elif source.suffix == ".md":
            self.pages.setdefault(place, self._relinked(source.read_text(encoding="utf-8"), path, place))
        elif source.suffix == ".ipynb":
            self.pages[place] = page_of_notebook(source.read_text(encoding="utf-8"))
        elif source.is_dir():
            names = sorted(each.name for each in source.iterdir() if each.is_file())
            lines = [
                f"- [{name}]({posixpath.relpath(self._place(f'{path}/{name}'), posixpath.dirname(place))})"
                for name in names
            ]
            self.pages[place] = "\n".join([f"# {breakable(path)}", "", *lines, ""])
        else:
            language = _LANGUAGES.get(source.suffix, "text")
            code = source.read_text(encoding="utf-8").rstrip()
            self.pages[place] = f"# {breakable(path)}\n\n````{language}\n{code}\n````\n"

    def _relinked(self, text: str, path: str, place: str) -> str:
        """Return a page with links that hold in the site."""

        def relink(match: re.Match[str]) -> str:
            before, link, after = match.groups()
            target, hash_sign, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or not target:
                target = path if not target and f"{path}#{anchor}" in self._anchors else ""
                if not target:
                    return match[0]
            else:
                target = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if not (ROOT / target).exists():
                raise BrokenLinkError(f"{path}: {link}")
            there = self._anchors.get(f"{target}#{anchor}")
            if there is not None:
                hash_sign = anchor = ""
            relative = posixpath.relpath(there or self._place(target), posixpath.dirname(place) or ".")
            return f"{before}{relative}{hash_sign}{anchor}{after}"

        parts = _FENCE.split(text)
        return "".join(part if i % 2 else _LINK.sub(relink, part) for i, part in enumerate(parts))

    # ---- behaviour ------------------------------------------------------------------------------

    def _add_behaviour(self) -> None:
        """Make a page of each section of docs/behaviour.md that has rows, and one that lists these pages."""
        path, shown = "docs/behaviour.md", docstrings_by_row()
        intro, *sections = re.split(r"^(?=## )", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)
        places = {}
        for section in sections:
            title = section.partition("\n")[0].removeprefix("## ")
            if any(map(_ROW.match, section.splitlines())):
                place = f"behaviour/{slug(re.split('[:,]', title)[0])}.md"
                places[title] = place
                self._anchors[f"{path}#{slug(title)}"] = place
        lines, titles, others = list[str](), dict[str, str](), list[str]()
        for section in sections:
            title, _, body = section.removeprefix("## ").partition("\n")
            if title not in places:
                others.append(section)
                continue
            self.pages[places[title]] = self._relinked(page_of_rows(title, body, shown), path, places[title])
            notes = notes_of(body)
            for row, cells in rows_of(body):
                titles.setdefault(row[0], re.split("[:,]", title)[0])
                case, *others_do, here = cells
                name = f"[{row}]({places[title]}#{row.lower()})"
                more = "<br>".join(" ".join(note.split()) for note in notes[row]).replace("|", r"\|")
                here += f" <details><summary>more</summary>{more}</details>" if more else ""
                lines.append(f"| {name} | {case} | {' '.join(others_do)} | {here} |")
        sections_by_letter = html.escape(json.dumps(titles))
        head = [
            f'<div id="behaviour-filter" data-sections="{sections_by_letter}"></div>',
            "",
            "| row | case | torch; DDP for several processes | unisono |",
            "|---|---|---|---|",
        ]
        script = (ROOT / "docs" / "behaviour.js").read_text(encoding="utf-8") if lines else ""
        text = "\n".join([intro, *head, *lines, "", f"<script>\n{script}</script>", "", *others])
        linked = set(places.values())
        self.pages["behaviour.md"] = _LINK.sub(
            lambda match: (
                match[0] if match[2].partition("#")[0] in linked else self._relinked(match[0], path, "behaviour.md")
            ),
            text,
        )

    # ---- anchors --------------------------------------------------------------------------------

    def _check_anchors(self, path: str, text: str) -> None:
        for i, part in enumerate(_FENCE.split(text)):
            for _, link, _ in [] if i % 2 else _LINK.findall(part):
                target, _, anchor = link.partition("#")
                if re.match(r"[a-z]+:", link) or not anchor:
                    continue
                page = posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) if target else path
                if anchor not in anchors_of(self.pages[page]):
                    raise BrokenLinkError(f"{path}: {link}: {page} has no heading for #{anchor}")

    def write(self, folder: Path) -> None:
        """Write all pages and files into a folder, which is made anew; the Chinese pages into one beside it, "-zh".

        They are a site of their own, because a site has one language for its words and its search.
        """
        chinese = folder.with_name(f"{folder.name}-zh")
        for each in (folder, chinese):
            shutil.rmtree(each, ignore_errors=True)
        for path, text in self.pages.items():
            own = chinese / path.removeprefix("zh/") if path.startswith("zh/") else folder / path
            own.parent.mkdir(parents=True, exist_ok=True)
            hidden = _HIDDEN if path.startswith(NOT_SEARCHED) else ""
            own.write_text(hidden + with_plain_bars(to_other_site(text, path)), encoding="utf-8")
        for path, source in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / path)
            if source.suffix == ".css":
                shutil.copyfile(source, chinese / path)


def to_other_site(text: str, path: str) -> str:
    """Return a page whose links to the other site, English or Chinese, lead to what the builder makes there."""

    def relink(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        target, hash_sign, anchor = link.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if re.match(r"[a-z]+:", link) or there.startswith("zh/") == path.startswith("zh/"):
            return match[0]
        return f"{before}{re.sub(r'[.]md$', '.html', target)}{hash_sign}{anchor}{after}"

    parts = _FENCE.split(text)
    return "".join(part if i % 2 else _LINK.sub(relink, part) for i, part in enumerate(parts))


def breakable(path: str) -> str:
    """Return a path that a narrow page breaks between its words."""
    return re.sub(r"([/_])(?=.)", r"\1<wbr>", path)


def with_plain_bars(text: str) -> str:
    """Return a page without the backslash before a bar in code in a table: GitHub needs it, the builder shows it."""
    code = re.compile(r"`[^`]*`")
    return re.sub(
        r"^\|.*\|$", lambda row: code.sub(lambda each: each[0].replace(r"\|", "|"), row[0]), text, flags=re.MULTILINE
    )


def slug(title: str) -> str:
    """Return the anchor of a heading, as GitHub and the builder make it."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    found = set()
    for i, part in enumerate(_FENCE.split(text)):
        for title in [] if i % 2 else re.findall(r"^#+ (.+)$", part, re.MULTILINE):
            own = re.search(r"\{ *#([\w-]+) *\}$", title)
            found.add(own[1] if own else slug(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)))
    return found


def docstrings_by_row() -> dict[str, list[tuple[str, str, str]]]:
    """Return row -> its tests: file, name, and what the docstring says after its rows."""
    found: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                docstring = ast.get_docstring(node) or ""
                rows = rows_named(docstring)
                said = re.sub(
                    rf"^{rows[-1] if rows else ''}[:., ;]*", "", docstring[docstring.find(rows[-1]) :] if rows else ""
                )
                for row in rows:
                    found[row].append((path.relative_to(ROOT).as_posix(), node.name, " ".join(said.split())))
    return found


def rows_of(body: str) -> list[tuple[str, list[str]]]:
    """Return the rows of a section: their names and cells."""
    matches = filter(None, map(_ROW.match, body.splitlines()))
    return [(match[1], re.split(r"(?<!\\) \| ", match[2])) for match in matches]


def notes_of(body: str) -> dict[str, list[str]]:
    """Return the notes of each row of a section."""
    notes = defaultdict(list)
    for row, paragraph in _MORE_OF_ROW.findall(body):
        notes[row].append(paragraph)
    return notes


def page_of_rows(title: str, body: str, shown: dict[str, list[tuple[str, str, str]]]) -> str:
    """Return a page with a part for each row of a section: its cells; below a fold notes, and what tests say."""
    lines, columns = [f"# {title}", ""], []
    more = notes_of(body)
    for line in _MORE_OF_ROW.sub("", body).splitlines():
        if match := _ROW.match(line):
            row, cells = match[1], re.split(r"(?<!\\) \| ", match[2])
            lines += ["", f"## {row}: {cells[0]} {{ #{row.lower()} }}", ""]
            for column, cell in zip(columns, cells[1:], strict=True):
                lines += [f"**{column}**: {cell}", ""]
            lines += ['??? info "More"', ""] if more[row] else []
            for paragraph in more[row]:
                lines += [textwrap.indent(paragraph, "    "), ""]
            tests = shown[row]
            lines += [f'??? note "{len(tests)} tests"', ""]
            for path, name, said in tests:
                words = name.removeprefix("test_").replace("_", " ")
                lines.append(f"    - {words}{': ' + said if said else ''} (`{path}`)")
            lines.append("")
        elif line.startswith("| # |"):
            columns = [cell.strip() for cell in line.strip("| ").split("|")][2:]
        elif not line.startswith(("|--", "<details>", "</details>")) and (not line.startswith("|") or not columns):
            lines.append(line)
    return "\n".join(lines) + "\n"


def page_of_notebook(text: str) -> str:
    """Return a notebook as a page, whose title says that it is one: its cells, with what they left."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output.get("data", {}):
                picture = "".join(output["data"]["image/png"]).replace("\n", "")
                parts.append(f"![what the cell shows](data:image/png;base64,{picture})")
    return re.sub(r"\A# .*", "# Notebook", "\n\n".join(parts)) + "\n"


if __name__ == "__main__":
    site = Site()
    site.build()
    site.write(Path(sys.argv[1] if len(sys.argv) > 1 else os.fspath(ROOT / ".site-source")))
    print(f"{len(site.pages)} pages")
