"""captum: attributions of a wrapped model's outputs, and of a layer inside, which hooks on its replicas note."""

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.contract import Wrap
from helpers.programs import run_pytest

attr = pytest.importorskip("captum.attr")


@pytest.mark.parametrize("name", ["IntegratedGradients", "Saliency", "DeepLift", "FeatureAblation"])
def test_attributions_to_inputs(wrap: Wrap, net: nn.Module, name: str) -> None:
    """X9: IntegratedGradients, Saliency, DeepLift and FeatureAblation of inputs, on two CPU replicas."""
    x = torch.randn(5, 5, requires_grad=True)
    expected = getattr(attr, name)(net).attribute(x, target=1)
    torch.testing.assert_close(getattr(attr, name)(wrap(net)).attribute(x, target=1), expected)


TESTS = """
import copy

import captum.attr
import pytest
import torch
import unisono

LAYERS = {
    "LayerActivation": {},
    "LayerGradientXActivation": {"target": 1},
    "LayerConductance": {"target": 1},
    "LayerDeepLift": {"target": 1},
    "LayerGradCam": {"target": 1},
    "InternalInfluence": {"target": 1},
    "NeuronGradient": {"neuron_selector": 2},
    "NeuronIntegratedGradients": {"neuron_selector": 2},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(devices, name):
    method, options = getattr(captum.attr, name), LAYERS[name]
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).double()
    x = torch.randn(5, 6).double().requires_grad_()
    expected = method(net, net[0]).attribute(x, **options)
    model = unisono.DataParallel(copy.deepcopy(net).to(devices[0]), devices)
    actual = method(model, model.module[0]).attribute(x.detach().to(devices[0]).requires_grad_(), **options)
    torch.testing.assert_close(actual.cpu(), expected)
"""


def test_attributions_to_layers(tmp_path: Path) -> None:
    """X9: `pytest --unisono 2`: eight methods about a layer or a neuron, such as LayerConductance and LayerGradCam.

    passed. LayerIntegratedGradients is an error: its hook brings in a tensor that was computed outside the model. The
    others tell replicas apart by device, so two replicas on one device are a warning
    """
    (tmp_path / "test_layers.py").write_text(TESTS)
    status, output = run_pytest(tmp_path, "--unisono", "2", "-W", "ignore")
    assert status == 0, output
    assert "8 passed" in output
