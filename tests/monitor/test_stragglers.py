"""Which replica the others wait for, and why."""

from typing import Any

import pytest

from unisono.monitor.nvml import Gpu
from unisono.monitor.stragglers import ReplicaFigures, Straggler, find


def on_host(*figures: tuple[int, float]) -> list[ReplicaFigures]:
    """Return replicas with these rows and milliseconds."""
    return [
        ReplicaFigures(i, "cpu", None, rows, None, ms / 3000, 2 * ms / 3000, None)
        for i, (rows, ms) in enumerate(figures)
    ]


def gpus(*loads: float | None, **changes: Any) -> list[Gpu]:
    """Return GPUs with these loads; the last one has `changes`."""
    plain = {"name": "A", "slowdown": None, "pids": (1,)}
    return [
        Gpu(number=i, pci=None, memory_bytes=None, used_bytes=None, load=load, temperature_c=None, power_w=None,
            power_limit_w=None, **(plain | (changes if i == len(loads) - 1 else {})))
        for i, load in enumerate(loads)
    ]  # fmt: skip


def on_gpus(*rows: int) -> list[ReplicaFigures]:
    return [ReplicaFigures(i, f"cuda:{i}", i, count, None, None, None, None) for i, count in enumerate(rows)]


Found = tuple[int, str | None] | None
ROWS = "it has 30 of 50 rows: change shares"


@pytest.mark.parametrize(
    ("figures", "loads", "own_cores", "found"),
    [
        ([(10, 50), (10, 55)], [1.0, 1.0], 0.5, None),
        ([(10, 50), (10, 65)], [0.5, 0.5], 1.0, (1, None)),
        ([(10, 50), (10, 65)], [1.0, 1.0], 1.2, (1, "other programs use 0.8 of 2 cores")),
        ([(10, 50), (10, 65)], [0.1] * 60 + [1.0] * 4, 0.0, (1, None)),  # many cores are free
        ([(30, 150), (10, 50), (10, 52)], [0.5], 0.0, (0, ROWS)),
        ([(30, 250), (10, 50), (10, 52)], [1.0], 0.2, (0, f"{ROWS}; other programs use 0.8 of 1 cores")),
        ([(10, 5), (10, 9)], [1.0], 0.0, None),  # 4 ms of a step of 100 ms
        ([(10, 50)], [1.0], 0.0, None),
    ],
)
def test_on_the_cpu(figures: list[tuple[int, float]], loads: list[float], own_cores: float, found: Found) -> None:
    """M8: a fifth slower than the others' median; by its rows if it has a fifth more."""
    assert find(on_host(*figures), 0.1, core_loads=loads, own_cores=own_cores) == (found and Straggler(*found))


@pytest.mark.parametrize(
    ("rows", "loads", "changes", "found"),
    [
        ((8, 8, 8), (0.9, 0.95, 0.97), {}, None),
        ((8, 8, 8), (0.6, 0.65, 0.99), {}, (2, None)),
        ((8, 8, 8), (0.6, 0.65, 0.99), {"slowdown": "it is too hot"}, (2, "GPU 2 runs at a low clock: it is too hot")),
        ((8, 8, 8), (0.6, 0.65, 0.99), {"pids": (1, 77)}, (2, "process 77 computes on GPU 2 too")),
        ((8, 8, 16), (0.6, 0.65, 0.99), {}, (2, "it has 16 of 32 rows: change shares")),
        ((8, 8, 8), (0.6, 0.65, 0.99), {"name": "B"}, (2, "GPU 2 is B: give it a smaller share")),
        ((8, 8, 8), (0.6, None, 0.99), {}, None),
        ((8, 8, 8), (0.6, 0.99), {}, None),  # one is not known to the driver
    ],
)
def test_on_gpus(rows: tuple[int, ...], loads: tuple[float | None, ...], changes: dict[str, Any], found: Found) -> None:
    """M8: times there are those of queuing; the busiest GPU is the one that the others wait for."""
    assert find(on_gpus(*rows), 0.1, gpus(*loads, **changes), own_pids=[1]) == (found and Straggler(*found))


def test_two_replicas_on_one_gpu_have_one_load() -> None:
    """M8: which of them is slow cannot be told."""
    both = [ReplicaFigures(i, "cuda:0", 0, 8, None, None, None, None) for i in range(2)]
    assert find(both, 0.1, gpus(0.9, 0.1)) is None


@pytest.mark.parametrize(("unit_s", "is_named"), [(1e-6, False), (1e-3, True)])
def test_waits_too_short_to_matter(unit_s: float, is_named: bool) -> None:
    """M8: a wait of 0.2 ms in a step of a millisecond was called a straggler's; on GPUs it would be."""
    step_s = 1000 * unit_s
    one, other = on_host((10, 200e3 * unit_s), (10, 400e3 * unit_s))
    assert bool(find([one, other], step_s)) is is_named
    assert bool(find(on_gpus(8, 8), step_s, gpus(0.7, 0.99))) is is_named
