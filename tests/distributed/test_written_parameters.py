"""Parameters that forward writes into, over ranks: right where all write the same values, else an error on each."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_same_gradients
from helpers.modules import Calls
from helpers.ranks import drawn, on_two_ranks, run_on_devices
from helpers.twins import rows_of, twins
from unisono import DataParallel

SIZES = (4, 9)
OTHER_VALUES = r"after forward, ranks 0 and 1 have different values in parameter '{}'.*{}"


def decay(net: Any, x: torch.Tensor) -> None:
    net.key.weight.mul_(0.9)


def codebook(net: Any, x: torch.Tensor) -> None:
    net.key.weight[0] = x[0]


def codebook_by_data(net: Any, x: torch.Tensor) -> None:
    net.key.weight.data[0] = x[0]


def of_all_rows(net: Any, x: torch.Tensor) -> None:
    total = x.sum(0).cpu()
    torch.distributed.all_reduce(total)
    net.key.weight[0] = total.to(x.device)


def on_one_rank(net: Any, x: torch.Tensor) -> None:
    if torch.distributed.get_rank():
        net.key.weight.mul_(0.9)


def initialise(net: Any, x: torch.Tensor) -> None:
    if not net.is_set:
        net.is_set.fill_(1)
        net.shift.data.copy_(x.mean(0)[:3])


def assign_of_rows(net: Any, x: torch.Tensor) -> None:
    net.shift.data = x[0, :3].clone()


def network(write: Callable[[Any, torch.Tensor], None]) -> Any:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            write(net, x)
        return net.key(x) + net.query(x) + net.shift

    net = Calls(forward, key=nn.Linear(5, 3), query=nn.Linear(5, 3), shift=nn.Parameter(torch.rand(3)))
    net.is_set = nn.Buffer(torch.zeros(1))
    net.key.requires_grad_(requires_grad=False)
    return net.double()


WRITES = {
    each.__name__: each
    for each in (*(decay, codebook, codebook_by_data, of_all_rows, on_one_rank, initialise, assign_of_rows),)
}


def inputs(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's rows, and all."""
    x = drawn(sum(SIZES), 5, seed=seed)
    return x[rows_of(rank, SIZES)], x


@on_two_ranks(1)
def test_what_all_ranks_write_alike_is_right(rank: int, options: dict) -> None:
    """C19: it is what one device writes. Other ways are programs of the contract."""
    model, oracle = twins(lambda: network(of_all_rows), loss="sum", **options)
    for seed in range(3):
        x, all_x = inputs(rank, seed)
        for module in (model, oracle):
            module.zero_grad()
        model(x).square().sum().backward()
        with torch.no_grad():  # its own sum over the ranks would count all rows twice
            oracle.key.weight[0] = all_x.sum(0)
        (oracle.key(all_x) + oracle.query(all_x) + oracle.shift).square().sum().backward()
        assert_same_gradients(model.module, oracle)


def fail(rank: int, name: str, message: str, way: str, **options: Any) -> None:
    model, _ = twins(lambda: network(WRITES[name]), loss="sum", **options)
    x, _ = inputs(rank, 0)
    if way == "without gradients first":
        with torch.no_grad():
            model(x)
    around: Any = {"in no_sync": model.no_sync, "while hooks of saved tensors are active": saved_tensors}.get(way)
    with (around or contextlib.nullcontext)(), pytest.raises(RuntimeError, match=message):
        model(x).sum().backward()


def saved_tensors() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


WAYS = ["in a step", "in no_sync", "without gradients first"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        *(("codebook", "key.weight"), ("codebook_by_data", "key.weight"), ("on_one_rank", "key.weight")),
        *(("initialise", "shift"), ("assign_of_rows", "shift")),
    ],
)
def test_what_ranks_write_for_their_own_rows_is_an_error(name: str, parameter: str, way: str) -> None:
    """C19: on all ranks, with the parameter and the remedies; their weights would go apart from there."""
    run_on_devices(2, fail, name, OTHER_VALUES.format(parameter, "To initialise .* call the plain module once"), way)


def test_a_mode_that_other_threads_cannot_join() -> None:
    """C19: there the module runs whole, in the caller's thread."""
    message = OTHER_VALUES.format("key.weight", "register_buffer")
    run_on_devices(2, fail, "codebook", message, "while hooks of saved tensors are active")


@on_two_ranks(1)
def test_a_later_step_that_writes(rank: int, options: dict) -> None:
    """C19: wherever the version counter tells, not in the first step only."""
    model, _ = twins(lambda: network(lambda net, x: codebook(net, x) if net.is_set else None), **options)
    x, _ = inputs(rank, 0)
    for _ in range(3):
        model(x).sum().backward()
    model.module.is_set.fill_(1)
    with pytest.raises(RuntimeError, match=OTHER_VALUES.format("key.weight", "register_buffer")):
        model(x).sum().backward()


@on_two_ranks(1)
def test_the_remedy_for_an_initialisation(rank: int, options: dict) -> None:
    """C19, C7: all ranks get rank 0's, from rank 0's batch."""
    x, all_x = inputs(rank, 0)
    net = network(initialise)
    with torch.no_grad():
        net(x)
    model = DataParallel(net, loss="sum", **options)
    model(x).square().sum().backward()
    totals = [torch.zeros_like(net.shift, device="cpu") for _ in range(2)]
    torch.distributed.all_gather(totals, net.shift.detach().cpu())
    assert torch.equal(*totals)
    torch.testing.assert_close(totals[0], all_x[rows_of(0, SIZES)].mean(0)[:3].cpu())


@on_two_ranks()
def test_max_norm(rank: int, options: dict) -> None:
    """C19: ranks that look up different rows would have different weights."""
    model, oracle = twins(lambda: nn.Embedding(20, 4, max_norm=1.0).double(), loss="sum", **options)
    same = torch.arange(6).to(model.module.weight.device)
    for _ in range(2):  # all ranks shorten the same rows
        model(same).square().sum().backward()
    oracle(same).square().sum().backward()
    torch.testing.assert_close(model.module.weight, oracle.weight)
    with pytest.raises(RuntimeError, match=r"with max_norm each rank .* weight.renorm_\(2.0, 0, 1.0\)"):
        model(same + 1 + 7 * rank).sum().backward()


@on_two_ranks(1)
def test_a_map_over_ranks(rank: int, options: dict) -> None:
    """C19, R22: each rank would write for its own batches."""
    model, _ = twins(lambda: network(decay), **options)
    with pytest.raises(RuntimeError, match=r"written into parameter 'key.weight', in several replicas"):
        for _ in model.map([inputs(0, seed)[0] for seed in range(4)]):
            pass
