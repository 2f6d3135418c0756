"""Scripts in the style of well-known ones, unmodified: under `unisono run` they print the plain script's losses."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from helpers.commands import run_to_the_end
from helpers.rounding import rounding_bound

PROGRAMS = Path(__file__).parent / "programs"
# What the numbers of one device need, where rows interact.
OPTIONS = {
    "recurrent_batches": [],
    "imagenet_loop": ["--sync-batch-norm", "--shares", "2,1"],
    "language_model": [],
}
WRAPPERS = {"recurrent_batches": 2}


pytestmark = pytest.mark.usefixtures("own_program")


def losses(output: str) -> list[float]:
    found = re.findall(r"loss(?:_[DG])?:?\]? +(\d+\.\d+)", output, flags=re.IGNORECASE)
    return [float(number) for number in found]


def plain_losses(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[float]:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [name])
        runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
    return losses(capsys.readouterr().out)


def assert_plain_losses(found: list[float], plain: list[float]) -> None:
    """The numbers of a handful of steps, each a sum over less than a thousand terms, printed with five digits or more.

    What a step rounds stays in the weights, so the bound grows with the steps before.
    """
    assert len(found) == len(plain) >= 4
    for number, (loss, oracle) in enumerate(zip(found, plain, strict=True), start=1):
        assert loss == pytest.approx(oracle, rel=2 * rounding_bound(1000 * number), abs=1.01e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_losses_are_those_of_the_plain_script(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """X1: on two devices; on one accelerator alone, both replicas are on it."""
    plain = plain_losses(name, monkeypatch, capsys)
    device = torch.accelerator.current_accelerator(check_available=True)
    devices = ["--devices", f"{device or 'cpu'}*2"]
    assert run_to_the_end(*devices, *OPTIONS[name], str(PROGRAMS / f"{name}.py")) == 0
    captured = capsys.readouterr()
    assert_plain_losses(losses(captured.out), plain)
    closing = captured.err.splitlines()[-1]
    number = WRAPPERS.get(name, 1)
    assert closing.startswith(f"unisono run: {number} wrapper{'s' * (number > 1)} on 2 replicas (2 x ")
    assert re.search(r"[\d,]+ rows in \d+ forwards, [\d,]+ rows/s; forward \d+%, ", closing)
    assert torch.nn.DataParallel.__module__ == "torch.nn.parallel.data_parallel"
