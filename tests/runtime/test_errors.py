"""Messages that are given once, and notes on exceptions."""

import logging
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from manyhands.runtime import errors


def test_log_once_logs_a_message_the_first_time_only(caplog):
    """Also from many threads, and as it is."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(errors.log_once, ["100 % of %s rows"] * 100))
    errors.log_once("another")
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("manyhands", logging.WARNING, "100 % of %s rows"),
        ("manyhands", logging.WARNING, "another"),
    ]


def test_warn_once_warns_the_first_time_only():
    with pytest.warns(UserWarning, match="mind the gap"):
        errors.warn_once("mind the gap")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors.warn_once("mind the gap")
    errors.forget_logged()
    with pytest.warns(UserWarning, match="mind the gap"):
        errors.warn_once("mind the gap")


def test_annotate_returns_the_lowest_replicas_error_with_notes_on_all():
    """F1, F2: the same exception object, and the others in its note."""
    first, second = ValueError("bad rows"), KeyError("name")
    assert errors.annotate([("replica 1 on cpu", first), ("replica 3 on cpu", second)]) is first
    assert first.__notes__ == ["raised in replica 1 on cpu", "replica 3 on cpu raised too: KeyError: 'name'"]
    assert not hasattr(second, "__notes__")


def test_annotate_does_not_name_one_exception_twice():
    """F2: neither as its own companion, nor when it is raised again."""
    shared = RuntimeError("raised by every replica")
    for _ in range(2):
        assert errors.annotate([("replica 0", shared), ("replica 1", shared)]) is shared
    assert shared.__notes__ == ["raised in replica 0"]
