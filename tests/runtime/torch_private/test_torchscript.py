"""What is in a scripted or traced module. tests/contract/test_scripted.py takes them apart."""

import pytest
import torch
from torch import nn

from unisono.runtime.torch_private import torchscript


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_batch_norms_in_a_script() -> None:
    scripts = [*map(torch.jit.script, (nn.Sequential(nn.BatchNorm1d(2), nn.Tanh()), nn.Tanh()))]
    scripts.append(torch.jit.trace(nn.BatchNorm1d(2).eval(), torch.zeros(3, 2)))
    assert [*map(torchscript.batch_norms_in_script, scripts)] == [[None], [], [False]]
    assert torchscript.batch_norms_in_script(nn.Tanh()) == [None], "it is no script, so that is not known"
