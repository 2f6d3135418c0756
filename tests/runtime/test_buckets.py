"""Flat buckets: how tensors are divided, what a bucket holds, how one is filled, and what a fingerprint shows."""

import pytest
import torch

from unisono.runtime.buckets import Bucket, BucketFiller, Form, buckets_of, fingerprint, is_plain


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


def test_devices_have_buckets_of_their_own_only_where_forms_name_them():
    cpu, meta = (torch.empty(3, device=device) for device in ("cpu", "meta"))
    assert numbers(buckets_of(forms(cpu, meta))) == [[0, 1]]
    divided = buckets_of({number: Form.of(tensor, tensor.device) for number, tensor in enumerate((cpu, meta, cpu))})
    assert numbers(divided) == [[1], [0, 2]], "by the last tensor"
    assert [bucket.device for bucket in divided] == [meta.device, cpu.device]


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


# ---- filling -------------------------------------------------------------------------------------


def test_full_buckets_are_handed_out_once_and_in_order():
    like = [torch.empty(300) for _ in range(4)]
    filling = BucketFiller(buckets_of(forms(*like), full_bytes=1000))
    assert filling.numbers == [0, 1, 2, 3]
    assert filling.add(1, torch.full((300,), 1.0))
    assert not list(filling.full()), "the first is missing"
    assert filling.add(0, torch.full((300,), 0.0))
    assert [flat[0].item() for _, flat in filling.full()] == [0.0, 1.0]
    assert not list(filling.full())
    assert filling.add(3, torch.full((300,), 3.0))
    filling.fill_up()
    flats = [flat for _, flat in filling.full()]
    assert [flat[0].item() for flat in flats] == [0.0, 3.0]
    assert [flat[-1].item() for flat in flats] == [0.0, 1.0], "which of them were given"
    assert filling.order == [1, 0, 3]


def test_missing_tensors_are_zero_and_flagged():
    like = [torch.empty(2, 2).t(), torch.empty(3), torch.empty(())]
    filling = BucketFiller(buckets_of(forms(*like)))
    assert filling.add(1, torch.tensor([1.0, 2.0, 3.0]))
    filling.fill_up()
    ((bucket, flat),) = filling.full()
    assert flat.tolist() == [0, 0, 0, 0, 1, 2, 3, 0, 0, 1, 0]
    assert bucket.pieces(flat)[1].tolist() == [1, 2, 3]


def test_which_tensors_are_added():
    filling = BucketFiller(buckets_of(forms(torch.empty(3), torch.empty(3)), full_bytes=1))
    assert not filling.add(2, torch.ones(3))
    assert not filling.add(0, torch.ones(3, dtype=torch.float64))
    assert not filling.add(0, torch.ones(1, 3))
    assert filling.add(0, torch.ones(6, requires_grad=True)[::2])
    assert not filling.add(0, torch.ones(3)), "a second one"
    assert len(list(filling.full())) == 1
    assert not filling.add(0, torch.ones(3)), "its bucket has been handed out"


# ---- fingerprints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex128, torch.int8, torch.bool]
)
@pytest.mark.parametrize("count", [1, 3, 1024, 5001])
def test_a_fingerprint_tells_tensors_apart(dtype, count):
    flat = (torch.arange(count) % 7 + 1).to(dtype)
    before = fingerprint(flat)
    assert before.shape == ()
    assert torch.equal(fingerprint(flat.clone()), before)
    for place in {0, count // 2, count - 1}:
        other = flat.clone()
        other[place] = 0
        assert not torch.equal(fingerprint(other), before)
    if count > 1 and dtype is not torch.bool:
        exchanged = flat.clone()
        exchanged[[0, 1]] = flat[[1, 0]]
        assert not torch.equal(fingerprint(exchanged), before)


def test_a_fingerprint_sees_every_bit():
    flat = torch.zeros(9, dtype=torch.int32)
    seen = {fingerprint(flat).item()}
    for place in range(9):
        for bit in range(32):
            other = flat.clone()
            other[place] = 1 << bit if bit < 31 else -(1 << 31)
            seen.add(fingerprint(other).item())
    assert len(seen) == 1 + 9 * 32


@pytest.mark.parametrize(
    "view",
    [
        *(torch.t, lambda t: t[:, 0], lambda t: t[:, :1].expand(-1, 4), lambda t: t[0, 0]),
        *(lambda t: t.to(torch.cfloat).conj(), lambda t: (t * 1j).conj().imag),
        lambda t: t[:1, 2],  # torch calls it contiguous, with the stride of the row: RuntimeError in a step with retry
    ],
)
def test_a_fingerprint_is_that_of_a_copy_without_strides(view):
    tensor = view(torch.arange(12.0).view(4, 3))
    assert torch.equal(fingerprint(tensor), fingerprint(tensor.clone(memory_format=torch.contiguous_format)))
    assert torch.equal(fingerprint(tensor), fingerprint(torch.tensor(tensor.tolist())))


def test_a_fingerprint_of_several_chunks():
    flat = torch.arange((1 << 21) + 5, dtype=torch.int32)
    before = fingerprint(flat)
    halves_exchanged = torch.cat([flat[1 << 20 : 1 << 21], flat[: 1 << 20], flat[1 << 21 :]])
    assert not torch.equal(fingerprint(halves_exchanged), before)
    flat[-1] += 1
    assert not torch.equal(fingerprint(flat), before)


def test_plain_tensors() -> None:
    class Own(torch.Tensor):
        pass

    assert is_plain(torch.ones(2))
    assert is_plain(torch.nn.Parameter(torch.ones(2)))
    assert not is_plain(torch.ones(2).as_subclass(Own))
    assert not is_plain(torch.ones(2, 2).to_sparse())
    assert not is_plain(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))
