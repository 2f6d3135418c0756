"""`pytest --unisono N`, run on small projects as their authors would run it."""

from pathlib import Path

import pytest

from helpers.programs import run_pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "two_device_tests"
TESTS = """
import random
import unittest
import torch
from torch import nn
from torch.nn import DataParallel


class Centred(nn.Linear):
    def forward(self, x, *, scale=1.0):
        return super().forward(x - scale * x.mean())


class OfDevice(nn.Linear):
    def forward(self, x):
        assert x.device in (torch.device("sim:0"), torch.device("sim:1"))
        return super().forward(x)


def test_same(devices):
    assert [str(device) for device in devices] == ["sim:0", "sim:1"]
    model = DataParallel(OfDevice(4, 4).to(devices[0]), devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(6, 4)).sum().backward()
        optimizer.step()


def test_differs(devices):
    DataParallel(Centred(4, 4).to(devices[0]))(torch.randn(6, 4), scale=2.0)


def test_as_in_torch(devices):
    DataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(devices[0]))(torch.randn(6, 4))


def test_wrong_device(devices):
    def on_the_cpu(module, inputs):
        return inputs[0] + torch.ones(4)

    layer = nn.Linear(4, 4).to(devices[0])
    layer.register_forward_pre_hook(on_the_cpu)
    DataParallel(layer)(torch.randn(6, 4))


def test_dropout(devices):
    DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)).to(devices[0]))(torch.randn(6, 4))


def test_dice(devices):
    class Dice(nn.Linear):
        def forward(self, x):
            return super().forward(x * random.random())

    DataParallel(nn.Sequential(Dice(4, 4)).to(devices[0]))(torch.randn(6, 4))


def test_numbers_name_simulated_devices(devices):
    assert DataParallel(OfDevice(4, 4).to(devices[1]), [1, 0]).devices == devices[::-1]


def test_one_device_is_not_compared(devices):
    DataParallel(nn.Linear(4, 4).to(devices[0]), [0])(torch.randn(6, 4))


class TestCase(unittest.TestCase):
    def test_method(self):
        model = DataParallel(OfDevice(4, 4).to("sim:0"))
        assert model(torch.randn(5, 4)).shape == (5, 4)


def test_in_eval_mode_the_same(devices):
    class CentredInTraining(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean() if self.training else x)

    DataParallel(CentredInTraining(4, 4).to(devices[0])).eval()(torch.randn(6, 4))


def test_cannot_be_compared(devices):
    class OnceOnly(nn.Linear):
        calls = 0

        def forward(self, x):
            OnceOnly.calls += 1
            if OnceOnly.calls > 2:
                raise RuntimeError("no more")
            return super().forward(x)

    DataParallel(OnceOnly(4, 4).to(devices[0]))(torch.randn(6, 4))
"""

FILES = {
    "test_models.py": TESTS,
    # Its subclass of torch's class is defined before any test file is imported, and is unisono's all the same.
    "library.py": "from torch import nn\nclass Parallel(nn.DataParallel): pass\n",
    "conftest.py": "import library\n",
    "test_library.py": """
import library, torch

def test_on_all(devices):
    model = library.Parallel(torch.nn.Linear(4, 4).to(devices[0]))
    assert model(torch.randn(6, 4)).shape == (6, 4)
""",
    # Calls that raise errors are not compared. The next call of the wrapper is; one whose calls all do does not count.
    "test_errors.py": """
import pytest, torch

@pytest.mark.parametrize("goes_on", [False, True])
def test_width(devices, goes_on):
    model = torch.nn.DataParallel(torch.nn.Linear(4, 4).to(devices[0]))
    with pytest.raises(RuntimeError):
        model(torch.randn(6, 5))
    if goes_on:
        model(torch.randn(6, 4))
""",
    # A program that asks torch how many devices there are.
    "test_torch_accelerator.py": """
import torch

def test_devices():
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 2
    model = torch.nn.Linear(3, 2).to(torch.accelerator.current_accelerator())
    assert torch.nn.DataParallel(model)(torch.ones(4, 3, device="sim:0")).shape == (4, 2)
""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("arguments", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["one", "xdist"])
def test_a_project_runs_on_simulated_devices(project: Path, arguments: tuple[str, ...]) -> None:
    """N12: each kind of outcome: the same, differs, as in torch, on a wrong device, not compared."""
    status, output = run_pytest(project, "--unisono", "2", "-rA", *arguments)
    assert status == 1, output
    assert "13 passed" in output
    assert "2 failed" in output
    assert "11 tests called a wrapped model: 11 wrappers, 7 with the numbers of one device" in output
    assert "test_errors.py::test_width" not in output.partition("tests called a wrapped model")[2].partition("short")[0]
    assert "test_models.py::test_as_in_torch: as in torch: batch norm per shard\n" in output
    assert "test_models.py::test_differs: differs: rows interact, first at the model itself\n" in output
    assert "test_models.py::test_cannot_be_compared: not compared: RuntimeError: no more\n" in output
    assert "test_models.py::test_dice: not compared: random numbers that cannot be switched off, in 0\n" in output
    assert "FAILED test_models.py::test_differs" in output
    assert "gradient of weight" in output  # verify's table
    assert "FAILED test_models.py::test_wrong_device - RuntimeError" in output
    assert "E           RuntimeError: Expected all tensors to be on the same device, but found" in output


def test_without_the_option_nothing_is_loaded(tmp_path: Path) -> None:
    """The fixture skips where the machine has too few devices; torch is not imported for other tests."""
    (tmp_path / "test_models.py").write_text(
        "import sys\n"
        "def test_nothing(): assert not {'torch', 'unisono'} & set(sys.modules)\n"
        "def test_two(devices): assert len(devices) > 1\n"
    )
    status, output = run_pytest(tmp_path, "-rs")
    assert status == 0, output
    assert "1 passed" in output
    assert "1 skipped" in output or "2 passed" in output
    assert "simulated devices" not in output


@pytest.mark.parametrize("count", ["1", "9", "two"])
def test_a_wrong_number_is_one_line(project: Path, count: str) -> None:
    status, output = run_pytest(project, "--unisono", count)
    assert status == 4
    assert "argument --unisono: invalid" in output
    assert "Traceback" not in output


def test_where_another_backend_is_it_is_one_line(project: Path) -> None:
    (project / "other.py").write_text("import torch\ntorch.utils.rename_privateuse1_backend('mine')\n")
    status, output = run_pytest(project, "-p", "other", "--unisono", "2")
    assert status == 4
    assert "ERROR: --unisono 2: simulated devices need torch's one free device name" in output
    assert "Traceback" not in output


def test_the_example_project(tmp_path: Path) -> None:
    """docs/testing.md: it passes, and without `device=` it fails on two devices, but not on the CPU."""
    status, output = run_pytest(EXAMPLE.parent.parent, "--unisono", "2", "examples/two_device_tests")
    assert status == 0, output
    assert "1 test called a wrapped model: 1 wrapper, 1 with the numbers of one device" in output
    for file in EXAMPLE.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    layer = tmp_path / "pooling.py"
    assert ", device=sequences.device" in layer.read_text()
    layer.write_text(layer.read_text().replace(", device=sequences.device", ""))
    status, output = run_pytest(tmp_path, "--unisono", "2")
    assert status == 1
    assert "RuntimeError: Expected all tensors to be on the same device" in output
    assert "1 failed, 1 passed" in output
