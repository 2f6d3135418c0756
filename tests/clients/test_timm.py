"""timm: averages of the weights of a wrapped model, ModelEma and its successors.

timm as a whole needs torchvision, which does not import beside the torch of this environment; the file with the
averages needs torch alone, and is loaded alone.
"""

import copy
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from helpers.benchmarks import import_file
from helpers.comparisons import assert_same_state
from helpers.contract import Wrap


def model_ema() -> ModuleType:
    """Return the module timm.utils.model_ema, without importing timm."""
    package = importlib.util.find_spec("timm")
    if package is None or package.origin is None:
        pytest.skip("could not import 'timm'", allow_module_level=True)
    return import_file(Path(package.origin).parent / "utils" / "model_ema.py", "timm_model_ema")


ema = model_ema()


def train(model: nn.Module, data: Dataset, average: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for x, y in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update(model)


@pytest.mark.parametrize("kind", ["ModelEma", "ModelEmaV2", "ModelEmaV3"])
def test_average(wrap: Wrap, net: nn.Module, data: Dataset, kind: str) -> None:
    """X9: ModelEma, V2 and V3, by their file alone, of the wrapper and of its module: updates, outputs."""
    x, average = next(iter(DataLoader(data, batch_size=37)))[0], getattr(ema, kind)
    start = copy.deepcopy(net)
    expected = average(net, decay=0.5)
    train(net, data, expected)
    averaged = expected.ema if kind == "ModelEma" else expected.module
    for of_wrapper in (True, False):
        wrapped = wrap(copy.deepcopy(start))
        made = average(wrapped if of_wrapper else wrapped.module, decay=0.5)
        train(wrapped, data, made)
        own = made.ema if kind == "ModelEma" else made.module
        torch.testing.assert_close(own(x), averaged(x))
        assert_same_state(own.module if of_wrapper else own, averaged)
