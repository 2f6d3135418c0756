"""Placements: part and join are inverse where that makes sense, and adjoint always."""

import pytest
import torch

from unisono.primitives.placements import PaddedShard, Placement, Replicate, Shard, Single, Stack, WeightedSum

PLACEMENTS = [
    (Shard(0, (2, 0, 3)), (5, 4), [(2, 4), (0, 4), (3, 4)]),
    (Shard(-1, (1, 2, 1)), (3, 4), [(3, 1), (3, 2), (3, 1)]),
    (PaddedShard(Shard(0, (2, 0, 3)), (1,), ((2,), (0,), (4,)), 0.0), (5, 4), [(2, 2), (0, 0), (3, 4)]),
    (
        PaddedShard(Shard(1, (1, 1, 1)), (0, 2), ((2, 1), (3, 1), (1, 2)), 0.0),
        (3, 3, 2),
        [(2, 1, 1), (3, 1, 1), (1, 1, 2)],
    ),
    (Stack(), (3,), [(), (), ()]),
    (Replicate(), (2, 2), [(2, 2)] * 3),
    (Single(1), (4,), [None, (4,), None]),
    (WeightedSum((0.5, 0.0, 2.0)), (3,), [(3,), None, (3,)]),
    (WeightedSum((1, 1, 1)), (), [(), (), ()]),
]


@pytest.mark.parametrize(
    ("placement", "shape", "part_shapes"), PLACEMENTS, ids=lambda value: str(value).split(" object at")[0]
)
def test_part_and_join_are_adjoint(placement: Placement, shape, part_shapes):
    """<join(parts), t> equals the sum of <part_i, part(t, i)>: so one placement serves forward and backward."""
    t = torch.randn(shape, dtype=torch.float64)
    parts = [None if s is None else torch.randn(s, dtype=torch.float64) for s in part_shapes]
    of_t = [placement.part(t, i) for i in range(3)]
    assert [None if p is None else tuple(p.shape) for p in of_t] == part_shapes
    right = sum((p * q).sum() for p, q in zip(parts, of_t, strict=True) if p is not None)
    torch.testing.assert_close((placement.join(parts) * t).sum(), right, rtol=1e-14, atol=1e-14)


def test_what_is_filled_in_is_a_constant_and_no_part_of_gradients():
    placement = PaddedShard(Shard(0, (1, 1)), (1,), ((1,), (3,)), 7.0)
    parts = [torch.tensor([[1, 2]])[:, :1], torch.tensor([[3, 4, 5]])]
    assert placement.join(parts).tolist() == [[1, 7, 7], [3, 4, 5]]
    assert placement.of_gradients().join(parts).tolist() == [[1, 0, 0], [3, 4, 5]]


def test_a_weight_of_one_keeps_integers():
    assert WeightedSum((1, 1)).join([torch.tensor(2), torch.tensor(3)]).dtype == torch.int64


def test_sums_are_in_replica_order():
    big, small = torch.tensor(1e8), torch.tensor(-1e8)
    one = torch.tensor(1.0)
    assert Replicate().join([big, small, one]).item() == 1
    assert Replicate().join([big, one, small]).item() == 0  # float32 cannot tell 1e8 + 1 from 1e8
