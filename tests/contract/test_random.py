"""Random numbers: a stream for each replica, equal runs from equal seeds, and the masks of the forward in backward."""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.comparisons import assert_alike, assert_all_same, assert_same, assert_same_gradients
from helpers.contract import ON_CPU, REFUSES_CHECKPOINTS, Wrap, at_one_place, in_turn, on_the_cpu, over_places
from helpers.losses import fresh, loss_of, tensors_in
from helpers.modules import Calls, Fn, WithBackward, mlp
from unisono import data_parallel


def run_steps(model: nn.Module, x: torch.Tensor, seed: int = 3, num_steps: int = 2) -> list[Any]:
    """Return what some steps from a seed give: outputs, gradients, and the random state in the end."""
    torch.manual_seed(seed)
    seen: list[Any] = []
    for _ in range(num_steps):
        x = fresh(x)
        model.zero_grad()
        output = model(x)
        loss_of(output).backward()
        seen += [*(tensor.detach() for tensor in tensors_in(output)), x.grad]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*seen, torch.get_rng_state()]


def recomputed(module: nn.Module, reentrant: bool) -> nn.Module:
    """Return a module whose activations are computed again in backward."""
    return Calls(lambda model, x: checkpoint(model.module, x, use_reentrant=reentrant), module=module)


def with_dropout(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, width), nn.Dropout(0.2))


class RandomLayers(nn.Module):
    """Draws in many ways: in dropout layers, inside an LSTM, inside attention, and in activations computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(with_dropout(), recomputed(with_dropout(), True), recomputed(with_dropout(), False))
        self.recurrent = nn.LSTM(5, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.blocks(x)[:, None].expand(-1, 3, -1))
        return self.attention(hidden)


def all_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def assert_repeats(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Check that steps give the same ten times, on a device, which takes longer, three times; return what they give."""
    expected = run_steps(model, x)
    assert all(all_equal(run_steps(model, x), expected) for _ in range(10 if ON_CPU else 3))
    return expected


def num_different(tensors: Any) -> int:
    return len({tuple(tensor.flatten().tolist()) for tensor in tensors})


@pytest.fixture
def busy() -> Iterator[None]:
    """Other threads that want the processor and the interpreter, so that the order of the replicas varies."""
    stop = threading.Event()

    def burn() -> None:
        a = torch.ones(64, 64)
        while not stop.is_set():
            a = torch.tanh(a @ a)
            sum(range(1000))

    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            pool.submit(burn)
        yield
        stop.set()


@over_places("num_replicas", [(8 if ON_CPU else 3,)], separate=[(3,)])
def test_equal_seeds_give_equal_runs_under_load(
    wrap: Wrap, busy: None, caplog: pytest.LogCaptureFixture, num_replicas: int
) -> None:
    """N6: 10 times the same bits, outputs, gradients and random state, whatever the order of the replicas."""
    model = wrap(RandomLayers(), num_replicas)
    x = torch.randn(16, 5)
    expected = assert_repeats(model, x)
    assert not all_equal(run_steps(model, x, 4), expected)
    assert not caplog.records


def after_a_seed(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(int(torch.randint(1 << 30, ())))
    return torch.rand(len(x), 9)


# One of each kind, and what finds a generator in another way; tests/runtime/test_rng.py has every operation that draws.
ON_THE_CPU = {"the default generator by name", "after torch.manual_seed"}
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": F.dropout,
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
        torch.arange(4096.0, device=x.device).view(1, 4, 32, 32).expand(len(x), 4, 32, 32), 2, 19
    ),
    "rand": lambda x: torch.rand(len(x), 9, device=x.device),
    "randperm": lambda x: torch.randperm(99, device=x.device).expand(len(x), 99),
    "rand_like": torch.rand_like,
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.5)),
    "multinomial": lambda x: torch.multinomial(torch.ones(len(x), 30, device=x.device), 9),
    "dirichlet": lambda x: torch.distributions.Dirichlet(torch.ones_like(x)).rsample(),
    "the default generator by name": lambda x: torch.rand(len(x), 9, generator=torch.default_generator),
    "after torch.manual_seed": after_a_seed,
    "under vmap": torch.vmap(F.dropout, randomness="different"),
}


@at_one_place
@pytest.mark.parametrize("name", [pytest.param(name, marks=on_the_cpu if name in ON_THE_CPU else ()) for name in DRAWS])
def test_every_replica_draws_from_a_stream_of_its_own(wrap: Wrap, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """N6: no two replicas, steps or seeds draw the same, and the plain composition draws the same."""
    model = wrap(Fn(DRAWS[name]), 3)
    x = torch.ones(6, 32, 8)
    torch.manual_seed(1)
    first, second, after = model(x), model(x), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(data_parallel(model.module, x, in_turn(3)), first)
    assert torch.equal(model(x), second)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(2)
    assert num_different([*first.chunk(3), *second.chunk(3), *model(x).chunk(3)]) == 9
    assert not caplog.records


@pytest.mark.parametrize(
    ("draws", "num_replicas"), [("some", 2), ("some", 3), ("some", 8), ("none in eval mode", 3), ("none", 3)]
)
def test_the_random_state_moves_on_alike_for_any_number_of_replicas(
    wrap: Wrap, caplog: pytest.LogCaptureFixture, draws: str, num_replicas: int
) -> None:
    """N6: by one number a forward that draws, nothing a backward; so data are drawn alike on any number of devices."""
    module = recomputed(mlp(), False) if draws == "none" else RandomLayers().train(draws == "some")
    model = wrap(module, num_replicas)
    torch.manual_seed(5)
    torch.rand(int(draws == "some"))
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    output = model(torch.ones(16, 5))
    assert torch.equal(torch.get_rng_state(), expected)
    if module.training:  # cuDNN has no backward of a recurrent layer in eval mode
        loss_of(output).backward()
        assert torch.equal(torch.get_rng_state(), expected)
    assert not caplog.records


def test_a_single_replica_draws_what_the_plain_module_draws(wrap: Wrap) -> None:
    """N6: a batch of one row."""
    x = torch.randn(1, 5)
    assert_alike(wrap, with_dropout(), lambda call, _: run_steps(call, x), 3)


# ---- activations computed again ------------------------------------------------------------------


@over_places("reentrant", [(True,), (False,)], separate=[(True,)])
def test_recomputed_activations_have_the_masks_of_the_forward(wrap: Wrap, reentrant: bool) -> None:
    """N6, R13: in `checkpoint(model, x)`; gradients by hand, from the masks.

    Many steps, because an order that depends on threads is right some of the time.
    """
    if not reentrant and REFUSES_CHECKPOINTS:
        pytest.skip("around several accelerators a checkpoint that is not reentrant is an error (R13)")
    layer = nn.Linear(5, 40)
    model = wrap(nn.Sequential(layer, nn.Dropout(0.5)), 3)
    for step in range(15):
        model.zero_grad()
        x = torch.randn(7 + step % 2, 5)
        x_model = fresh(x)
        output = checkpoint(model, x_model, use_reentrant=reentrant)
        mask = (output.detach() != 0) * 2.0
        assert 0.2 < mask.mean() / 2 < 0.8
        assert_same(output.detach(), (layer(x) * mask).detach())
        loss_of(output).backward()
        x_plain, expected = fresh(x), copy.deepcopy(layer)
        expected.zero_grad()
        loss_of(expected(x_plain) * mask).backward()
        assert_same_gradients(layer, expected)
        assert_same(x_model.grad, x_plain.grad)


def backward(output: torch.Tensor, x: torch.Tensor, kind: str) -> None:
    loss = loss_of(output)
    if kind == "create_graph":
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.pow(2).sum().backward()
    if kind == "twice with retain_graph":
        loss.backward(retain_graph=True)
    if kind != "create_graph":
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outside", [False, True], ids=["", "with a global parameter"])
def test_recomputed_activations_in_every_kind_of_backward(wrap: Wrap, reentrant: bool, outside: bool) -> None:
    """N6, N3: against the same replicas without checkpoints."""
    shared = nn.Parameter(torch.ones(5)) if outside else torch.ones(5)
    kinds = ["backward", "twice with retain_graph", "create_graph"]
    found: list[list[torch.Tensor]] = [[], []]
    for grads, recompute in zip(found, (False, True), strict=True):
        torch.manual_seed(2)
        model = wrap(nn.Sequential(with_dropout(), nn.Identity(), Fn(lambda x: x * shared.to(x.device))), 3)
        if recompute:
            model.module[0] = recomputed(model.module[0], reentrant)
        for kind in kinds[:1] if reentrant else kinds:  # torch's reentrant checkpoints know a plain backward only
            torch.manual_seed(3)
            model.zero_grad()
            x = fresh(torch.randn(7, 5))
            output = model(x)
            other = model(x * 2)  # a later forward with masks of its own, whose backward comes first
            loss_of(other).backward()
            backward(output, x, kind)
            assert x.grad is not None
            grads += [x.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()]
    assert_all_same(found[1], found[0])


# ---- other places that draw ----------------------------------------------------------------------


def test_a_wrapper_inside_a_replica_draws_from_that_replicas_stream(
    wrap: Wrap, caplog: pytest.LogCaptureFixture
) -> None:
    """N6, A10: equal seeds, equal runs, and masks that differ everywhere."""
    inner = wrap(nn.Sequential(recomputed(nn.Dropout(0.5), False), nn.Dropout(0.1)), 2)
    model = wrap(nn.Sequential(nn.Linear(5, 20), inner), 3)
    x = torch.ones(12, 5)
    expected = assert_repeats(model, x)
    assert num_different(part != 0 for part in expected[0].chunk(6)) == 6
    assert not caplog.records


def adds_noise(x: torch.Tensor) -> torch.Tensor:
    """Add noise to the gradient."""
    return WithBackward.apply(x, lambda grad: grad + torch.randn_like(grad))


def test_random_numbers_in_backward(wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    """N6: streams of their own too; the random state moves on, so that the next backward draws others."""
    assert_repeats(wrap(nn.Sequential(nn.Linear(5, 5), Fn(adds_noise)), 3), torch.randn(6, 5))
    model, noise = wrap(Fn(adds_noise), 3), []
    for _ in range(2):
        x_model = fresh(torch.zeros(6, 5))
        (grad,) = torch.autograd.grad(model(x_model).sum(), x_model)
        noise += grad.chunk(3)
    assert num_different(noise) == 6
    assert not caplog.records


@on_the_cpu
def test_the_random_state_functions_act_on_the_replicas_stream(wrap: Wrap) -> None:
    """N6: manual_seed, seed, initial_seed, get_rng_state, set_rng_state and fork_rng, in every replica at once.

    A generator of the user's own is left to the user.
    """

    def draw(x: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        drawn = torch.rand(9)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(x[0]))
            assert torch.initial_seed() == int(x[0])
            seeded = torch.rand(9)
            torch.seed()
        after = torch.rand(9)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(9), drawn)
        assert torch.equal(torch.rand(9), after)
        return torch.stack([drawn, seeded, after])[None]

    before = torch.get_rng_state()
    own = wrap(Fn(lambda x: torch.rand(1, 9, generator=torch.Generator().manual_seed(int(x[0])))), 3)
    assert torch.equal(own(torch.arange(3.0)), from_seeds_0_to_2())
    assert torch.equal(torch.get_rng_state(), before)
    model = wrap(Fn(draw), 3)
    for _ in range(20):
        torch.set_rng_state(before)
        output = model(torch.arange(3.0))
        assert torch.equal(output[:, 1], from_seeds_0_to_2())
        assert num_different([*output[:, 0], *output[:, 2]]) == 6
    torch.set_rng_state(before)
    assert torch.initial_seed() == torch.default_generator.initial_seed()


def from_seeds_0_to_2() -> torch.Tensor:
    return torch.stack([torch.rand(9, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1, 2)])


def in_a_thread(x: torch.Tensor) -> torch.Tensor:
    drawn: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: drawn.append(torch.rand_like(x)))
    thread.start()
    thread.join()
    return drawn[0]


def seed_by_hand(x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(int(x[0, 0]))
    return x


@on_the_cpu
@pytest.mark.parametrize("draw", [in_a_thread, seed_by_hand])
def test_draws_outside_the_replicas_streams_are_reported(
    wrap: Wrap, caplog: pytest.LogCaptureFixture, draw: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """N6: once, with the remedy."""
    model = wrap(nn.Sequential(Fn(draw)), 3)
    for _ in range(3):
        model(torch.ones(6, 5))
    (record,) = caplog.records
    assert "drawn from while the replicas of Sequential ran" in record.getMessage()
    assert "generator=..." in record.getMessage()
