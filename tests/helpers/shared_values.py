"""A file of a user's with a list, into which forward of another file writes."""

from typing import Any

values: list[Any] = []


def add(value: Any) -> None:
    values.append(value)
