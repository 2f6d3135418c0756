"""Random numbers of one device: dropout and every other draw are the plain module's, on every engine, for every split.

tests/runtime/test_whole_batch_draws.py has every operation that draws, and test_nn_sweep.py every class that does.
"""

import copy
import importlib
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.comparisons import assert_alike, assert_all_same, assert_same, twins
from helpers.contract import Wrap, in_processes, in_time, on_engines, on_the_cpu, on_threads, over_engines
from helpers.failing import FailureError
from helpers.in_time import WAIT_S
from helpers.losses import penalty_loss
from helpers.modules import Calls, Composed, Fn, WithBackward
from helpers.random_layers import RandomLayers, recomputed, run_steps, with_dropout
from unisono import DataParallel, verify

pytestmark = on_the_cpu

ONE_DEVICE = {"randomness": "one_device"}


def assert_as_one_device(wrap: Wrap, module: nn.Module, x: torch.Tensor, num_replicas: int = 2, **options: Any) -> None:
    """Check that steps are those of the plain module, and that the random state afterwards is, too."""
    assert_alike(wrap, module, lambda call, _: run_steps(call, x), num_replicas, **ONE_DEVICE, **options)


# ---- modules -------------------------------------------------------------------------------------

# Replicas and rows: equal shares, which become unequal; others; more replicas than rows.
SPLITS = [(2, 8), (3, 7), (4, 8), (5, 3), (8, 8), (8, 17), (2, 2), (3, 1)]


@over_engines("num_replicas, rows", SPLITS, processes=[(2, 8), (3, 7)], gloo=[(3, 7)])
def test_layers_that_draw(wrap: Wrap, num_replicas: int, rows: int) -> None:
    """N12, R13: dropout, an LSTM's, attention's, and both kinds of activation checkpoints."""
    assert_as_one_device(wrap, RandomLayers(), torch.randn(rows, 5), num_replicas)


class Attention(nn.Module):
    """Attention of two heads, as models write it: by matrix products of three or four axes, or by torch's function."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.to_qkv, self.out = form, nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.to_qkv(x).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        if self.form == "torch's function":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        elif self.form == "rows, heads":
            y = F.dropout((q @ k.mT).softmax(-1), 0.3) @ v
        else:
            q, k, v = (part.reshape(rows * 2, length, width // 2) for part in (q, k, v))
            y = torch.bmm(F.dropout(torch.bmm(q, k.mT).softmax(-1), 0.3), v).view(rows, 2, length, width // 2)
        return F.dropout(self.out(y.transpose(1, 2).reshape(x.shape)), 0.1)


def drop_path(x: torch.Tensor) -> torch.Tensor:
    kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(0.7)
    return x + torch.tanh(x) * kept / 0.7


def reparametrised(x: torch.Tensor) -> torch.Tensor:
    mean, std = x[:, :3], F.softplus(x[:, 3:6])
    return mean + torch.randn_like(std) * std + F.gumbel_softmax(x[:, 3:6]) + torch.normal(mean, std)


def time_first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x.transpose(0, 1))[0].transpose(0, 1)


# A module, the shape of a row, and options. Some rows are as long as a replica has rows.
MODELS: dict[str, tuple[Callable[[], nn.Module], Sequence[int], dict[str, Any]]] = {
    "rows * heads": (lambda: Attention("rows * heads"), (4, 6), {}),
    "rows, heads": (lambda: Attention("rows, heads"), (3, 6), {}),
    "torch's function": (lambda: Attention("torch's function"), (8, 6), {}),
    "drop path": (lambda: nn.Sequential(nn.Linear(6, 6), Fn(drop_path)), (8, 6), {}),
    "drawn latents": (lambda: nn.Sequential(nn.Linear(6, 6), Fn(reparametrised)), (6,), {}),
    **{
        f"an LSTM over {n} steps": (lambda: Calls(time_first, layer=nn.LSTM(6, 4, 2, dropout=0.4)), (n, 6), {})
        for n in (3, 5, 8)  # as many as one replica has rows, as the other has, and as the batch has
    },
    "an image": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.4), nn.AlphaDropout(0.2)), (3, 6, 6), {}),
    "batch norm too": (
        lambda: nn.Sequential(with_dropout(8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 5)),
        (5,),
        {"sync_batch_norm": True},
    ),
    "random numbers in backward": (
        lambda: nn.Sequential(with_dropout(), Fn(lambda x: WithBackward.apply(x, F.dropout)), nn.Linear(5, 5)),
        (5,),
        {},
    ),
    "a seed": (lambda: Fn(lambda x: (torch.manual_seed(9), F.dropout(x))[1]), (5,), {}),
    "a fork of the random state": (lambda: Fn(forked), (5,), {}),
}


def forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        x = F.dropout(x)
    return F.dropout(x)


IN_PROCESSES = ("rows * heads", "an LSTM over 5 steps", "batch norm too", "random numbers in backward", "a seed")


@over_engines("name", [(n,) for n in MODELS], processes=[(n,) for n in IN_PROCESSES], gloo=[("rows * heads",)])
def test_models_that_draw(wrap: Wrap, name: str) -> None:
    """N12: whichever axis of a draw has the rows, in forward and in backward."""
    make, shape, options = MODELS[name]
    assert_as_one_device(wrap, make(), torch.randn(8, *shape), **options)


@over_engines("reentrant", [(True,), (False,)], processes=[(True,), (False,)], gloo=[(False,)])
def test_checkpoints_around_the_wrapper(wrap: Wrap, reentrant: bool) -> None:
    """N12, R13: the wrapper computes again, with the random state of the forward."""
    x = torch.randn(7, 5)
    assert_alike(wrap, with_dropout(), lambda call, _: run_steps(recomputed(call, reentrant), x), 3, **ONE_DEVICE)


def test_derivatives_of_higher_order(wrap: Wrap) -> None:
    """N12, N3: of a gradient penalty, with activations that are computed again."""

    def step(call: nn.Module, root: nn.Module) -> torch.Tensor:
        root.zero_grad()
        penalty_loss(call, torch.linspace(-1, 1, 40).view(8, 5)).backward()
        return torch.get_rng_state()

    module = nn.Sequential(with_dropout(8), nn.Tanh(), nn.Linear(8, 8))
    for part in (module, recomputed(module, False)):
        assert_alike(wrap, part, step, 3, 1e-10, **ONE_DEVICE)


def test_without_gradients_and_in_eval_mode(wrap: Wrap) -> None:
    """N12: in eval mode nothing is drawn."""
    x = torch.randn(7, 5)
    both_modes = torch.no_grad()(lambda call, _: [call(x), call.eval()(x), torch.get_rng_state()])
    assert_alike(wrap, with_dropout(), both_modes, 3, **ONE_DEVICE)


@over_engines("num_replicas", [(n,) for n in (1, 2, 3, 5, 8)], processes=[(2,), (5,)], gloo=[(3,)])
def test_training_is_that_of_one_device(wrap: Wrap, num_replicas: int) -> None:
    """N12, N9: 40 steps with batches of several sizes; weights and random state at the end."""

    def train(call: nn.Module, root: nn.Module) -> torch.Tensor:
        optimizer = torch.optim.SGD(call.parameters(), 0.05, momentum=0.9)
        for step in range(40):
            batch = torch.randn((16, 9, 16, 2)[step % 4], 5)  # drawn between the steps
            optimizer.zero_grad()
            call(batch).square().mean().backward()
            optimizer.step()
        return torch.get_rng_state()

    attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
    over_pieces = Calls(lambda model, x: model.over(*[x.view(len(x), 2, 4)] * 3)[0].flatten(1), over=attention)
    module = nn.Sequential(with_dropout(6)[:3], over_pieces, nn.Dropout(0.3), nn.Linear(8, 3))
    assert_alike(wrap, module, train, num_replicas, 1e-9, **ONE_DEVICE)


def test_verify_compares_models_with_active_dropout(wrap: Wrap, engine: str) -> None:
    """N12: `verify` has nothing to excuse; without the option it names it."""
    module, x = RandomLayers(), torch.randn(7, 5)
    assert verify(wrap(module, 3, **ONE_DEVICE), x, show=False).same
    report = verify(wrap(module, 3), x, show=False)
    assert not report.same
    if not in_processes(engine):  # whose calls are not recorded
        assert 'with randomness="one_device", in both modes' in " ".join(str(report).split())


@on_threads
def test_verify_shows_rows_that_are_drawn_block_after_block(wrap: Wrap) -> None:
    """N12: shapes cannot tell this from k entries of each row."""

    def dropped_twice(x: torch.Tensor) -> torch.Tensor:
        first, second = F.dropout(torch.cat([x, x])).chunk(2)
        return first + second

    report = verify(wrap(Fn(dropped_twice), 2, **ONE_DEVICE), torch.ones(8, 20), show=False)
    assert not report.same
    assert not report.explained
    assert "block after block" in " ".join(str(report).split())


# ---- where replicas do not run together ----------------------------------------------------------


@on_threads
def test_under_a_mode_one_device_runs_the_whole_batch(wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    """N12, R14"""
    plain, model = twins(wrap, with_dropout(), 2, **ONE_DEVICE)
    x = torch.randn(8, 5)
    with torch.autograd.graph.save_on_cpu():
        assert_all_same(run_steps(model, x), run_steps(plain, x))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith('DataParallel with randomness="one_device" runs the whole batch on its first device')


@pytest.mark.parametrize("outer", [ONE_DEVICE, {}], ids=["one device", "per replica"])
@pytest.mark.parametrize("inner", [ONE_DEVICE, {}], ids=["one device", "per replica"])
@on_threads
def test_a_wrapper_inside_a_replica(wrap: Wrap, outer: dict[str, Any], inner: dict[str, Any]) -> None:
    """N12, A10: its module runs the replica's rows at once, where either of them draws as one device."""
    part, x = with_dropout(), torch.randn(8, 5)
    model = wrap(nn.Sequential(nn.Linear(5, 5), wrap(part, 2, **inner)), 2, **outer)
    plain = wrap(nn.Sequential(copy.deepcopy(model.module[0]), copy.deepcopy(part)), 2, **outer)
    if outer:
        plain = plain.module
    if outer or inner:
        assert_all_same(run_steps(model, x), run_steps(plain, x))


@on_threads
def test_a_call_from_a_replica_backward_inside_forward(wrap: Wrap) -> None:
    """N12: a backward inside forward draws, too."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = checkpoint(model.energy, x, use_reentrant=False)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return F.dropout(force)

    assert_as_one_device(wrap, Calls(forward, energy=with_dropout(1)), torch.randn(8, 5))


# ---- failures ------------------------------------------------------------------------------------


def fails_on_negative_rows(x: torch.Tensor) -> torch.Tensor:
    x = F.dropout(x, 0.1)
    if bool((x < 0).any()):
        raise FailureError(3, "after the draw")
    return F.dropout(x)


def draws_by_rows(x: torch.Tensor) -> torch.Tensor:
    F.dropout(x)
    return torch.rand(len(x), 2) if x[0, 0] == 0 else torch.randn(len(x), 2)


def seeds_by_rows(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(int(x[0, 0]))
    return x * 2


# Name -> the function, the row that is negative, the error, its message, and options.
WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int | None, type[Exception], str, dict[str, Any]]] = {
    "a failure of the first": (fails_on_negative_rows, 0, FailureError, "after the draw", ONE_DEVICE),
    "a failure of the last": (fails_on_negative_rows, 7, FailureError, "after the draw", ONE_DEVICE),
    "a failure, with streams": (fails_on_negative_rows, 7, FailureError, "after the draw", {}),
    "ways": (draws_by_rows, None, RuntimeError, "replica 0 called rand.*, replicas 1 and 2 called randn", ONE_DEVICE),
    "axes": (lambda x: torch.rand(len(x), len(x)), None, RuntimeError, "rand cannot be drawn", ONE_DEVICE),
    "seeds": (seeds_by_rows, None, RuntimeError, "have ended at different random states", ONE_DEVICE),
}


@over_engines("name", [(name,) for name in WRONG], processes=[(name,) for name in WRONG], gloo=[])
def test_what_goes_wrong_leaves_the_random_state(wrap: Wrap, name: str) -> None:
    """N12, N6, N11, F1: a replica that fails, for which none waits, also where each has a stream of its own; draws, or
    states in the end, that differ between replicas. The error names the operations, and the next call works."""
    function, negative, error, message, options = WRONG[name]
    model = wrap(nn.Sequential(Fn(function), nn.Dropout(0.1)), 3, **options)
    x = torch.arange(8.0).view(8, 1).expand(8, 20).clone()
    if negative is not None:
        x[negative] = -1
    before = torch.get_rng_state()
    with pytest.raises(error, match=message):
        in_time(lambda: model(x))
    assert torch.equal(torch.get_rng_state(), before)
    model.module[0] = nn.Dropout()
    assert_all_same(run_steps(model, x), run_steps(model.module if options else model, x))


# ---- several models at once -----------------------------------------------------------------------


class RunsWhenSent:
    """Another model runs in another thread when this is pickled, that is while the processes engine sends a batch."""

    other: Callable[[torch.Tensor], Any] = staticmethod(nn.Dropout())

    def __reduce__(self) -> tuple[Any, ...]:
        thread = threading.Thread(target=self.other, args=(torch.ones(8, 2),))
        thread.start()
        thread.join(WAIT_S)
        return RunsWhenSent, ()


@on_engines(["threads", "processes"])
def test_another_model_in_another_thread(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """N12: it moves torch's random state meanwhile; each draws from the state at its own beginning."""
    model, x = wrap(Fn(lambda x, unused=None: F.dropout(x)), 2, **ONE_DEVICE), torch.ones(8, 20)
    torch.manual_seed(1)
    expected = model.module(x)
    monkeypatch.setattr(RunsWhenSent, "other", staticmethod(wrap(nn.Dropout(), 2, **ONE_DEVICE)))
    torch.manual_seed(1)
    assert_same(in_time(lambda: model(x, RunsWhenSent())), expected)


# ---- the argument --------------------------------------------------------------------------------


def test_what_is_refused(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """A13, N12: what was given, what was expected, and what to do; accelerators, and one of several processes."""
    with pytest.raises(ValueError, match=r"randomness='same': expected one of \['per_replica', 'one_device'\]"):
        DataParallel(nn.Dropout(), ["cpu"] * 2, randomness="same")
    with pytest.raises(TypeError, match="randomness=True: expected one of"):
        DataParallel(nn.Dropout(), ["cpu"] * 2, randomness=True)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"Composed\.gather is overridden, and with randomness"):
        Composed(nn.Dropout(), ["cpu"] * 2, **ONE_DEVICE)(torch.ones(4, 4))
    module = importlib.import_module("unisono.data_parallel")  # the attribute is the function of that name
    with monkeypatch.context() as patch:  # a process does not know the rows of the others
        patch.setattr(module, "communicator_for", lambda process_group: object())
        with pytest.raises(ValueError, match=r"in one of several processes: .* process_group=False\."):
            wrap(nn.Dropout(), 2, **ONE_DEVICE)
    monkeypatch.setattr("unisono.runtime.devices.computes_on_host", lambda device: False)
    with pytest.raises(ValueError, match=r"on cpu, cpu: .* on the CPU only, as yet"):
        DataParallel(nn.Dropout(), ["cpu"] * 2, **ONE_DEVICE)


def test_a_copy_draws_alike(wrap: Wrap) -> None:
    """N12, A14"""
    model = wrap(with_dropout(), 2, **ONE_DEVICE)
    x = torch.randn(8, 5)
    expected = run_steps(model.module, x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_all_same(run_steps(copied, x), expected)
        copied.close()


@on_threads
def test_a_batch_that_leaves_replicas_without_rows_is_reported(wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    """S0, N12: one row a replica would be equal shares."""
    wrap(with_dropout(), 4, shares="even", **ONE_DEVICE)(torch.randn(4, 5))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "gives [2, 1, 1, 0] rows to the 4 devices" in message
    assert "Use batches of 5 rows or more." in message
