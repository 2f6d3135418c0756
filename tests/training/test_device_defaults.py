"""What `unisono train` computes in where it is not told, on devices that count as GPUs which are fast in bfloat16."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.cli import main
from unisono.console.errors import OptionError
from unisono.runtime import devices
from unisono.training import device_defaults
from unisono.training.device_defaults import advice_on_rows, with_device_defaults
from unisono.training.options import Options
from unisono.training.ranks import ALONE

CUDA = [torch.device("cuda", index) for index in range(8)]
BF16 = {"precision": "bf16"}
COMPILED = {**BF16, "compile": True}


@pytest.fixture
def compiler_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_defaults, "expect_compiler", lambda device: None)


def say_capability_is(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])


@pytest.mark.usefixtures("compiler_works")
@pytest.mark.parametrize(
    ("capabilities", "given", "expected"),
    [
        ([(9, 0)], {}, COMPILED),
        ([(8, 0)], {}, COMPILED),
        ([(7, 5)], {}, {}),
        ([(9, 0)] * 2, {}, BF16),
        ([(9, 0), (7, 5)], {}, {}),
        ([(9, 0)], {"precision": "fp32"}, {"compile": True}),
        ([(9, 0)], {"compile": False}, BF16),
        ([(9, 0)], {"precision": "fp32", "compile": False}, {}),
        ([(9, 0)], {"engine": "processes"}, BF16),
    ],
)
def test_capable_gpus_use_bfloat16_and_a_single_one_compiles(
    monkeypatch: pytest.MonkeyPatch,
    capabilities: list[tuple[int, int]],
    given: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    """T11"""
    say_capability_is(monkeypatch, *capabilities)
    options, lines = with_device_defaults(Options(**given), given, CUDA[: len(capabilities)], ALONE)
    assert options == Options(**{**given, **expected})
    assert bool(lines) == bool(expected)
    profiled, _ = with_device_defaults(Options(**given), given, CUDA[: len(capabilities)], ALONE, profile=True)
    assert profiled == replace(options, compile=False)
    assert with_device_defaults(Options(), {}, [torch.device("cpu")], ALONE) == (Options(), [])


def test_a_compiler_that_does_not_work_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """T11"""

    def fails(device: torch.device) -> None:
        raise OptionError("no Triton")

    monkeypatch.setattr(device_defaults, "expect_compiler", fails)
    say_capability_is(monkeypatch, (9, 0))
    options, lines = with_device_defaults(Options(), {}, CUDA[:1], ALONE)
    assert options == Options(precision="bf16")
    assert lines[1] == "not compiled: no Triton"


@pytest.mark.usefixtures("compiler_works")
def test_what_was_decided_is_printed_recorded_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """T11: the run goes on as it began on a machine where the default is another; on the CPU nothing is decided."""
    monkeypatch.chdir(tmp_path)
    small = ["train", "--model", "mlp", "--epochs", "1", "--devices", "1", "--no-compile"]
    monkeypatch.setattr(devices, "has_fast_bfloat16", lambda device: True)
    assert main([*small, "--output", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mlp on digits, in bf16; results in out" in lines[0]
    assert lines[1] == "on cpu the default is --precision bf16; exact float32: --precision fp32 --no-compile"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "out", "--epochs", "2"]) == 0
    assert json.loads(Path("out/config.json").read_text())["options"]["precision"] == "bf16"
    assert main([*small, "--output", "exact"]) == 0
    assert json.loads(Path("exact/config.json").read_text())["options"]["precision"] == "fp32"


@pytest.mark.parametrize(
    ("devices_by_rank", "options", "said"),
    [
        ([CUDA], {}, "16 rows for each of 8 devices are few: .* --batch-size 512 gives each 64$"),
        ([CUDA[:2]], {"accumulate": 2}, "32 rows for each of 2 devices .* --batch-size 256 "),
        ([CUDA[:2]], {}, None),
        ([CUDA[:1]], {"batch_size": 8}, None),
        ([[device] for device in CUDA], {}, None),
        ([[torch.device("cpu")] * 8], {}, None),
    ],
)
def test_few_rows_for_each_of_several_gpus_of_a_process_are_advised_against(
    monkeypatch: pytest.MonkeyPatch,
    devices_by_rank: list[list[torch.device]],
    options: dict[str, Any],
    said: str | None,
) -> None:
    monkeypatch.setattr(devices, "_accelerator_types", {"cuda"})
    advice = advice_on_rows(Options(**options), devices_by_rank)
    assert advice is None if said is None else re.search(said, advice or "")
