"""Cores are divided without overlap, node by node; replicas' threads keep to theirs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unisono
from unisono.bench.machine import num_cores
from unisono.runtime import affinity

pytestmark = pytest.mark.only_on("linux", because="cores are bound there")


@pytest.fixture(autouse=True)
def _not_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have it; conftest.py switches it off where pytest runs in several processes."""
    monkeypatch.delenv("UNISONO_BIND_CORES", raising=False)


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of two nodes of two cores of two halves, numbered as they often are: 0-3, and once more 4-7."""
    for cpu in range(8):
        folder = tmp_path / f"cpu/cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology/core_id").write_text(f"{cpu % 2}\n")
        (folder / f"node{cpu % 4 // 2}").mkdir()
    monkeypatch.setattr(affinity, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    affinity._divided.cache_clear()
    yield
    affinity._divided.cache_clear()


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    "parts",
    [
        [(0, 4, 1, 5), (2, 6, 3, 7)],
        [(0, 4), (1, 5), (2, 6)],  # the rest stays unused
        [(0, 4), (1, 5), (2, 6), (3, 7)],
        [tuple(range(8))] * 9,  # too few to be divided
    ],
    ids=len,
)
def test_parts_are_whole_nodes_and_whole_cores(parts: list[tuple[int, ...]]) -> None:
    assert affinity.cores_per_replica(len(parts)) == parts


class _TellsItsCores(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = torch.zeros(1, 1024)
        mine[0, list(os.sched_getaffinity(0))] = 1
        return mine.expand(len(x), 1024)


@pytest.mark.skipif(num_cores() < 2, reason="needs two cores")
def test_workers_run_on_their_part_and_the_caller_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    part = set(affinity.cores_per_replica(2)[1])
    assert part != before
    for switch, cores in (("1", part), ("0", before)):
        monkeypatch.setenv("UNISONO_BIND_CORES", switch)
        model = unisono.DataParallel(_TellsItsCores(), ["cpu", "cpu"])
        of_caller, of_worker = (set(row.nonzero().flatten().tolist()) for row in model(torch.zeros(2, 1)))
        assert (of_caller, of_worker) == (before, cores)
    assert affinity.cores_per_replica(2) == [tuple(sorted(before))] * 2
    assert os.sched_getaffinity(0) == before
