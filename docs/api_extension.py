"""An extension of griffe, which reads the docstrings for the pages of the API.

Examples become blocks of code: a `>>>` at the beginning of a line is a quotation to Markdown; here it begins an
example, up to the next empty line. What a function returns that is written as a generator of one value is shown as the
context manager that it is. What a signature has only to refuse it (`**unknown: Never`) is left out. An enumeration has
its values. A class that a program does not construct, because something returns or raises it, is shown without
arguments. A page of docs/ that is named becomes a link.
"""

import re
import textwrap
from typing import Any

import griffe

CONSTRUCTED = ("DataParallel", "SampleList")
_EXAMPLE = re.compile(r"^[ ]*>>> .*\n?(?:^[ ]*\S.*\n?)*", re.MULTILINE)


class ApiExtension(griffe.Extension):
    """Fences the examples of every docstring; shows context managers as such, and the values of enumerations."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe with each object that it has read."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub(_fenced, obj.docstring.value)
            text = re.sub(r"\bdocs/([\w-]+)[.]md\b", r"[docs/\1.md](\1.html)", text)
            obj.docstring.value = re.sub(r"^( *\w+Error), (?=\w+Error: )", r"\1 | ", text, flags=re.MULTILINE)
        if obj.is_function:
            for each in [each for each in obj.parameters if str(each.annotation) == "Never"]:
                del obj.parameters[each.name]
        if obj.is_function and any(each.callable_path.endswith("contextmanager") for each in obj.decorators):
            obj.returns = str(obj.returns).replace("Iterator", "AbstractContextManager", 1)
            if obj.docstring is not None:
                obj.docstring.value = obj.docstring.value.replace("\nYields:\n", "\nReturns:\n")

    def on_class_members(self, *, cls: Any, **_: Any) -> None:
        """Called by griffe with each class, when it has read what is in it."""
        if cls.docstring is not None and any(str(base).endswith("Enum") for base in cls.bases):
            values = [f"- `{name}`: {str(each.value)[1:-1]}" for name, each in cls.members.items() if each.is_attribute]
            cls.docstring.value += "\n\n" + "\n".join(values)
        if cls.name not in CONSTRUCTED:
            cls.members.pop("__init__", None)
            cls.labels.discard("dataclass")  # and griffe makes no arguments of the fields
            cls.decorators = [each for each in cls.decorators if "dataclass" not in each.callable_path]


def _fenced(match: re.Match[str]) -> str:
    return f"\n```python\n{textwrap.dedent(match[0]).rstrip()}\n```\n"
