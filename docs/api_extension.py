"""An extension of griffe, which reads the docstrings for the pages of the API.

Examples become blocks of code: a `>>>` at the beginning of a line is a quotation to Markdown; here it begins an
example, up to the next empty line. What a function returns that is written as a generator of one value is shown as the
context manager that it is. What a signature has only to refuse it (`**unknown: Never`) is left out. An enumeration has
its values.
"""

import re
import textwrap
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^[ ]*>>> .*\n?(?:^[ ]*\S.*\n?)*", re.MULTILINE)


class ApiExtension(griffe.Extension):
    """Fences the examples of every docstring; shows context managers as such, and the values of enumerations."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe with each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)
        if obj.is_function:
            for each in [each for each in obj.parameters if str(each.annotation) == "Never"]:
                del obj.parameters[each.name]
        if obj.is_function and any(each.callable_path.endswith("contextmanager") for each in obj.decorators):
            obj.returns = str(obj.returns).replace("Iterator", "AbstractContextManager", 1)

    def on_class_members(self, *, cls: Any, **_: Any) -> None:
        """Called by griffe with each class, when it has read what is in it."""
        if cls.docstring is not None and any(str(base).endswith("Enum") for base in cls.bases):
            values = [f"- `{name}`: {str(each.value)[1:-1]}" for name, each in cls.members.items() if each.is_attribute]
            cls.docstring.value += "\n\n" + "\n".join(values)


def _fenced(match: re.Match[str]) -> str:
    return f"\n```python\n{textwrap.dedent(match[0]).rstrip()}\n```\n"
