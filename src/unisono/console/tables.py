"""Tables: text that is Markdown too, and HTML for notebooks."""

from collections.abc import Sequence
from html import escape


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Return a Markdown table whose columns line up in plain text too: so many of words, then numbers on the right."""
    widths = [max(3, *(len(row[i]) for row in [header, *rows])) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i < text_columns else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> str:
    """Return the same as HTML. It sets no colours, so it is readable in light and dark notebooks."""

    def line(cells: Sequence[str], tag: str) -> str:
        aligned = ["left" if i < text_columns else "right" for i in range(len(cells))]
        return "".join(
            f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
            for side, cell in zip(aligned, cells, strict=True)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(header, 'th')}</tr></thead><tbody>{body}</tbody></table>"
