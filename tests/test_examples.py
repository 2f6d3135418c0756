"""Every example runs as its docstring says, to its last line, in whole lines, and nothing is on standard error."""

import ast
import contextlib
import functools
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.accelerators import on_accelerator
from helpers.contract import ON_CPU
from helpers.forked import forked
from helpers.ranks import free_port, run_ranks
from helpers.rounding import rounding_bound

EXAMPLES = Path(__file__).parent.parent / "examples"


# Of each example: the arguments it is run with, and its last line. Most compare their own numbers with the plain
# module's, and end in an error where these differ.
CHECKS = {
    "first_steps.py": ([], "same: 20 comparisons, in training and eval"),
    "four_lines.py": ([], "differs: 9 of 27 comparisons, in training"),
    "same_numbers.py": (
        [],
        r"state of an LSTM: \(4, 2, 4\) by torch's rule, \(1, 8, 4\) with out_dims=1; \(1, 8, 4\) on one device",
    ),
    "transcript.py": (["--devices", "8"], r"Outside: input \[10, 5\] output \[10, 2\]"),
    "middle_block.py": ([], "Output and gradients: as without the wrapper"),
    "sequences.py": ([], r"Packed: \[17, 4\] in 6 steps, as without the wrapper"),
    "half_on_cpu.py": ([], "Output and gradients: the same both ways"),
    "bce_training.py": (["--devices", "2"], r"Same numbers: losses differ by \S+ at most"),
    "verbs_by_hand.py": ([], "Output and gradients: those of the plain module"),
    "contrastive.py": (
        ["--parts", "4"],
        # One accelerator computes the backward of one replica after the other.
        "Two replicas, 4 parts each: losses .+; hidden activations of (12|24) rows at most",
    ),
    "several_processes.py": ([], "processes: 1"),
    "transformers_trainer.py": ([], r"Same numbers: parameters differ by (\d\.\de-(0[5-9]|\d\d)|0\.0e\+00) at most"),
}
# Trainer chooses its devices itself, and knows no simulated ones; importing it takes seconds.
WITH_ANY_DEVICE = CHECKS.keys() - {"transformers_trainer.py"}
FROM_A_REPLICA = r"    In \w+: input \[[\d, ]+\] output \[[\d, ]+\]( on \S+)?"


def check(name: str, output: str) -> None:
    """Check an example's last line, and that no replica has written into another one's line.

    print() writes a line in pieces, and replicas that write at once would mix them, as in the transcript of torch's
    tutorial.
    """
    *before, last = output.splitlines()
    assert re.fullmatch(CHECKS[name][1], last), output
    assert all(re.fullmatch(FROM_A_REPLICA, line) for line in before if "In model" in line or "In block" in line)


def within_rounding(losses: list[float]) -> Any:
    """Return what losses are equal to that were printed with six digits, of epochs of four batches of 30 rows at most.

    A step sums over the rows of its batch, and what it rounds stays in the weights. Two numbers that are printed differ
    by a unit in the last place where they are nearly the same.
    """
    sums = [4 * 30 * epoch for epoch in range(1, len(losses) + 1)]
    return [
        pytest.approx(loss, rel=2 * rounding_bound(num_terms), abs=1.01e-6)
        for loss, num_terms in zip(losses, sums, strict=True)
    ]


def losses_of_several_processes(output: str, num_processes: int) -> list[float]:
    *epochs, last = output.splitlines()
    assert last == f"processes: {num_processes}"
    losses = [float(re.fullmatch(r"epoch \d: loss (\d\.\d{6})", line)[1]) for line in epochs]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    return losses


def run_example(name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@functools.cache
def output_of(name: str) -> str:
    """Run an example as a program; nothing it writes is buffered, so pieces of lines would mix if there were any."""
    with forked(run_example, name, *CHECKS[name][0], cwd=EXAMPLES.parent) as program:
        assert (program.wait(), program.err) == (0, "")
        return program.out


def run_here(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run an example in this process, as on a machine with two accelerators; return what it writes."""
    writes: list[str] = []
    with monkeypatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.setattr(sys, "argv", [name, *arguments])
        patch.setattr(sys, "stdout", SimpleNamespace(write=writes.append, flush=lambda: None))
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "device_count", lambda: 2)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return "".join(writes)


@pytest.fixture
def two_accelerators(simulated_accelerators):
    """The names of two simulated devices, which unisono takes for the machine's accelerators."""
    with simulated_accelerators(2) as devices:
        yield tuple(map(str, devices))


def test_every_example_has_a_test_a_row_in_the_index_and_its_command() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}  # a folder is a project, with a test of its own
    assert files == set(CHECKS)
    assert (
        set(re.findall(r"^\| .* \| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)) == files
    )
    for name in files:
        docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
        assert re.search(rf"^    python examples/{re.escape(name)}", docstring, re.MULTILINE), name


def output_as_rank(rank: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_example("several_processes.py")
    return out.getvalue()


@pytest.mark.parametrize("path", ["README.md", "README.zh-CN.md"])
def test_the_figures_of_the_readme_are_printed_by_an_example(path: str) -> None:
    """An error that a README gives as 1e-7 is rounding, whose last digits differ between processors."""
    readme, printed = (EXAMPLES.parent / path).read_text(encoding="utf-8"), output_of("same_numbers.py")
    percent = re.findall(r"(\d+)% off", printed)
    assert len(percent) == 2
    assert re.findall(r"^\|.* (\d+) % .*1e-7", readme, re.MULTILINE) == percent
    assert max(float(error) for error in re.findall(r"\de-\d+", printed)) < 5e-7
    shapes = re.findall(r"\(\d(?:, \d)+\)", printed)
    assert re.findall(r"\(\d(?:, \d)+\)", re.search(r"^\|.*LSTM.*", readme, re.MULTILINE)[0]) == shapes[:2]
    assert shapes[1] == shapes[2]


def test_several_processes_print_what_one_prints() -> None:
    one = losses_of_several_processes(output_of("several_processes.py"), 1)
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    first, second = run_ranks(2, output_as_rank, init=False, env=launcher)
    assert second == ""
    assert losses_of_several_processes(first, 2) == within_rounding(one)


@pytest.mark.skipif(not ON_CPU, reason="where there are accelerators, the last test runs them")
@pytest.mark.parametrize("name", CHECKS)
def test_runs_as_a_program(name):
    for library in ("transformers", "accelerate") if name == "transformers_trainer.py" else ():
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    check(name, output_of(name))


@pytest.mark.filterwarnings("ignore:In sim autocast")  # torch 2.9 warns of one that is switched off
@pytest.mark.parametrize("name", sorted(WITH_ANY_DEVICE))
def test_on_accelerators_too(name, two_accelerators, monkeypatch):
    """The first replica is on the first of two accelerators, the second on the second, and so on."""
    output = run_here(name, CHECKS[name][0], monkeypatch)
    check(name, output)
    devices = set(re.findall(r"^    In .* on (\S+)$", output, re.MULTILINE))
    assert devices in (set(), set(two_accelerators))


@on_accelerator
@pytest.mark.parametrize("name", CHECKS)
def test_runs_on_accelerators(name):
    check(name, output_of(name))
