"""`unisono devices`: accelerators, their numbers and links, which are free, and the CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.commands import assert_misused, status_of
from helpers.fake_gpus import GIB, NVMLError, install, nvml
from unisono.bench.machine import num_cores
from unisono.monitor import cpu
from unisono.monitor.nvml import GpuReader
from unisono.runtime import devices

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def say_torch_has(
    patch: pytest.MonkeyPatch, buses: Sequence[int], memory: Sequence[int], cores: Sequence[int]
) -> list[torch.device]:
    """Have torch report a GPU for each bus number of PCI, with so much memory (GiB) and so many cores."""
    present = [torch.device("cuda", number) for number, _ in enumerate(buses)]
    properties = [
        SimpleNamespace(
            name="Fake GPU",
            total_memory=gib * GIB,
            multi_processor_count=count,
            pci_domain_id=0,
            pci_bus_id=bus,
            pci_device_id=0,
        )
        for bus, gib, count in zip(buses, memory, cores, strict=True)
    ]
    module = SimpleNamespace(
        get_device_properties=lambda device: properties[torch.device(device).index],
        can_device_access_peer=lambda source, target: {source.index, target.index} == {0, 1},
    )
    patch.setattr(torch, "get_device_module", lambda device=None: module)
    patch.setattr(devices, "accelerators", lambda: present)
    patch.setattr(devices, "computes_on_host", lambda device: device.type == "cpu")
    patch.setattr("unisono.runtime.devices.free_memory_bytes", lambda device: memory[device.index] * GIB)
    patch.setattr("unisono.monitor.inventory._copy_bytes_per_s", lambda source, target: 45e9)
    patch.setattr(devices, "copies_arrive", lambda source, target: {source.index, target.index} != {0, 2})
    return present


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def lines(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[str]:
    assert status_of("devices", *arguments) == status
    shown = capsys.readouterr().out
    assert shown.isascii()
    return [line.strip() for line in shown.splitlines()]


def facts(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert status_of("devices", "--json", *arguments) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_machine_without_accelerators(no_accelerators: None, capsys: pytest.CaptureFixture[str]) -> None:
    """M1: cores, threads, limits and nodes are there."""
    shown = lines(capsys)
    assert shown[0] == "accelerators: none that torch can use"
    assert f"cores: {num_cores()} of {os.cpu_count()}" in " ".join(shown)
    assert f"intra-op threads: {torch.get_num_threads()} (OMP_NUM_THREADS: " in " ".join(shown)
    assert any(line.startswith("cgroup limits: ") for line in shown)


def test_simulated_accelerators_are_listed_and_copied_between(
    sim: list[torch.device], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M1: figures that a device does not have are left out; the copies are measured."""
    monkeypatch.setattr("unisono.monitor.inventory._COPIED_BYTES", 1 << 16)
    found = facts(capsys)
    assert [each["device"] for each in found["accelerators"]] == [str(device) for device in sim]
    assert all(each["is_free"] is None and each["problem"] is None for each in found["accelerators"])
    assert len(found["links"]) == 12
    assert all(link["bytes_per_s"] > 0 and link["arrives"] for link in found["links"])
    assert all(link["bytes_per_s"] is None for link in facts(capsys, "--no-bandwidth")["links"])


def test_numbers_memory_links_and_shares_of_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M1, M2: CUDA counts the fastest first: its 0 is nvidia-smi's 2, and its 1 is 0. The busy one is left out."""
    say_torch_has(monkeypatch, buses=[0x3B, 0x1A, 0x2A], memory=[16, 16, 8], cores=[80, 80, 80])
    gpus = [
        {"bus": 0x1A},
        {"bus": 0x2A, "load": 97, "used": 12, "pids": (4711, os.getpid())},
        {"bus": 0x3B},
        {"bus": 9},
    ]
    install(monkeypatch, nvml(gpus))
    shown = lines(capsys)
    assert shown[:5] == [
        "cuda:0: Fake GPU",
        "memory: 16.0 GiB, 16.0 GiB of it free",
        "cores: 80 multiprocessors",
        "PCI address: 0000:3b:00, number 2 in PCI order; GPU 2 in nvidia-smi",
        "now: free, load 0%",
    ]
    assert "now: busy, load 97%, used by process 4711" in shown
    assert "GPUs that this process does not see: 3 (Fake GPU)" in shown
    assert any(
        "so their numbers differ here. CUDA_DEVICE_ORDER=PCI_BUS_ID makes them the same" in line for line in shown
    )
    assert "cuda:0 to cuda:1: peer access, 45 GB/s" in shown
    assert "cuda:0 to cuda:2: no peer access, not measured" in shown  # cuda:2 is busy
    warning = next(line for line in shown if line.startswith("warning: "))
    assert "cuda:2 has less than 75 % of the memory of cuda:0" in warning
    assert "shares=[1.0, 1.0, 0.5]" in warning
    assert "free now: cuda:0, cuda:1" in shown
    assert any(line.startswith("driver 550.54") for line in shown)


def test_the_free_memory_of_a_slice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """M1, M2: a slice (MIG) has the address of its GPU, whose figures are not the slice's."""
    say_torch_has(monkeypatch, buses=[1], memory=[4], cores=[20])
    install(monkeypatch, nvml([{"bus": 1, "used": 2}]))
    assert "memory: 4.0 GiB, 4.0 GiB of it free" in lines(capsys)


def test_damaged_copies_and_a_link_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M1, M4: a copy that raises is in its line, and the exit status is 1."""
    present = say_torch_has(monkeypatch, buses=[1, 2, 3], memory=[16] * 3, cores=[80] * 3)
    install(monkeypatch, None)
    assert "cuda:0 to cuda:2: no peer access, 45 GB/s, through the host, because direct copies arrive damaged" in lines(
        capsys
    )

    def copy(source: torch.device, target: torch.device) -> float:
        if target == present[1]:
            raise RuntimeError("CUDA error: out of memory\nand more")
        return 45e9

    monkeypatch.setattr("unisono.monitor.inventory._copy_bytes_per_s", copy)
    shown = lines(capsys, status=1)
    assert "cuda:0 to cuda:1: peer access, cannot copy: CUDA error: out of memory" in shown
    assert any("nvidia-ml-py not installed: pip install nvidia-ml-py" in line for line in shown)


def test_an_accelerator_that_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M4: the others are reported, and the exit status is 1."""
    present = say_torch_has(monkeypatch, buses=[1, 2], memory=[16] * 2, cores=[80] * 2)
    ask = devices.properties_of

    def lost(device: torch.device) -> Any:
        if device == present[1]:
            raise RuntimeError("CUDA error: the GPU has fallen off the bus")
        return ask(device)

    monkeypatch.setattr(devices, "properties_of", lost)
    install(monkeypatch, None)
    found = facts(capsys, status=1)
    assert [each["problem"] for each in found["accelerators"]] == [None, "CUDA error: the GPU has fallen off the bus"]
    assert [each["is_free"] for each in found["accelerators"]] == [True, None]


@pytest.mark.parametrize(
    ("text", "num_seen", "said"),
    [
        ("5,6,7", 3, "5 is cuda:0, 6 is cuda:1, 7 is cuda:2"),
        ("5, 6", 2, "5 is cuda:0, 6 is cuda:1"),
        ("GPU-8932f937,1", 2, "GPU-8932f937 is cuda:0, 1 is cuda:1"),
        ("0,-1,1", 1, "0 is cuda:0\n-1 is not a GPU, so CUDA ignores it and all after it"),
        ("0,,1", 1, "0 is cuda:0\nan empty entry is not a GPU, so CUDA ignores it and all after it"),
        ("3,3", 0, "no GPU is seen"),
        ("", 0, "no GPU is seen"),
    ],
)
def test_what_the_variable_makes_of_the_numbers(
    text: str, num_seen: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M2: which entries became devices follows from how many torch sees; and how to have nvidia-smi's numbers."""
    say_torch_has(monkeypatch, buses=range(1, 1 + num_seen), memory=[16] * num_seen, cores=[80] * num_seen)
    install(monkeypatch, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    order = "CUDA numbers the fastest GPU first, and nvidia-smi uses PCI order, which is the same here"
    shown = lines(capsys)
    assert f"CUDA_VISIBLE_DEVICES={text}: {said}" in "\n".join(shown)
    assert (order in shown) == (num_seen > 1)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert order not in lines(capsys)


@pytest.mark.parametrize(("hip", "given"), [(None, None), ("6.4", "HIP_VISIBLE_DEVICES=0,??[31m: no GPU is seen")])
def test_rocms_variable_counts_only_with_rocm(
    hip: str | None,
    given: str | None,
    no_accelerators: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """M2, M4: CUDA's counts otherwise. Bytes that are no text, and escape sequences, are question marks."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,\udcff\x1b[31m")
    assert given == next((line for line in lines(capsys) if line.startswith("HIP")), None)


def test_a_driver_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """M1: a driver without its library, and figures that a GPU does not have."""
    module = nvml([{"bus": 1, "load": None, "power": None}])
    install(monkeypatch, module)
    (gpu,) = GpuReader().read()
    assert (gpu.load, gpu.power_w, gpu.temperature_c) == (None, None, 60)

    def missing() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    module.nvmlInit = missing  # type: ignore[attr-defined]
    reader = GpuReader()
    assert reader.read() == []
    assert reader.problem == "cannot read NVIDIA's driver (NVML Shared Library Not Found)"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores", "memory_bytes"),
    [
        ({
            "proc/self/cgroup": "0::/jobs/one\n",
            "sys/fs/cgroup/jobs/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/jobs/one/cpu.max": "max 100000\n",
            "sys/fs/cgroup/jobs/one/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.max": "max\n",
        }, 1.5, 4 * GIB),
        ({
            "proc/self/cgroup": "4:memory:/host/path\n3:cpu,cpuacct:/host/path\n2:cpuset:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        }, 1.5, 4 * GIB),
        ({
            "proc/self/cgroup": "3:cpu:/\n4:memory:/\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        }, None, None),
        ({}, None, None),
    ],
    ids=["version 2", "version 1, in a container", "both say that there is none", "no files"],
)  # fmt: skip
def test_limits_of_control_groups(
    tmp_path: Path, files: dict[str, str], cores: float | None, memory_bytes: int | None
) -> None:
    """M3: the lowest limit of the group and of those that it is in."""
    found = cpu.describe(write(tmp_path, files))
    assert (found.cgroup_cores, found.cgroup_memory_bytes) == (cores, memory_bytes)
    assert found.usable_cores == (found.allowed if cores is None else min(2, found.allowed))


def test_numa_nodes(tmp_path: Path) -> None:
    """M3: their cores."""
    node = "sys/devices/system/node/node"
    found = cpu.describe(write(tmp_path, {f"{node}{n}/cpulist": f"{n}-{n}\n" for n in (0, 10, 2)}))
    assert [*found.numa_nodes.items()] == [(0, "0-0"), (2, "2-2"), (10, "10-10")]


def test_more_threads_than_cores_are_warned_about(
    no_accelerators: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M3: torch takes the cores of the machine, not the time that a control group leaves."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(cpu, "_cgroup_cores", lambda root: 1.0)
    assert "warning: 64 intra-op threads on 1 cores wait for each other. Set OMP_NUM_THREADS=1" in lines(capsys)


@pytest.mark.parametrize("arguments", [["--jsn"], ["gpu"]])
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """M4: exit status 2."""
    assert_misused(["devices", *arguments], arguments[0], capsys)


def test_in_a_bare_environment_with_a_reader_that_ends(tmp_path: Path) -> None:
    """M4: without HOME, in an ASCII locale; `head` has closed the pipe already: no traceback, and no failure."""
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment |= {"LC_ALL": "C", "PYTHONIOENCODING": "ascii:strict"}
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "unisono", "devices"],
            env=environment,
            cwd=tmp_path,
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=100,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
