"""Communication hooks as in torch's DistributedDataParallel: functions that all-reduce a bucket of gradients.

Hooks written for it, such as compression to bf16 or PowerSGD, work unchanged. They return the mean over the processes
as the result, so a bucket is scaled before a hook gets it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from unisono.runtime.buckets import Bucket

CommHook: TypeAlias = Callable[[Any, Any], Any]


class GradBucket:
    """A bucket for a communication hook, like `torch.distributed.GradBucket`, which Python cannot construct."""

    def __init__(self, bucket: Bucket, flat: torch.Tensor, index: int, is_last: bool, tensors: Sequence[Any]) -> None:
        self._bucket, self._flat, self._index, self._is_last = bucket, flat, index, is_last
        self._tensors = tensors

    def index(self) -> int:
        """Return the bucket's place in the order in which buckets are sent."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last one of this backward."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return all its gradients as one flat tensor."""
        return self._flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer."""
        self._flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return its gradients as views of the buffer."""
        return list(self._bucket.pieces(self._flat).values())

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients it holds."""
        return [self._tensors[number] for number, _ in self._bucket.items]
