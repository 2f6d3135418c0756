"""Narrower floating types are computed in a wider one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from unisono.runtime.draws_off import DrawsOff
from unisono.runtime.widening import widened

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("dtype", "least", "expected"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float8_e4m3fn, torch.float64, torch.float64),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.int32, torch.float64, torch.int32),
        (torch.bool, torch.float32, torch.bool),
    ],
)
def test_the_wider_type(dtype: torch.dtype, least: torch.dtype, expected: torch.dtype) -> None:
    assert widened(dtype, least) == expected


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.bfloat16) * 1,
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x.sum(0, dtype=torch.float32),
        lambda x: torch.linalg.vector_norm(x, dtype=torch.float32),
        lambda x: x @ torch.tensor([0.5, 1.0, 2.0]),
        lambda x: x @ torch.zeros(3, dtype=torch.float32),
        lambda x: x @ torch.full((3,), 0.5).half(),
        lambda x: x @ torch.randn(3),
        lambda x: x.new_ones(3, dtype=torch.float16) @ x.T,
    ],
)
def test_what_asks_for_a_narrower_type_gets_the_wider_one(compute: Callable[[torch.Tensor], Any]) -> None:
    x = X.clone().requires_grad_()
    with DrawsOff(torch.float64) as off, torch.autocast("cpu", torch.bfloat16):
        y = compute(x)
        y.sum().backward()
    assert y.dtype is torch.float64
    assert off.asked - {torch.float64}
    assert X.float().dtype is torch.float32  # outside everything is as always


def test_integers_and_wider_types_stay() -> None:
    with DrawsOff(torch.float32):
        assert torch.arange(3).dtype is torch.int64
        assert torch.full((2,), 1).dtype is torch.int64
        assert torch.tensor([True]).dtype is torch.bool
        assert X.to(torch.int32).dtype is torch.int32
        assert (X * 1).dtype is X.to(torch.float64).dtype is torch.float64


@pytest.mark.parametrize(
    "compute",
    [
        lambda n: n / 3,
        lambda n: n * 0.5,
        lambda n: n.sqrt(),
        lambda n: n.float() * torch.tensor(0.5),
        lambda n: (n > 1).float() / torch.tensor(3.0),
        lambda n: n.float().mean() * n.float(),
        lambda n: torch.where(n > 1, 0.5, 2.0) * n,
        lambda n: n.to(torch.bfloat16) / 3.0,
    ],
)
def test_what_kernels_convert_themselves_stays_right(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """They rely on the type that they ask for: with another one they would read its memory as that."""
    n = torch.arange(6)
    expected = compute(n)
    for least in (torch.float64, torch.float32):
        with DrawsOff(least):
            found = compute(n)
        torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("compute", [lambda x: x + 16_777_217, lambda x: x * 0.1, lambda x: torch.where(x > 1, x, 0.1)])
@pytest.mark.parametrize("least", [None, torch.float32, torch.float64])
def test_numbers_keep_their_bits(compute: Callable[[torch.Tensor], torch.Tensor], least: torch.dtype | None) -> None:
    """In float64: 2**24 + 1 is none of float32."""
    with DrawsOff(least):
        found = compute(X)
    assert found.equal(compute(X))
