"""A system that lacks what Windows lacks: the package is imported, threads work, and the rest is one clear error.

It is simulated: Python's modules lose what they do not have there. That shows what unisono asks for, no more.
"""

import textwrap

import pytest

from helpers.programs import run_script

# After torch has been imported, which has its own code for each system.
_LIKE_WINDOWS = """
    import os, select, signal, socket, subprocess, sys, tempfile
    import torch, torch._dynamo, torch.distributed

    MISSING = {
        os: "fork forkpty register_at_fork memfd_create sched_getaffinity sched_setaffinity sched_yield getuid geteuid "
            "getgid pread pwrite waitpid killpg setsid getpgid getloadavg statvfs sysconf O_NOFOLLOW O_NONBLOCK "
            "O_CLOEXEC RTLD_NOLOAD WNOHANG uname",
        select: "poll epoll",
        socket: "AF_UNIX send_fds recv_fds",
        signal: "SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGSYS SIGURG SIGUSR1 SIGUSR2 SIGXCPU SIGXFSZ",
    }
    for module, names in MISSING.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in ("fcntl", "grp", "pwd", "resource", "termios"):
        sys.modules[name] = None  # importing it is an ImportError
"""


def on_windows(program: str) -> list[str]:
    """Return the lines that a program prints on such a system."""
    done = run_script(textwrap.dedent(_LIKE_WINDOWS) + textwrap.dedent(program))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_threads_work() -> None:
    """F14: forward, backward, map and evaluate."""
    lines = on_windows("""
        from unisono import *
        import unisono

        plain = torch.nn.Linear(5, 2)
        model, x = unisono.DataParallel(plain, ["cpu"] * 2), torch.randn(8, 5)
        outputs = [model(x), plain(x), *model.map([x])]
        grads = [torch.autograd.grad(output.sum(), plain.weight)[0] for output in outputs[:2]]
        print([torch.allclose(outputs[1], output) for output in outputs], torch.allclose(*grads))
        print(model.evaluate([(x, plain(x))], torch.nn.functional.mse_loss) < 1e-12)
        print(unisono.keep_freed_memory() in (True, False))
        """)
    assert lines == ["[True, True, True] True", "True", "True"]


@pytest.mark.parametrize("command", ["bench", "devices", "watch"])
def test_commands_that_ask_the_system_say_so(command: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """F14: in one line."""
    from unisono import cli

    monkeypatch.delattr("os.sysconf")
    assert cli.main([command]) == 2
    assert capsys.readouterr().err == (
        f"unisono {command}: error: this command needs Linux or macOS; this system is linux\n"
    )
