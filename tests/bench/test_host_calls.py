"""How many Python calls a step makes: bounds that hold exactly, because calls do not depend on the clock."""

import ast

import pytest
import torch

from helpers.benchmarks import BENCHMARKS, benchmark
from helpers.programs import run_script
from helpers.ranks import run_ranks
from unisono.runtime.thread_pool import OBJECTS_HAVE_THREADS

BOUNDS = {  # for each parameter, and for the whole step
    ("one memory", 1): (0, 20),
    ("one memory", 2): (0, 750),
    ("one memory", 8): (0, 930),
    ("separate memory", 2): (0, 880),
    ("separate memory", 8): (0, 1300),
}
# A newer torch has functions for what were flags. Without the lock idle workers run once at the end of each pass, and a
# context has filters of warnings.
MORE = 2 * hasattr(torch.fx._symbolic_trace, "_get_is_fx_tracing") + 65 * OBJECTS_HAVE_THREADS


@pytest.fixture(scope="module")
def costs() -> dict[tuple[str, int], tuple[float, float]]:
    """What a step costs beyond the plain module's, with a batch norm behind each layer.

    In a program of its own: what tests leave in this one, such as torch's compiler, adds a call here and there.
    """
    script = f"""
        import sys
        sys.path.insert(0, {str(BENCHMARKS)!r})
        import host_calls

        found = {{case: tuple(host_calls.cost(*case, batch_norm=True)) for case in {[*BOUNDS]!r}}}
        found["all outputs", 2] = tuple(host_calls.cost("one memory", 2, batch_norm=False, returns_all=True))
        print(found)
    """
    done = run_script(script, timeout_s=300)
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, int], tuple[float, float]] = ast.literal_eval(done.stdout)
    return found


@pytest.mark.parametrize(("memory", "replicas"), BOUNDS)
def test_a_steady_step_makes_few_calls(
    memory: str, replicas: int, costs: dict[tuple[str, int], tuple[float, float]]
) -> None:
    per_parameter, fixed = BOUNDS[memory, replicas]
    found_per_parameter, found_fixed = costs[memory, replicas]
    if not hasattr(torch, "_foreach_clone") and replicas > 1:  # an older torch clones three buffers singly
        per_parameter += 3 / 4
    assert found_per_parameter == pytest.approx(0, abs=per_parameter + 0.01)
    assert found_fixed <= fixed + MORE


def test_an_output_makes_few_calls(costs: dict[tuple[str, int], tuple[float, float]]) -> None:
    """A layer of two parameters has one. The calls grew with the square of the number of outputs."""
    assert costs["all outputs", 2][0] * 2 <= 270


def counted(rank: int) -> dict[str, list[int]]:
    benchmark("host_calls")  # which the other imports
    found: dict[str, list[int]] = benchmark("launches").counts()
    return found


def test_a_rank_launches_no_operation_for_each_parameter() -> None:
    """Under a launcher, beyond the plain module's. DDP runs some for each."""
    counts, _ = run_ranks(2, counted)
    beyond = {name: [own - plain for own, plain in zip(counts[name], counts["plain"], strict=True)] for name in counts}
    # Some write the rank's weight and digest into the first bucket, and read the other ranks': an all-gather less.
    assert beyond["unisono"][0] == beyond["unisono"][1] <= 17
    assert beyond["ddp"][1] > beyond["ddp"][0] > beyond["unisono"][0]


CALLS_OF_A_WAIT = 7


def calls_of_ranks(rank: int) -> dict[str, list[int]]:
    host_calls, ways = benchmark("host_calls"), benchmark("launches").WAYS
    return {
        name: [host_calls.calls_of(wrap(host_calls.layers(number, batch_norm=False))).calls for number in (20, 60)]
        for name, wrap in ways.items()
    }


def test_a_rank_makes_few_calls_more_than_ddp() -> None:
    """And none for a parameter. A rank that finds the sum there makes none of the calls of its wait."""
    counts, _ = run_ranks(2, calls_of_ranks)
    short, long = [own - ddp for own, ddp in zip(counts["unisono"], counts["ddp"], strict=True)]
    assert max(short, long) <= 303 + MORE
    assert abs(long - short) in (0, CALLS_OF_A_WAIT)
