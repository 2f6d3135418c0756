"""When two numbers count as the same."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.verification.compare import (
    Tolerance,
    decided,
    difference,
    gradient_rows,
    joined_numbers,
    largest,
    module_scales,
    rows_of,
)
from unisono.verification.report import Kind

CPU = torch.device("cpu")
EXACT = Tolerance(0.0)
nan, inf = math.nan, math.inf


ENTRIES = st.floats() | st.sampled_from([0.0, 1.0, inf, -inf, nan])  # the latter often on both sides


@pytest.mark.property
@given(st.lists(st.tuples(ENTRIES, ENTRIES), max_size=6))
def test_the_largest_difference_is_that_of_python(pairs: list[tuple[float, float]]) -> None:
    """NaN beside NaN, and an infinity beside itself, do not differ; beside a number they differ without bound."""
    gaps = [0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) for a, b in pairs]
    expected = max([inf if math.isnan(gap) else gap for gap in gaps], default=0.0)
    one, many = (torch.tensor([pair[side] for pair in pairs], dtype=torch.float64) for side in (0, 1))
    assert difference(one, many) == expected
    values = [abs(value) for value in one.tolist() if math.isfinite(value)]
    assert largest(one) == max(values, default=0.0)


@pytest.mark.parametrize(
    ("one", "many", "expected"),
    [([1, 2], [1, 5], 3.0), ([True], [False], 1.0), ([2**62], [2**62 + 1], 1.0), ([1 + 2j], [1 + 5j], 3.0)],
)
def test_the_largest_difference_of_other_types_and_layouts(one: list[Any], many: list[Any], expected: float) -> None:
    assert difference(torch.tensor(one), torch.tensor(many)) == expected
    assert difference(torch.tensor(one).to_sparse(), torch.tensor(many).to_sparse()) == expected


@pytest.mark.parametrize(
    ("dtypes", "rtol"),
    [
        ([torch.float64], 1e-10),
        ([torch.float64, torch.int64], 1e-10),
        ([torch.complex128], 1e-10),
        ([torch.float64, torch.float32], 1e-5),
        ([torch.float32, torch.bfloat16], 4e-2),
        ([torch.float16], 5e-3),
        ([torch.float8_e4m3fn, torch.float32], 0.25),
        ([torch.int64], 1e-5),
    ],
)
def test_the_coarsest_type_decides(dtypes: list[torch.dtype], rtol: float) -> None:
    tolerance = Tolerance.of(dtypes, CPU, None)
    assert tolerance.rtol == rtol
    assert tolerance.floor == (1e-12 if rtol == 1e-10 else rtol)
    assert Tolerance.of(dtypes, CPU, 0.5).rtol == 0.5
    assert Tolerance.of(dtypes, CPU, 0.0) == Tolerance(0.0)


def test_float32_is_coarser_where_its_products_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.verification.compare.rounds_float32", lambda device: True)
    assert Tolerance.of([torch.float32], CPU, None).rtol == 5e-3
    assert Tolerance.of([torch.float64], CPU, None).rtol == 1e-10


@pytest.mark.parametrize(
    ("tolerance", "one", "many", "same"),
    [
        (Tolerance(10.0), [3], [4], False),  # integers are exact whatever is allowed
        (Tolerance(10.0), [3.0], [4.0], True),
        (Tolerance(1e-5), [1000.0, 1e-9], [1000.0, 3e-3], True),  # of the largest value, not of each: what is
        (Tolerance(1e-6), [1000.0, 1e-9], [1000.0, 3e-3], False),  # left of numbers that cancelled is rounded
    ],
)
def test_tolerance(tolerance: Tolerance, one: list[float], many: list[float], same: bool) -> None:
    assert tolerance.same(torch.tensor(one), torch.tensor(many)) is same


X = torch.ones(2)


@pytest.mark.parametrize(
    ("one", "many", "expected"),
    [
        ({"a": X, "b": X}, {"a": X, "b": X + 1}, {"a": (False, ""), "b": (True, "")}),
        ({"a": X}, {"a": X[:1]}, {"a": (True, "float32 (2,) on one device, float32 (1,) on several")}),
        ({"a": X}, {"a": X.double()}, {"a": (True, "float32 (2,) on one device, float64 (2,) on several")}),
        ({"a": X}, {}, {"a": (True, "float32 (2,) on one device, none on several")}),
        ({}, {"a": X}, {"a": (True, "none on one device, float32 (2,) on several")}),
        ({"a": None}, {"a": None}, {}),
    ],
)
def test_tensors_are_matched_by_their_names(one: Any, many: Any, expected: dict[str, tuple[bool, str]]) -> None:
    found = rows_of("eval", Kind.OUTPUT, one, many, EXACT)
    assert {row.name: (row.differs, row.note) for row in found} == expected


@pytest.mark.parametrize(
    ("one", "many", "expected"),
    [
        (2.0, [1.0, 3.0], 2.0),
        (2.0, [1.0, 4.0], 2.5),
        (7, [4, 3], 7),  # a count
        (7, [7, 7], 7),  # the same everywhere
        (7, [7, 8], 15),
        (True, [True, True], True),
        (True, [True, False], False),
    ],
)
def test_one_number_a_replica(one: Any, many: list[Any], expected: Any) -> None:
    assert joined_numbers({"n": torch.tensor(one)}, {"n": torch.tensor(many)})["n"].item() == expected


def test_the_scales_of_buffers() -> None:
    """The largest value of the floating buffers of one module that the step updates."""
    buffers = {"a.mean": torch.tensor([1e-9]), "a.var": torch.tensor([2.0]), "a.count": torch.tensor(4), "b": X}
    buffers["a.mask"] = torch.tensor([-1e9])
    scales = {"a.mean": 2.0, "a.var": 2.0, "a.count": 4.0, "b": 1.0, "a.mask": 1e9}
    assert module_scales(buffers, {"a.mean", "a.var", "a.count"}) == scales


DOUBLE = Tolerance.of([torch.float64], CPU, None)


@pytest.mark.parametrize(
    ("own", "many", "nudged", "verdict"),
    [
        (1.0, 1.0 + 1e-11, 1.0, "same"),
        (1.0, 1.05, 1.0, "differs"),
        (1e-9, 1.05e-9, 1e-9, "differs"),  # relative to itself, however small
        (1e-14, 1.05e-14, 1e-14 * (1 + 1e-11), "differs"),  # below the floor, and no rounding error: a nudge moves it
        (1e-14, 1e-14 * (1 + 1e-9), 1e-14 * (1 + 1e-9), "same"),  # little, but as far as this
        (1e-17, -2e-17, 3e-17, "same"),  # zero but for rounding: a nudge changes all of it
        (0.0, 2e-17, 0.0, "same"),
        (1e-17, 1e-9, 3e-17, "differs"),  # zero on one device only
        (0.5, 0.6, 0.4, "not judged"),  # rounding moves as much: the kink of a ReLU
        (0.5, 0.9, 0.4, "differs"),
    ],
)
def test_gradients_in_float64(own: float, many: float, nudged: float, verdict: str) -> None:
    """N15: the largest gradient of all is 1."""

    def gradients(value: float) -> dict[str, torch.Tensor]:
        return {"a": torch.tensor([1.0], dtype=torch.float64), "b": torch.tensor([value, 0.0], dtype=torch.float64)}

    rows, moved = (
        [*gradient_rows("eval", gradients(own), gradients(other), DOUBLE, coarsely=False)] for other in (many, nudged)
    )
    same, found = decided(rows, [moved], DOUBLE)
    assert not same.differs
    assert (found.value, found.scale) == (own, own)
    assert verdict == ("not judged" if not found.judged else "differs" if found.differs else "same")


def test_coarse_values_may_differ_as_far_as_nudges_move_them() -> None:
    one = {"a": torch.tensor([10.0]), "b": torch.ones(2), "unused": None, "lost": torch.ones(1)}
    many = one | {"b": torch.ones(2) * 1.15, "lost": None}
    tolerance = Tolerance(1e-6)
    rows = [*gradient_rows("eval", one, many, tolerance, coarsely=True)]
    assert [(row.value, row.scale) for row in rows] == [(10.0, 10.0), (1.0, 10.0), (1.0, 10.0)]

    def verdicts(moved: float) -> list[str]:
        nudged = [*gradient_rows("eval", one, one | {"a": torch.tensor([10.0 + moved])}, tolerance, coarsely=True)]
        judged = decided(rows, [nudged], tolerance, coarsely=True)
        return ["not judged" if not row.judged else "differs" if row.differs else "same" for row in judged]

    assert verdicts(0.0) == ["same", "differs", "differs"]
    assert verdicts(0.1) == ["same", "same", "differs"]  # as far as any gradient moves
    rows = [*gradient_rows("eval", one, many | {"b": torch.ones(2) * 2.5}, tolerance, coarsely=True)]
    assert verdicts(0.5) == ["same", "differs", "differs"]
    assert verdicts(5.0) == ["same", "not judged", "differs"]  # a tenth of the largest at most
