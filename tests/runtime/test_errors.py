"""Messages that are given once, and notes on exceptions."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import unisono
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


def test_the_replica_of_a_single_row_is_named_by_it():
    """It was "rows 2 to 2 of 3"."""
    model = unisono.DataParallel(torch.nn.BatchNorm1d(5), ["cpu", "cpu"], sync_batch_norm=False)
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        model(torch.zeros(3, 5))
    assert raised.value.__notes__[0] == "raised in replica 1 on cpu, row 2 of 3"


def test_annotate_does_not_name_one_exception_twice():
    """F2: neither as its own companion, nor when it is raised again."""
    shared = RuntimeError("raised by every replica")
    for _ in range(2):
        assert errors.annotate([("replica 0", shared), ("replica 1", shared)]) is shared
    assert shared.__notes__ == ["raised in replica 0"]


def test_a_value_in_a_message_is_one_short_line() -> None:
    assert errors.shown([0, 1]) == "[0, 1]"
    assert errors.shown("cuda") == "'cuda'"
    assert errors.shown(torch.nn.Linear) == "the class Linear"
    assert errors.shown(torch.zeros(2, 3)) == "a Tensor of shape (2, 3)"
    assert errors.shown(torch.nn.Sequential(torch.nn.ReLU())) == "an object of type Sequential"  # has several lines
    assert errors.shown(["cpu"] * 99) == "an object of type list"
