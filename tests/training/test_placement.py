import pytest
import torch

from manyhands import devices
from manyhands.training.errors import OptionError
from manyhands.training.placement import choose_devices

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


@pytest.mark.usefixtures("with_two_gpus")
def test_processes_are_for_the_cpu() -> None:
    assert choose_devices("cpu*3", "processes") == [CPU] * 3
    with pytest.raises(OptionError, match=r"--devices auto is cuda:0, cuda:1: take --devices 'cpu\*2', or leave out"):
        choose_devices("auto", "processes")


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
