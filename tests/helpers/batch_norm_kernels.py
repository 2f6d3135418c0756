"""torch's kernels of synchronised batch norm, in plain arithmetic on the CPU, as strict about types as they are."""

import functools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unisono.runtime import devices


def _axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _over(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _check(x: Tensor, *per_channel: Tensor | None) -> None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    assert x.numel(), "the kernels are not made for no rows"
    assert x.is_contiguous() or x.is_contiguous(memory_format=formats[x.dim()])
    for values in per_channel:
        if values is not None:
            assert values.dtype == _wide(x).dtype
            assert values.is_contiguous()
            assert values.shape == (x.size(1),)


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x)
    var, mean = torch.var_mean(_wide(x), _axes(x), correction=0)
    return mean, torch.rsqrt(var + eps)


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    inverse_stds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    for running in (running_mean, running_var):
        assert running is None or running.dtype == counts.dtype, "the kernel reads both as one type"
    assert x.dtype == counts.dtype
    assert means.is_contiguous()
    assert inverse_stds.is_contiguous()
    mean, squares, count = torch.zeros_like(means[0]), torch.zeros_like(means[0]), torch.zeros_like(counts[0])
    for m, inverse_std, n in zip(means, inverse_stds, counts, strict=True):  # one after the other, as the kernel
        squares = squares + ((1 / inverse_std) ** 2 - eps) * n + (mean - m) ** 2 * count * n * (1 / (count + n))
        mean = count * (1 / (count + n)) * mean + n * (1 / (count + n)) * m
        count = count + n
    if running_mean is not None:
        running_mean.copy_((1 - momentum) * running_mean + momentum * mean)
    if running_var is not None:
        running_var.copy_((1 - momentum) * running_var + momentum * squares / (count - 1))
    return mean, torch.rsqrt(squares / count + eps)


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse_std: Tensor, eps: float
) -> Tensor:
    _check(x, weight, bias, mean, inverse_std)
    result = (_wide(x) - _over(mean, x)) * _over(inverse_std, x)
    result = result if weight is None else result * _over(weight, x)
    return (result if bias is None else result + _over(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    _check(x, weight, mean, inverse_std)
    _check(grad)
    assert grad.dtype == x.dtype
    assert weight is not None or not (weight_g or bias_g), "the kernel takes the form of the weight"
    sum_dy = _wide(grad).sum(_axes(x))
    sum_dy_xmu = (_wide(grad) * (_wide(x) - _over(mean, x))).sum(_axes(x))
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        sum_dy_xmu * inverse_std if weight_g else None,
        sum_dy if bias_g else None,
    )


def batch_norm_backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    _check(x, weight, mean, inverse_std, sum_dy, sum_dy_xmu)
    _check(grad)
    assert count.dtype == torch.int32
    total = count.sum()
    centred = (_wide(x) - _over(mean, x)) * _over(inverse_std.square() * sum_dy_xmu / total, x)
    scale = inverse_std if weight is None else inverse_std * weight
    return ((_wide(grad) - _over(sum_dy / total, x) - centred) * _over(scale, x)).to(x.dtype)


KERNELS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


def use_kernels(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Have every device use these functions as its kernels; return the number of calls of each from now on."""
    calls: Counter[str] = Counter()

    def call(kernel: Callable[..., object], *args: object) -> object:
        calls[kernel.__name__] += 1
        return kernel(*args)

    for kernel in KERNELS:
        patch.setattr(torch, kernel.__name__, functools.partial(call, kernel))
    patch.setattr(devices, "has_batch_norm_kernels", lambda device: True)
    return calls
