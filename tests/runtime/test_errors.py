"""Messages that are given once, and notes on exceptions."""

import logging
from concurrent.futures import ThreadPoolExecutor

from unisono.runtime import errors


def test_log_once_logs_a_message_the_first_time_only(caplog):
    """Also from many threads, and as it is."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(errors.log_once, ["100 % of %s rows"] * 100))
    errors.log_once("another")
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("unisono", logging.WARNING, "100 % of %s rows"),
        ("unisono", logging.WARNING, "another"),
    ]


def test_annotate_does_not_name_one_exception_twice():
    """F2: neither as its own companion, nor when it is raised again."""
    shared = RuntimeError("raised by every replica")
    for _ in range(2):
        assert errors.annotate([("replica 0", shared), ("replica 1", shared)]) is shared
    assert shared.__notes__ == ["raised in replica 0"]
