"""The report, and the table that it is printed as."""

import dataclasses
import math
from typing import Any

import pytest

from unisono.verification.report import Cause, Finding, Kind, Report, Row

SAME = Row("training", Kind.OUTPUT, "", (9, 2), 2.0, 1e-7, 2e-5)
DIFFERS = Row("training", Kind.GRADIENT, "linear.weight", (2, 5), 2.0, 0.5, 2e-5)
LOST = Row("eval", Kind.BUFFER, "norm.mean", (5,), 2.0, math.inf, 0.0, "gone")
FOUND = Finding("training", "linear", "Linear", Cause.ROWS_INTERACT, "because.")
EXPECTED = Finding("eval", "", "Net", Cause.ONE_NUMBER_A_SHARD, "asked for.", explained=True)
DRAWN = Finding("training", "0", "Dice", Cause.RANDOM_NUMBERS, "dice.")


def report(*rows: Row, findings: tuple[Finding, ...] = ()) -> Report:
    return Report("Net on cpu, and on 2 replicas", rows, findings, ("a note",))


@pytest.mark.parametrize(
    ("found", "verdict", "lines"),
    [
        (report(SAME), (True, False, None, None), ["a note", "same: 1 comparisons, in training"]),
        (
            report(SAME, DIFFERS, LOST, findings=(EXPECTED, FOUND)),
            (False, False, "linear", Cause.ROWS_INTERACT),  # what is not explained comes first
            [
                "eval: differs, as expected, first at the model itself (Net): asked for.",
                "training: differs, first at linear (Linear): because.",
                "differs: 2 of 3 comparisons, in training and eval",
            ],
        ),
        (
            report(LOST, findings=(EXPECTED,)),
            (False, True, "", Cause.ONE_NUMBER_A_SHARD),
            ["differs, as expected: 1 of 1 comparisons, in eval"],
        ),
        (
            report(dataclasses.replace(SAME, mode="eval"), findings=(DRAWN,)),
            (False, False, "0", Cause.RANDOM_NUMBERS),
            [
                "training: not compared, because of 0 (Dice): dice.",
                "same: 1 comparisons, in eval",
                "not compared: training",
            ],
        ),
        (
            report(LOST, findings=(DRAWN, EXPECTED)),
            (False, False, "0", Cause.RANDOM_NUMBERS),
            ["differs: 1 of 1 comparisons, in eval", "not compared: training"],
        ),
        (
            report(DIFFERS, findings=(FOUND, dataclasses.replace(FOUND, mode="eval"))),
            (False, False, "linear", Cause.ROWS_INTERACT),
            ["training and eval: differs, first at linear (Linear): because."],
        ),
    ],
)
def test_the_verdict(found: Report, verdict: tuple[Any, ...], lines: list[str]) -> None:
    assert (found.same, found.explained, found.first_module, found.cause) == verdict
    assert found.differences == tuple(row for row in found.rows if row.difference > row.allowed)
    assert [line for line in str(found).splitlines() if line in lines] == lines


def test_a_difference_that_is_no_number_differs() -> None:
    assert dataclasses.replace(SAME, difference=math.nan).differs


def test_the_table_is_aligned() -> None:
    lines = str(report(SAME, DIFFERS, LOST)).splitlines()
    assert lines[2:8] == [
        "                             shape  largest value  difference  allowed",
        "training",
        "  output                     9 x 2       2.00e+00     1.0e-07  2.0e-05",
        "  gradient of linear.weight  2 x 5       2.00e+00     5.0e-01  2.0e-05  differs",
        "eval",
        "  buffer norm.mean           5           2.00e+00         inf  0.0e+00  differs: gone",
    ]


@pytest.mark.parametrize(("differing", "shown"), [(0, 3), (1, 6), (50, 6)])
def test_of_hundreds_of_rows_the_worst_are_shown_and_the_others_counted(differing: int, shown: int) -> None:
    rows = [
        Row("training", Kind.GRADIENT, f"p{i}", (2,), 1.0, i * 1e-8 if i < 200 - differing else float(i), 1e-5)
        for i in range(200)
    ]
    lines = [line for line in str(report(*rows)).splitlines() if "gradient" in line]
    assert [line.split()[2] for line in lines[:-1]] == [f"p{199 - i}" for i in range(shown)]
    counted = "all the same" if differing <= 6 else f"{differing - 6} of which differ"
    assert lines[-1] == f"  {200 - shown} more gradients, {counted}"


def test_its_repr_is_one_line() -> None:
    """For the last line of a cell in a notebook: the table has been printed."""
    assert repr(report(SAME)) == "Report(same: 1 comparisons, in training)"
    both = report(SAME, DIFFERS, LOST, findings=(EXPECTED, FOUND))
    assert repr(both) == "Report(differs: 2 of 3 comparisons, in training and eval; first at linear (Linear))"
    own = "; first at the model itself (Net))"
    assert repr(report(LOST, findings=(EXPECTED,))) == f"Report(differs, as expected: 1 of 1 comparisons, in eval{own}"
