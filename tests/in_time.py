"""A limit for what may hang."""

import threading
from collections.abc import Callable
from typing import Any

WAIT_S = 15.0


def in_time(function: Callable[[], Any]) -> Any:
    """Call `function` in a thread of its own, and fail, rather than hang, if it does not return."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors.pop()
    return result.pop()
