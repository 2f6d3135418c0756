"""`unisono verify`: what it finds, what it prints, and how it ends."""

import sys
from pathlib import Path

import pytest
import torch

from helpers.commands import assert_misused, status_of

SCRIPT = """\
import random

import torch
from torch import nn

x, target = torch.randn(9, 5), torch.randn(9, 2)

def build():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)), x

def with_batch_norm():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), x

def with_dropout():
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.Linear(8, 2)), x

class Dice(nn.Module):
    def forward(self, x):
        return x * random.random() if self.training else x

def with_dice():
    return nn.Sequential(nn.Linear(5, 8), Dice(), nn.Linear(8, 2)), x

def arguments():
    model, inputs = build()
    return {"model": model, "inputs": inputs, "target": target, "criterion": nn.MSELoss(), "shares": [2, 1]}

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, x):
        return self.layer(x).pow(2).mean()

    @staticmethod
    def build():
        return Loss(), x

def fails():
    raise KeyError("as asked")

def interrupted():
    raise KeyboardInterrupt

class Failing(nn.Linear):
    def forward(self, x):
        raise RuntimeError("no such layer")

def fails_in_forward():
    return Failing(5, 2), x

class Silent(nn.Module):
    def forward(self, x):
        return None

three = lambda: (1, 2, 3)
nothing = lambda: None
without_output = lambda: (Silent(), x)
without_rows = lambda: (nn.Linear(5, 2), x[:0])
unknown = lambda: {"model": nn.Linear(5, 2), "inputs": x, "colour": "red"}
without_inputs = lambda: {"model": nn.Linear(5, 2)}
number = 5
"""

pytestmark = pytest.mark.usefixtures("script")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder with a user's scripts."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    Path("theirs.py").write_text(SCRIPT)


def run(*arguments: str) -> int:
    """Run the command; return its exit status."""
    before = list(sys.path)
    try:
        return status_of("verify", *arguments)
    finally:
        assert sys.path == before
        sys.modules.pop("theirs", None)


TWO = ("--devices", "cpu,cpu")


@pytest.mark.parametrize(
    ("arguments", "status", "texts"),
    [
        (
            ["theirs:build"],
            0,
            [
                "Sequential on cpu, and on 2 replicas (cpu 5 rows, cpu 4 rows)\n",
                "same: 20 comparisons, in training and eval\n",
            ],
        ),
        (
            ["theirs:with_batch_norm", "--shares", "2,1"],
            1,
            ["(cpu 6 rows, cpu 3 rows)", "first at 1 (BatchNorm1d): batch norm used each replica's own rows"],
        ),
        (["theirs:with_dropout"], 0, ["dropout drops nothing: bernoulli_\n", "same: 20 comparisons"]),
        (["theirs:with_dice"], 2, ["not compared, because of 1 (Dice): ", "in eval\nnot compared: training\n"]),
        (["theirs:arguments"], 0, ["(cpu 6 rows, cpu 3 rows)"]),
        (["theirs:arguments", "--shares", "1,2"], 0, ["(cpu 3 rows, cpu 6 rows)"]),  # not those of the dict
        (["theirs:with_batch_norm", "--sync-batch-norm"], 0, ["same: "]),
        (["theirs:with_batch_norm", "--no-sync-batch-norm"], 0, ["differs, as expected"]),
        (["theirs:build", "--out-dims", "7"], 1, ["joined along dimension 7. Fix: out_dims=0"]),  # it said 1
        (["theirs:Loss.build"], 1, ["scalars='mean'"]),
        (["theirs:Loss.build", "--scalars", "mean"], 0, ["same: "]),
        (["theirs:Loss.build", "--scalars", "stack"], 0, ["differs, as expected"]),
        (["theirs:build", "--devices", "3", "--shares", "even", "--in-dims", "0"], 0, ["on 3 replicas"]),
    ],
)
@pytest.mark.filterwarnings("ignore:Each replica returned a scalar")
def test_the_report_and_the_status(
    arguments: list[str], status: int, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments[0], *TWO, *arguments[1:]) == status
    out = capsys.readouterr().out
    assert all(text in out for text in texts)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "the following arguments are required: package.module:build"),
        (["theirs.py"], "expected package.module:build, such as theirs:build; or compare the first step of the script"),
        (["theirs:build", "--device", "2"], "there is no option --device; did you mean --devices?"),
        (["theirs:build", "--shares", "1,2,3"], "error: --shares 1,2,3: 3 weights for 2 devices; give one"),
        (["theirs:build", "--in-dims", "x"], "argument --in-dims: expected Python's notation"),
        (["theirs:number"], "expected a function without arguments, got an object of type int"),
        (["theirs:fails"], "theirs:fails raised KeyError: 'as asked' ("),
        (["theirs:three"], "returned a tuple of 3: expected (model, inputs)"),
        (["theirs:nothing"], "returned a value of type NoneType: expected (model, inputs)"),
        (
            ["theirs:unknown"],
            "returned: unisono.verify has no argument 'colour'; it has model, inputs, target, criterion",
        ),
        (["theirs:without_inputs"], "returned a dict without 'inputs'"),
        *(
            ([*arguments], f"{arguments[0]}: nothing was compared, because one device had all rows")
            for arguments in (
                ["theirs:without_rows", *TWO],
                ["theirs:build", "--devices", "cpu"],
                ["theirs:build", *TWO, "--shares", "1,0"],
            )
        ),
        (["theirs:without_output", *TWO], "nothing was compared, because the model has no output"),
        (["theirs:fails_in_forward"], "theirs:fails_in_forward could not be compared: RuntimeError: no such layer"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert assert_misused(["verify", *arguments], error, capsys) == ""


def test_an_error_of_ours_names_no_file_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """The line ended with a path into the package, as if that were where to look."""
    assert run("theirs:build", *TWO, "--in-dims", "5") == 2
    assert capsys.readouterr().err.endswith("inputs[0] of shape (9, 5) along dim=5: it has no such dimension\n")


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It spoke of what had been saved, and this command saves nothing."""
    assert run("theirs:interrupted") == 130
    assert capsys.readouterr().err == "unisono verify: error: stopped at once\n"


def test_a_model_goes_to_the_first_device(simulated_accelerators, capsys: pytest.CaptureFixture[str]) -> None:
    """The script makes it on the CPU."""
    with simulated_accelerators(2):
        assert run("theirs:build") == 0
        assert "Sequential on sim:0, and on 2 replicas (sim:0 5 rows, sim:1 4 rows)" in capsys.readouterr().out
        assert run("theirs:build", "--devices", "cpu*2") == 0
