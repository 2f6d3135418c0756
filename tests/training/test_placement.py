from contextlib import nullcontext
from typing import Any

import pytest
import torch

from manyhands.console.device_option import choose_devices
from manyhands.console.errors import OptionError
from manyhands.runtime import devices
from manyhands.training.options import Options
from manyhands.training.placement import expect_combination

CPU = torch.device("cpu")


@pytest.fixture
def without_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerators", list)


@pytest.fixture
def with_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: [torch.device("cuda", 0), torch.device("cuda", 1)])


@pytest.mark.usefixtures("without_accelerators")
@pytest.mark.parametrize(
    ("text", "replicas"),
    [("auto", 2), ("1", 1), ("3", 3), ("cpu", 1), ("cpu,cpu", 2), ("cpu, cpu", 2), ("cpu*8", 8), ("cpu*2,cpu", 3)],
)
def test_on_a_machine_without_accelerators(text: str, replicas: int) -> None:
    assert choose_devices(text) == [CPU] * replicas


@pytest.mark.usefixtures("with_two_gpus")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", ["cuda:0", "cuda:1"]),
        ("1", ["cuda:0"]),
        ("2", ["cuda:0", "cuda:1"]),
        ("cuda:1", ["cuda:1"]),
        ("cuda:1,cuda:0", ["cuda:1", "cuda:0"]),
        ("cuda:0*3", ["cuda:0"] * 3),
        ("cpu*2", ["cpu", "cpu"]),
    ],
)
def test_on_a_machine_with_two_gpus(text: str, expected: list[str]) -> None:
    assert list(map(str, choose_devices(text))) == expected


@pytest.mark.usefixtures("without_accelerators")
@pytest.mark.parametrize(
    "text", ["", "0", "-1", "two", "gpu", "cpu*", "cpu*0", "cpu*x", "*2", "cpu,,cpu", "meta", "1.5"]
)
def test_what_is_no_device_is_told_with_its_text(text: str) -> None:
    with pytest.raises(OptionError, match="--devices"):
        choose_devices(text)


CUDA = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("changes", "places", "synchronised", "message"),
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
def test_what_goes_together(
    changes: dict[str, Any], places: list[list[torch.device]], synchronised: bool, message: str | None
) -> None:
    with nullcontext() if message is None else pytest.raises(OptionError, match=message):
        expect_combination(Options(**changes), places, synchronised=synchronised)


@pytest.mark.usefixtures("with_two_gpus")
def test_more_than_there_are() -> None:
    with pytest.raises(OptionError, match=r"--devices 3: there are only 2 \(cuda:0, cuda:1\); 'cuda:0\*3' puts 3"):
        choose_devices("3")
    with pytest.raises(OptionError, match="no accelerator 7"):
        choose_devices("cuda:7")


@pytest.mark.usefixtures("with_two_gpus")
def test_replicas_are_on_one_kind_of_device() -> None:
    with pytest.raises(OptionError, match="one kind"):
        choose_devices("cpu,cuda:0")


@pytest.mark.usefixtures("without_accelerators")
@pytest.mark.parametrize(("text", "replicas"), [("auto", 1), ("1", 1), ("3", 3), ("cpu*2", 2)])
def test_one_of_several_processes_without_accelerators(text: str, replicas: int) -> None:
    assert choose_devices(text, among_several=True) == [CPU] * replicas


@pytest.mark.parametrize(
    ("text", "local_rank", "expected"),
    [
        ("auto", 0, ["cuda:0"]),
        ("auto", 3, ["cuda:3"]),
        ("1", 2, ["cuda:2"]),
        ("2", 0, ["cuda:0", "cuda:1"]),
        ("2", 1, ["cuda:2", "cuda:3"]),
        ("cuda:1", 0, ["cuda:1"]),
    ],
)
def test_one_of_several_processes_has_accelerators_of_its_own(
    monkeypatch: pytest.MonkeyPatch, text: str, local_rank: int, expected: list[str]
) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: [torch.device("cuda", index) for index in range(4)])
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert choose_devices(text, among_several=True) == [torch.device(name) for name in expected]


@pytest.mark.usefixtures("with_two_gpus")
@pytest.mark.parametrize(
    ("text", "message"),
    [("auto", "LOCAL_RANK=2, and this machine has 2 accelerators"), ("1", "--devices 1 for each of 3 processes")],
)
def test_more_processes_than_accelerators(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(OptionError, match=message):
        choose_devices(text, among_several=True)
