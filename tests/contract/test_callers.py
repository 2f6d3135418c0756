"""Several threads that call, and programs that end."""

import torch

from helpers.contract import (
    ON_CPU,
    Wrap,
    assert_same,
    fresh,
    in_threads,
    loss_of,
    mlp,
    on_engines,
    over_gloo_too,
    twins,
)
from helpers.programs import run_script


@over_gloo_too
def test_calls_from_several_threads_at_once(wrap: Wrap) -> None:
    """F5: each caller gets its own batch's outputs and gradients."""
    plain, model = twins(wrap, mlp(), 3)
    batches = [torch.randn(7, 5) for _ in range(4)]

    def call(number: int) -> None:
        for _ in range(10):
            x_model, x_plain = fresh(batches[number]), fresh(batches[number])
            (mine,) = torch.autograd.grad(loss_of(model(x_model)), x_model)
            (theirs,) = torch.autograd.grad(loss_of(plain(x_plain)), x_plain)
            assert_same(mine, theirs)

    in_threads(4, call)


# A program of its own does not see what a test sets here, so that gloo would be no case of its own.
in_a_program_of_its_own = on_engines(["threads", "processes"] if ON_CPU else ["threads"])


@in_a_program_of_its_own
def test_the_interpreter_exits_cleanly_after_training(engine: str) -> None:
    """F5: status 0, nothing on stderr, with outputs and graphs still alive; no idle worker when atexit is through."""
    done = run_script(f"""
        import atexit, threading

        def report():  # registered first, so it runs last
            print([thread.name for thread in threading.enumerate() if thread.name == "manyhands-worker"])

        atexit.register(report)
        import torch, manyhands
        model = manyhands.DataParallel(torch.nn.Linear(5, 3), ["cpu"] * 3, engine={engine!r})
        for _ in range(3):
            output = model(torch.randn(7, 5))
            output.sum().backward()
        kept = model(torch.randn(7, 5))
        print("trained")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n[]\n", "")


@in_a_program_of_its_own
def test_sys_exit_inside_a_replica_ends_the_program(engine: str) -> None:
    """F3, F5: with its status, and with other replicas at work."""
    done = run_script(f"""
        import sys, torch, manyhands

        class Exits(torch.nn.Module):
            def forward(self, x):
                if x[0] == 0:
                    sys.exit(5)
                while True:
                    torch.ones(100).sum()

        manyhands.DataParallel(Exits(), ["cpu"] * 2, engine={engine!r})(torch.arange(4.0))
    """)
    assert (done.returncode, done.stderr) == (5, "")
