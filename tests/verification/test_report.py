"""The report, and the table that it is printed as."""

import dataclasses
import math

import pytest

from manyhands.verification.report import Cause, Finding, Kind, Report, Row

SAME = Row("training", Kind.OUTPUT, "", (9, 2), 2.0, 1e-7, 2e-5)
DIFFERS = Row("training", Kind.GRADIENT, "linear.weight", (2, 5), 2.0, 0.5, 2e-5)
LOST = Row("eval", Kind.BUFFER, "norm.mean", (5,), 2.0, math.inf, 0.0, "gone")
FOUND = Finding("training", "linear", "Linear", Cause.ROWS_INTERACT, "because.")
EXPECTED = Finding("eval", "", "Net", Cause.RANDOM_NUMBERS, "dice.", explained=True)


def report(*rows: Row, findings: tuple[Finding, ...] = ()) -> Report:
    return Report("Net on cpu, and on 2 replicas", rows, findings, ("a note",))


def test_nothing_differs() -> None:
    found = report(SAME)
    assert (found.same, found.explained, found.differences) == (True, False, ())
    assert (found.first_module, found.cause) == (None, None)
    assert str(found).splitlines()[-2:] == ["a note", "same: 1 comparisons, in training"]


def test_what_is_not_explained_comes_first() -> None:
    found = report(SAME, DIFFERS, LOST, findings=(EXPECTED, FOUND))
    assert (found.same, found.explained) == (False, False)
    assert found.differences == (DIFFERS, LOST)
    assert (found.first_module, found.cause) == ("linear", Cause.ROWS_INTERACT)
    text = str(found)
    assert "eval: differs, as expected, first at the model itself (Net): dice." in text
    assert "training: differs, first at linear (Linear): because." in text
    assert text.endswith("differs: 2 of 3 comparisons, in training and eval")


def test_all_of_it_explained() -> None:
    found = report(LOST, findings=(EXPECTED,))
    assert (found.same, found.explained) == (False, True)
    assert (found.first_module, found.cause) == ("", Cause.RANDOM_NUMBERS)
    assert str(found).endswith("differs, as expected: 1 of 1 comparisons, in eval")


def test_the_table_is_aligned() -> None:
    lines = str(report(SAME, DIFFERS, LOST)).splitlines()
    assert lines[2:8] == [
        "                             shape  largest value  difference  allowed",
        "training",
        "  output                     9 x 2       2.00e+00     1.0e-07  2.0e-05",
        "  gradient of linear.weight  2 x 5       2.00e+00     5.0e-01  2.0e-05  differs",
        "eval",
        "  buffer norm.mean           5                                          differs: gone",
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


def test_what_is_the_same_in_both_modes_is_said_once() -> None:
    both = (FOUND, dataclasses.replace(FOUND, mode="eval"))
    assert "training and eval: differs, first at linear (Linear): because." in str(report(DIFFERS, findings=both))


def test_a_report_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        report(SAME).rows = ()  # type: ignore[misc]
    assert not Row("eval", Kind.LOSS, "", (), 0.0, 0.0, 0.0).differs
    assert Row("eval", Kind.LOSS, "", (), 1.0, math.nan, 1.0).differs
