"""Many tensors in one call, and one by one."""

import pytest
import torch
from torch import nn

from unisono.runtime.torch_private import foreach


@pytest.mark.parametrize("lacks", [False, True], ids=["one call", "one by one"])
def test_many_tensors_in_one_call(lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: clones keep values, strides and classes, and share nothing."""
    tensors = [torch.rand(3), torch.tensor(5), torch.rand(2, 3).t(), torch.zeros(0), torch.rand(2, 2).to_sparse()]
    targets, parts = [torch.ones(2), torch.ones(2, 3)], [torch.tensor([[1, 2], [3, 4]]).t(), torch.tensor(5)]

    def no_kernel(*_: object) -> None:
        raise NotImplementedError

    with monkeypatch.context() as patch:
        if lacks:
            patch.setattr(foreach, "_HAS_CLONE", False)  # as in torch 2.9
            for name in ("_foreach_add_", "_foreach_add", "_foreach_copy_"):
                patch.setattr(torch, name, no_kernel)
        for given in (tensors, [*tensors, nn.Parameter(torch.rand(2))], []):
            for copy, tensor in zip(foreach.clones(given), given, strict=True):
                torch.testing.assert_close(copy, tensor)
                assert copy is not tensor
                assert copy.layout != torch.strided or copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
                assert copy.layout != torch.strided or copy.stride() == tensor.stride()
        sums = foreach.add_all(targets, [torch.ones(2), torch.ones(2, 3)])
        assert [total.sum().item() for total in sums] == [4.0, 12.0]
        foreach.add_all_in_place(targets, [torch.ones(2), torch.full((2, 3), 4.0)])
        assert [target.sum().item() for target in targets] == [4.0, 30.0]
        foreach.copy_all_in_place(targets, [torch.zeros(2), torch.full((2, 3), 2.0)])
        assert [target.sum().item() for target in targets] == [0.0, 12.0]
        foreach.add_all_in_place([], [])
        foreach.copy_all_in_place([], [])
    assert foreach.flattened([*parts, torch.empty(0, dtype=int)]).tolist() == [1, 3, 2, 4, 5]
    assert foreach.of_one_kind([*targets, *parts]) == [targets, parts]
