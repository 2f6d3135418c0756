"""Workers: tasks run together, whatever ends them reaches the caller, and nothing hangs, leaks or outlives its use."""

import _thread
import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.forks import in_a_fork
from helpers.garbage import no_garbage, wait_for_workers
from helpers.in_time import WAIT_S, in_time
from helpers.modules import PassingMode
from helpers.programs import run_script
from unisono.runtime import thread_pool
from unisono.runtime.thread_pool import Outcome, inside_replica, replica_path, run_together
from unisono.runtime.thread_state import ThreadState
from unisono.runtime.torch_private import modes

CPU = torch.device("cpu")


def run(*tasks: Callable[[], Any]) -> list[Outcome[Any]]:
    return run_together(tasks, [CPU] * len(tasks))


def values(*tasks: Callable[[], Any]) -> list[Any]:
    outcomes = run(*tasks)
    assert [outcome.error for outcome in outcomes] == [None] * len(tasks)
    return [outcome.value for outcome in outcomes]


def raises(error: BaseException) -> Callable[[], Any]:
    def task() -> None:
        raise error

    return task


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "unisono-worker"}


def test_tasks_know_that_they_are_replicas_and_which() -> None:
    """A10: and of which call, where a replica calls itself."""
    assert values(*[lambda: (inside_replica(), replica_path(), values(*[replica_path] * 2))] * 3) == [
        (True, (i,), [(i, 0), (i, 1)]) for i in range(3)
    ]
    assert values(lambda: (inside_replica(), replica_path())) == [(True, (0,))]
    run(raises(ValueError()), inside_replica)
    assert (inside_replica(), replica_path()) == (False, ())


def test_workers_are_kept_and_used_again_in_the_same_order() -> None:
    """F5"""
    thread_pool.pool.stop()
    stuck = worker_threads()  # in earlier tests
    first = values(*[threading.get_ident] * 3)
    threads = worker_threads() - stuck
    for _ in range(20):
        assert values(*[threading.get_ident] * 3) == first
    assert worker_threads() - stuck == threads


# ---- errors ----------------------------------------------------------------------------------------


def nothing() -> None:
    pass


def signal_the_main_thread() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.parametrize(
    ("by_caller", "by_worker"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), nothing),
        (_thread.interrupt_main, nothing),
        pytest.param(
            *(nothing, signal_the_main_thread),
            marks=pytest.mark.only_on("linux", "macos", because="a signal is sent to a thread"),
        ),
    ],
    ids=["in its task", "in its task, in C", "while it waits for a result"],
)
def test_ctrl_c_while_workers_are_busy(by_caller: Callable[[], None], by_worker: Callable[[], None]) -> None:
    """F3: the caller is interrupted; the next call has fresh workers, and works while the first ones are stuck."""
    assert threading.current_thread() is threading.main_thread()
    release, busy = threading.Event(), threading.Barrier(3)

    def task(interrupt: Callable[[], None], patience_s: float = 2 * WAIT_S) -> None:
        busy.wait(WAIT_S)
        interrupt()
        release.wait(patience_s)

    with pytest.raises(KeyboardInterrupt):
        run(partial(task, by_caller, 0), partial(task, by_worker), partial(task, nothing))
    assert not release.is_set()
    assert len(set(values(*[threading.get_ident] * 3))) == 3
    release.set()


# The collector has callbacks, such as torch's compiler's; Python reports an interrupt in one.
@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("when", ["before its task", "in its task", "after its task"])
def test_an_abandoned_worker_ends_silently(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """F3: it is interrupted at its next Python instruction; nothing is printed. Many times: there is a race in it."""
    printed: list[Any] = []
    thread_pool.pool.stop()
    stuck = worker_threads()  # in earlier tests
    monkeypatch.setattr(threading, "excepthook", printed.append)
    for _ in range(30):
        started = threading.Event()

        def task(started: threading.Event = started) -> None:
            started.set()
            while when == "in its task":
                torch.ones(10).sum()

        def interrupted(started: threading.Event = started) -> None:
            assert when == "before its task" or started.wait(WAIT_S)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(interrupted, task)
    thread_pool.pool.stop()
    assert worker_threads() <= stuck
    assert [args.exc_type for args in printed] == []


def test_a_worker_that_cannot_take_the_callers_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1, R14: such as a device that fails when it is made current, as a GPU does after an error.

    `around` is entered before the caller's state is set, and left if that fails: so it can wake a task that waits.
    """

    def fails(self: ThreadState) -> Any:
        raise RuntimeError("no such state here")

    left = [threading.Event(), threading.Event()]

    def around(index: int) -> Any:
        context = contextlib.ExitStack()
        context.callback(left[index].set)
        return context

    with monkeypatch.context() as patch:
        patch.setattr(ThreadState, "applied", fails)
        outcomes = in_time(lambda: run_together([lambda: left[1].wait(WAIT_S), lambda: True], [CPU] * 2, around))
    assert outcomes[0].value is True
    assert "no such state here" in str(outcomes[1].error)
    assert left[0].is_set()
    assert values(lambda: 0, lambda: 1) == [0, 1]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_a_checkpoint_that_fails_leaves_no_hooks_in_its_thread() -> None:
    """R13, F1: as long as the error lives, too; older releases of torch leave that to the error's end."""
    failed = run(*[partial(checkpoint, raises(ValueError()), use_reentrant=False)] * 3)
    assert [type(outcome.error) for outcome in failed] == [ValueError] * 3
    assert values(*[modes.has_saved_tensor_hooks] * 3) == [False] * 3
    assert not modes.has_saved_tensor_hooks()


def test_torch_compiles_after_dispatch_modes_that_overlapped() -> None:
    """R13: older releases think that the second mode, which ends last, is still active, and compile nothing."""
    from torch._dynamo.testing import CompileCounter

    second_entered, first_entered, first_left = (threading.Event() for _ in range(3))

    def in_mode(entered: threading.Event, other: threading.Event) -> None:
        with PassingMode():
            entered.set()
            assert other.wait(WAIT_S)

    def first() -> None:
        in_mode(first_entered, second_entered)
        first_left.set()

    def second() -> None:
        assert first_entered.wait(WAIT_S)
        in_mode(second_entered, first_left)

    values(first, second)
    counter = CompileCounter()
    torch.compile(lambda x: x + 1, backend=counter)(torch.ones(1))
    assert counter.frame_count == 1


@pytest.mark.parametrize("ends", ["after the pass", "during the pass"])
def test_a_dispatch_mode_of_another_thread(ends: str) -> None:
    """R17: the flags of torch that say that it is active were switched off at the end of each pass, or on again."""
    from torch.utils import _python_dispatch

    entered, leave = threading.Event(), threading.Event()

    def in_mode() -> None:
        with PassingMode():
            entered.set()
            assert leave.wait(WAIT_S)

    def end() -> None:
        leave.set()
        thread.join()

    assert not _python_dispatch._is_in_torch_dispatch_mode
    thread = threading.Thread(target=in_mode)
    thread.start()
    assert entered.wait(WAIT_S)
    try:
        values(int, end if ends == "during the pass" else int)
        assert _python_dispatch._is_in_torch_dispatch_mode == (ends == "after the pass")
    finally:
        end()
    assert not _python_dispatch._is_in_torch_dispatch_mode


def test_where_no_thread_can_start_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """R17: later calls from new threads took the number of intra-op threads for that of a replica."""

    def fails(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(RuntimeError, match="can't start"):
        run(*[int] * 20)
    assert not thread_pool.thread_counts._running


# ---- threads of torch ------------------------------------------------------------------------------


def num_threads_of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.get_num_threads).result()


@pytest.fixture
def four_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_intra_op_threads_are_shared_out_and_put_back() -> None:
    """R14, R8: in the caller, and for threads that start later; after success, errors, interrupts and a change."""
    for tasks, each in ((2, 2), (4, 1), (8, 1), (3, 1)):
        assert values(*[torch.get_num_threads] * tasks) == [each] * tasks
        assert torch.get_num_threads() == 4
        assert num_threads_of_a_new_thread() == 4
    assert values(torch.get_num_threads) == [4]
    run(raises(ValueError()), raises(ValueError()))
    assert torch.get_num_threads() == num_threads_of_a_new_thread() == 4
    with pytest.raises(KeyboardInterrupt):
        run(raises(KeyboardInterrupt()), lambda: 1)
    assert torch.get_num_threads() == num_threads_of_a_new_thread() == 4
    torch.set_num_threads(2)
    assert values(*[torch.get_num_threads] * 2) == [1, 1]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("asked_for", [None, 1])
def test_overlapping_calls_leave_the_number_of_threads_as_it_was(asked_for: int | None) -> None:
    """R14, F5: narrated.

    1. thread B asks for one thread and calls, or has not used torch yet
    2. caller A runs; its replicas have one thread each
    3. B calls
    4. A ends, then B: A has its four threads again, and B one if it asked for one, else four

    (Of a thread that calls for the first time, it is unknown whether it asked for one or began with one.)
    """
    b_is_ready, b_may_call, a_may_end, b_may_end = (threading.Event() for _ in range(4))
    after: list[int] = []

    def task_of_b() -> None:
        a_may_end.set()
        assert b_may_end.wait(WAIT_S)

    def caller_b() -> None:
        if asked_for is not None:
            torch.set_num_threads(asked_for)
            run(lambda: None, lambda: None)
        b_is_ready.set()
        assert b_may_call.wait(WAIT_S)
        run(*[task_of_b] * 4)
        after.append(torch.get_num_threads())

    def task_of_a() -> None:
        b_may_call.set()
        assert a_may_end.wait(WAIT_S)

    b = threading.Thread(target=caller_b, daemon=True)
    b.start()
    assert b_is_ready.wait(WAIT_S)
    torch.set_num_threads(4)
    run(*[task_of_a] * 4)
    b_may_end.set()
    b.join(WAIT_S)
    assert not b.is_alive()
    assert after == [asked_for or 4]
    assert torch.get_num_threads() == num_threads_of_a_new_thread() == 4


class Thing:
    pass


def test_workers_keep_nothing_alive() -> None:
    """N10: neither tasks, nor what they returned, from the moment when the caller has the results.

    Many times, with another thread that asks for its turn as often as it can: a worker that drops its job only after it
    has handed over the result is late some of the time.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            pass

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:
        with no_garbage():
            for _ in range(300):
                thing, result = Thing(), Thing()
                references = [weakref.ref(thing), weakref.ref(result)]
                tasks = [lambda t=thing, r=result: (t, r)] * 3
                outcomes = run(*tasks)
                del tasks, outcomes, thing, result
                wait_for_workers()
                assert [reference() for reference in references] == [None, None]
            run(*[Thing] * 3)
    finally:
        ended.set()
        spinner.join()
        sys.setswitchinterval(interval)


def test_an_interrupt_leaves_no_cycle() -> None:
    """N10: what its task held is freed without the garbage collector; errors are in tests/contract/test_memory.py."""
    held: list[weakref.ref[Thing]] = []

    def fails() -> None:
        thing = Thing()
        held.append(weakref.ref(thing))
        raise KeyboardInterrupt

    def once() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            run(fails, nothing, nothing)
        run(*[nothing] * 3)  # an abandoned worker ends in its own time

    once()
    with no_garbage():
        once()
        assert [reference() for reference in held] == [None] * 2


# ---- processes -------------------------------------------------------------------------------------


@pytest.mark.only_on("linux", "macos", because="forks")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads
def test_a_fork_has_workers_of_its_own() -> None:
    """F5: after the parent has used workers, and while it has some."""
    before = values(*[threading.get_ident] * 3)

    def child() -> int:
        signal.alarm(60)
        return len(set(values(*[threading.get_ident] * 3)))

    assert in_a_fork(child) == 3
    assert values(*[threading.get_ident] * 3) == before


COMPUTE = "weight = torch.randn(300, 300, requires_grad=True); (weight @ weight).sum().backward()"


@pytest.mark.only_on("linux", because="whether a thread sleeps is read from /proc")
@pytest.mark.parametrize(
    "task", [COMPUTE, "time.sleep(1e6)", pytest.param("threading.Event().wait()", marks=pytest.mark.slow)]
)
def test_the_interpreter_exits_while_workers_are_busy(task: str) -> None:
    """F5, F3: with the program's status, and nothing on stderr; more is in tests/contract/test_callers.py.

    A sleeping thread cannot be interrupted, and exit waited ten seconds for it, then warned. Here it would for ever.
    """
    done = run_script(f"""
        import signal, sys, threading, time
        import torch
        from unisono.runtime import thread_pool

        thread_pool._EXIT_WAIT_S = 1e6
        busy = threading.Event()

        def endless():
            busy.set()
            while True:
                {task}

        def first():
            busy.wait(30)
            signal.raise_signal(signal.SIGINT)

        try:
            thread_pool.run_together([first, endless, endless], [torch.device("cpu")] * 3)
        except KeyboardInterrupt:
            pass
        sys.exit(3)
    """)
    assert (done.returncode, done.stderr) == (3, "")


def test_ctrl_c_ends_a_program_as_python_does() -> None:
    """F3, F5: with a traceback that ends in KeyboardInterrupt, and nothing after it."""
    done = run_script("""
        import signal, threading
        import torch
        import unisono

        busy = threading.Barrier(2)

        class Endless(torch.nn.Module):
            def forward(self, x):
                busy.wait(30)
                if x[0] == 0:
                    signal.raise_signal(signal.SIGINT)
                while True:
                    x = x * 1.0

        unisono.DataParallel(Endless(), ["cpu"] * 2)(torch.arange(4.0))
    """)
    assert done.returncode in (-signal.SIGINT, 130, 1)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
