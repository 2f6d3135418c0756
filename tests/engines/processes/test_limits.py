"""What the system refuses worker processes: an error that names the limit and the remedy, and nothing left behind."""

import contextlib
import copy
import errno
import gc
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import leftovers
from helpers.deaths import each_fork_request_runs
from helpers.programs import until
from helpers.twins import step
from unisono import DataParallel
from unisono.engines.processes import fork_server, limits
from unisono.engines.processes.channel import Channel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")


@contextlib.contextmanager
def limited(limit: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataParallel]:
    """A model with large and small gradients, whose fork server is running, but no worker; nothing is to be left."""
    monkeypatch.setenv("UNISONO_PUBLISH", "0")  # else it opens a file in its second second
    torch.manual_seed(0)
    model = DataParallel(nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 4)), ["cpu"] * 3, engine="processes")
    step(model, torch.randn(6, 200))
    leftovers.end_workers_of_earlier_tests()
    before = what_is_left_by(model)
    yield model
    assert until(lambda: what_is_left_by(model) == before), (before, what_is_left_by(model))


def what_is_left_by(model: DataParallel) -> tuple[int, ...]:
    """Close a model; return what this process then has: the mapping of the parameters is one."""
    model.close()
    model.zero_grad()
    gc.collect()
    return leftovers.of_this_process()


def lowest_free_descriptor() -> int:
    with open(os.devnull) as file:
        return file.fileno()


@pytest.mark.parametrize(
    ("limit", "soft", "number", "words"),
    [
        (resource.RLIMIT_NOFILE, range(0, 40, 3), errno.EMFILE, "ulimit -n"),
        (resource.RLIMIT_FSIZE, (10, 5000, 300_000), errno.EFBIG, "ulimit -f"),
    ],
    ids=["descriptors", "size of a file"],
)
def test_what_the_system_refuses(model: DataParallel, limit: int, soft: range, number: int, words: str) -> None:
    """F12: at each place of a step; the message names limit and remedy, nothing is left, and the next step works.

    Descriptors that did not arrive were `zip() argument 2 is shorter`, and memory that got no size stayed open.
    """
    x = torch.randn(6, 200)
    messages: list[str] = []
    plain = step(copy.deepcopy(model.module), x)
    before = what_is_left_by(model)
    for more in soft:
        with limited(limit, more + (lowest_free_descriptor() if limit == resource.RLIMIT_NOFILE else 0)):
            try:
                step(model, x)
            except OSError as error:
                messages.append(str(error) if error.errno == number else repr(error))
        assert until(lambda: what_is_left_by(model) == before), (before, what_is_left_by(model))
    assert len(messages) > 1
    assert all(words in message and "raise the limit" in message for message in messages), messages
    torch.testing.assert_close(step(model, x), plain)


def test_a_worker_to_which_the_system_refuses_memory(model: DataParallel) -> None:
    """F12: an address space that has no place for what the caller shares ended the worker, with a traceback."""
    x = torch.randn(6, 200)
    plain = step(copy.deepcopy(model.module), x)
    step(model, x)
    [pid, _] = [worker.pid for worker in model._engine._worker_group.workers]
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    with pytest.raises(OSError, match=r"bytes of memory that processes share cannot be had.*ulimit -v") as raised:
        model(torch.randn(30_000, 200))
    assert any("replica 1 on cpu" in note for note in raised.value.__notes__)
    del raised
    torch.testing.assert_close(step(model, x), plain)


NO_FURTHER_PROCESS = """
import os
def fork(original=os.fork):
    os.fork = original
    raise BlockingIOError(11, "as asked")
os.fork = fork
"""


def test_no_further_process(model: DataParallel) -> None:
    """F4, F12: none is allowed to the fork server, which says so, and goes on."""
    process = fork_server.server._process
    with (
        each_fork_request_runs(NO_FURTHER_PROCESS),
        pytest.raises(BlockingIOError, match=r"a worker process cannot be had.*ulimit -u.*raise the limit"),
    ):
        model(torch.zeros(6, 200))
    assert model(torch.zeros(6, 200)).shape == (6, 4)
    assert fork_server.server._process is process


def test_a_message_whose_descriptors_find_no_place() -> None:
    """F12: those that came are closed; the next message can be read."""
    own, other = Channel.pair()
    for count in (3, 1):
        other.send(b"body", [1] * count)
    free = lowest_free_descriptor()
    with limited(resource.RLIMIT_NOFILE, free + 2), pytest.raises(OSError, match="Too many open files") as raised:
        own.receive()
    assert raised.value.errno == errno.EMFILE
    assert lowest_free_descriptor() == free
    body, [fd] = own.receive()
    os.close(fd)
    assert body == b"body"
    own.close()
    other.close()


@pytest.mark.parametrize("number", limits._REMEDIES)
def test_each_error_keeps_its_number(number: int) -> None:
    """F12: and so its class; any other error is left as it is."""
    found = limits.explanation(OSError(number, "as asked"), "a thing")
    assert type(found) is type(OSError(number, ""))
    assert found.errno == number
    assert "a thing cannot be had" in str(found)
    other = OSError(errno.EBADF, "as asked")
    assert limits.explanation(other, "a thing") is other


def test_a_closed_model_has_nothing_of_its_last_map(model: DataParallel) -> None:
    """F5, N10: it had the memory of the lanes' workers until another map began."""
    assert len([*model.map([torch.randn(2, 200)] * 4)]) == 4
