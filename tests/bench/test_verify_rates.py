"""benchmarks/verify_rates.py: programs of both kinds are as its tables say, and a false verdict is counted as one."""

from dataclasses import replace
from types import ModuleType

import pytest

from helpers.benchmarks import benchmark


@pytest.fixture
def rates() -> ModuleType:
    for imported in ("verify_models", "verify_programs"):
        benchmark(imported)
    return benchmark("verify_rates")


def test_there_are_60_programs_of_each_kind(rates: ModuleType) -> None:
    names = [program.name for program in (*rates.RIGHT, *rates.FAULTY)]
    assert (len(rates.RIGHT), len(rates.FAULTY), len(set(names))) == (60, 60, 120)


def test_the_truth_is_confirmed_without_verify(rates: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not what their table says are not confirmed."""
    monkeypatch.setattr(rates.unisono, "verify", lambda *_, **__: pytest.fail("asks verify"))
    for programs, faulty in ((rates.RIGHT, False), (rates.FAULTY, True)):
        for program in programs[:3]:
            for as_said in (True, False):
                known = rates.truth(program, faulty is as_said, 0)
                outcome = rates.Outcome(program, faulty is as_said, "same", False, 0.0, known)
                assert outcome.truth_fails is not as_said, program.name


def test_a_fault_that_is_not_judged_counts_as_a_false_same(rates: ModuleType) -> None:
    fault = rates.Outcome(rates.FAULTY[0], True, "not judged", False, 0.0, None)
    right = replace(fault, program=rates.RIGHT[0], faulty=False)
    last = rates.page([fault, replace(fault, verdict="different"), right, replace(right, verdict="different")], 0)
    assert last.splitlines()[-1] == (
        "false same: 1 of 2; false different: 1 of 2; right models with values not judged: 1"
    )
