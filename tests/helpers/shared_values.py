"""A file of a user's with a list, into which forward of another file writes."""

from typing import Any

values: list[Any] = []
number_of_rows = 0


def add(value: Any) -> None:
    values.append(value)
