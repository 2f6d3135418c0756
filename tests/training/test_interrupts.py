import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.commands import run_captured
from unisono.training.run import StopRequest

pytestmark = pytest.mark.only_on("linux", "macos", because="no such signals")


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


def test_a_run_outside_the_main_thread_leaves_signals_alone(tmp_path: Path) -> None:
    """T3: as in a worker of Ray Train. It was a ValueError: only the main thread may say what a signal does."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    arguments = ["train", "--model", "mlp", "--epochs", "1", "--devices", "1", "--output", "run", "--resume"]
    with ThreadPoolExecutor(1) as other_thread:
        status, out, err = other_thread.submit(run_captured, 0, tmp_path, *arguments).result()
    assert (status, err) == (0, "")
    assert out.count("so Ctrl-C and SIGTERM end it without saving") == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    _, out, _ = run_captured(0, tmp_path, *arguments)
    assert "nothing left to do" in out
    assert "another thread" not in out
