import signal
import threading

import pytest

from manyhands.console.errors import Interrupted
from manyhands.training.interrupts import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.check()
        signal.raise_signal(number)
        with pytest.raises(Interrupted) as caught:
            stop.check()
    assert caught.value.received == number
    assert signal.getsignal(number) is before
    assert "finishing the step in flight" in capfd.readouterr().err


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
