"""Steps that are run again: after a worker's death, and in parts where a replica ran out of memory.

The oracle of a step that is run again is the same step undisturbed, bit for bit; that of one in parts is the plain
module.
"""

import contextlib
import copy
import hashlib
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.deaths import PLACES, Dies, differences, train, workers_of
from helpers.modules import Calls, Fn, WithBackward
from helpers.programs import have_ended
from helpers.ranks import run_ranks
from helpers.twins import assert_equal, assert_same_gradients, rows_of, state_of, twins
from unisono import DataParallel, ReplicaDied
from unisono.engines.processes import fork_server
from unisono.engines.processes.engine import Processes
from unisono.engines.threads import Threads
from unisono.runtime import devices

Wrap = Callable[..., DataParallel]


@pytest.fixture
def wrap(wrap: Wrap) -> Wrap:
    """Wrap a module for some CPU replicas in processes, whose steps are run again; close it after the test."""

    def wrap_with_retry(module: nn.Module, num_replicas: int = 3, share_memory: bool = True, **options: Any) -> Any:
        engine = Processes(share_memory=share_memory, on_worker_loss="retry")
        return wrap(module, num_replicas, engine=engine, **options)

    return wrap_with_retry


def module_in(folder: Path, **options: Any) -> Dies:
    torch.manual_seed(1)
    folder.mkdir(exist_ok=True)
    return Dies(folder, **options)


def assert_undisturbed(
    wrap: Wrap, folder: Path, deaths: dict[int, Any], steps: int, loss_of: Any = None, **options: Any
) -> None:
    """Train without deaths and with them: losses, parameters, gradients, buffers and the random state are the same."""
    expected = train(wrap(module_in(folder / "none"), **options), {}, steps)
    losses, state = train(wrap(module_in(folder / "some"), **options), deaths, steps, loss_of)
    assert losses == expected[0]
    assert not differences(state, expected[1])


SYNC = {"sync_batch_norm": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sync": SYNC,
    "gloo": {"share_memory": False},
    "gloo, sync": {"share_memory": False, **SYNC},
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gloo, sync",)]


@pytest.mark.parametrize("options", ["plain", "sync", "gloo", *SLOW])
def test_a_death_at_any_place_changes_no_number(wrap: Wrap, tmp_path: Path, options: str, caplog: Any) -> None:
    """F10: the log says who died, how, and that the step is run again."""
    assert_undisturbed(wrap, tmp_path, dict(enumerate(PLACES, 1)), steps=8, **OPTIONS[options])
    assert len(caplog.messages) == len(PLACES)
    assert all("its worker process" in text and "SIGKILL" in text and "run again" in text for text in caplog.messages)


def test_workers_that_die_in_the_step_that_is_run_again(wrap: Wrap, tmp_path: Path) -> None:
    """F10: three deaths one after the other are survived, in forward as in backward."""
    assert_undisturbed(wrap, tmp_path, {1: ("forward", 3), 2: ("backward", 3)}, steps=4)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_shard_that_ends_its_worker_each_time_is_an_error(wrap: Wrap, tmp_path: Path, place: str) -> None:
    """F10: `ReplicaDied` after a few; everything is as before the step, and the next one works."""
    model = wrap(module_in(tmp_path / "deaths"))
    train(model, {}, steps=1)
    before, grads = state_of(model), [p.grad.clone() for p in model.parameters()]
    model.module.place = place
    for number in range(50):
        (tmp_path / "deaths" / str(number)).touch()
    with pytest.raises(ReplicaDied, match="SIGKILL") as raised:
        model(torch.ones(17, 20)).sum().backward()
    assert any("run again 3 times" in note for note in raised.value.__notes__)
    assert_equal((p.grad for p in model.parameters()), grads)
    if place == "forward":
        assert_equal(state_of(model), before)
    for file in (tmp_path / "deaths").iterdir():
        file.unlink()
    model.module.place = ""
    model(torch.ones(17, 20)).sum().backward()


def test_the_fork_server_dies(wrap: Wrap, tmp_path: Path) -> None:
    """F10: all workers die with it; another one starts, and no number changes."""

    def loss_of(model: DataParallel, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        process = fork_server.server._process
        assert process is not None
        workers = workers_of(model)
        os.kill(process.pid, signal.SIGKILL)
        assert have_ended(workers)
        return nn.functional.cross_entropy(output, y)

    assert_undisturbed(wrap, tmp_path, {}, steps=2, loss_of=loss_of)


# ---- what is kept until backward ends ------------------------------------------------------------


def kill_a_worker(model: DataParallel) -> None:
    pid = workers_of(model)[0]
    os.kill(pid, signal.SIGKILL)
    assert have_ended([pid])


# What happens between forward and backward, in the two runs that are compared.
NO_DEATH_AND_ONE: tuple[Callable[[DataParallel], None], ...] = (lambda model: None, kill_a_worker)


def gradients(model: nn.Module, loss: torch.Tensor, **options: Any) -> list[torch.Tensor | None]:
    """Return the parameters' gradients after one backward, whose options these are."""
    model.zero_grad()
    loss.backward(**options)
    return [p.grad for p in model.parameters()]


def test_inputs_buffers_and_random_state_are_those_of_the_forward(wrap: Wrap, tmp_path: Path) -> None:
    """F10: between forward and backward the inputs are overwritten, buffers move on, and numbers are drawn."""
    model = wrap(module_in(tmp_path / "deaths"))
    x, z, found = torch.randn(17, 20), torch.randn(17, 20), []
    for death in NO_DEATH_AND_ONE:
        torch.manual_seed(5)
        given = x.clone().requires_grad_()
        output = model(given)
        buffers = [buffer.clone() for buffer in model.buffers()]
        with torch.no_grad():
            given.mul_(0.0)
            model(z)  # another forward: other random numbers, and the buffers' next values
            torch.rand(3)
            after = [buffer.clone() for buffer in model.buffers()]
            random = torch.get_rng_state()
        death(model)
        found.append([*gradients(model, output.square().sum()), given.grad])
        assert_equal([*model.buffers(), torch.get_rng_state()], [*after, random])
        assert not all(map(torch.equal, buffers, after))
        with torch.no_grad():  # as they were before, for the second round
            for module in (model.module.first, model.module.second):
                module.reset_running_stats()
    assert_equal(*found)


def test_several_forwards_before_their_backwards(wrap: Wrap, tmp_path: Path) -> None:
    """F10: a death costs the graphs of all of them, and each is made anew when its backward comes."""
    model = wrap(module_in(tmp_path / "deaths", dropout=0.0).eval())
    batches = [torch.randn(9, 20) for _ in range(3)]
    expected = [gradients(model, model(x).square().sum()) for x in batches]
    outputs = [model(x) for x in batches]
    kill_a_worker(model)
    for k in (1, 0, 2):
        assert_equal(gradients(model, outputs[k].square().sum()), expected[k])


def test_a_graph_that_is_kept_for_a_second_backward(wrap: Wrap, tmp_path: Path) -> None:
    """F10, A3: retain_graph=True; a death before each of the two."""
    model = wrap(module_in(tmp_path / "deaths"))
    output = model(torch.randn(9, 20))
    expected = gradients(model, output.square().sum(), retain_graph=True)
    for workers_are_others in (False, True):
        kill_a_worker(model)
        if workers_are_others:
            model(torch.randn(9, 20))
        assert_equal(gradients(model, output.square().sum(), retain_graph=True), expected)


@pytest.mark.parametrize("dies_at", ["first", "second", "both"])
def test_gradients_of_gradients(wrap: Wrap, tmp_path: Path, dies_at: str) -> None:
    """F10, A4: a gradient penalty; a death before the first derivative, before the second, or before both."""
    model = wrap(Fn(torch.tanh, module_in(tmp_path / "deaths", dropout=0.0).eval()))
    x = torch.randn(9, 20)
    found = []
    for places in ((), ("first", "second") if dies_at == "both" else (dies_at,)):
        given = x.clone().requires_grad_()
        output = model(given)
        if "first" in places:
            kill_a_worker(model)
        (grad,) = torch.autograd.grad(output.sum(), given, create_graph=True)
        if "second" in places:
            kill_a_worker(model)
        loss = output.mean() + (grad.norm(dim=1) - 1).square().mean()
        found.append([loss.detach(), *gradients(model, loss), given.grad])
    assert_equal(*found)


def test_a_module_that_checkpoints_and_has_an_autocast_around_it(wrap: Wrap, tmp_path: Path) -> None:
    """F10, D7: the forward that is run again, in backward, has the caller's thread state of the first one."""
    inner = module_in(tmp_path / "deaths")
    model = wrap(Fn(lambda x: checkpoint(inner, x, use_reentrant=False), nn.Linear(20, 20)))
    found = []
    for death in NO_DEATH_AND_ONE:
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.ones(9, 20) * torch.arange(9.0)[:, None])
        death(model)
        found.append([output.detach(), *gradients(model, output.float().square().sum())])
        inner.first.reset_running_stats()
        inner.second.reset_running_stats()
    assert found[0][0].dtype == torch.bfloat16
    assert_equal(*found)


def test_a_backward_inside_forward_is_passed_on_once(wrap: Wrap) -> None:
    """F10, A8: the module's own gradients are in `grad` already when its forward is run again."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.own(x).square().sum().backward()
        return module.layer(x)

    model = wrap(Calls(forward, own=nn.Linear(4, 4), layer=nn.Linear(4, 4)))
    x, found = torch.randn(9, 4), []
    for death in NO_DEATH_AND_ONE:
        model.zero_grad()
        output = model(x)
        death(model)
        output.sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert_equal(*found)


def test_nothing_is_kept_after_backward(wrap: Wrap, tmp_path: Path) -> None:
    """F10, P4: the copies of the inputs go with the graphs."""
    model = wrap(module_in(tmp_path / "deaths"))
    output = model(torch.randn(9, 20))
    graphs = output.grad_fn.graphs
    assert graphs.replay is not None
    output.sum().backward()
    assert graphs.replay is None


# ---- what cannot be run again --------------------------------------------------------------------


class ScalesGradients(torch.autograd.Function):
    """Multiplies gradients by a number: the outputs do not show which."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def scaled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = ScalesGradients.apply(module.first(x), module.factor)
    return module.second(nn.functional.dropout(y, training=module.training))


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "another factor": lambda module: setattr(module, "factor", 3.0),
    "eval mode": lambda module: module.eval(),
    "frozen": lambda module: module.first.weight.requires_grad_(False),
    "others frozen": lambda module: (module.first.weight.requires_grad_(False), module.second.bias.requires_grad_()),
    "a hook removed": lambda module: module.first._forward_hooks.clear(),
    "another layer": lambda module: setattr(module, "second", nn.Linear(4, 4)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_module_is_that_of_the_forward(wrap: Wrap, change: str) -> None:
    """F10: attributes, flags and hooks that change between forward and backward; they stay changed."""
    grads = []
    for death in NO_DEATH_AND_ONE:
        torch.manual_seed(2)
        module = Calls(scaled, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
        module.factor = 1.0
        module.second.bias.requires_grad_(False)
        module.first.register_forward_hook(lambda module, args, output: output * 2)
        model, parameters = wrap(module), [*module.parameters()]
        output = model(torch.randn(9, 4))
        CHANGES[change](module)
        kept = {name: dict(part.__dict__) for name, part in module.named_modules()}
        flags = [parameter.requires_grad for parameter in parameters]
        death(model)
        output.square().sum().backward()
        assert {name: dict(part.__dict__) for name, part in module.named_modules()} == kept
        assert [parameter.requires_grad for parameter in parameters] == flags
        grads.append([parameter.grad for parameter in parameters])
    assert_equal(*grads)


def test_containers_of_inputs_that_changed_since_the_forward(wrap: Wrap) -> None:
    """F10: what the caller adds to a dict or a list of inputs is not the forward's."""

    def forward(module: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return module.layer(batch["x"]) * len(batch["names"])

    model = wrap(Calls(forward, layer=nn.Linear(4, 4)))
    x, grads = torch.randn(9, 4), []
    for death in NO_DEATH_AND_ONE:
        batch: dict[str, Any] = {"x": x, "names": ["a", "b"]}
        batch["y"] = model(batch)
        batch["names"].append("c")
        death(model)
        grads.append(gradients(model, batch["y"].sum()))
    assert_equal(*grads)


def test_parameters_that_changed_since_the_forward(wrap: Wrap, tmp_path: Path) -> None:
    """F10: forward would give other outputs now, so the death is an error that says so."""
    model = wrap(module_in(tmp_path / "deaths"))
    output = model(torch.randn(9, 20))
    with torch.no_grad():
        model.module.last.bias.add_(1.0)
    kill_a_worker(model)
    with pytest.raises(ReplicaDied) as raised:
        output.sum().backward()
    assert any("1 parameters were changed" in note for note in raised.value.__notes__)
    model(torch.randn(9, 20)).sum().backward()


def test_a_forward_that_is_not_the_same_a_second_time(wrap: Wrap) -> None:
    """F10: other outputs would have other gradients; an error, not wrong numbers."""
    calls = [0]

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return module.layer(x) * (1.0 + calls[0])

    model = wrap(Calls(forward, layer=nn.Linear(4, 4)))
    output = model(torch.randn(9, 4))
    kill_a_worker(model)
    with pytest.raises(RuntimeError, match="gave other outputs than the first time"):
        output.sum().backward()
    assert all(p.grad is None for p in model.parameters())


OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": lambda y: y[:, 0],
    "expanded": lambda y: y[:, :1].expand(-1, 3),
    "conjugated": lambda y: torch.view_as_complex(y.view(-1, 2, 2)).conj(),
    "negated": lambda y: torch.view_as_complex(y.view(-1, 2, 2)).conj().imag,
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_outputs_that_are_views(wrap: Wrap, output: str) -> None:
    """F10: the outputs are compared with the first ones, whatever their strides; those of one feature were refused."""
    model = wrap(Calls(lambda module, x: OUTPUTS[output](module.layer(x)), layer=nn.Linear(4, 4)), num_replicas=2)
    x = torch.randn(6, 4)
    found, expected = model(x), model.module(x)
    torch.testing.assert_close(found, expected)
    kill_a_worker(model)
    grads = [torch.autograd.grad(y.abs().sum(), [*model.parameters()]) for y in (found, expected)]
    torch.testing.assert_close(*grads)


def test_an_error_of_the_module_is_raised_once(wrap: Wrap) -> None:
    """F10, F1: only deaths are survived."""
    calls = [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        wrap(Fn(forward))(torch.ones(6, 2))
    assert calls == [1]


# ---- forwards without gradients, maps, several processes -----------------------------------------


def test_a_forward_without_gradients(wrap: Wrap, tmp_path: Path) -> None:
    """F10: it is run again, too."""
    model = wrap(module_in(tmp_path / "deaths").eval())
    x = torch.randn(9, 20)
    with torch.no_grad():
        expected = model(x)
        model.module.place = "forward"
        (tmp_path / "deaths" / "0").touch()
        assert torch.equal(model(x), expected)
    assert not list((tmp_path / "deaths").iterdir())


def test_a_batch_of_a_map_goes_to_another_replica(wrap: Wrap, tmp_path: Path, caplog: Any) -> None:
    """F10, I9: no batch is lost; the log says who died."""
    model = wrap(module_in(tmp_path / "deaths").eval())
    batches = [torch.randn(3, 20) for _ in range(12)]
    expected = list(model.map(batches))
    model.module.place = "forward"
    model.refresh()
    (tmp_path / "deaths" / "0").touch()
    with caplog.at_level(logging.WARNING, logger="unisono"):
        found = list(model.map(batches))
    assert_equal(found, expected)
    if not list((tmp_path / "deaths").iterdir()):  # a worker had a batch before this process had done all
        assert any("Another replica computes its batch" in record.getMessage() for record in caplog.records)


def rank_with_deaths(rank: int, folder: Path, deaths: dict[int, str]) -> list[tuple[list[float], dict[str, bytes]]]:
    """Train as one of two ranks, without deaths and with them; return the losses, and a digest of each tensor."""
    torch.set_num_threads(1)
    found = []
    for name, dying in (("none", {}), ("some", deaths if rank == 1 else {})):
        module = module_in(folder / f"{name} {rank}")
        with contextlib.closing(DataParallel(module, ["cpu"] * 2, engine=Processes(on_worker_loss="retry"))) as model:
            losses, state = train(model, dying, steps=5)
        found.append((losses, {key: hashlib.sha256(t.numpy().tobytes()).digest() for key, t in state.items()}))
    return found


@pytest.mark.slow
def test_a_worker_of_a_rank_dies(tmp_path: Path) -> None:
    """F10, K1: the other rank waits, and every number is that of an undisturbed run."""
    deaths = {1: "forward", 2: "backward", 3: "between"}
    for undisturbed, disturbed in run_ranks(2, rank_with_deaths, tmp_path, deaths):
        assert disturbed == undisturbed


# ---- out of memory -------------------------------------------------------------------------------


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


def rescued(engine: str, module: nn.Module, **options: Any) -> DataParallel:
    with_rescue = {"threads": Threads, "processes": Processes}[engine](rescue=True)
    return DataParallel(module, ["cpu"] * 2, engine=with_rescue, scalars="mean", **options)


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_shard_that_does_not_fit_is_run_in_parts(engine: str, in_backward: bool, float64: None, caplog: Any) -> None:
    """F11: outputs and gradients are the plain module's; what the replica can bear is logged and remembered."""
    plain = Greedy(99, False)
    model = rescued(engine, copy.deepcopy(plain))
    model.module.most, model.module.in_backward = 6, in_backward
    for step in range(2):
        x = torch.randn(34, 20)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with caplog.at_level(logging.WARNING, logger="unisono"):
            output = model(mine)
            (output["loss"] * 3 + output["y"].abs().sum()).backward()
        expected = plain(theirs)
        (expected["loss"] * 3 + expected["y"].abs().sum()).backward()
        for name in expected:
            torch.testing.assert_close(output[name], expected[name])
        torch.testing.assert_close(mine.grad, theirs.grad)
        assert_same_gradients(model.module, plain)
        told = [record.getMessage() for record in caplog.records if "in parts of 8 rows" in record.getMessage()]
        assert len(told) == (2 if step == 0 else 0), "both replicas, once"
        caplog.clear()
    model.close()


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_one_replica_that_can_bear_less(engine: str, float64: None) -> None:
    """F11: only its shard is run in parts."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] >= 8 and len(x) > 4:
            raise torch.OutOfMemoryError("simulated")
        return module.layer(x).tanh()

    plain = Calls(lambda module, x: module.layer(x).tanh(), layer=nn.Linear(2, 2))
    model = rescued(engine, Calls(forward, layer=copy.deepcopy(plain.layer)))
    x = torch.arange(16.0)[:, None].repeat(1, 2)
    model(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(model.module.layer.weight.grad, plain.layer.weight.grad)
    assert model.engine.row_limits == {1: 4}
    model.close()


def test_a_replica_that_is_left_no_memory_by_another_one() -> None:
    """F11: of replicas that share memory, not the one fails that takes most of it: that one is run in parts, too."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == 0 and limits.get(1, 8) > 2:
            raise torch.OutOfMemoryError("the other replica has it all")
        return module.layer(x)

    model = DataParallel(Calls(forward, layer=nn.Linear(1, 2)), ["cpu"] * 2, engine=Threads(rescue=True))
    limits = model.engine.row_limits
    x = torch.cat([torch.zeros(8, 1), torch.ones(8, 1)])
    torch.testing.assert_close(model(x), model.module.layer(x))
    assert limits == {0: 1, 1: 2}


def test_what_parts_take_is_loaded_before_memory_is_short() -> None:
    """F11: checkpoints load torch's compiler; where that failed for lack of memory, no later one worked."""
    model = rescued("processes", Fn(lambda x: x * 0 + float("torch._dynamo" in sys.modules)))
    assert model(torch.ones(2)).tolist() == [1.0, 1.0]
    model.close()


def test_dropout_in_parts_has_the_same_masks_in_backward(float64: None) -> None:
    """F11: each part is computed again with its own random numbers."""
    model = rescued("threads", Fn(nn.functional.dropout, Greedy(3, False).net[0]))
    model.engine.row_limits.update({0: 3, 1: 2})
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
        (nn.BatchNorm1d(2), 8, {}, "normalises over all of its rows"),
        (nn.Identity(), 8, {"sync_batch_norm": True}, "wait for each other"),
        (nn.Identity(), 2, {}, "a single row needs more memory"),
    ],
)
def test_what_cannot_be_run_in_parts(module: nn.Module, rows: int, options: dict[str, Any], reason: str) -> None:
    """F11: the error is the module's own, with a note that says why."""

    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("simulated")

    model = rescued("threads", Calls(forward, inner=module), **options)
    with pytest.raises(torch.OutOfMemoryError, match="simulated") as raised:
        model(torch.ones(rows, 2))
    assert any(reason in note for note in raised.value.__notes__)
    assert not model.engine.row_limits


def of_whole_batch(output: torch.Tensor) -> torch.Tensor:
    """A contrastive loss: each row is compared with every other one."""
    return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_parts_give_the_gradients_of_a_loss_over_the_whole_batch(engine: str, devices: int, float64: None) -> None:
    """N13: also where parts differ in size, and without gradients; no forward sees more rows than a part has."""
    plain = Greedy(99, False)
    model = DataParallel(copy.deepcopy(plain), ["cpu"] * devices, engine=engine, parts=3, scalars="mean")
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
    model.close()


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


@pytest.mark.filterwarnings("ignore:gathering 0-dim outputs")
@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (nn.BatchNorm1d(2), {}, r"parts=\): the model itself \(BatchNorm1d\) normalises over all of its rows"),
        (nn.Identity(), {"sync_batch_norm": True}, rf"parts=\): {WAIT}"),
        (in_forward(counted), {}, "changes the buffer 'count'"),
        (in_forward(lambda module, x: module.layer(x).mean()), {}, "0-dim tensors"),
        (in_forward(lambda module, x: module.layer(x).mean(0)), {}, r"\[4, 4\] rows it .* of lengths \[2, 2\]"),
        (in_forward(lambda module, x: (module.layer(x), len(x))), {}, "numbers, which would be one a part"),
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


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_what_one_part_assigns_the_next_does_not_find(engine: str, float64: None) -> None:
    """N13, R6: nor does the second computation in backward; each part begins as the replica does."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.factor = module.factor * 0.9 + 1
        return module.layer(x) * module.factor

    model = DataParallel(Calls(forward, layer=nn.Linear(3, 2)), ["cpu"] * 2, engine=engine, parts=2)
    model.module.factor = 1.0
    output = model(torch.ones(8, 3))
    output.sum().backward()
    torch.testing.assert_close(output, (model.module.layer(torch.ones(8, 3)) * 1.9).detach())
    torch.testing.assert_close(model.module.layer.bias.grad, torch.full((2,), 8 * 1.9))
    model.close()


@pytest.mark.parametrize(("parts", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError), ("two", TypeError)])
def test_bad_parts(parts: Any, error: type[Exception]) -> None:
    """A13."""
    with pytest.raises(error, match=r"parts="):
        DataParallel(nn.Identity(), ["cpu"] * 2, parts=parts)


def test_what_counts_as_out_of_memory() -> None:
    """F11: torch's error for devices, and that of its allocator on the host; not Python's, which may be of the user."""
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert devices.is_out_of_memory(raised.value)
    assert devices.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not devices.is_out_of_memory(MemoryError())
    assert not devices.is_out_of_memory(RuntimeError("out of luck"))


def train_in_parts(rank: int, num_replicas: int) -> None:
    model, oracle = twins(lambda: nn.Linear(3, 2).double(), device_ids=["cpu"] * num_replicas, parts=3)
    x = torch.randn(13, 3, generator=torch.Generator().manual_seed(0)).double()
    own = rows_of(rank, (8, 5))
    output, expected = model(x[own]), oracle(x)
    torch.testing.assert_close(output, expected[own])
    output.square().mean().backward()
    expected.square().mean().backward()
    assert_same_gradients(model.module, oracle)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_ranks_run_their_shards_in_parts(num_replicas: int) -> None:
    """N13, C1: with one device a process too, whose output is not joined with others, but from its parts."""
    run_ranks(2, train_in_parts, num_replicas)
