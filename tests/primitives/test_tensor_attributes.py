"""Attributes of tensors that replicas' tensors have, too."""

import torch

from unisono.primitives.tensor_attributes import carry_attributes


def test_attributes_are_carried_over_where_there_are_none():
    """R6"""
    tensor, own, other = torch.ones(2), torch.ones(2), torch.ones(2)
    tensor.scale, tensor.labels = 2.0, ["a"]
    own.scale = 3.0
    carry_attributes(tensor, [own, None, other])
    assert own.scale == 3.0
    assert other.scale == 2.0
    assert other.labels is own.labels is tensor.labels


def test_marks_of_the_compiler_stay_with_the_callers():
    """R6"""
    tensor, own = torch.ones(2), torch.ones(2)
    torch._dynamo.mark_dynamic(tensor, 0)
    carry_attributes(tensor, [own])
    assert own.__dict__ == {}
