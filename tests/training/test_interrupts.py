import signal
import sys

import pytest

from unisono.training.run import StopRequest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such signals")


def test_a_scheduler_may_say_it_twice(capfd: pytest.CaptureFixture[str]) -> None:
    """T3: it signals every process of a job, and torchrun passes on its own. The second SIGTERM ended the process
    before it had saved. The second Ctrl-C acts at once."""
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        assert stop.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert capfd.readouterr().err.count("finishing the step in flight") == 1


def test_an_ignored_signal_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest():
        inside = signal.signal(signal.SIGHUP, before)
    assert inside == signal.SIG_IGN
