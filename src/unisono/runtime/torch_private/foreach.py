"""How is one thing done to many tensors in one call, rather than in one call for each?

The lists are of one dtype and device each (`of_one_kind`), where that matters for speed.
"""

from collections.abc import Callable, Iterable

import torch


def of_one_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors in lists of one dtype and device each, in which they keep their order.

    For the functions below: torch's CUDA kernels take one such list at once. Given several dtypes, as those of batch
    norm's buffers, torch launches a kernel for each tensor.
    """
    lists: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(lists.values())


def add_all_in_place(targets: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Add each of `others` to its target. Fallback, where a device lacks it for a dtype: one after the other."""
    if not targets:
        return
    try:
        torch._foreach_add_(targets, others)
    except NotImplementedError:
        for target, other in zip(targets, others, strict=True):
            target.add_(other)


def add_all(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum of each pair, in memory of its own. Fallback, as above: one after the other."""
    try:
        return list(torch._foreach_add(tensors, others))
    except NotImplementedError:
        return [tensor + other for tensor, other in zip(tensors, others, strict=True)]


def copy_all_in_place(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each of `sources` into its target. Fallback, as above: one after the other."""
    if not targets:
        return
    try:
        torch._foreach_copy_(targets, sources)
    except NotImplementedError:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a clone of each tensor. Fallback, with torch 2.9 and for subclasses of tensors: one after the other."""
    if {*map(type, tensors)} == {torch.Tensor} and _HAS_CLONE:
        return list(torch._foreach_clone(tensors))
    return [tensor.clone() for tensor in tensors]


_HAS_CLONE = hasattr(torch, "_foreach_clone")


# Return the entries of several tensors as one new flat tensor.
flattened: Callable[[list[torch.Tensor]], torch.Tensor] = torch._C._nn.flatten_dense_tensors
