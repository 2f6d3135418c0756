import signal
import sys
import threading

import pytest

from unisono.training.interrupts import StopRequest


def test_the_second_ctrl_c_acts_at_once_and_so_does_one_afterwards() -> None:
    with StopRequest(), pytest.raises(KeyboardInterrupt):  # noqa: PT012  both signals are tested
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with StopRequest():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_a_scheduler_may_say_it_twice(capfd: pytest.CaptureFixture[str]) -> None:
    """T3: it signals every process of a job, and torchrun passes on its own. The second SIGTERM ended the process
    before it had saved."""
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        assert stop.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert capfd.readouterr().err.count("finishing the step in flight") == 1


def test_in_another_thread_signals_are_left_alone() -> None:
    """As where a cluster's scheduler runs the training beside its own main thread."""
    before = signal.getsignal(signal.SIGINT)
    handlers = []

    def train() -> None:
        with StopRequest() as stop:
            handlers.append(signal.getsignal(signal.SIGINT))
            stop.check()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert handlers == [before]
