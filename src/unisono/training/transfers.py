"""Pictures on their way to a device, and numbers on their way back, without waiting for either."""

from collections.abc import Callable

import torch

from unisono.runtime import devices as _devices
from unisono.runtime import torch_private


def has_room_for(device: torch.device, num_bytes: int) -> bool:
    """Return whether data of this size take no more than a quarter of an accelerator's free memory.

    False on the host, where data stay as they are.
    """
    if _devices.computes_on_host(device):
        return False
    return num_bytes <= torch_private.free_memory_bytes(device) // 4


def rows_on(
    device: torch.device, tensor: torch.Tensor, rows: torch.Tensor, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `tensor[rows]` on `device`, in the memory of `into` if that is given.

    A copy from the host is queued there and not waited for. That needs pinned memory: from pageable memory, the calling
    thread would wait for the copy. torch keeps the pinned memory until the copy has ended, and then reuses it for the
    next rows.
    """
    if into is not None and tensor.device == into.device:
        return torch.index_select(tensor, 0, rows, out=into)
    if not _devices.is_cpu(tensor.device) or not _devices.has_streams(device):
        there = tensor[rows]
        return there.to(device) if into is None else into.copy_(there)
    pinned = torch.empty(len(rows), *tensor.shape[1:], dtype=tensor.dtype, device="cpu", pin_memory=True)
    torch.index_select(tensor, 0, rows, out=pinned)
    return pinned.to(device, non_blocking=True) if into is None else into.copy_(pinned, non_blocking=True)


def begin_to_read(number: torch.Tensor) -> Callable[[], float]:
    """Begin to copy a 0-dim tensor to the host; return a function that waits for it and returns the number."""
    if _devices.computes_on_host(number.device):
        value = number.item()
        return lambda: value
    copy, is_there = _devices.begin_copy_to_host(number)

    def read() -> float:
        is_there(True)
        return copy.item()

    return read
