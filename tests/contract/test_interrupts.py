"""Ctrl-C at any moment of a step: it comes out, once, and the next step is the one that there would have been.

Found by KeyboardInterrupt at every place of a step where CPython looks for signals (helpers/interrupts.py). Of 1,530
moments of a step with two threads 48 left something behind: the number of intra-op threads at a replica's, so that the
rest of the program ran at half speed; gradients off; Python's garbage collector off; a replica's random stream as the
caller's own. Maps had others: "release unlocked lock" in the place of KeyboardInterrupt, and the
interrupt swallowed by a finalizer, which also failed for an object whose `__init__` had not been done.
"""

import random
import signal
from collections.abc import Iterator

import pytest
import torch

from helpers.contract import ON_CPU
from helpers.interrupts import OPTIONS, campaign

pytestmark = pytest.mark.skipif(not ON_CPU, reason="the moments are those of the host")
SAMPLES = {**dict.fromkeys(OPTIONS, 30), "map": 8, "evaluate": 8}
_MORE = 4  # times as many, for `make test-all`


@pytest.fixture(autouse=True)
def two_intra_op_threads() -> Iterator[None]:
    """So that a replica has fewer than the caller."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", SAMPLES)
@pytest.mark.parametrize("times", [1, pytest.param(_MORE, marks=pytest.mark.slow)])
def test_an_interrupt_leaves_nothing_behind(case: str, times: int) -> None:
    """F3: KeyboardInterrupt comes out, the thread's state is as before, and so are the next step's numbers."""
    number = times * SAMPLES[case]
    count, wrong = campaign(case, lambda last: [1, *random.Random(times).sample(range(1, last + 1), number)])
    assert not wrong
    # A step that waits for lanes may be over before a later moment.
    assert count > (number / 2 if case in OPTIONS else 0)


@pytest.mark.only_on("linux", "macos", because="time limits by SIGALRM")
@pytest.mark.parametrize(("case", "every"), [("training", 7), ("map", 500)])
def test_a_time_limit_that_raises_leaves_nothing_behind(case: str, every: int) -> None:
    """F3: test runners set time limits by SIGALRM, with a handler that raises.

    Of 2,000 steps that were cut off so, three left gradients off, the number of intra-op threads at a
    replica's, or raised a KeyError of the thread pool.
    """
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        count, wrong = campaign(case, lambda last: range(1, last + 1, every), signal.SIGALRM)
        assert signal.getsignal(signal.SIGALRM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not wrong
    assert count > 2
