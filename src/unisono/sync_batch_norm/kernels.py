"""Statistics, and normalising by them, with torch's own kernels for synchronised batch norm.

They are the kernels of `torch.nn.SyncBatchNorm`, for devices that have them (`devices.has_batch_norm_kernels`). What
`Statistics` does with plain arithmetic, for all other devices, these do in one pass over the rows:

    forward     (1) batch_norm_stats               rows ──► mean, inverse deviation
                (2) batch_norm_gather_stats_...    those of all replicas ──► those of all rows; running statistics
                (3) batch_norm_elemt               rows ──► output
    backward    (4) batch_norm_backward_reduce     gradient, rows ──► two sums a channel; gradients of weight and bias
                (5) batch_norm_backward_elemt      gradient, rows, sums over all replicas ──► gradient of the rows

Mean, inverse deviation and count of a replica are one tensor, so they take one copy, or one all-gather. Counts are in
it because the host would have to wait for the device to learn those of other processes. For the same reason nothing
here makes a tensor from numbers of the host, or reads one.

Derivatives of higher order use plain arithmetic on the same tensors.

(3) computes (x - mean) * inverse deviation * weight + bias for each channel, in the precision of the statistics, with
x and the result in their own. So it also computes a gradient here, with another weight and bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.runtime import devices as _devices
from unisono.sync_batch_norm.statistics import ReduceGrad, all_but_channels, per_channel, statistics_dtype

# The count of no rows: so small that such a part changes nothing, and not 0, by which the kernel would divide.
_NO_ROWS = 1e-30


@dataclass(frozen=True)
class KernelStatistics:
    """Mean, inverse standard deviation and count of each channel, in one tensor."""

    # Of shape (2 * channels + 1): means, inverse deviations 1 / sqrt(variance + eps), and the count.
    packed: torch.Tensor
    eps: float  # of the batch norm
    count: int | None  # the count; None where the host does not know it

    @classmethod
    def of(cls, x: torch.Tensor, eps: float) -> "KernelStatistics":
        """Return the statistics of x, of shape (rows, channels, ...), without a history."""
        x = x.detach()
        if not x.numel():
            return cls.without_rows(torch.empty(2 * x.size(1) + 1, dtype=statistics_dtype(x), device=x.device), eps)
        count = x.numel() // x.size(1)
        mean, inverse_std = torch.batch_norm_stats(x, eps)
        return cls(torch.cat([mean, inverse_std, mean.new_full((1,), count)]), eps, count)

    @classmethod
    def without_rows(cls, like: torch.Tensor, eps: float) -> "KernelStatistics":
        """Return statistics of no rows, which change no others; `like` has the form of `packed`."""
        num_channels = len(like) // 2
        parts = [like.new_zeros(num_channels), like.new_ones(num_channels), like.new_full((1,), _NO_ROWS)]
        return cls(torch.cat(parts), eps, 0)

    @property
    def mean(self) -> torch.Tensor:
        return self.packed[: len(self.packed) // 2]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.packed]

    @classmethod
    def of_all(cls, parts: "Sequence[KernelStatistics]", device: torch.device) -> "KernelStatistics":
        """Combine the statistics of several tensors, in order, on a device."""
        if len(parts) == 1:
            return parts[0].on(device)
        counts = [part.count for part in parts]
        count, eps = None if None in counts else sum(counts), parts[0].eps  # type: ignore[arg-type]
        means, inverse_stds, each_count = _split(
            torch.stack([_devices.moved_to(part.packed, device) for part in parts])
        )
        mean, inverse_std = _gather(means, inverse_stds, each_count, eps)
        return cls(torch.cat([mean, inverse_std, each_count.sum(0)]), eps, count)

    def on(self, device: torch.device) -> "KernelStatistics":
        """Return the same statistics on a device."""
        return KernelStatistics(_devices.moved_to(self.packed, device), self.eps, self.count)

    def update(self, running_mean: torch.Tensor | None, running_var: torch.Tensor | None, momentum: float) -> None:
        """Move running statistics towards these, as torch does."""
        if running_mean is None and running_var is None:
            return
        mean, inverse_std, count = _split(self.packed.detach())
        with torch.no_grad():
            # The kernel wants one type, and a count does not fit into a half one.
            moved = [None if each is None else each.to(mean.dtype) for each in (running_mean, running_var)]
            _gather(mean[None], inverse_std[None], count, self.eps, moved, momentum)
            for running, new in zip((running_mean, running_var), moved, strict=True):
                if running is not None and new is not None and new is not running:
                    running.data.copy_(new)

    def normalise(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        reduce_grad: ReduceGrad,
    ) -> torch.Tensor:
        """Return (x - mean) * inverse deviation * weight + bias; see `Statistics.normalise`. `eps` is in them."""
        output: torch.Tensor = _Normalise.apply(x, self.packed, weight, bias, reduce_grad)  # type: ignore[no-untyped-call]
        return output


def _split(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return means, inverse deviations and count, of shape (1,); contiguous, because kernels take their addresses."""
    num_channels = packed.size(-1) // 2
    mean, inverse_std, count = torch.split(packed, [num_channels, num_channels, 1], dim=-1)
    return mean.contiguous(), inverse_std.contiguous(), count.contiguous()


def _gather(
    means: torch.Tensor,
    inverse_stds: torch.Tensor,
    counts: torch.Tensor,
    eps: float,
    running: Sequence[torch.Tensor | None] = (None, None),
    momentum: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine statistics of shape (parts, channels); return mean and inverse deviation; update running statistics."""
    kernel: Any = torch.batch_norm_gather_stats_with_counts
    # Of its first argument the kernel only takes the type.
    mean, inverse_std = kernel(means, means, inverse_stds, *running, momentum, eps, counts.view(-1))
    return mean, inverse_std


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x in one of the memory formats that the kernels are made for; differentiable."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]):
        return x
    return x.contiguous()


def _uses_kernels(x: torch.Tensor) -> bool:
    """Return whether x is for the kernels. They are not made for no rows, and have no derivative."""
    return x.numel() > 0 and not torch.is_grad_enabled()


def _elemt(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_std: torch.Tensor,
) -> torch.Tensor:
    """(3): (x - mean) * inverse_std * weight + bias, in the type of x."""
    if _uses_kernels(x):
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse_std, 0.0)
    result = (x - per_channel(mean, x)) * per_channel(_times(inverse_std, weight), x)
    return (result if bias is None else result + per_channel(bias, x)).to(x.dtype)


def _times(values: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return values if weight is None else values * weight


def _as_statistics(tensor: torch.Tensor | None, packed: torch.Tensor) -> torch.Tensor | None:
    """Return a weight or bias in the type of the statistics, as the kernels want it."""
    return None if tensor is None else tensor.to(packed.dtype).contiguous()


class _LinkedStatistics(torch.autograd.Function):
    """Links packed statistics, which are computed already, to the rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, reduce_grad: ReduceGrad) -> torch.Tensor:
        packed = packed.detach()
        ctx.save_for_backward(x, packed)  # as an output: with its history
        ctx.reduce_grad = reduce_grad
        return packed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, packed = ctx.saved_tensors
        mean, inverse_std, count = _split(packed)
        grad_mean, grad_inverse_std, _ = _split(grad)
        shift, slope = (ctx.reduce_grad(torch.stack([grad_mean, grad_inverse_std])) / count).unbind()
        # grad_mean / count - grad_inverse_std * inverse_std ** 3 * (x - mean) / count
        return _elemt(x, -slope * inverse_std.square(), shift, mean, inverse_std), None, None


class _Normalise(torch.autograd.Function):
    """(3) to (5): batch norm with given statistics.

    The gradient of x includes the part that reaches x through them, reduced by `reduce_grad`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        reduce_grad: ReduceGrad,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, packed, weight)
        ctx.bias_dtype, ctx.reduce_grad = None if bias is None else bias.dtype, reduce_grad
        mean, inverse_std, _ = _split(packed)
        return _elemt(x, _as_statistics(weight, packed), _as_statistics(bias, packed), mean, inverse_std)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, packed, weight = ctx.saved_tensors
        needs_x, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # for derivatives of higher order
            packed = _LinkedStatistics.apply(x, packed, ctx.reduce_grad)  # type: ignore[no-untyped-call]
        mean, inverse_std, count = _split(packed)
        factor = _as_statistics(weight, packed)
        grad = dense(grad)
        # Not the kernel's gradient of the bias, which is the first sum: without a weight it could not make it.
        kernels: Any = torch
        if _uses_kernels(x):
            sum_dy, sum_dy_xmu, grad_weight, _ = kernels.batch_norm_backward_reduce(
                grad, x, mean, inverse_std, factor, True, needs_weight, False
            )
        else:
            sum_dy = grad.to(mean.dtype).sum(all_but_channels(x))
            sum_dy_xmu = (grad * (x - per_channel(mean, x))).sum(all_but_channels(x))
            grad_weight = sum_dy_xmu * inverse_std
        grad_x = None
        if needs_x:
            sums = ctx.reduce_grad(torch.stack([sum_dy, sum_dy_xmu]))
            if _uses_kernels(x):  # the count as an integer: the kernel sums such counts, and divides by their sum
                grad_x = kernels.batch_norm_backward_elemt(
                    grad, x, mean, inverse_std, factor, *sums.unbind(), count.to(torch.int32)
                )
            else:
                shift, slope = (per_channel(each, x) for each in (sums / count).unbind())
                centred = (x - per_channel(mean, x)) * per_channel(inverse_std.square(), x)
                grad_x = ((grad - shift - centred * slope) * per_channel(_times(inverse_std, factor), x)).to(x.dtype)
        return (
            grad_x,
            None,
            grad_weight.to(weight.dtype) if needs_weight else None,
            sum_dy.to(ctx.bias_dtype) if needs_bias else None,
            None,
        )
