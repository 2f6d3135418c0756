"""Attributes that the program has assigned to a tensor (`weight.scale`, `x.lengths`): a replica's tensor has them, too.

They are carried over as they are, in the first replica and in the others alike: nothing in them is split or copied.
"""

from collections.abc import Iterable

import torch

# Marks, such as those of `mark_dynamic`: they are about the caller's tensor.
_OF_COMPILER = ("_dynamo_", "_has_dynamo_", "_specialize_on")


def carry_attributes(tensor: torch.Tensor, own: Iterable[torch.Tensor | None]) -> None:
    """Give the tensors that replicas have in a tensor's place its attributes, but those that they have already."""
    for name, value in tensor.__dict__.items():
        if not name.startswith(_OF_COMPILER):
            for each in own:
                if each is not None:
                    each.__dict__.setdefault(name, value)
