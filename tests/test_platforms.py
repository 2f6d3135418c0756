"""Systems that lack what macOS and Windows lack: threads work, a training runs, and the rest is one clear error.

They are simulated (platforms/simulated.py). These are small programs; `make test-platforms` runs the whole suite so.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from platforms import simulated

pytestmark = pytest.mark.only_on("linux", because="the other systems are simulated there")

SYSTEMS = [simulated.MACOS, simulated.WINDOWS]


def run_as_on(system: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments as on another system."""
    path = os.pathsep.join([simulated.ENTRY_POINT, *sys.path])
    env = {**os.environ, simulated.VARIABLE: system, "PYTHONPATH": path}
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=100)


def lines_on(system: str, program: str) -> list[str]:
    """Return the lines that a program prints there."""
    done = run_as_on(system, "-c", textwrap.dedent(program))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_taken_away_is_missing_in_scripts_and_in_their_processes(system: str) -> None:
    """And torch has it still: it has code of its own for each system."""
    lines = lines_on(system, """
        import multiprocessing, os, signal, subprocess, sys

        def missing():
            names = [name for name in ("fork", "sched_getaffinity") if not hasattr(os, name)]
            names += [name for name in ("SIGHUP", "SIGPWR", "SIGINT") if not hasattr(signal, name)]
            try:
                import fcntl
            except ImportError:
                names.append("fcntl")
            try:
                open("/proc/self/stat").close()
            except FileNotFoundError:
                names.append("/proc")
            return sys.platform, os.name, names

        print(*missing())
        print(multiprocessing.get_start_method())
        print(subprocess.run([sys.executable, "-c", "import sys; print(sys.platform)"], capture_output=True).stdout)
        import torch, psutil
        print(torch.ones(2).sum().item(), psutil.Process().num_threads() > 0, "linux" in psutil._common.sys.platform)
        """)  # fmt: skip
    if system == simulated.MACOS:
        assert lines[0] == "darwin posix ['sched_getaffinity', 'SIGPWR', '/proc']"
    else:
        assert lines[0] == "win32 nt ['fork', 'sched_getaffinity', 'SIGHUP', 'SIGPWR', 'fcntl', '/proc']"
    assert lines[1:] == ["spawn", f"b'{lines[0].split()[0]}\\n'", "2.0 True True"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_threads_work_and_a_training_keeps_its_folder(system: str, tmp_path: Path) -> None:
    """F14: forward, backward, map and evaluate. `unisono train`: a second one in its folder is refused, by the lock
    that the system has."""
    program = """
        import torch, unisono

        torch.manual_seed(0)
        plain = torch.nn.Linear(5, 2)
        model, x = unisono.DataParallel(plain, ["cpu"] * 2), torch.randn(8, 5)
        outputs = [model(x), plain(x), *model.map([x])]
        grads = [torch.autograd.grad(output.sum(), plain.weight)[0] for output in outputs[:2]]
        torch.testing.assert_close(outputs, [outputs[1]] * 3)
        torch.testing.assert_close(*grads)
        print(model.evaluate([(x, plain(x))], torch.nn.functional.mse_loss) < 1e-12)
        print(unisono.keep_freed_memory())

        from unisono.cli import main
        from unisono.training.run_folder import RunFolder
        from pathlib import Path

        train = ["train", "--model", "mlp", "--devices", "cpu*2", "--epochs", "1", "--output", "out"]
        assert main(train) == 0
        folder = RunFolder(Path("out"))
        folder.claim()
        print(main([*train, "--overwrite"]))
        folder.close()
        assert main([*train, "--overwrite"]) == 0
        """
    done = run_as_on(system, "-c", textwrap.dedent(program), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["True", "False"]
    assert done.stdout.count("\n2\n") == 1
    assert "another run is using out (process " in done.stderr


def test_commands_about_the_machine_say_what_the_system_tells_and_bench_asks_for_process_groups() -> None:
    """F14: fewer figures, no error; and what cannot be done is an error in one line."""
    done = lines_on(simulated.WINDOWS, """
        import sys
        from unisono.cli import main

        sys.stderr = sys.stdout
        print(main(["devices", "--json"]))
        print("-")
        print(main(["watch", "--once"]))
        print("-")
        print(main(["bench"]))
        """)  # fmt: skip
    *told, bench = "\n".join(done).split("\n-\n")
    for text in told:
        assert text.endswith("\n0")
        assert text.count("\n") > 2
    assert bench.splitlines() == [
        "unisono bench: error: bench needs process groups, which this system (win32) does not have: use Linux or macOS",
        "2",
    ]
