import re

import pytest
import torch

from unisono.console.device_option import choose_devices
from unisono.console.errors import OptionError
from unisono.console.files import as_typed
from unisono.runtime import devices

THREE_TYPED = re.escape(as_typed("cuda:0*3"))


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: [torch.device("cuda", index) for index in range(count)])


def chosen(text: str, *, among_several: bool = False) -> list[str]:
    return list(map(str, choose_devices(text, among_several=among_several)))


@pytest.mark.parametrize(
    ("text", "replicas", "among_several"),
    [("auto", 2, 1), ("1", 1, 1), ("3", 3, 3), ("cpu", 1, 1), ("cpu,cpu", 2, 2), ("cpu, cpu", 2, 2), ("cpu*8", 8, 8),
     ("cpu*2,cpu", 3, 3)],
)  # fmt: skip
def test_without_accelerators(no_accelerators: None, text: str, replicas: int, among_several: int) -> None:
    assert chosen(text) == ["cpu"] * replicas
    assert chosen(text, among_several=True) == ["cpu"] * among_several


@pytest.mark.parametrize(
    ("text", "local_rank", "expected"),
    [
        ("auto", None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("1", None, ["cuda:0"]),
        ("2", None, ["cuda:0", "cuda:1"]),
        ("cuda:1,cuda:0", None, ["cuda:1", "cuda:0"]),
        ("0,1", None, ["cuda:0", "cuda:1"]),
        ("3, 1", None, ["cuda:3", "cuda:1"]),
        ("2,", None, ["cuda:2"]),
        (" 2", None, ["cuda:0", "cuda:1"]),
        ("1,cuda:1", None, ["cuda:1", "cuda:1"]),
        ("1*2", None, ["cuda:1", "cuda:1"]),
        ("cuda:0*3", None, ["cuda:0"] * 3),
        ("cpu*2", None, ["cpu", "cpu"]),
        ("auto", "0", ["cuda:0"]),
        ("auto", "3", ["cuda:3"]),
        ("1", "2", ["cuda:2"]),
        ("2", "0", ["cuda:0", "cuda:1"]),
        ("2", "1", ["cuda:2", "cuda:3"]),
        ("cuda:1", "0", ["cuda:1"]),
    ],
)
def test_each_of_several_processes_has_its_own_accelerators(
    monkeypatch: pytest.MonkeyPatch, text: str, local_rank: str | None, expected: list[str]
) -> None:
    with_gpus(monkeypatch, 4)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert chosen(text, among_several=local_rank is not None) == expected


@pytest.mark.parametrize(
    ("text", "among_several", "message"),
    [
        ("3", False, rf"only 2 \(cuda:0, cuda:1\); write --devices 2, or {THREE_TYPED} for 3 replicas on one device"),
        ("0", False, r"--devices 0: a number is a count, 1 or more; write --devices 0, \(with a comma\) for"),
        ("", False, f"--devices {as_typed('')}: expected auto, a count, or devices"),
        ("cuda:7", False, "--devices cuda:7: there is no accelerator 7"),
        ("0,2", False, "--devices 0,2: there is no accelerator 2"),
        ("cpu,cuda:0", False, "one kind"),
        ("auto", True, "LOCAL_RANK=2, but this machine has only 2 accelerators"),
        ("1", True, r"--devices 1 for each of 3 processes: this machine has only 2 .*; start at most 2 here"),
        ("3", True, r"--devices 3 for each of 3 processes: this machine has only 2 .*; write --devices 2, or"),
        *((text, False, "--devices") for text in ("-1", "two", "gpu", "cpu*", "cpu*0", "cpu*x", "*2")),
        *((text, False, "--devices") for text in ("cpu,,cpu", ",", "0,,", "meta", "1.5", "12345")),
    ],
)
def test_what_the_machine_does_not_have(
    monkeypatch: pytest.MonkeyPatch, text: str, among_several: bool, message: str
) -> None:
    with_gpus(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(OptionError, match=message):
        choose_devices(text, among_several=among_several)


def test_an_accelerator_where_there_is_none(no_accelerators: None) -> None:
    with pytest.raises(OptionError, match=r"--devices 0,1: there is no accelerator 0.*write --devices 'cpu\*2'"):
        choose_devices("0,1")
