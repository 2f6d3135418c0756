"""What is done in the child of a fork; on a system that does not fork (Windows), nothing."""

import os
from collections.abc import Callable


def in_forked_child(function: Callable[[], object]) -> None:
    """Have `function` called in the child of each fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
