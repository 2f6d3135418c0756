"""gpytorch: MultiDeviceKernel is a DataParallel with a forward and a gather of its own, for rows on axis -2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from helpers.programs import run_pytest
from unisono.scripts.install import Installation

with unisono.install(["cpu", "cpu"]):  # as under `unisono run`: its class is defined when the library is imported
    gpytorch = pytest.importorskip("gpytorch")


def negative_likelihoods(make_kernel: Callable[[Any], Any]) -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
    """Train a Gaussian process; return the loss of each step, the last gradients, and the predicted means."""
    x = torch.linspace(0, 1, 21)[:, None]
    y = torch.sin(6 * x[:, 0])
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Process(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = make_kernel(gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    process = Process()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, process)
    optimizer = torch.optim.SGD(process.parameters(), 0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = -objective(process(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    process.eval()
    likelihood.eval()
    with torch.no_grad():
        mean = likelihood(process(torch.linspace(0, 1, 9)[:, None])).mean
    return losses, [p.grad for p in process.parameters()], mean


def test_multi_device_kernel(float64: None, installed: Installation) -> None:
    """X9: an exact Gaussian process, its kernel's rows on two devices: losses, gradients, predictions."""
    expected = negative_likelihoods(lambda kernel: kernel)
    actual = negative_likelihoods(
        lambda kernel: gpytorch.kernels.MultiDeviceKernel(
            kernel, [torch.device("cpu")] * 2, output_device=torch.device("cpu")
        )
    )
    assert issubclass(gpytorch.kernels.MultiDeviceKernel, unisono.DataParallel)
    torch.testing.assert_close(actual, expected)


TESTS = """
import gpytorch
import pytest
import torch


@pytest.fixture
def kernels(devices):
    plain = gpytorch.kernels.RBFKernel()
    on_all = gpytorch.kernels.MultiDeviceKernel(
        gpytorch.kernels.RBFKernel().to(devices[0]), devices, output_device=devices[0]
    )
    return plain, on_all


def test_product(kernels, devices):
    plain, on_all = kernels
    x, y = torch.linspace(0, 1, 21)[:, None], torch.linspace(1, 2, 21)[:, None]
    expected, actual = plain(x) @ y, on_all(x.to(devices[0])) @ y.to(devices[0])
    expected.sum().backward()
    actual.sum().backward()
    torch.testing.assert_close(actual.cpu(), expected)
    torch.testing.assert_close(on_all.module.raw_lengthscale.grad.cpu(), plain.raw_lengthscale.grad)


def test_dense(kernels, devices):
    plain, on_all = kernels
    x = torch.linspace(0, 1, 21)[:, None]
    torch.testing.assert_close(on_all(x.to(devices[0])).to_dense().cpu(), plain(x).to_dense())


def test_features(kernels, devices):
    plain, _ = kernels
    features = torch.nn.DataParallel(torch.nn.Linear(3, 2).to(devices[0]), devices)
    plain.to(devices[0])(features(torch.randn(7, 3, device=devices[0]))).to_dense().sum().backward()
    assert features.module.weight.grad is not None
"""


def test_under_the_pytest_plugin(tmp_path: Path) -> None:
    """X9: `pytest --unisono 2`: MultiDeviceKernel's matrix in a product, and dense; wrapped features.

    Product and features pass. The dense matrix fails: `CatLinearOperator.to_dense` joins tensors of two devices.
    """
    (tmp_path / "test_kernels.py").write_text(TESTS)
    status, output = run_pytest(tmp_path, "--unisono", "2")
    assert status == 1, output
    assert "1 failed, 2 passed" in output
    assert "FAILED test_kernels.py::test_dense - RuntimeError: Expected all tensors" in output
    assert "on the same device, but found at least two devices, sim:0 and sim:1! (in aten.cat.default)" in output
    assert "1 test called a wrapped model: 1 wrapper, 1 with the numbers of one device" in output
