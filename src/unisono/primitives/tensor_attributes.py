"""Attributes that the program has assigned to a tensor (`weight.scale`, `x.lengths`): a replica's tensor has them, too.

They are carried over as they are, in the first replica and in the others alike: nothing in them is split. A tensor that
a parameter has so is copied to the replica's device, as attributes of modules are.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

# Marks, such as those of `mark_dynamic`: they are about the caller's tensor.
_OF_COMPILER = ("_dynamo_", "_has_dynamo_", "_specialize_on")


def carry_attributes(
    tensor: torch.Tensor, own: Iterable[torch.Tensor | None], copies: Mapping[int, torch.Tensor] = MappingProxyType({})
) -> None:
    """Give the tensors that replicas have in a tensor's place its attributes, but those that they have already.

    Args:
        copies: by id, what stands for an attribute's value.
    """
    for name, value in tensor.__dict__.items():
        if not name.startswith(_OF_COMPILER):
            for each in own:
                if each is not None:
                    each.__dict__.setdefault(name, copies.get(id(value), value))
