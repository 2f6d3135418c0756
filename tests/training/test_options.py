import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from helpers.commands import status_of
from unisono.cli import main
from unisono.console.errors import OptionError
from unisono.training import options as options_module
from unisono.training.data import known
from unisono.training.options import Options, with_device_defaults
from unisono.training.ranks import ALONE

CPU = torch.device("cpu")
CUDA = [torch.device("cuda", index) for index in range(8)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("batch_size", [0]),
        ("epochs", [0]),
        ("lr", [0.0, float("nan"), float("inf")]),
        ("seed", [-1]),
    ],
)
def test_a_value_out_of_range_is_named_as_it_is_typed(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(OptionError) as caught:
            Options(**{name: value})
        assert str(caught.value).startswith(f"--{name.replace('_', '-')} {value}: expected ")


@pytest.mark.parametrize(
    ("changes", "devices_by_rank", "synchronised", "message"),
    [
        ({"compile": True}, [[CPU] * 2], True, r"over 2 replicas \(cpu, cpu\).* --no-sync-batch-norm or --devices 1"),
        ({"compile": True}, [[CPU], [CPU]], True, "over 2 replicas"),
        ({"compile": True}, [[CPU] * 2], False, None),
        ({"compile": True}, [[CPU]], True, None),
    ],
)
def test_options_that_do_not_go_together_on_these_devices(changes, devices_by_rank, synchronised, message):
    with nullcontext() if message is None else pytest.raises(OptionError, match=message):
        Options(**changes).check_devices(devices_by_rank, synchronised=synchronised)


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        ({"lr": 0.3, "data": "fashion-mnist", "epochs": 3}, {}, None),
        ({"epochs": 3}, {"epochs": 5, "devices": "cpu*3"}, None),
        ({"lr": 0.3}, {"lr": 0.3}, None),
        ({}, {"compile": True}, None),
        ({"compile": True}, {"compile": False}, None),
        ({"lr": 0.3}, {"lr": 0.2}, r"^--lr 0.2: the run to resume has --lr 0.3; leave this"),
        ({}, {"sync_batch_norm": False}, r"^--no-sync-batch-norm: the run to resume has --sync-batch-norm; leave this"),
        ({"sync_batch_norm": False}, {"sync_batch_norm": True}, r"^--sync-batch-norm: the run to resume has --no-sync"),
    ],
)
def test_resuming_may_change_devices_and_length_but_not_the_recipe(saved, given, message):
    with nullcontext() if message is None else pytest.raises(OptionError, match=message):
        assert Options.from_saved(dataclasses.asdict(Options(**saved)), given) == Options(**(saved | given))


@pytest.mark.parametrize("name", ["lr", "sync_batch_norm"])
def test_an_option_that_is_missing_from_a_config_is_an_error(name: str) -> None:
    """T4: nothing is added in its place."""
    saved = dataclasses.asdict(Options())
    del saved[name]
    with pytest.raises(
        OptionError, match=rf"another version of unisono wrote .*\({name} is not in both\): start a new"
    ):
        Options.from_saved(saved, {})


def test_a_data_folder_is_found_again_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named like a data set is not taken for it."""
    for name in ("pictures", "digits"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    options = Options(data=known("pictures"))
    assert options.data == str(tmp_path / "pictures")
    assert Options.from_saved(dataclasses.asdict(options), {"data": known("pictures")}) == options
    assert known("digits") == "digits"


# ---- what depends on the devices, on some that count as GPUs -------------------------------------

BF16 = {"precision": "bf16"}
COMPILED = {**BF16, "compile": True}


@pytest.fixture
def compiler_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "expect_compiler", lambda device: None)


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
    ],
)
def test_capable_gpus_use_bfloat16_and_a_single_one_compiles(monkeypatch, capabilities, given, expected):
    """T11"""
    say_capability_is(monkeypatch, *capabilities)
    options, lines = with_device_defaults(Options(**given), given, CUDA[: len(capabilities)], ALONE)
    assert options == Options(**{**given, **expected})
    assert bool(lines) == bool(expected)
    profiled, _ = with_device_defaults(Options(**given), given, CUDA[: len(capabilities)], ALONE, profile=True)
    assert profiled == dataclasses.replace(options, compile=False)
    assert with_device_defaults(Options(), {}, [torch.device("cpu")], ALONE) == (Options(), [])


def test_a_compiler_that_does_not_work_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """T11"""

    def fails(device: torch.device) -> None:
        raise OptionError("no Triton")

    monkeypatch.setattr(options_module, "expect_compiler", fails)
    say_capability_is(monkeypatch, (9, 0))
    options, lines = with_device_defaults(Options(), {}, CUDA[:1], ALONE)
    assert options == Options(precision="bf16")
    assert lines[1] == "not compiled: no Triton"


@pytest.mark.usefixtures("compiler_works")
def test_what_was_decided_is_printed_recorded_and_resumed(tmp_path, monkeypatch, capsys):
    """T11: the run goes on as it began on a machine where the default is another; on the CPU nothing is decided."""
    monkeypatch.chdir(tmp_path)
    small = ["train", "--model", "mlp", "--epochs", "1", "--devices", "1", "--no-compile"]
    monkeypatch.setattr(options_module, "has_fast_bfloat16", lambda device: True)
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


SMALL = ["train", "--model", "mlp", "--epochs", "1", "--no-compile", "--precision", "fp32"]


@pytest.mark.filterwarnings("ignore:In sim autocast")  # torch 2.9 warns of one that is switched off
def test_all_accelerators_for_few_rows_are_named(own_folder, capsys, sim):
    """T12: with the rows that each has, and the option that takes fewer; not where the devices were given."""
    assert status_of(*SMALL, "--output", "out") == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith(
        "--devices auto takes all 4 accelerators, with 32 rows of a step's 128 for each: --devices 1"
    )
    assert status_of(*SMALL, "--devices", "2", "--output", "two") == 0
    assert "--devices auto" not in capsys.readouterr().out


def test_two_replicas_on_an_accelerator_with_batch_norm(monkeypatch):
    """T12, A12: an error that names the option; processes on several machines may have GPUs of one name."""
    monkeypatch.setattr(options_module, "computes_on_host", lambda device: device.type == "cpu")
    shared = Options(devices="cuda:1,cuda:0,cuda:1")
    with pytest.raises(
        OptionError, match=r"--devices cuda:1,cuda:0,cuda:1: 2 replicas on cuda:1.*--no-sync-batch-norm"
    ):
        shared.check_devices([[CUDA[1], CUDA[0], CUDA[1]]], synchronised=True)
    shared.check_devices([[CUDA[1], CUDA[0], CUDA[1]]], synchronised=False)
    Options().check_devices([CUDA[:2], CUDA[:2]], synchronised=True)
    Options().check_devices([[CPU, CPU]], synchronised=True)
