"""Shards that are run in parts: as `parts=` asks, and where a replica ran out of memory.

The oracle is the plain module.
"""

import contextlib
import copy
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from helpers.comparisons import assert_equal, assert_same_gradients
from helpers.modules import Calls, Fn, WithBackward
from helpers.programs import run_script
from helpers.ranks import on_two_ranks
from helpers.twins import rows_of, twins
from unisono import DataParallel
from unisono.runtime import devices


class Greedy(nn.Module):
    """Runs out of memory on a shard of more than `most` rows, in forward or in backward."""

    def __init__(self, most: int, in_backward: bool) -> None:
        super().__init__()
        self.most, self.in_backward = most, in_backward
        self.net = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.LayerNorm(300))
        self.head = nn.Linear(300, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if not self.in_backward:
            self.need(x)
        h = self.net(x)
        if self.in_backward and h.requires_grad:
            h = WithBackward.apply(h, self.need)
        y = self.head(h)
        return {"y": y, "loss": y.square().mean()}

    def need(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) > self.most:
            raise torch.OutOfMemoryError(f"simulated: {len(rows)} rows")
        return rows


class LiveRows:
    """Counts the rows of an activation that backward needs and that are in memory at the same time, in any thread."""

    def __init__(self) -> None:
        self.alive = self.most = 0
        self._lock = threading.Lock()

    def squared(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        activation: torch.Tensor = layer(x)
        weakref.finalize(activation, self._add, -len(activation))
        self._add(len(activation))
        return activation.square()  # whose backward needs it

    def _add(self, rows: int) -> None:
        with self._lock:
            self.alive += rows
            self.most = max(self.most, self.alive)


def rescued(module: nn.Module, **options: Any) -> DataParallel:
    return DataParallel(module, ["cpu"] * 2, rescue=True, scalars="mean", **options)


class HalvesLayers(TorchDispatchMode):
    """Halves what layers compute, but not their gradients."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func is torch.ops.aten.addmm.default else found


@pytest.mark.parametrize("mode", [contextlib.nullcontext, HalvesLayers])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_shard_that_does_not_fit_is_run_in_parts(
    in_backward: bool, mode: Callable[[], Any], float64: None, caplog: Any
) -> None:
    """F11: outputs and gradients are the plain module's; what the replica can bear is logged and remembered. A mode
    around backward does not see what runs again.
    """
    plain = Greedy(99, False)
    model = rescued(copy.deepcopy(plain))
    model.module.most, model.module.in_backward = 6, in_backward
    for step in range(2):
        x = torch.randn(34, 20)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with caplog.at_level(logging.WARNING, logger="unisono"):
            output = model(mine)
            with mode():
                (output["loss"] * 3 + output["y"].abs().sum()).backward()
        expected = plain(theirs)
        (expected["loss"] * 3 + expected["y"].abs().sum()).backward()
        for name in expected:
            torch.testing.assert_close(output[name], expected[name])
        torch.testing.assert_close(mine.grad, theirs.grad)
        assert_same_gradients(model.module, plain)
        told = [record.getMessage() for record in caplog.records if "in parts of at most 8 rows" in record.getMessage()]
        assert len(told) == (2 if step == 0 else 0), "both replicas, once"
        caplog.clear()


def by_backward(output: torch.Tensor, x: torch.Tensor, module: nn.Module) -> list[torch.Tensor]:
    output.square().mean().backward(create_graph=True)
    found = [x.grad, *[parameter.grad for parameter in module.parameters()]]
    for tensor in (x, *module.parameters()):  # a gradient with a graph makes a cycle with it
        tensor.grad = None
    return found


def by_grad(output: torch.Tensor, x: torch.Tensor, module: nn.Module) -> list[torch.Tensor]:
    return [*torch.autograd.grad(output.square().mean(), [x, module.net[0].weight], create_graph=True)]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("asked", [by_backward, by_grad], ids=lambda asked: asked.__name__)
def test_a_backward_with_create_graph_is_run_again(asked: Callable[..., list[torch.Tensor]], float64: None) -> None:
    """F11, N3: all gradients were None. The inputs were those of the graphs that had failed."""
    plain = Greedy(99, False)
    model = rescued(copy.deepcopy(plain))
    model.module.most, model.module.in_backward = 6, True
    x = torch.randn(34, 20)
    found = []
    for call, root in ((plain, plain), (model, model.module)):
        given = x.clone().requires_grad_()
        first = asked(call(given)["y"], given, root)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), [given, root.net[0].weight])
        found.append([*first, *second])
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


outside = torch.ones(20, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_forward_that_makes_leaves_is_run_again(create_graph: bool, float64: None) -> None:
    """F11: as one does that returns forces. In parts it makes others, and more of them. It was an error."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = module.greedy(x.detach().requires_grad_() * outside)["y"]
        return WithBackward.apply(y, module.greedy.need) if module.greedy.in_backward else y

    plain = Calls(forward, greedy=Greedy(99, False))
    model = rescued(copy.deepcopy(plain))
    model.module.greedy.most, model.module.greedy.in_backward = 6, True
    x, found = torch.randn(34, 20), []
    for call, root in ((plain, plain), (model, model.module)):
        tensors = [outside, *root.parameters()]
        gradients = torch.autograd.grad(call(x).square().sum(), tensors, create_graph=create_graph)
        if create_graph:
            gradients += torch.autograd.grad(sum(each.square().sum() for each in gradients), tensors)
        found.append(gradients)
    torch.testing.assert_close(found[1], found[0])
    assert model._step_memory.row_limits


@pytest.mark.parametrize("change", [lambda bias: bias.detach().add_(1), lambda bias: bias.requires_grad_(False)])
def test_a_backward_after_a_parameter_has_changed_is_not_run_again(change: Callable[[torch.Tensor], object]) -> None:
    """F11: forward would compute something else. The error has a note that says why."""
    model = rescued(Greedy(6, True))
    loss = model(torch.randn(34, 20))["loss"]
    change(model.module.head.bias)
    with pytest.raises(torch.OutOfMemoryError, match="simulated") as raised:
        loss.backward()
    assert any("1 parameters changed between forward and backward" in note for note in raised.value.__notes__)


def test_one_replica_that_can_bear_less(float64: None) -> None:
    """F11: only its shard is run in parts."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] >= 8 and len(x) > 4:
            raise torch.OutOfMemoryError("simulated")
        return module.layer(x).tanh()

    plain = Calls(lambda module, x: module.layer(x).tanh(), layer=nn.Linear(2, 2))
    model = rescued(Calls(forward, layer=copy.deepcopy(plain.layer)))
    x = torch.arange(16.0)[:, None].repeat(1, 2)
    model(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(model.module.layer.weight.grad, plain.layer.weight.grad)
    assert model._step_memory.row_limits == {1: 4}


def test_a_checkpoint_that_runs_out_of_memory_while_another_forwards_waits(float64: None) -> None:
    """F11, R5: its forward is run again in backward, before that of the other one has come to its checkpoint."""
    fails = [True]

    def need(_: torch.Tensor) -> torch.Tensor:
        if fails and fails.pop():
            raise torch.OutOfMemoryError("simulated")
        return _

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda h: module.layer(h).tanh(), x, use_reentrant=False)
        return WithBackward.apply(h, need) if module.is_greedy else h

    layers, x = [nn.Linear(2, 2) for _ in range(2)], torch.randn(8, 2)
    one, other = (Calls(forward, layer=copy.deepcopy(layer)) for layer in layers)
    one.is_greedy, other.is_greedy = True, False
    (DataParallel(other, ["cpu"] * 2)(x) + rescued(one)(x)).square().sum().backward()
    assert not fails
    sum(layer(x).tanh() for layer in layers).square().sum().backward()
    assert_same_gradients(one.layer, layers[0])
    assert_same_gradients(other.layer, layers[1])


def test_a_replica_that_is_left_no_memory_by_another_one() -> None:
    """F11: of replicas that share memory, not the one fails that takes most of it: that one is run in parts, too."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == 0 and limits.get(1, 8) > 1:
            raise torch.OutOfMemoryError("the other replica has it all")
        return module.layer(x)

    model = DataParallel(Calls(forward, layer=nn.Linear(1, 2)), ["cpu"] * 2, rescue=True)
    limits = model._step_memory.row_limits
    x = torch.cat([torch.zeros(8, 1), torch.ones(8, 1)])
    torch.testing.assert_close(model(x), model.module.layer(x))
    assert limits == {0: 1, 1: 1}


def test_what_parts_take_is_loaded_before_memory_is_short() -> None:
    """F11: checkpoints load torch's compiler; where that failed for lack of memory, no later one worked."""
    done = run_script("""
        import sys
        import torch, unisono
        unisono.DataParallel(torch.nn.Linear(1, 1), ["cpu"] * 2, rescue=True)(torch.ones(2, 1))
        print("torch._dynamo" in sys.modules)
    """)
    assert done.stdout == "True\n", done.stderr


def test_dropout_in_parts_has_the_same_masks_in_backward(float64: None) -> None:
    """F11: each part is computed again with its own random numbers."""
    model = rescued(Fn(nn.functional.dropout, Greedy(3, False).net[0]))
    model._step_memory.row_limits.update({0: 3, 1: 2})
    x = torch.randn(12, 20, requires_grad=True)
    output = model(x)
    output.sum().backward()
    weight = model.module.layer.weight
    mask = (output != 0).double() * 2
    torch.testing.assert_close(x.grad, mask @ weight)
    torch.testing.assert_close(weight.grad, mask.T @ x.detach())


@pytest.mark.parametrize(
    ("module", "rows", "options", "reason"),
    [
        (nn.BatchNorm1d(2), 8, {"sync_batch_norm": False}, "normalises over all its rows"),
        (nn.Identity(), 8, {"sync_batch_norm": True}, "wait for each other"),
        (nn.Identity(), 2, {}, "a single row needs more memory"),
    ],
)
def test_what_cannot_be_run_in_parts(module: nn.Module, rows: int, options: dict[str, Any], reason: str) -> None:
    """F11: the error is the module's own, with a note that says why."""

    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("simulated")

    model = rescued(Calls(forward, inner=module), **options)
    with pytest.raises(torch.OutOfMemoryError, match="simulated") as raised:
        model(torch.ones(rows, 2))
    assert any(reason in note for note in raised.value.__notes__)
    assert not model._step_memory.row_limits


def of_whole_batch(output: torch.Tensor) -> torch.Tensor:
    """A contrastive loss: each row is compared with every other one."""
    return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_parts_give_the_gradients_of_a_loss_over_the_whole_batch(devices: int, float64: None) -> None:
    """N13: also where parts differ in size, and without gradients; no forward sees more rows than a part has."""
    plain = Greedy(99, False)
    model = DataParallel(copy.deepcopy(plain), ["cpu"] * devices, parts=3, scalars="mean")
    model.module.most = -(-17 // devices // 3) + 1
    x = torch.randn(17, 20)
    for _ in range(2):
        output, expected = model(x), plain(x)
        (of_whole_batch(output["y"]) + output["loss"]).backward()
        (of_whole_batch(expected["y"]) + expected["loss"]).backward()
        assert_same_gradients(model.module, plain)
    with torch.no_grad():
        torch.testing.assert_close(model(x)["y"], plain(x)["y"])
    model.module.most, model.parts = 17, 1
    torch.testing.assert_close(model(x)["loss"], plain(x)["loss"])


def test_only_one_part_of_each_replica_is_in_memory(float64: None) -> None:
    """N13: activations are those of one part a replica, in forward and in backward."""
    rows = LiveRows()
    model = DataParallel(
        Calls(lambda module, x: rows.squared(module.layer, x), layer=nn.Linear(4, 4)), ["cpu"] * 2, parts=4
    )
    of_whole_batch(model(torch.randn(16, 4))).backward()
    assert rows.most <= 2 * 2
    assert rows.alive == 0
    model.parts = 1
    of_whole_batch(model(torch.randn(16, 4))).backward()
    assert rows.most == 16


def counted(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.count.add_(1)
    return module.layer(x)


def in_forward(forward: Callable[..., Any]) -> nn.Module:
    return Calls(forward, layer=nn.Linear(2, 2), count=nn.Buffer(torch.zeros(())))


WAIT = "its replicas wait for each other"


@pytest.mark.filterwarnings("ignore:Each replica returned a scalar")
@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (nn.BatchNorm1d(2), {}, r"parts=\): the model itself \(BatchNorm1d\) normalises over all its rows"),
        (nn.Identity(), {"sync_batch_norm": True}, rf"parts=\): {WAIT}"),
        (in_forward(counted), {}, "changes the buffer 'count'"),
        (in_forward(lambda module, x: module.layer(x).mean()), {}, "it returns scalars"),
        (in_forward(lambda module, x: module.layer(x).mean(0)), {}, r"\[4, 4\] rows it .* of lengths \[2, 2\]"),
        (in_forward(lambda module, x: (module.layer(x), len(x))), {}, "numbers, one for each part"),
    ],
)
def test_parts_that_would_change_numbers(module: nn.Module, options: dict[str, Any], reason: str) -> None:
    """N13, F11: an error that says why, not other numbers; and batch norm in eval mode works."""
    model = DataParallel(module, ["cpu"] * 2, parts=2, **options)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError, match=reason):
        model(torch.randn(16, 2))
    assert_equal(module.state_dict().values(), before.values())
    if isinstance(module, nn.BatchNorm1d):
        model.eval()
        torch.testing.assert_close(model(torch.ones(8, 2)), module(torch.ones(8, 2)))


@pytest.mark.filterwarnings("ignore:forward of")
def test_what_one_part_assigns_the_next_does_not_find(float64: None) -> None:
    """N13, R6: nor does the second computation in backward; each part begins as the replica does."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.factor = module.factor * 0.9 + 1
        return module.layer(x) * module.factor

    model = DataParallel(Calls(forward, layer=nn.Linear(3, 2)), ["cpu"] * 2, parts=2)
    model.module.factor = 1.0
    output = model(torch.ones(8, 3))
    output.sum().backward()
    torch.testing.assert_close(output, (model.module.layer(torch.ones(8, 3)) * 1.9).detach())
    torch.testing.assert_close(model.module.layer.bias.grad, torch.full((2,), 8 * 1.9))


@pytest.mark.filterwarnings("ignore:forward of")
def test_a_hook_that_one_part_registers_the_next_does_not_have(float64: None) -> None:
    """N13, R6: nor a flag that only the last part of each replica sets: the module keeps what it had."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.is_late = bool(x[0, 0] > 4)
        module.layer.register_forward_hook(lambda layer, args, output: output * 2)
        return module.layer(x)

    plain = Calls(forward, layer=nn.Linear(3, 2), is_late=None)
    model = DataParallel(copy.deepcopy(plain), ["cpu"] * 2, parts=2)
    x = torch.tensor([1.0, 1, 5, 5, 1, 1, 5, 5])[:, None].expand(-1, 3)
    output, expected = model(x), plain(x)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert_same_gradients(model.module, plain)
    assert model.module.is_late is None


def initialised(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return other numbers in the first forward, as one does that sets its weights by its first batch."""
    scale, module.is_ready = 1.0 if module.is_ready else 3.0, True
    return module.greedy(x * scale)["y"]


def counting(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.steps += 1
    return module.greedy(x * module.steps)["y"]


@pytest.mark.parametrize(
    ("forward", "options"), [(initialised, {"parts": 2}), (initialised, {"rescue": True}), (counting, {"rescue": True})]
)
def test_what_forward_assigns_is_kept(
    forward: Callable[..., torch.Tensor], options: dict[str, Any], float64: None
) -> None:
    """N13, F11, R6: in backward, what runs again finds what it had found in forward, and leaves nothing else."""
    plain = Calls(forward, greedy=Greedy(99, False), is_ready=False, steps=0)
    model = DataParallel(copy.deepcopy(plain), ["cpu"] * 2, **options)
    x = torch.randn(34, 20)
    for step in range(3):
        if step == 2 and "rescue" in options:
            model.module.greedy.most, model.module.greedy.in_backward = 10, True
        outputs, expected = [model(x), model(x)], [plain(x), plain(x)]
        for output, each in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, each)
            output.square().sum().backward()
            each.square().sum().backward()
        assert_same_gradients(model.module, plain)
        assert (model.module.is_ready, model.module.steps) == (plain.is_ready, plain.steps)
    assert bool(model._step_memory.row_limits) == ("rescue" in options)


def test_what_counts_as_out_of_memory() -> None:
    """F11: torch's error for devices, and that of its allocator on the host; not Python's, which may be of the user."""
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert devices.is_out_of_memory(raised.value)
    assert devices.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not devices.is_out_of_memory(MemoryError())
    assert not devices.is_out_of_memory(RuntimeError("out of luck"))


@on_two_ranks()
def test_ranks_run_their_shards_in_parts(rank: int, options: dict[str, Any]) -> None:
    """N13, C1: with one device a process too, whose output is not joined with others, but from its parts."""
    model, oracle = twins(lambda: nn.Linear(3, 2).double(), parts=3, **options)
    x = torch.randn(13, 3, generator=torch.Generator().manual_seed(0)).double()
    own = rows_of(rank, (8, 5))
    output, expected = model(x[own]), oracle(x)
    torch.testing.assert_close(output, expected[own])
    output.square().mean().backward()
    expected.square().mean().backward()
    assert_same_gradients(model.module, oracle)
