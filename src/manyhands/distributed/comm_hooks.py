"""Communication hooks in the form of torch's DistributedDataParallel: functions that sum a bucket of gradients.

Hooks that are written for it, such as compression to bf16 or PowerSGD, can be used as they are. They take the mean over
the processes to be the result, so a bucket is scaled before it is handed to one.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from manyhands.runtime.buckets import Bucket

CommHook: TypeAlias = Callable[[Any, Any], Any]


class GradBucket:
    """What a communication hook gets: the methods of `torch.distributed.GradBucket`, which cannot be made in Python."""

    def __init__(self, bucket: Bucket, flat: torch.Tensor, index: int, is_last: bool, of: Sequence[Any]) -> None:
        self._bucket, self._flat, self._index, self._is_last, self._of = bucket, flat, index, is_last, of

    def index(self) -> int:
        """Return the bucket's place in the order in which buckets leave."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last one of this backward."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return all its gradients as one flat tensor."""
        return self._flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor in the place of the buffer."""
        self._flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return its gradients as views of the buffer."""
        return list(self._bucket.pieces(self._flat).values())

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients it holds."""
        return [self._of[number] for number, _ in self._bucket.items]
