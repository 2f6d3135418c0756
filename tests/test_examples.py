"""Every example runs as its docstring says, reports the sizes it should, in whole lines, and says nothing else."""

import ast
import functools
import importlib.util
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.forked import forked
from helpers.rounding import rounding_bound

EXAMPLES = Path(__file__).parent.parent / "examples"

# On 8 devices: rows of each shard of a full batch (30 rows) and of the last one (10 rows).
FULL, LAST = [4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2]

MIDDLE_BLOCK = """\
    In block1: input [30, 10] output [30, 20]
    In block2: input [15, 20] output [15, 20]
    In block2: input [15, 20] output [15, 20]
    In block3: input [30, 20] output [30, 20]
Outside: input [30, 10] output [30, 20]
Output and gradients: as without the wrapper
"""

HALF_ON_CPU = """\
Halves: embedding on cpu, rest on {0}
    In model: input [30, 10] output [30, 10] on {0}
Outside: input [30] on cpu output [30, 10] on {0}
Gradients: embedding.weight on cpu, rest.weight on {0}, rest.bias on {0}
Halves: embedding on cpu, rest on {0}, {1}
    In model: input [15, 10] output [15, 10] on {0}
    In model: input [15, 10] output [15, 10] on {1}
Outside: input [30] on cpu output [30, 10] on {0}
Gradients: embedding.weight on cpu, rest.module.weight on {0}, rest.module.bias on {0}
Output and gradients: the same both ways
"""

VERBS_BY_HAND = """\
By hand:
    In model: input [11, 5] output [11, 2] on {0}
    In model: input [11, 5] output [11, 2] on {1}
    In model: input [9, 5] output [9, 2] on {2}
Shards: [11, 11, 9] rows, replicas: 3, outputs: 3
Outside: input [31, 5] output [31, 2]
Plain module:
    In model: input [31, 5] output [31, 2] on {0}
Output and gradients: those of the plain module
"""


SEQUENCES = """\
Padded: output [5, 6, 4] hidden state [1, 5, 4], as without the wrapper
Without total_length: ValueError: cannot gather output[0]: replicas returned different sizes off the joined axis 0 \
(replica 0: (3, 6, 4); replica 1: (2, 5, 4)). Every replica's output must have the same structure; only the number of \
rows may differ.
    If the module pads its sequences (pad_packed_sequence), each replica pads to the longest of its own: give \
total_length=, or have the outputs padded: DataParallel(..., out_dims=unisono.pad(axis)). If the rows are on another \
axis, say so: DataParallel(..., out_dims=...).
Packed: [17, 4] in 6 steps, as without the wrapper
"""


def check_same(output: str, expected: str) -> None:
    assert output == expected


def check_transcript(output: str, devices: tuple[str, ...]) -> None:
    expected = "Replicas: 8\n"
    for shards in (FULL, FULL, FULL, LAST):
        for rows, device in zip(shards, in_turn(devices, len(shards)), strict=True):
            expected += f"    In model: input [{rows}, 5] output [{rows}, 2] on {device}\n"
        expected += f"Outside: input [{sum(shards)}, 5] output [{sum(shards)}, 2]\n"
    assert in_order(output) == in_order(expected)


def check_half_on_cpu(output: str, devices: tuple[str, ...]) -> None:
    if devices == ("cpu",):
        devices = ("sim:0", "sim:1")
    assert in_order(output) == HALF_ON_CPU.format(*in_turn(devices, 2))


def check_bce_training(output: str, devices: tuple[str, ...]) -> None:
    epochs = 10
    patterns = ["Wrapped, replicas: 2"]
    patterns += [rf"    epoch {epoch}: loss (\d\.\d{{6}})" for epoch in range(1, epochs + 1)]
    for replica, device in enumerate(in_turn(devices, 2)):
        patterns.append(f"    In the last step: replica {replica} trained on 5 rows on {device}")
    patterns += ["Plain module:", *patterns[1 : 1 + epochs], r"Same numbers: losses differ by \d\.\de-\d\d at most"]
    lines = output.splitlines()
    matches = [re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=True)]
    assert None not in matches, output
    losses = [float(match[1]) for match in matches if match and match.re.groups]
    wrapped, plain = losses[:epochs], losses[epochs:]
    assert all(later < earlier for earlier, later in itertools.pairwise(wrapped))
    assert wrapped == within_rounding(plain)


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
    # Before that, some releases of torch say in all processes at once, in pieces, who is connected.
    *epochs, last = output[output.index("epoch 1:") :].splitlines()
    assert last == f"processes: {num_processes}"
    losses = [float(re.fullmatch(r"epoch \d: loss (\d\.\d{6})", line)[1]) for line in epochs]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    return losses


def check_verbs_by_hand(output: str, devices: tuple[str, ...]) -> None:
    assert in_order(output) == in_order(VERBS_BY_HAND.format(*in_turn(devices, 3)))


def check_transformers_trainer(output: str, devices: tuple[str, ...]) -> None:
    losses = "".join(rf"    epoch {epoch}: loss (\S+)\n" for epoch in range(1, 5))
    end = r"Same numbers: parameters differ by (\d\.\de-\d\d|0\.0e\+00) at most\n"
    match = re.fullmatch(rf"One device:\n{losses}Wrapped:\n{losses}{end}", output)
    assert match, output
    *values, difference = map(float, match.groups())
    one_device, wrapped = values[:4], values[4:]
    assert one_device == sorted(one_device, reverse=True)
    assert wrapped == pytest.approx(one_device, abs=1.01e-4)  # they are printed with four digits
    assert difference < 1e-4


def check_contrastive(output: str, devices: tuple[str, ...]) -> None:
    line = r"losses (\d\.\d{4}), (\d\.\d{4}), (\d\.\d{4}); hidden activations of (\d+) rows at most\n"
    match = re.fullmatch(rf"Plain module: {line}Two replicas, 4 parts each: {line}", output)
    assert match, output
    plain, wrapped = [*map(float, match.groups()[:4])], [*map(float, match.groups()[4:])]
    assert wrapped[:3] == pytest.approx(plain[:3], abs=1.01e-4)  # they are printed with four digits
    assert plain[3] == 192, "both views of all rows"
    assert wrapped[3] <= 2 * 12, "a part of each replica"


def check_first_steps(output: str, devices: tuple[str, ...]) -> None:
    first, second, *_, last = output.splitlines()
    num_replicas = max(2, len(devices))
    rows = [-(-600 // num_replicas)] * (num_replicas - 1)
    assert re.fullmatch(rf"loss \d\.\d\d, rows: {re.escape(str([*rows, 600 - sum(rows)]))}", first)
    assert f"on {num_replicas} replicas" in second
    assert last == "same: 12 comparisons, in training and eval"


# Of each example: the arguments it is run with, and what reads its output.
CHECKS = {
    "first_steps.py": ([], check_first_steps),
    "transcript.py": (["--devices", "8"], check_transcript),
    "middle_block.py": ([], lambda output, devices: check_same(output, MIDDLE_BLOCK)),
    "sequences.py": ([], lambda output, devices: check_same(output, SEQUENCES)),
    "half_on_cpu.py": ([], check_half_on_cpu),
    "bce_training.py": (["--devices", "2", "--epochs", "10"], check_bce_training),
    "verbs_by_hand.py": ([], check_verbs_by_hand),
    "contrastive.py": (["--parts", "4"], check_contrastive),
    "several_processes.py": ([], lambda output, devices: losses_of_several_processes(output, 1)),
    "transformers_trainer.py": ([], check_transformers_trainer),
}
# Trainer chooses its devices itself, and knows no simulated ones; importing it takes seconds.
WITH_ANY_DEVICE = CHECKS.keys() - {"transformers_trainer.py"}


def check(name: str, devices: tuple[str, ...], **options: bool) -> None:
    """Run an example as a program, and check its output."""
    for library in ("transformers", "accelerate") if name == "transformers_trainer.py" else ():
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    CHECKS[name][1](output_of(name, **options), devices)


def in_turn(devices: tuple[str, ...], num_replicas: int) -> list[str]:
    """The device of each replica, where there are more replicas than devices."""
    return [devices[i % len(devices)] for i in range(num_replicas)]


def in_order(output: str) -> str:
    """Sort the lines that replicas wrote at once: each run of `In ...` lines."""
    blocks = re.split(r"((?:^    In .*\n)+)", output, flags=re.MULTILINE)
    return "".join("".join(sorted(b.splitlines(True))) if b.startswith("    In ") else b for b in blocks)


def run_example(name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@functools.cache
def output_of(name: str, *, use_gpus: bool = False) -> str:
    """Run an example as a program; nothing it writes is buffered, so pieces of lines would mix if there were any."""
    environment = {} if use_gpus else {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    with forked(run_example, name, *CHECKS[name][0], cwd=EXAMPLES.parent, env=environment) as program:
        assert (program.wait(), program.err) == (0, "")
        return program.out


def run_here(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, num_accelerators: int = 0) -> list[str]:
    """Run an example in this process, as on a machine with `num_accelerators`; return what each write was given."""
    writes: list[str] = []
    with monkeypatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.setattr(sys, "argv", [name, *arguments])
        patch.setattr(sys, "stdout", SimpleNamespace(write=writes.append, flush=lambda: None))
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        patch.setattr(torch.accelerator, "is_available", lambda: num_accelerators > 0)
        patch.setattr(torch.accelerator, "device_count", lambda: num_accelerators)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return writes


@pytest.fixture
def two_accelerators(simulated_accelerators):
    """The names of two simulated devices, which unisono takes for the machine's accelerators."""
    with simulated_accelerators(2) as devices:
        yield tuple(map(str, devices))


def test_every_example_has_a_test_a_row_in_the_index_and_its_command() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}  # a folder is a project, with a test of its own
    assert files == set(CHECKS)
    assert set(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)) == files
    for name in files:
        docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
        assert re.search(rf"^    python examples/{re.escape(name)}", docstring, re.MULTILINE), name


@pytest.mark.parametrize("name", CHECKS)
def test_runs_as_a_program(name):
    check(name, ("cpu",))


@pytest.mark.parametrize("name", sorted(WITH_ANY_DEVICE))
def test_on_accelerators_too(name, two_accelerators, monkeypatch):
    """The first replica is on the first of two accelerators, the second on the second, and so on.

    Replicas write whole lines: print() writes a line in pieces, and replicas that write at once would mix them, as in
    the transcript of torch's tutorial.
    """
    arguments, check_output = CHECKS[name]
    writes = run_here(name, arguments, monkeypatch, num_accelerators=2)
    check_output("".join(writes), two_accelerators)
    # What the program prints between two calls of the model may come in pieces.
    from_replicas = [text for text in writes if re.match(r" *In (model|block)", text)]
    assert all(re.fullmatch(r"    In .*\n", text) for text in from_replicas)
    silent = ("bce_training.py", "contrastive.py", "first_steps.py", "sequences.py", "several_processes.py")
    assert from_replicas or name in silent


def test_several_processes_print_what_one_prints() -> None:
    one = losses_of_several_processes(output_of("several_processes.py"), 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two = subprocess.run(
        [*command, "examples/several_processes.py"],
        cwd=EXAMPLES.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert two.returncode == 0, two.stderr
    assert losses_of_several_processes(two.stdout, 2) == within_rounding(one)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *(("transcript.py", "--devices", value) for value in ("0", "-1", "two", "1.5", "")),
        ("bce_training.py", "--devices", "0"),
        ("bce_training.py", "--epochs", "0"),
    ],
)
def test_bad_numbers_are_refused_in_one_line(name, option, value, monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        run_here(name, [f"{option}={value}"], monkeypatch)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"{name}: error: argument {option}: expected a whole number, 1 or more, got {value!r}"


@pytest.mark.parametrize("name", ["transcript.py", "bce_training.py"])
def test_help_has_an_example(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert f"example: python examples/{name} --devices " in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_runs_on_gpus(name):
    check(name, tuple(f"cuda:{i}" for i in range(torch.cuda.device_count())), use_gpus=True)
