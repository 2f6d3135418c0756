"""Several threads that call, wrappers that come and go, forks, and programs that end."""

import pytest

from helpers.programs import run_script


@pytest.mark.parametrize("kept", ["[model(batch)]", "[next(outputs), outputs]"], ids=["a graph", "an open map"])
def test_the_interpreter_exits_cleanly(kept: str) -> None:
    """F5, I7: status 0, nothing on stderr, with a graph or a map still alive; no thread of ours after atexit."""
    done = run_script(f"""
        import atexit, threading

        def report():  # registered first, so it runs last
            print([thread.name for thread in threading.enumerate() if thread.name == "unisono-worker"])

        atexit.register(report)
        import torch, unisono
        model, batch = unisono.DataParallel(torch.nn.Linear(5, 3), ["cpu"] * 3), torch.ones(7, 5)
        for _ in range(3):
            model(batch).sum().backward()
        outputs = model.map([batch] * 20)
        kept = {kept}
        kept.append(kept)
        print("trained")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n[]\n", "")


def test_sys_exit_inside_a_replica_ends_the_program() -> None:
    """F3, F5: with its status, and with other replicas at work."""
    done = run_script("""
        import sys, torch, unisono

        class Exits(torch.nn.Module):
            def forward(self, x):
                if x[0] == 0:
                    sys.exit(5)
                while True:
                    torch.ones(100).sum()

        unisono.DataParallel(Exits(), ["cpu"] * 2)(torch.arange(4.0))
    """)
    assert (done.returncode, done.stderr) == (5, "")


@pytest.mark.only_on("linux", because="what a process holds is read from /proc")
def test_wrappers_that_come_and_go_leave_nothing() -> None:
    """F5, N10: no process or descriptor, no thread but one a device: a forward, a backward and a map each."""
    done = run_script("""
        import gc, threading
        import psutil, torch, unisono

        def once():
            module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
            model = unisono.DataParallel(module, ["cpu"] * 2, sync_batch_norm=False)
            model(torch.randn(6, 4)).sum().backward()
            list(model.map([torch.randn(6, 4)] * 2))

        def held():
            gc.collect()
            return threading.active_count(), me.num_fds(), len(me.children(recursive=True))

        me = psutil.Process()
        for _ in range(3):
            once()
        before = held()
        for _ in range(20):
            once()
        print(held() == before and before[0] <= 1 + 2, held(), before)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True"), done.stdout


@pytest.mark.only_on("linux", "macos", because="forks")
def test_a_fork_while_another_thread_is_in_a_step() -> None:
    """F5: the child's first forward waited for that thread's step for ever: the thread does not exist there."""
    done = run_script("""
        import builtins, os, signal, threading, warnings
        import torch, unisono

        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a process with threads
        builtins.inside, builtins.other, builtins.go_on = (threading.Event() for _ in range(3))
        builtins.parent = os.getpid()

        class Waits(torch.nn.Linear):
            def forward(self, x):
                import builtins, os, threading
                y = super().forward(x)
                if os.getpid() == builtins.parent:
                    is_first = threading.current_thread().name == "another"
                    (builtins.inside if is_first else builtins.other).set()
                    builtins.go_on.wait(60)
                return y

        model = unisono.DataParallel(Waits(4, 2), ["cpu"] * 2)

        def step():
            model.zero_grad()
            model(torch.ones(6, 4)).sum().backward()
            return bool((model.module.weight.grad == 6).all())

        another = threading.Thread(target=step, name="another")
        another.start()
        builtins.inside.wait(60)
        builtins.other.wait(60)  # a child forked while a thread is in torch may find a C++ lock locked for ever
        child = os.fork()
        if not child:
            signal.alarm(60)
            os._exit(0 if step() else 1)
        _, status = os.waitpid(child, 0)
        builtins.go_on.set()
        another.join()
        print("child", os.waitstatus_to_exitcode(status), step())
    """)
    assert (done.returncode, done.stdout) == (0, "child 0 True\n"), done.stderr


def test_the_program_ends_quietly_with_a_step_in_flight() -> None:
    """F5: in a thread of its own, with replicas that compute: its own status, nothing on stderr."""
    done = run_script("""
        import builtins, sys, threading
        import torch, unisono

        builtins.outside_of_torch = threading.Event()

        class Computes(torch.nn.Linear):
            def forward(self, x):
                import builtins, threading
                if not x[0, 0]:  # the caller's own replica: a daemon thread that is in torch at exit ends the program
                    builtins.outside_of_torch.set()
                    threading.Event().wait()
                while True:
                    x = super().forward(x)

        def run():
            model(torch.arange(6.0).unsqueeze(1).expand(6, 4))

        model = unisono.DataParallel(Computes(4, 4), ["cpu"] * 2)
        threading.Thread(target=run, daemon=True).start()
        builtins.outside_of_torch.wait(60)
        sys.exit(4)
    """)
    assert (done.returncode, done.stderr) == (4, "")
