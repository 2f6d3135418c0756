"""Mean and variance of the channels of a tensor, combined from several tensors, and normalising by them.

The arithmetic of a batch norm whose rows are on several devices, differentiable to any order; kernels.py does the same
on devices that have kernels for it. A kernel computes `Statistics` without a history; `normalise` links them to the
rows that they normalise, and takes a function that reduces their gradient on its way to these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from unisono.runtime import devices as _devices

# From one replica's gradients of mean and variance, as one tensor of shape (2, channels), to those that each row gets:
# the same, or their sum over replicas. Differentiable.
ReduceGrad: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Statistics:
    """Mean and (biased) variance of each channel, over `count` values a channel.

    Of half types they are in single precision, as in torch.
    """

    count: int
    mean: torch.Tensor
    var: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.mean, self.var]

    @classmethod
    def of(cls, x: torch.Tensor) -> "Statistics":
        """Return the statistics of x, of shape (rows, channels, ...), without a history; zeros if it has no rows."""
        x = x.detach()
        num_channels = x.size(1)
        dtype = statistics_dtype(x)
        zeros = torch.zeros(num_channels, dtype=dtype, device=x.device)
        if not x.numel():
            return cls(0, zeros, zeros)
        if _devices.computes_on_host(x.device):
            # The kernel computes in the type of the running statistics.
            mean, var = torch.batch_norm_update_stats(x, zeros, torch.ones_like(zeros), 0.0)
        else:
            var, mean = torch.var_mean(x.to(dtype), all_but_channels(x), correction=0)
        return cls(x.numel() // num_channels, mean, var)

    @classmethod
    def of_all(cls, parts: "Sequence[Statistics]", device: torch.device) -> "Statistics":
        """Combine the statistics of several tensors, in order, on a device; differentiable.

        Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing
        sample variances", 1979. Unlike the mean of the squares it stays exact where the mean is large.
        """
        if len(parts) == 1:
            return parts[0]
        count = sum(part.count for part in parts)
        means = torch.stack([_devices.moved_to(part.mean, device) for part in parts])
        variances = torch.stack([_devices.moved_to(part.var, device) for part in parts])
        shares = _devices.numbers([[part.count / max(count, 1)] for part in parts], means.dtype, device)
        mean = (shares * means).sum(0)
        return cls(count, mean, (shares * (variances + (means - mean).square())).sum(0))

    def on(self, device: torch.device) -> "Statistics":
        """Return the same statistics on a device."""
        return Statistics(self.count, *(_devices.moved_to(tensor, device) for tensor in self.tensors))

    def update(self, running_mean: torch.Tensor | None, running_var: torch.Tensor | None, momentum: float) -> None:
        """Move running statistics towards these, as torch does: the variance as an estimate for the population.

        Autograd does not notice, as with torch's kernel: graphs that have saved the statistics stay valid.
        """
        unbiased = self.var.detach() * (self.count / max(self.count - 1, 1))
        with torch.no_grad():
            for running, new in ((running_mean, self.mean.detach()), (running_var, unbiased)):
                if running is not None:
                    running.data.copy_(running.to(new.dtype) * (1 - momentum) + new * momentum)

    def normalise(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        reduce_grad: ReduceGrad,
    ) -> torch.Tensor:
        """Return (x - mean) / sqrt(variance + eps) * weight + bias; differentiable, also by way of the statistics.

        The graph holds x and some numbers a channel.

        Args:
            reduce_grad: applied to the gradient of mean and variance before each row of x gets its part.
        """
        output: torch.Tensor = _Normalise.apply(x, self.mean, self.var, weight, bias, eps, self.count, reduce_grad)  # type: ignore[no-untyped-call]
        return output


class _LinkedStatistics(torch.autograd.Function):
    """Links mean and variance, which are computed already, to the rows."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, count: int, reduce_grad: ReduceGrad
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mean, var = mean.detach(), var.detach()  # other replicas have the same tensors
        ctx.save_for_backward(x, mean)
        ctx.count, ctx.reduce_grad = count, reduce_grad
        return mean, var

    @staticmethod
    def backward(ctx: Any, grad_mean: torch.Tensor, grad_var: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        grad = _rows_grad(x, mean, ctx.count, ctx.reduce_grad(torch.stack([grad_mean, grad_var])))
        return grad.to(x.dtype), None, None, None, None


class _Normalise(torch.autograd.Function):
    """Batch norm with a given mean and variance. The gradient of x includes the part that reaches x through them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        count: int,
        reduce_grad: ReduceGrad,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps, ctx.bias_dtype = eps, bias.dtype if bias is not None else None
        ctx.count, ctx.reduce_grad = count, reduce_grad
        weight, bias = (None if tensor is None else tensor.to(mean.dtype) for tensor in (weight, bias))
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # for derivatives of higher order
            mean, var = _LinkedStatistics.apply(x, mean, var, ctx.count, ctx.reduce_grad)  # type: ignore[no-untyped-call]
        inverse_std = torch.rsqrt(var + ctx.eps)
        scale = inverse_std if weight is None else inverse_std * weight
        grad_scaled, grad_shift = _sums(grad, x, mean, var, inverse_std, ctx.eps)
        statistics_grad = torch.stack([-scale * grad_shift, -0.5 * scale * inverse_std * grad_scaled])
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _rows_grad(x, mean, ctx.count, ctx.reduce_grad(statistics_grad))
            grad_x = grad_x.addcmul_(grad, per_channel(scale, x)).to(x.dtype)
        return (
            grad_x,
            None,
            None,
            grad_scaled.to(weight.dtype) if weight is not None else None,
            grad_shift.to(ctx.bias_dtype) if ctx.bias_dtype is not None else None,
            *(None, None, None),
        )


def _rows_grad(x: torch.Tensor, mean: torch.Tensor, count: int, statistics_grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x from those of mean and variance: grad_mean / count + 2 grad_var (x - mean) / count.

    It is a new tensor, in the type of the statistics.
    """
    shift, slope = (per_channel(each, x) for each in (statistics_grad / max(count, 1)).unbind())
    # The difference first: where the mean is large, a product with x would lose the digits of small differences.
    centred = x - per_channel(mean, x)
    if _devices.computes_on_host(x.device):
        return centred.mul_(2 * slope).add_(shift)  # in place: passes over memory are its cost
    return torch.addcmul(shift, centred, 2 * slope)  # of batched gradients too, which vmap does not write in place


def _sums(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, inverse_std: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each channel, the sum of `grad` times the normalised x, and the sum of `grad`."""
    if x.numel() and not torch.is_grad_enabled() and _devices.computes_on_host(x.device):
        # One pass over both; the kernel is torch's for batch norm in eval mode, without the gradient of x.
        kernel = torch.ops.aten.native_batch_norm_backward
        _, scaled, shift = kernel(grad, x, None, mean, var, None, None, False, eps, [False, True, True])
        return scaled, shift
    normalised = (x - per_channel(mean, x)) * per_channel(inverse_std, x)
    axes = all_but_channels(x)
    return (grad * normalised).sum(axes), grad.to(mean.dtype).sum(axes)


def statistics_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the type of the statistics of x."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def all_but_channels(x: torch.Tensor) -> list[int]:
    """Return the axes over which statistics are taken."""
    return [axis for axis in range(x.dim()) if axis != 1]


def per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a view of one value a channel that broadcasts over x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
