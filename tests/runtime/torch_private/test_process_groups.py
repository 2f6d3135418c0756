"""Process groups, and what FSDP and DDP mark."""

import importlib
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from unisono.runtime.torch_private import process_groups


def test_a_group_is_aborted_without_a_wait() -> None:
    """C12: gloo's collectives end by themselves; others wait on the accelerator for a rank that never comes."""
    aborted, may_end = threading.Event(), threading.Event()

    def abort() -> None:
        aborted.set()
        may_end.wait()

    backend = SimpleNamespace(abort=abort)
    group = SimpleNamespace(_device_types=["cpu", "cuda"], _get_backend=lambda kind: backend)
    process_groups.abort_group(group)
    assert aborted.wait(60)
    may_end.set()
    process_groups.abort_group(SimpleNamespace(_device_types=[]))


def test_what_shards_parameters_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/distributed/test_beside_torch.py has its parameters."""
    sharded = importlib.import_module("torch.distributed.tensor").DTensor
    assert sharded in process_groups.sharded_tensor_types()
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")  # as long as nothing has imported it
    assert sharded not in process_groups.sharded_tensor_types()


@pytest.fixture
def default_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("default_group")
def test_the_name_of_a_group():
    """The keys of a group begin with its name."""

    def made() -> str:
        return torch.distributed.new_group([0], use_local_synchronization=True).group_name

    with process_groups.group_named("ours"):
        assert made() == "ours"
    assert made() != "ours"
