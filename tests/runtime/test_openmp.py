"""`pause_threads`: the calling thread's idle OpenMP threads end, and nothing else changes."""

import pytest

from helpers.programs import run_script
from unisono.runtime import openmp

PROGRAM = '''
import os, threading, time
import torch
from unisono.runtime import openmp

torch.set_num_threads(3)
x = torch.linspace(-3, 3, 512 * 512).view(512, 512)
expected = torch.log_softmax(x, 1)  # three threads take part, so two are started

def check():
    assert torch.equal(torch.log_softmax(x, 1), expected)

def wait_for_threads(number):
    """A thread that has ended is listed until the system has taken it away."""
    until = time.monotonic() + 60
    while len(os.listdir("/proc/self/task")) != number:
        assert time.monotonic() < until
        time.sleep(0.001)

# Threads end, and the next operation starts them again.
before = len(os.listdir("/proc/self/task"))
for _ in range(20):
    openmp.pause_threads()
    wait_for_threads(before - 2)
    openmp.pause_threads()  # there is no pool
    assert torch.get_num_threads() == 3
    check()
    wait_for_threads(before)

# The child of a fork does not wait for its parent's threads.
pid = os.fork()
if not pid:
    openmp.pause_threads()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
openmp.pause_threads()
check()

# Other threads compute meanwhile: each has a pool of its own, which another thread's pause leaves alone.
torch.set_num_threads(2)  # also of new threads
together = threading.Barrier(4)
done = []

def work(pauses):
    together.wait()
    for _ in range(300):
        check()
        if pauses:
            openmp.pause_threads()
    done.append(pauses)

workers = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
assert sorted(done) == [False, False, True, True]
'''


@pytest.mark.skipif(openmp._pause() is None, reason="needs GNU OpenMP")
def test_threads_end_and_nothing_else_changes() -> None:
    run = run_script(PROGRAM)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("lacking", ["platform", "library", "symbol", "GNU's"])
def test_where_it_cannot_be_done_nothing_happens(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """Without `omp_pause_resource_all`; or LLVM's, with it."""

        def __init__(self, *_: object) -> None:
            if lacking == "library":
                raise OSError
            if lacking == "GNU's":
                vars(self).update({"omp_pause_resource_all": None, "__kmpc_fork_call": None})

    monkeypatch.setattr(openmp.ctypes, "CDLL", Library)
    monkeypatch.setattr(openmp.sys, "platform", "darwin" if lacking == "platform" else "linux")
    openmp._pause.cache_clear()
    try:
        openmp.pause_threads()
        assert openmp._pause() is None
    finally:
        openmp._pause.cache_clear()
