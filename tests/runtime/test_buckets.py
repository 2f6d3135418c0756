"""Flat buckets: how tensors are divided, and what a bucket holds."""

import pytest
import torch

from unisono.runtime.buckets import Bucket, BucketPlan, Form, buckets_of, is_plain


def forms(*tensors: torch.Tensor) -> dict[int, Form]:
    return {number: Form.of(tensor) for number, tensor in enumerate(tensors)}


def numbers(buckets: tuple[Bucket, ...]) -> list[list[int]]:
    return [[number for number, _ in bucket.items] for bucket in buckets]


# ---- plans ---------------------------------------------------------------------------------------


FLOATS, ONE, LARGE, HALF = torch.empty(100), torch.empty(1), torch.empty(300), torch.empty(3, dtype=torch.float16)


@pytest.mark.parametrize(
    ("tensors", "full_bytes", "expected"),
    [
        ([], 800, []),
        ([FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, HALF], 800, [[0, 1], [2, 3], [4], [5]]),
        ([HALF, LARGE, LARGE, HALF], 1000, [[1], [2], [0, 3]]),  # a bucket that is not full holds up no other
        ([ONE, LARGE, ONE], 100, [[0, 1], [2]]),  # a tensor larger than a bucket is not split
    ],
)
def test_tensors_are_divided_by_dtype_and_size(tensors, full_bytes, expected):
    """In the order given; buckets are in the order in which they become full."""
    buckets = buckets_of(forms(*tensors), full_bytes)
    assert numbers(buckets) == expected
    for bucket in buckets:
        assert bucket.num_entries == sum(tensors[number].numel() for number, _ in bucket.items)


@pytest.mark.parametrize("by_number", [list, lambda tensors: dict(enumerate(tensors))])
def test_a_bucket_holds_copies_of_its_tensors_strides_included(by_number):
    tensors = [torch.randn(2, 3), torch.randn(3, 4).t(), torch.randn(6)[::2], torch.tensor(1.5), torch.empty(0)]
    (bucket,) = buckets_of(forms(*tensors))
    flat = bucket.flat(by_number(tensors))
    view = torch.cat([torch.zeros(5), flat])[5:]
    for whole in (flat, view):
        for number, piece in bucket.pieces(whole).items():
            assert torch.equal(piece, tensors[number])
            assert piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert bucket.pieces(flat)[1].stride() == tensors[1].stride()


def test_the_buckets_of_a_modules_parameters() -> None:
    """The last ones first; those that fill a bucket alone, and what cannot be flattened, in buckets of their own."""

    class Own(torch.nn.Parameter):
        pass

    parameters = [FLOATS, LARGE, HALF, Own(torch.empty(2)), FLOATS, ONE]
    plan = BucketPlan.of_replicas(parameters, 800)
    assert plan.numbers == [(5, 4, 0), (2,), (1,), (3,)]
    assert [form is None for form in plan.forms] == [False, False, False, True]
    assert plan.sources == [torch.device("cpu")]
    assert plan.part(0, [True] * 3) is plan.forms[0]
    part = plan.part(0, [True, False, True])
    assert part.numbers == (5, 0)
    assert plan.part(0, (True, False, True)) is part


def test_plain_tensors() -> None:
    class Own(torch.Tensor):
        pass

    assert is_plain(torch.ones(2))
    assert is_plain(torch.nn.Parameter(torch.ones(2)))
    assert not is_plain(torch.ones(2).as_subclass(Own))
    assert not is_plain(torch.ones(2, 2).to_sparse())
    assert not is_plain(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))
