"""A limit for what may hang."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

WAIT_S = 60.0


def in_time(
    function: Callable[[], Any],
    limit_s: float = WAIT_S,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Call `function` in a thread of its own, `within` a context, and fail, rather than hang, if it does not return."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with within():
                result.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors.pop()
    return result.pop()
