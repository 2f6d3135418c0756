import dataclasses
from pathlib import Path
from typing import Any

import pytest

from manyhands.console.errors import OptionError
from manyhands.training.options import Options, flag


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("epochs", 0),
        ("accumulate", 0),
        ("accumulate", 129),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("momentum", 1.0),
        ("weight_decay", -1e-4),
        ("warmup_epochs", -1.0),
        ("warmup_epochs", 9.0),
        ("warmup_epochs", float("nan")),
        ("seed", -1),
        ("schedule", "linear"),
        ("precision", "fp16"),
        ("device_order", "RANDOM"),
    ],
)
def test_a_value_out_of_range_is_named_as_it_is_typed(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        Options(**{name: value})
    assert str(caught.value).startswith(f"{flag(name)} {value}: expected ")


def test_flag() -> None:
    assert flag("warmup_epochs") == "--warmup-epochs"


def test_options_survive_being_saved() -> None:
    options = Options(lr=0.3, data="fashion-mnist", mirror="http://localhost/", epochs=3)
    assert Options.from_saved(dataclasses.asdict(options), {}) == options


def test_resuming_may_change_where_and_how_long() -> None:
    saved = dataclasses.asdict(Options(epochs=3))
    resumed = Options.from_saved(saved, {"epochs": 5, "devices": "cpu*3"})
    assert resumed == Options(epochs=5, devices="cpu*3")


def test_resuming_may_repeat_what_the_run_has() -> None:
    assert Options.from_saved(dataclasses.asdict(Options(lr=0.3)), {"lr": 0.3}).lr == 0.3


def test_resuming_with_another_recipe_is_another_run() -> None:
    with pytest.raises(OptionError, match=r"--lr 0.2: the run to resume has --lr 0.3; leave it out"):
        Options.from_saved(dataclasses.asdict(Options(lr=0.3)), {"lr": 0.2})


def test_resuming_keeps_the_rule_of_batch_norm() -> None:
    saved = dataclasses.asdict(Options())
    with pytest.raises(OptionError, match=r"^--no-sync-batch-norm: the run to resume has --sync-batch-norm; leave it"):
        Options.from_saved(saved, {"sync_batch_norm": False})
    saved["sync_batch_norm"] = False
    with pytest.raises(OptionError, match=r"^--sync-batch-norm: the run to resume has --no-sync-batch-norm; leave it"):
        Options.from_saved(saved, {"sync_batch_norm": True})
    del saved["sync_batch_norm"]  # begun before there was the option, when every device was by itself
    assert not Options.from_saved(saved, {}).sync_batch_norm


def test_a_data_folder_is_found_again_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    options = Options.from_given({"data": "pictures"})
    assert options.data == str(tmp_path / "pictures")
    assert Options.from_saved(dataclasses.asdict(options), {"data": "pictures"}) == options


def test_a_data_set_keeps_its_name_beside_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Options.from_given({"data": "digits"}).data == "digits"


def test_device_order_is_that_of_nvidia_smi_unless_someone_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert Options.from_given({}).device_order == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert Options.from_given({}).device_order == "FASTEST_FIRST"
    assert Options.from_given({"device_order": "PCI_BUS_ID"}).device_order == "PCI_BUS_ID"


def test_what_is_compiled_stays_in_its_process() -> None:
    with pytest.raises(OptionError, match=r"^--compile with --engine processes: .* leave one out$"):
        Options(compile=True, engine="processes")


def test_resuming_may_compile_or_not() -> None:
    assert Options.from_saved(dataclasses.asdict(Options()), {"compile": True}).compile
    assert not Options.from_saved(dataclasses.asdict(Options(compile=True)), {"compile": False}).compile


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "resnet18 on digits"),
        ({"precision": "tf32"}, "resnet18 on digits, in tf32"),
        ({"precision": "bf16", "compile": True, "model": "mlp"}, "mlp on digits, in bf16, compiled"),
    ],
)
def test_options_in_words(changes: dict[str, Any], words: str) -> None:
    assert str(Options(**changes)) == words
