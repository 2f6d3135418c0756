"""torch's other tools for several processes, beside, around and inside a DataParallel: they work, or say what to do."""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_module

import unisono
from helpers.ranks import in_ranks, run_ranks

WHOLE = r"DataParallel needs whole parameters in each process, as plain tensors, but "


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def step(model: nn.Module) -> None:
    rank = torch.distributed.get_rank()
    model(torch.full((2 + rank, 8), 1.0 + rank)).square().sum(1).mean().backward()


def wrapped(module: nn.Module) -> unisono.DataParallel:
    return unisono.DataParallel(module, ["cpu"])


def with_dtensors() -> nn.Module:
    module = net()
    distribute_module(module, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return module


def with_a_sharded_tensor() -> nn.Module:
    module = net()
    placements = [f"rank:{rank}/cpu" for rank in range(torch.distributed.get_world_size())]
    weight = nn.Parameter(sharded_tensor.rand(ChunkShardingSpec(dim=0, placements=placements), 8, 8))
    del module[0].weight
    module[0].register_parameter("weight", weight)
    return module


def sharded_later() -> None:
    model = wrapped(net())
    step(model)
    fully_shard(model.module)
    step(model)


CPU = torch.device("cpu")
SHARDED: dict[str, tuple[Callable[[], object], str]] = {
    "FSDP1 inside": (lambda: wrapped(FullyShardedDataParallel(net(), device_id=CPU)), "FSDP manages layer '_fsdp"),
    "FSDP1 around": (lambda: step(FullyShardedDataParallel(wrapped(net()), device_id=CPU)), "FSDP manages the module"),
    "FSDP2 inside": (lambda: wrapped(fully_shard(net())), "FSDP manages the module"),
    "FSDP2 around": (lambda: step(fully_shard(wrapped(net()))), "FSDP manages the module"),
    "FSDP2 later": (sharded_later, "FSDP manages the module"),
    "DTensor": (lambda: wrapped(with_dtensors()), r"0\.weight is a DTensor"),
    "ShardedTensor": (lambda: wrapped(with_a_sharded_tensor()), r"0\.weight is a ShardedTensor"),
}


@in_ranks(2)
def test_sharded_parameters_are_an_error(rank: int) -> None:
    """C17: it was one of torch's internals."""
    for name, (make, what) in SHARDED.items():
        with pytest.raises(TypeError) as raised:
            make()
        assert re.match(WHOLE + what, str(raised.value)), name


@in_ranks(2)
def test_tools_that_need_ddp_say_what_to_use(rank: int) -> None:
    """C17"""
    model = wrapped(net())
    with pytest.raises(AttributeError, match=r"torch's Join is for DistributedDataParallel.*model\.batches\(loader\)"):
        Join([model])
    with pytest.raises(AttributeError, match=r"torch's Join is for DistributedDataParallel.*model\.batches\(loader\)"):
        model.join()
    with pytest.raises(AttributeError, match=r"ZeroRedundancyOptimizer\(model\.parameters\(\), \.\.\.\) without it"):
        _ = model.process_group
    module = net()
    module.process_group = 3
    module.join = "what the module has"
    assert wrapped(module).process_group == 3, "what the module has is the module's"
    assert wrapped(module).join == "what the module has"


@in_ranks(2)
def test_what_ddp_is_told_to_ignore(rank: int) -> None:
    """C17: these gradients and buffers were sent all the same, without a word."""
    for name in ("0.weight", "1.running_mean"):
        module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        ddp = nn.parallel.DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(module, [name, "of another model"])
        with pytest.raises(ValueError, match=f"leave out {name} .*del module._ddp_params_and_buffers_to_ignore"):
            wrapped(module)
        unisono.DataParallel(module, ["cpu"], process_group=False)
        del module._ddp_params_and_buffers_to_ignore
        step(wrapped(module))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for _ in range(3):
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    return [*model.parameters()]


@in_ranks(2)
def test_zero_1(rank: int) -> None:
    """C17"""
    plain, sharded = wrapped(net()), wrapped(net())
    expected = trained(plain, torch.optim.Adam(plain.parameters(), lr=0.1))
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.Adam, lr=0.1)
    assert all(map(torch.equal, trained(sharded, optimizer), expected))
    assert len(optimizer.optim.state) < len(expected), "each process has a part of the optimizer's state"


def sends_twice(rank: int) -> list[int]:
    def inside() -> None:
        wrapped(nn.parallel.DistributedDataParallel(net()))

    def around() -> None:
        step(nn.parallel.DistributedDataParallel(wrapped(net())))

    def around_one_alone() -> None:
        step(nn.parallel.DistributedDataParallel(unisono.DataParallel(net(), ["cpu"], process_group=False)))

    counts = []
    for function in (inside, around, around_one_alone):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
        counts.append(sum("they are sent twice" in str(warning.message) for warning in caught))
    return counts


def test_gradients_that_are_sent_twice():
    """C17: accelerate's prepare does so too, under a launcher."""
    assert run_ranks(2, sends_twice) == [[1, 1, 0]] * 2


def make(kind: str) -> tuple[nn.Module, nn.Module]:
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(net())
        return model, model  # torch leaves out its prefix
    model = wrapped(net())
    return model, model.module


def saves_and_loads(rank: int, folder: str, first: str, second: str) -> None:
    model, to_save = make(first)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    weights = [weight.detach().clone() for weight in trained(model, optimizer)]
    weights_of_model, of_optimizer = get_state_dict(to_save, optimizer)
    assert [*weights_of_model] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    checkpoint.save({"model": weights_of_model, "optimizer": of_optimizer}, checkpoint_id=folder)

    model, to_load = make(second)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = dict(zip(("model", "optimizer"), get_state_dict(to_load, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(to_load, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(map(torch.equal, model.parameters(), weights))
    assert all(state["step"] == 3 for state in optimizer.state.values())
    step(model)


@pytest.mark.parametrize(("first", "second"), [("ddp", "unisono"), ("unisono", "ddp")])
def test_checkpoints_of_ddp_and_ours_are_the_same(tmp_path: Path, first: str, second: str):
    """C17: torch.distributed.checkpoint takes the prefix "module." off for DDP; here it is given the module."""
    run_ranks(2, saves_and_loads, os.fspath(tmp_path), first, second)
