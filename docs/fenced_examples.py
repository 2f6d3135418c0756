"""An extension of griffe, which reads the docstrings for docs/api.md: examples in them become blocks of code.

A `>>>` at the beginning of a line is a quotation to Markdown; here it begins an example, up to the next empty line.
"""

import re
import textwrap
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^[ ]*>>> .*\n?(?:^[ ]*\S.*\n?)*", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Fences the examples of every docstring."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe with each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    return f"\n```python\n{textwrap.dedent(match[0]).rstrip()}\n```\n"
