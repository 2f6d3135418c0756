import signal
import threading

import pytest

from manyhands.training.interrupts import StopRequest


def test_the_second_ctrl_c_acts_at_once_and_so_does_one_afterwards() -> None:
    with StopRequest(), pytest.raises(KeyboardInterrupt):  # noqa: PT012  both signals are tested
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with StopRequest():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


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
