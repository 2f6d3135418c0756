"""Memory that must be free without the garbage collector."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Switch the garbage collector off for the block, and assert that it then finds nothing to collect."""
    gc.collect()
    gc.disable()
    try:
        yield
        assert gc.collect() == 0
    finally:
        gc.enable()
