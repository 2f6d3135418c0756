import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.console.device_option import choose_devices
from unisono.console.errors import CommandError, OptionError
from unisono.training import data, models
from unisono.training.options import Options
from unisono.training.schedule import learning_rate, num_steps

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


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["cpu*9999", "cpu*1024,cpu", "\0", "/dev/zero", "processes", "threads", "cosine"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=4,
)
OPTION_NAMES = [field.name for field in dataclasses.fields(Options)]


@pytest.mark.property
@given(changes=st.dictionaries(st.sampled_from([*OPTION_NAMES, "more"]), JSON_VALUES, min_size=1, max_size=3))
def test_options_from_a_config_that_someone_wrote_are_an_error_or_can_be_used(changes: dict[str, Any]) -> None:
    """T5: a rate of 400 digits was an OverflowError, such a batch size a division by zero."""
    try:
        options = Options.from_saved({**dataclasses.asdict(Options()), **changes}, {})
        models.expect_known(options.model, options.init)
        data.expect_known(options.data)
        devices = choose_devices(options.devices)
    except CommandError:
        return
    assert len(devices) <= 1024
    steps = num_steps(1437, options.batch_size)
    warmup = round(options.warmup_epochs * steps)
    last = learning_rate(
        steps - 1, peak=options.lr, schedule=options.schedule, warmup_steps=warmup, total_steps=options.epochs * steps
    )
    assert 0 <= last <= 1.01 * options.lr


@pytest.mark.parametrize("name", ["lr", "sync_batch_norm"])
def test_an_option_that_is_missing_from_a_config_is_an_error(name: str) -> None:
    """T4: nothing is added in its place."""
    saved = dataclasses.asdict(Options())
    del saved[name]
    with pytest.raises(OptionError, match=f"config.json of the run to resume has '{name}': 'nothing'"):
        Options.from_saved(saved, {})


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
