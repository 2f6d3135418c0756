"""The report, and the table that it is printed as."""

import dataclasses
import math
import re
from typing import Any

import pytest

from unisono.verification.report import Cause, Finding, Kind, Report, Row

SAME = Row("training", Kind.OUTPUT, "", (9, 2), 2.0, 2.0, 1e-7, 2e-5)
DIFFERS = Row("training", Kind.GRADIENT, "linear.weight", (2, 5), 1.0, 2.0, 0.5, 2e-5)
LOST = Row("eval", Kind.BUFFER, "norm.mean", (5,), 2.0, 2.0, math.inf, 0.0, "gone")
UNJUDGED = Row("eval", Kind.GRADIENT, "kink.weight", (5,), 1.0, 1.0, 0.3, 1e-5, judged=False, precision="float32")
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
            report(SAME, UNJUDGED),
            (False, False, None, None),
            ["same: 1 comparisons, in training", "not judged: 1 values, in eval"],
        ),
        (
            report(SAME, findings=(FOUND,)),  # a batch norm that uses a replica's rows, whatever the numbers
            (False, False, "linear", Cause.ROWS_INTERACT),
            ["training: differs, first at linear (Linear): because.", "differs: 1 comparisons are the same"],
        ),
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
    assert found.differences == tuple(row for row in found.rows if row.judged and row.difference > row.allowed)
    assert [line for line in str(found).splitlines() if line in lines] == lines


def test_a_difference_that_is_no_number_differs() -> None:
    assert dataclasses.replace(SAME, difference=math.nan).differs


def test_the_table_is_aligned() -> None:
    lines = str(report(SAME, DIFFERS, LOST, UNJUDGED)).splitlines()
    assert lines[2:12] == [
        "                             shape       value       scale  difference     allowed",
        "training",
        "  output                     9 x 2    2.00e+00    2.00e+00     1.0e-07     2.0e-05",
        "  gradient of linear.weight  2 x 5    1.00e+00    2.00e+00     5.0e-01     2.0e-05  differs",
        "eval",
        "  buffer norm.mean           5        2.00e+00    2.00e+00         inf     0.0e+00  differs: gone",
        "eval, in float32",
        "  gradient of kink.weight    5        1.00e+00    1.00e+00     3.0e-01     1.0e-05  not judged",
        "",
        "differs: the difference is above allowed, which is relative to the scale. Each is the largest of its tensor",
    ]
    assert "above allowed" not in str(report(SAME))


@pytest.mark.parametrize(("differing", "shown"), [(0, 3), (1, 6), (50, 6)])
def test_of_hundreds_of_rows_the_worst_are_shown_and_the_others_counted(differing: int, shown: int) -> None:
    rows = [
        Row("training", Kind.GRADIENT, f"p{i}", (2,), 1.0, 1.0, i * 1e-8 if i < 200 - differing else float(i), 1e-5)
        for i in range(200)
    ]
    lines = [line for line in str(report(*rows)).splitlines() if "gradient" in line]
    assert [line.split()[2] for line in lines[:-1]] == [f"p{199 - i}" for i in range(shown)]
    counted = "all the same" if differing <= 6 else f"{differing - 6} of which differ"
    assert lines[-1] == f"  {200 - shown} more gradients, {counted}"


def test_where_nothing_is_compared_there_is_no_table() -> None:
    drawn = report(findings=(DRAWN, dataclasses.replace(DRAWN, mode="eval")))
    assert repr(drawn) == "Report(not compared: training and eval; first at 0 (Dice))"
    assert str(drawn).splitlines() == [
        "Net on cpu, and on 2 replicas",
        "",
        "training and eval: not compared, because of 0 (Dice): dice.",
        "a note",
        "not compared: training and eval",
    ]
    assert "<table>" not in drawn._repr_html_()
    assert "scale" not in str(report())


def test_its_repr_is_one_line() -> None:
    """For the last line of a cell in a notebook: the table has been printed."""
    assert repr(report(SAME)) == "Report(same: 1 comparisons, in training)"
    both = report(SAME, DIFFERS, LOST, findings=(EXPECTED, FOUND))
    assert repr(both) == "Report(differs: 2 of 3 comparisons, in training and eval; first at linear (Linear))"
    own = "; first at the model itself (Net))"
    assert repr(report(LOST, findings=(EXPECTED,))) == f"Report(differs, as expected: 1 of 1 comparisons, in eval{own}"


def test_a_notebook_shows_a_table_with_what_differs_first() -> None:
    """Below the closing line; without colours, which a dark notebook would have otherwise."""
    shown = report(SAME, DIFFERS, LOST, findings=(EXPECTED, FOUND))._repr_html_()
    closing = "differs: 2 of 3 comparisons, in training and eval; first at linear (Linear)"
    assert shown.startswith(f"<details open><summary><b>{closing}</b></summary><p>Net on cpu, and on 2 replicas</p>")
    assert "<p>training: differs, first at linear (Linear): because.</p><p>a note</p><table>" in shown
    cells = [re.findall(r"<t[hd] [^>]*>([^<]*)</t[hd]>", line) for line in shown.split("<tr>")[1:]]
    assert cells == [
        ["mode", "in", "module", "compared", "shape", "result", "value", "scale", "difference", "allowed"],
        ["eval", "", "norm", "buffer mean", "5", "differs: gone", "2.00e+00", "2.00e+00", "inf", "0.0e+00"],
        [
            "training",
            "",
            "linear",
            "gradient of weight",
            "2 x 5",
            "differs",
            *["1.00e+00", "2.00e+00", "5.0e-01", "2.0e-05"],
        ],
        ["training", "", "", "output", "9 x 2", "same", "2.00e+00", "2.00e+00", "1.0e-07", "2.0e-05"],
    ]
    assert "color" not in shown


def test_what_has_been_printed_is_folded_in_a_notebook() -> None:
    assert dataclasses.replace(report(SAME), is_printed=True)._repr_html_().startswith("<details><summary>")


@pytest.mark.parametrize(("differing", "counted"), [(0, "all the same"), (50, "30 of which differ")])
def test_a_notebook_shows_the_first_of_many_rows(differing: int, counted: str) -> None:
    rows = [Row("eval", Kind.GRADIENT, f"p{i}", (2,), 1.0, 1.0, float(i >= 200 - differing), 1e-5) for i in range(200)]
    shown = report(*rows)._repr_html_()
    assert shown.count("<tr>") == 21
    assert f"<p>180 more comparisons, {counted}</p></details>" in shown


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [
        (Kind.OUTPUT, ".a.b", ["", "output .a.b"]),
        (Kind.GRADIENT, "0.net.weight", ["0.net", "gradient of weight"]),
        (Kind.PARAMETER, "scale", ["", "parameter scale"]),
        (Kind.ATTRIBUTE, "seen['a.b'] (in <lambda>)", ["", "attribute seen[&#x27;a.b&#x27;] (in &lt;lambda&gt;)"]),
    ],
)
def test_a_notebook_shows_the_module_of_each_name(kind: Kind, name: str, place: list[str]) -> None:
    shown = report(Row("eval", kind, name))._repr_html_()
    assert re.findall(r"<td [^>]*>([^<]*)</td>", shown)[2:4] == place
