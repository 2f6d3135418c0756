"""When two numbers count as the same."""

import math
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from unisono.primitives import pytree
from unisono.verification.compare import (
    Tolerance,
    allowing,
    buffer_rows,
    difference,
    gradient_rows,
    in_one_number,
    largest,
    loss_row,
    output_rows,
    sensitivity,
    tensors_in,
)

CPU = torch.device("cpu")
EXACT = Tolerance(0.0, 0.0)
nan, inf = math.nan, math.inf


@pytest.mark.parametrize(
    ("one", "many", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([1.0, nan], [1.0, nan], 0.0),
        ([1.0, nan], [1.5, nan], 0.5),
        ([1.0, nan], [1.0, 2.0], inf),
        ([1.0, 2.0], [1.0, nan], inf),
        ([inf, -inf], [inf, -inf], 0.0),
        ([inf, 0.0], [-inf, 0.0], inf),
        ([inf, 0.0], [3.0, 0.0], inf),
        ([], [], 0.0),
        ([1, 2], [1, 5], 3.0),
        ([True, False], [True, True], 1.0),
        ([2**62], [2**62 + 1], 1.0),
        ([1 + 2j], [1 + 5j], 3.0),
    ],
)
def test_the_largest_difference(one: list[Any], many: list[Any], expected: float) -> None:
    assert difference(torch.tensor(one), torch.tensor(many)) == expected


def test_sparse_and_empty_tensors() -> None:
    one = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert difference(one.to_sparse(), (one * 2).to_sparse()) == 2.0
    assert largest(one.to_sparse()) == 2.0
    assert largest(torch.zeros(0)) == 0.0
    assert largest(torch.tensor([nan, inf])) == 0.0


@pytest.mark.parametrize(
    ("dtypes", "rtol"),
    [
        ([torch.float64], 1e-12),
        ([torch.float64, torch.int64], 1e-12),
        ([torch.complex128], 1e-12),
        ([torch.float64, torch.float32], 1e-5),
        ([torch.float32, torch.bfloat16], 4e-2),
        ([torch.float16], 5e-3),
        ([torch.float8_e4m3fn, torch.float32], 0.25),
        ([torch.int64], 1e-5),
    ],
)
def test_the_coarsest_type_decides(dtypes: list[torch.dtype], rtol: float) -> None:
    tolerance = Tolerance.of(dtypes, CPU, None, None)
    assert (tolerance.rtol, tolerance.atol) == (rtol, 0.0)
    assert Tolerance.of(dtypes, CPU, 0.5, 0.25) == Tolerance(0.5, 0.25)


def test_float32_is_coarser_where_its_products_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.runtime.devices.rounds_float32", lambda device: True)
    assert Tolerance.of([torch.float32], CPU, None, None).rtol == 5e-3
    assert Tolerance.of([torch.float64], CPU, None, None).rtol == 1e-12


def test_integers_are_exact_whatever_is_allowed() -> None:
    tolerance = Tolerance(10.0, 10.0)
    assert not tolerance.same(torch.tensor([3]), torch.tensor([4]))
    assert tolerance.same(torch.tensor([3.0]), torch.tensor([4.0]))


def test_tolerance_is_of_the_largest_value_not_of_each() -> None:
    """What is left of numbers that cancelled has their rounding error."""
    one, many = torch.tensor([1000.0, 1e-9]), torch.tensor([1000.0, 3e-3])
    assert Tolerance(1e-5, 0.0).same(one, many)
    assert not Tolerance(1e-6, 0.0).same(one, many)


def rows(one: Any, many: Any) -> list[tuple[str, bool, str]]:
    return [(row.name, row.differs, row.note) for row in output_rows("eval", one, many, EXACT)]


def test_outputs_are_matched_by_their_paths() -> None:
    x = torch.ones(2)
    assert rows(x, x) == [("", False, "")]
    assert rows({"a": (x, [x])}, {"a": (x, [x + 1])}) == [("['a'][0]", False, ""), ("['a'][1][0]", True, "")]
    assert rows((x, x), (x,)) == [("[0]", False, ""), ("[1]", True, "on one device only")]
    assert rows((x,), (x, x)) == [("[0]", False, ""), ("[1]", True, "on several devices only")]
    assert rows(x, x[:1]) == [("", True, "(2,) on one device, (1,) on several")]
    assert rows(x, x.double()) == [("", True, "torch.float32 on one device, torch.float64 on several")]
    assert rows((x, "a", None), (x, "a", None)) == [("[0]", False, "")]
    assert rows((x, "a"), (x, "b")) == [("[0]", False, ""), ("[1]", True, "'a' on one device, 'b' on several")]
    assert rows(x, None) == [("", True, "torch.float32 tensor on one device, None on several")]


@pytest.mark.parametrize(
    ("one", "many", "differs"),
    [
        (2.0, [1.0, 3.0], False),
        (2.0, [1.0, 4.0], True),
        (7, [4, 3], False),  # a count
        (7, [7, 7], False),  # the same everywhere
        (7, [7, 8], True),
        (True, [True, True], False),
        (True, [True, False], True),
    ],
)
def test_one_number_a_replica(one: Any, many: list[Any], differs: bool) -> None:
    (row,) = output_rows("eval", {"n": one}, {"n": many}, EXACT)
    assert (row.name, row.differs) == ("['n']", differs)
    assert str(many) in row.note
    (row,) = output_rows("eval", torch.tensor(one), torch.tensor(many), EXACT)
    assert row.differs is differs


def test_a_scalar_of_several_replicas_keeps_its_gradient() -> None:
    numbers = torch.tensor([1.0, 3.0], requires_grad=True)
    in_one_number(torch.tensor(2.0), numbers).backward()
    assert numbers.grad is not None
    assert numbers.grad.tolist() == [0.5, 0.5]


def test_gradients_are_held_against_the_largest_of_all() -> None:
    one = {"weight": torch.tensor([100.0]), "bias": torch.tensor([1e-6]), "unused": None, "lost": torch.ones(2)}
    many = {"weight": torch.tensor([100.0]), "bias": torch.tensor([-3e-6]), "unused": None, "lost": None}
    weight, bias, lost = gradient_rows("eval", one, many, Tolerance(1e-6, 0.0))
    assert (weight.largest, weight.differs, bias.largest, bias.differs) == (100.0, False, 100.0, False)
    assert (lost.differs, lost.shape, lost.note) == (True, (2,), "a gradient on one device, none on several")
    (_, _, found) = gradient_rows("eval", many, one, EXACT)
    assert found.note == "a gradient on several, none on one device"


def test_gradients_may_differ_as_far_as_nudges_move_them() -> None:
    one = {"a": torch.tensor([10.0]), "b": torch.ones(2), "unused": None, "lost": torch.ones(1)}
    nudged = {"a": torch.tensor([10.1]), "b": torch.ones(2), "unused": None, "lost": None}
    moved = sensitivity(one, nudged)
    assert moved == pytest.approx(0.01, rel=1e-4)
    rows = list(gradient_rows("eval", one, one | {"b": torch.ones(2) * 1.15, "lost": None}, Tolerance(1e-6, 0.0)))
    assert [row.differs for row in rows] == [False, True, True]
    assert [row.differs for row in allowing(rows, moved)] == [False, False, True]
    assert [row.allowed for row in allowing(rows, 5.0)] == pytest.approx([1.0] * 3)  # a tenth of the largest at most
    assert allowing(rows, 0.0) == rows
    assert sensitivity({"a": None}, {"a": None}) == sensitivity({}, {}) == 0.0


def test_buffers_are_held_against_the_largest_of_their_module() -> None:
    one = {
        "a.mean": torch.tensor([1e-9]),
        "a.var": torch.tensor([2.0]),
        "a.count": torch.tensor(4),
        "b.x": torch.ones(1),
    }
    many = {name: buffer + 1e-7 if buffer.is_floating_point() else buffer + 1 for name, buffer in one.items()}
    found = {row.name: row for row in buffer_rows("eval", one, many, Tolerance(1e-6, 0.0))}
    assert [found[name].largest for name in one] == [2.0, 2.0, 4.0, 1.0]
    assert [found[name].differs for name in one] == [False, False, True, False]


def test_the_loss_is_held_against_the_outputs() -> None:
    one, many = torch.tensor(0.0), torch.tensor(1e-4)
    assert loss_row("eval", one, many, 100.0, Tolerance(1e-5, 0.0)).differs is False
    assert loss_row("eval", one, many, 1.0, Tolerance(1e-5, 0.0)).differs is True


def test_tensors_in_batches_of_other_kinds() -> None:
    packed = pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    assert [(path, tuple(tensor.shape)) for path, tensor in tensors_in({"x": packed})] == [
        ("['x'].data", (2, 4, 3)),
        ("['x'].lengths", (2,)),
    ]
    doubled = pytree.map_all_tensors(lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor, (packed, 1))
    assert doubled[0].data.unique().tolist() == [2.0]
    assert doubled[0].batch_sizes is packed.batch_sizes
    assert doubled[1] == 1
