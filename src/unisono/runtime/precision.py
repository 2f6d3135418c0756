"""Precision: how devices compute float32 products, and torch's settings for it, which belong to the process."""

from collections.abc import Iterator
from typing import Any

import torch

from unisono.runtime.contexts import contextmanager
from unisono.runtime.devices import is_cuda


def rounds_float32(device: torch.device) -> bool:
    """Return whether float32 products on `device` may be computed with fewer bits, as GPUs do with TF32."""
    if not is_cuda(device):
        return False
    return "tf32" in (product_flags()[1], *convolution_flags()[3:])


def convolution_flags() -> tuple[Any, ...]:
    """Return the user's settings for convolutions on GPUs."""
    cudnn: Any = torch.backends.cudnn
    precisions = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic, *precisions


def set_convolution_flags(flags: tuple[Any, ...]) -> None:
    """Set what `convolution_flags` returned."""
    if flags != convolution_flags():
        cudnn: Any = torch.backends.cudnn
        if flags[3] == flags[4]:  # torch's older setting for both; it cannot be read unless the newer ones agree
            cudnn.allow_tf32 = flags[3] == "tf32"
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = flags[:3]
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = flags[3:]


def product_flags() -> tuple[str | None, str, str]:
    """Return the user's settings for float32 matrix products, on GPUs and on the CPU.

    torch has an older setting for both and a newer one for each; where they disagree the older one cannot be read, and
    is None here.
    """
    backends: Any = torch.backends
    try:
        both = torch.get_float32_matmul_precision()
    except RuntimeError:
        both = None
    return both, backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision


def set_product_flags(flags: tuple[str | None, str, str]) -> None:
    """Set what `product_flags` returned."""
    if flags != product_flags():
        backends: Any = torch.backends
        both, on_gpus, on_cpu = flags
        if both is not None:
            torch.set_float32_matmul_precision(both)
        backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision = on_gpus, on_cpu


def has_tf32(device: torch.device) -> bool:
    """Return whether a device can compute float32 products in TF32: NVIDIA's GPUs from Ampere on."""
    if not is_cuda(device) or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether a device computes products in bfloat16 faster than in float32: the GPUs that have TF32, too."""
    return has_tf32(device)


@contextmanager
def float32_products(device: torch.device, *, rounded: bool) -> Iterator[None]:
    """Compute float32 products and convolutions of CUDA devices exactly, or, `rounded`, in TF32 where they have it.

    Rounded, cuDNN also tries its algorithms and takes the fastest. (torch's default is neither: it rounds convolutions
    and computes products exactly.) The settings belong to the process, and are restored when the context ends. Other
    kinds of device have none.
    """
    if not is_cuda(device):
        yield
        return
    products, convolutions = product_flags(), convolution_flags()
    try:
        torch.set_float32_matmul_precision("high" if rounded else "highest")
        torch.backends.cudnn.allow_tf32 = rounded
        torch.backends.cudnn.benchmark = rounded
        yield
    finally:
        set_product_flags(products)
        set_convolution_flags(convolutions)
