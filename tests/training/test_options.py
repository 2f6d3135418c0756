import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.console.errors import OptionError
from manyhands.training.options import Options

CPU = torch.device("cpu")
CUDA = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("batch_size", [0]),
        ("epochs", [0]),
        ("accumulate", [0, 129]),
        ("lr", [0.0, float("nan"), float("inf")]),
        ("momentum", [1.0]),
        ("weight_decay", [-1e-4]),
        ("warmup_epochs", [-1.0, 9.0, float("nan")]),
        ("seed", [-1]),
        ("schedule", ["linear"]),
        ("precision", ["fp16"]),
        ("device_order", ["RANDOM"]),
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
        ({"engine": "processes"}, [CUDA], True, r"--devices auto is cuda:0, cuda:1, .*or take --no-sync-batch-norm$"),
        ({"engine": "processes"}, [CUDA], False, None),
        ({"engine": "processes"}, [[CPU] * 3], True, None),
        ({"compile": True}, [[CPU] * 2], True, r"over 2 replicas \(cpu, cpu\).* --no-sync-batch-norm or --devices 1"),
        ({"compile": True}, [[CPU], [CPU]], True, "over 2 replicas"),
        ({"compile": True}, [[CPU] * 2], False, None),
        ({"compile": True}, [[CPU]], True, None),
    ],
)
def test_options_that_do_not_go_together_on_these_devices(
    changes: dict[str, Any], devices_by_rank: list[list[torch.device]], synchronised: bool, message: str | None
) -> None:
    with nullcontext() if message is None else pytest.raises(OptionError, match=message):
        Options(**changes).check_devices(devices_by_rank, synchronised=synchronised)


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        ({"lr": 0.3, "data": "fashion-mnist", "mirror": "http://localhost/", "epochs": 3}, {}, None),
        ({"epochs": 3}, {"epochs": 5, "devices": "cpu*3"}, None),
        ({"lr": 0.3}, {"lr": 0.3}, None),
        ({}, {"compile": True}, None),
        ({"compile": True}, {"compile": False}, None),
        ({"lr": 0.3}, {"lr": 0.2}, r"^--lr 0.2: the run to resume has --lr 0.3; leave it"),
        ({}, {"sync_batch_norm": False}, r"^--no-sync-batch-norm: the run to resume has --sync-batch-norm; leave it"),
        ({"sync_batch_norm": False}, {"sync_batch_norm": True}, r"^--sync-batch-norm: the run to resume has --no-sync"),
    ],
)
def test_resuming_may_change_devices_and_length_but_not_the_recipe(
    saved: dict[str, Any], given: dict[str, Any], message: str | None
) -> None:
    with nullcontext() if message is None else pytest.raises(OptionError, match=message):
        assert Options.from_saved(dataclasses.asdict(Options(**saved)), given) == Options(**(saved | given))


def test_a_data_folder_is_found_again_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named like a data set is not taken for it."""
    for name in ("pictures", "digits"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    options = Options.from_given({"data": "pictures"})
    assert options.data == str(tmp_path / "pictures")
    assert Options.from_saved(dataclasses.asdict(options), {"data": "pictures"}) == options
    assert Options.from_given({"data": "digits"}).data == "digits"


def test_device_order_is_that_of_nvidia_smi_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert Options.from_given({}).device_order == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert Options.from_given({}).device_order == "FASTEST_FIRST"
    assert Options.from_given({"device_order": "PCI_BUS_ID"}).device_order == "PCI_BUS_ID"
