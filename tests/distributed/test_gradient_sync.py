"""Gradients over processes are those of one device over all processes' rows. The oracle is the plain module there."""

import contextlib
import copy
import gc
import io
import os
import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import manyhands
from helpers.ranks import run_ranks
from manyhands.distributed.process_group import communicator_for

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [[4, 9, 5, 1], [7, 3, 0, 2], [1, 1, 1, 1], [0, 6, 2, 5]]
ONE: dict = {}
TWO = {"device_ids": ["cpu"] * 2}
PROCESSES = {"device_ids": ["cpu"] * 2, "engine": "processes"}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def rows_of(rank: int, sizes: list[int]) -> slice:
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def batch(sizes: list[int], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(sum(sizes), 5, generator=generator).double()
    return x, torch.randn(sum(sizes), 3, generator=generator).double()


def assert_same_gradients(module: nn.Module, oracle: nn.Module, rtol: float = 1e-11, atol: float = 1e-13) -> None:
    for (name, parameter), other in zip(module.named_parameters(), oracle.parameters(), strict=True):
        if other.grad is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            one, two = parameter.grad, other.grad
            if two.is_sparse:
                assert one.is_sparse, name
                one, two = one.to_dense(), two.to_dense()
            torch.testing.assert_close(one, two, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def twins(make: Callable[[], nn.Module] = perceptron, **options) -> tuple[manyhands.DataParallel, nn.Module]:
    """Return a wrapped module, and a plain one with the same values."""
    module = make()
    model = manyhands.DataParallel(module, **options)
    oracle = make()
    oracle.load_state_dict(module.state_dict())
    return model, oracle


def same_bits(value: object) -> object:
    """Return tensors as bytes, to be compared between processes."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [same_bits(item) for item in value]


def train(rank: int, world_size: int, options: dict, loss: str) -> list[float]:
    model, oracle = twins(loss=loss, **options)
    generator = torch.Generator().manual_seed(5)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, oracle)]
    for step in range(6):
        sizes = SIZES[step % len(SIZES)][:world_size]
        x, y = batch(sizes, generator)
        rows = rows_of(rank, sizes)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mse_loss(model(x[rows]), y[rows], reduction=loss).backward()
        mse_loss(oracle(x), y, reduction=loss).backward()
        assert_same_gradients(model.module, oracle)
        for optimizer in optimizers:
            optimizer.step()
    return [p.sum().item() for p in model.parameters()]


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, ONE), (2, TWO), pytest.param(2, PROCESSES, marks=pytest.mark.slow), (4, ONE)],
    ids=["2x1", "2x2 threads", "2x2 processes", "4x1"],
)
def test_training_is_that_of_one_device_over_all_rows(world_size, options, loss):
    """C1, C2, C13"""
    ends = run_ranks(world_size, train, world_size, options, loss)
    assert all(end == ends[0] for end in ends), "every process ends with the same bits"


# What follows runs in two processes, with 4 and 9 rows where nothing else is said.


def data(rank: int, seed: int = 0, sizes: tuple[int, ...] = (4, 9)) -> tuple[torch.Tensor, ...]:
    """Return this rank's inputs and targets, and those of all."""
    x, y = batch(list(sizes), torch.Generator().manual_seed(seed))
    rows = rows_of(rank, list(sizes))
    return x[rows], y[rows], x, y


def step_and_compare(rank: int, model: nn.Module, oracle: nn.Module, seed: int = 0, **tolerance: float) -> None:
    """Take one step with both, from no gradients, and compare these."""
    x, y, all_x, all_y = data(rank, seed)
    model.zero_grad()
    oracle.zero_grad()
    mse_loss(model(x), y).backward()
    mse_loss(oracle(all_x), all_y).backward()
    assert_same_gradients(model.module, oracle, **tolerance)


CASES = []
OVER_PROCESSES = []


def case(*options: dict) -> Callable[[Callable], Callable]:
    """Have a function run in two ranks, once for each of some options of the wrapper."""
    names = {id(ONE): "one replica", id(TWO): "threads"}

    def take(function: Callable) -> Callable:
        for each in options or (ONE, TWO):
            if each is PROCESSES:
                OVER_PROCESSES.append(function)
            else:
                CASES.append(pytest.param(function, each, id=f"{function.__name__}-{names[id(each)]}"))
        return function

    return take


# ---- which parameters


class Various(nn.Module):
    """Parameters of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.turn = nn.Parameter(torch.tensor([1 + 0.5j, 2 - 1j, 1j]))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.sometimes = nn.Parameter(torch.ones(3))
        self.late = nn.Parameter(torch.ones(3))
        self.uses = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * self.scale * self.frozen + self.empty.sum() + self.late
        y = y + (y * self.turn).abs()
        images = y[:, None, :, None].to(memory_format=torch.channels_last)
        y = y + self.conv(images).mean((1, 3))
        return y * self.sometimes if self.uses else y


@case(ONE, TWO, PROCESSES)
def kinds_of_parameters(rank: int, options: dict) -> None:
    def make() -> nn.Module:
        module = Various()
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.complex128 if parameter.is_complex() else torch.float64)
        return module

    model, oracle = twins(make, **options)
    model.module.uses = rank == 1  # used in one process only
    for seed in range(3):
        x, y, all_x, all_y = data(rank, seed)
        model.zero_grad()
        oracle.zero_grad()
        for module in (model.module, oracle):
            module.late.requires_grad_(seed != 1)
        mse_loss(model(x), y).backward()
        for part, weight, uses in ((slice(0, 4), 4 / 13, False), (slice(4, 13), 9 / 13, True)):
            oracle.uses = uses
            (mse_loss(oracle(all_x[part]), all_y[part]) * weight).backward()
        assert_same_gradients(model.module, oracle)
        assert model.module.unused.weight.grad is None
        assert model.module.conv.weight.grad.stride() == model.module.conv.weight.stride()


@case()
def parameters_of_two_dtypes_and_tied_ones(rank: int, options: dict) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
            self.two.weight = self.one.weight
            self.short = nn.Linear(5, 5).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.two(torch.relu(self.one(x)))
            return self.last(self.short(x.bfloat16()).float())

    module = Tied()
    model = manyhands.DataParallel(module, **options)
    oracle = Tied()
    oracle.load_state_dict(module.state_dict())
    x, y, all_x, all_y = (tensor.float() for tensor in data(rank))
    mse_loss(model(x), y).backward()
    mse_loss(oracle(all_x), all_y).backward()
    assert module.short.weight.grad.dtype == torch.bfloat16
    assert_same_gradients(module, oracle, rtol=0.05, atol=0.02)


@case(ONE)
def one_device_returns_what_the_module_returns(rank: int, options: dict) -> None:
    """A3: nothing is joined, so what is 0-dim stays so, and objects of any class come out as they are."""

    class Result(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(5, 3).double(), object()

        def forward(self, x: torch.Tensor) -> dict:
            return {"loss": self.layer(x).square().mean(), "rows": len(x), "ok": True, "kept": self.kept}

    model, oracle = twins(Result, **options)
    x, _, all_x, _ = data(rank)
    output, expected = model(x), oracle(all_x)
    assert (output["loss"].shape, output["rows"], output["ok"]) == ((), len(x), True)
    assert output["kept"] is model.module.kept
    output["loss"].backward()
    expected["loss"].backward()
    assert_same_gradients(model.module, oracle)


@case(ONE, TWO)
def nothing_outlives_a_step(rank: int, options: dict) -> None:
    """N10: buckets go with the gradients that lie in them, not when the collector comes."""
    model, _ = twins(**options)
    x, y, *_ = data(rank)

    def step() -> None:
        mse_loss(model(x), y).backward()
        model.zero_grad()

    step()
    gc.collect()
    gc.disable()
    step()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    left = [type(thing) for thing in gc.garbage]
    assert not [kind for kind in left if kind is torch.Tensor or kind.__module__.startswith("manyhands")]


@case(ONE)
def what_does_not_go_through_the_wrapper(rank: int, options: dict) -> None:
    """C16"""
    model, oracle = twins(**options)
    x, y, all_x, all_y = data(rank)

    def penalty(module: nn.Module) -> torch.Tensor:
        return sum(parameter.square().sum() for parameter in module.parameters())

    (mse_loss(model(x), y) + penalty(model)).backward()
    (mse_loss(oracle(all_x), all_y) + penalty(oracle)).backward()
    assert_same_gradients(model.module, oracle)

    own = copy.deepcopy(oracle)
    own.zero_grad()
    model.zero_grad()
    model.module(x).square().mean().backward()
    own(x).square().mean().backward()
    assert_same_gradients(model.module, own)


@case(ONE, TWO, PROCESSES)
def sparse_gradients(rank: int, options: dict) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.rest = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)
            self.skips = False

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            words = self.words(index)
            return self.rest(words.detach() if self.skips else words)

    model, oracle = twins(lambda: Words().double(), **options)
    index = torch.arange(13) % 6
    _, _, _, y = data(rank)
    for step in range(4):
        model.zero_grad()
        oracle.zero_grad()
        model.module.skips = step == 2 and rank == 0  # sparse gradients in one process only
        rows = rows_of(rank, [4, 9])
        mse_loss(model(index[rows]), y[rows]).backward()
        output = oracle(index)
        if step == 2:
            output = torch.cat([oracle.rest(oracle.words(index[:4]).detach()), output[4:]])
        mse_loss(output, y).backward()
        assert_same_gradients(model.module, oracle)


# ---- how backward is called


@case(ONE, TWO, PROCESSES)
def several_forwards_and_several_backwards(rank: int, options: dict) -> None:
    model, oracle = twins(**options)
    x, y, all_x, all_y = data(rank)
    for module, a, b in ((model, x, y), (oracle, all_x, all_y)):
        one, two, three = module(a), module(a * 2), module(a - 1)
        loss = mse_loss(one, b) + 2 * mse_loss(three, b)
        loss.backward(retain_graph=True)
        loss.backward()
        mse_loss(two, b).backward()
    assert_same_gradients(model.module, oracle)
    losses = mse_loss(model(x), y), mse_loss(oracle(all_x), all_y)
    parts = [[m[0].weight, m[4].bias] for m in (model.module, oracle)]
    for one, two in zip(*(torch.autograd.grad(loss, p) for loss, p in zip(losses, parts, strict=True)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)
    assert_same_gradients(model.module, oracle)  # as they were


@case(ONE, TWO, PROCESSES)
def derivatives_of_higher_order(rank: int, options: dict) -> None:
    model, oracle = twins(**options)
    x, _, all_x, _ = data(rank)
    for module, a in ((model, x), (oracle, all_x)):
        a = a.clone().requires_grad_()
        output = module(a)
        (slope,) = torch.autograd.grad(output.sum(), a, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().add(output.square().mean()).backward()
    assert_same_gradients(model.module, oracle, rtol=1e-9)
    for module, a in ((model, x), (oracle, all_x)):
        module.zero_grad()
        loss = module(a).square().mean()
        grads = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        sum(grad.pow(3).sum() for grad in grads).backward()
    assert_same_gradients(model.module, oracle, rtol=1e-9)
    for module, a in ((model, x), (oracle, all_x)):
        module.zero_grad()
        module(a).square().mean().backward(create_graph=True)
        sum(p.grad.square().sum() for p in module.parameters()).backward()
    assert_same_gradients(model.module, oracle, rtol=1e-9)


@case()
def a_backward_for_inputs_only_waits_for_nobody(rank: int, options: dict) -> None:
    model, oracle = twins(**options)
    x, _, _, _ = data(rank)
    if rank == 0:
        for keeps in (False, True):
            grads = []
            for module in (model, oracle):
                a = x.clone().requires_grad_()
                grads.append(torch.autograd.grad(module(a).sum(), a, create_graph=keeps)[0])
                module.eval()(a).sum().backward(inputs=[a])
                module.train()
                grads.append(a.grad)
            torch.testing.assert_close(grads[:2], grads[2:], rtol=1e-11, atol=1e-13)
    model.module.zero_grad()
    # What rank 0 has done was in training mode, and counts there: the forwards have to be as many.
    for _ in range(2 if rank else 0):
        model(x)
    step_and_compare(rank, model, oracle)


@case(ONE, TWO, PROCESSES)
def two_models_that_train_each_other(rank: int, options: dict) -> None:
    """As in adversarial training: parts are frozen in turn."""
    makes = [lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)).double(), perceptron]
    pairs = [twins(make, **options) for make in makes]
    x, y, all_x, all_y = data(rank)
    sides = [([pair[0] for pair in pairs], x, y), ([pair[1] for pair in pairs], all_x, all_y)]
    for _ in range(2):
        for (maker, judge), a, b in sides:
            judge.zero_grad()
            (mse_loss(judge(a), b) + mse_loss(judge(maker(a).detach()), -b)).backward()
            maker.zero_grad()
            judge.requires_grad_(False)
            mse_loss(judge(maker(a)), b).backward()
            judge.requires_grad_(True)
        for pair in pairs:
            assert_same_gradients(pair[0].module, pair[1])


@case()
def a_wrapper_inside_a_wrapped_module(rank: int, options: dict) -> None:
    class Outer(nn.Module):
        def __init__(self, wraps: bool) -> None:
            super().__init__()
            inner = nn.Linear(5, 5).double()
            self.inner = manyhands.DataParallel(inner, **options) if wraps else inner
            self.last = nn.Linear(5, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.inner(x)))

    for loss in ("mean", "sum"):
        plain, module = Outer(False), Outer(True)
        model = manyhands.DataParallel(module, loss=loss, **options)
        plain.load_state_dict({name.replace("module.", ""): value for name, value in module.state_dict().items()})
        x, y, all_x, all_y = data(rank)
        for surroundings in (contextlib.nullcontext, torch.autograd.graph.save_on_cpu):
            model.zero_grad()
            plain.zero_grad()
            with surroundings():
                mse_loss(model(x), y, reduction=loss).backward()
            mse_loss(plain(all_x), all_y, reduction=loss).backward()
            assert_same_gradients(module, plain)
    torch.manual_seed(0)  # here nobody else makes the last layer equal
    inner_only, oracle = Outer(True), Outer(False)
    oracle.load_state_dict({name.replace("module.", ""): v for name, v in inner_only.state_dict().items()})
    mse_loss(inner_only(x), y).backward()
    mse_loss(oracle(all_x), all_y).backward()
    assert_same_gradients(inner_only.inner.module, oracle.inner)


# ---- accumulation


def accumulate(rank: int, options: dict, how: str, loss: str) -> None:
    model, oracle = twins(loss=loss, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, oracle)]
    sizes = [(4, 9), (2, 2), (0, 5), (7, 1), (3, 0), (1, 6)]
    for i, each in enumerate(sizes):
        x, y, all_x, all_y = data(rank, i, each)
        last = i % 3 == 2
        local = {"synchronised": False, "no_sync": not last, "now and then": i in (1, 3)}[how]
        with model.no_sync() if local else contextlib.nullcontext():
            mse_loss(model(x), y, reduction=loss).backward()
        mse_loss(oracle(all_x), all_y, reduction=loss).backward()
        if last:
            assert_same_gradients(model.module, oracle)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@case(ONE, TWO, PROCESSES)
def accumulation(rank: int, options: dict) -> None:
    for how in ("synchronised", "no_sync", "now and then"):
        for loss in ("mean", "sum"):
            accumulate(rank, options, how, loss)


@case()
def what_was_accumulated_can_be_dropped_or_scaled(rank: int, options: dict) -> None:
    model, oracle = twins(**options)
    for sets_to_none in (True, False):
        x, y, *_ = data(rank, 7)
        with model.no_sync():
            mse_loss(model(x), y).backward()
        model.zero_grad(set_to_none=sets_to_none)
        step_and_compare(rank, model, oracle, seed=8)
    model.zero_grad()
    oracle.zero_grad()
    for seed, local in ((1, True), (2, False)):
        x, y, all_x, all_y = data(rank, seed)
        with model.no_sync() if local else contextlib.nullcontext():
            mse_loss(model(x), y).backward()
        mse_loss(oracle(all_x), all_y).backward()
        for module in (model, oracle):
            for parameter in module.parameters():
                parameter.grad.mul_(0.5)
    assert_same_gradients(model.module, oracle)


@case()
def inside_no_sync_only_backward_counts(rank: int, options: dict) -> None:
    """A gradient penalty, an attack on the inputs, and gradients that are only looked at."""
    model, oracle = twins(**options)
    for seed in (1, 2):
        x, y, all_x, all_y = data(rank, seed)
        for module, a, b in ((model, x, y), (oracle, all_x, all_y)):
            context = model.no_sync() if module is model and seed == 1 else contextlib.nullcontext()
            with context:
                a = a.clone().requires_grad_()
                (attack,) = torch.autograd.grad(mse_loss(module(a), b), a)
                a = (a + attack.sign()).detach().requires_grad_()
                output = module(a)
                (slope,) = torch.autograd.grad(output.sum(), a, create_graph=True)
                (mse_loss(output, b) + slope.square().mean()).backward()
        # Looking at gradients leaves what has been accumulated as it is.
        looked = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
        expected = torch.autograd.grad(mse_loss(oracle(all_x), all_y), list(oracle.parameters()))
        for one, two in zip(looked, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-13)
    assert_same_gradients(model.module, oracle, rtol=1e-9)


# ---- what surrounds the module, and what is in it


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        for layer in (self.one, self.two, self.one):  # gradients of one come in several parts
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=self.reentrant)
        return self.last(x)


@case(ONE, TWO, PROCESSES)
def activation_checkpoints(rank: int, options: dict) -> None:
    for reentrant in (False, True):
        model, oracle = twins(lambda r=reentrant: Checkpointed(r).double(), **options)
        for seed in range(2):
            step_and_compare(rank, model, oracle, seed)
        x, y, all_x, all_y = data(rank)  # around the wrapper
        for module, a, b in ((model, x, y), (oracle, all_x, all_y)):
            module.zero_grad()
            a = a.clone().requires_grad_()
            mse_loss(checkpoint(module, a, use_reentrant=reentrant), b).backward()
        assert_same_gradients(model.module, oracle)
        with torch.autograd.graph.save_on_cpu():
            if reentrant:
                with pytest.raises(RuntimeError, match="reentrant activation checkpoint inside the module"):
                    model(x)
            else:
                step_and_compare(rank, model, oracle)


@case(ONE)
def compiled_modules(rank: int, options: dict) -> None:
    module = perceptron()
    model = manyhands.DataParallel(torch.compile(module, backend="aot_eager"), **options)
    oracle = perceptron()
    oracle.load_state_dict(module.state_dict())
    for seed in range(2):
        step_and_compare(rank, model, oracle, seed)


@case(ONE, TWO, PROCESSES)
def a_module_whose_output_is_its_loss(rank: int, options: dict) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return mse_loss(self.body(x), y)

    model, oracle = twins(WithLoss, scalars="mean", **options)
    for sizes in ((4, 9), (0, 3)):
        x, y, all_x, all_y = data(rank, 0, sizes)
        model.zero_grad()
        oracle.zero_grad()
        model(x, y).backward()
        oracle(all_x, all_y).backward()
        assert_same_gradients(model.module, oracle)


@case()
def losses_over_tokens(rank: int, options: dict) -> None:
    """C1"""
    for loss in ("mean", "sum"):
        model, oracle = twins(loss=loss, **options)
        _, _, x, _ = data(rank)
        target = torch.arange(13) % 4 - 1
        target[target < 0] = -100  # not counted
        rows = rows_of(rank, [4, 9])
        for step in range(3):
            model.zero_grad()
            oracle.zero_grad()
            here = target[rows] if step or rank else torch.full((4,), -100)  # first, rank 0 has none that counts
            whole = target if step else torch.cat([torch.full((4,), -100), target[4:]])
            model.set_batch_weight((here >= 0).sum())
            nn.functional.cross_entropy(model(x[rows]), here, reduction=loss).backward()
            nn.functional.cross_entropy(oracle(x), whole, reduction=loss).backward()
            assert_same_gradients(model.module, oracle)


# ---- communication hooks


def own_hook(state: list, bucket: object) -> torch.futures.Future:
    state.append((bucket.index(), bucket.is_last(), len(bucket.parameters()), len(bucket.gradients())))
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / torch.distributed.get_world_size())


@case()
def communication_hooks(rank: int, options: dict) -> None:
    """C10"""
    calls: list = []
    low_rank = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2)
    for hook, state, tolerance in (
        (default_hooks.allreduce_hook, None, 1e-6),
        (default_hooks.bf16_compress_hook, None, 2e-2),
        (default_hooks.fp16_compress_hook, None, 2e-3),
        (own_hook, calls, 1e-6),
        (powerSGD_hook.powerSGD_hook, low_rank, 1e-4),
    ):
        module = perceptron().float()
        model = manyhands.DataParallel(module, **options)
        model.register_comm_hook(state, hook)
        oracle = perceptron().float()
        oracle.load_state_dict(module.state_dict())
        for step in range(4):
            x, y, all_x, all_y = (tensor.float() for tensor in data(rank, step))
            model.zero_grad()
            oracle.zero_grad()
            with model.no_sync() if step == 1 else contextlib.nullcontext():
                mse_loss(model(x), y).backward()
            if step == 1:
                mse_loss(model(x), y).backward()
                mse_loss(oracle(all_x), all_y).backward()
            mse_loss(oracle(all_x), all_y).backward()
            assert_same_gradients(module, oracle, rtol=tolerance, atol=tolerance / 10)
    assert calls == [(0, True, 6, 6)] * 4


@case(ONE)
def communication_hooks_that_cannot_be_used(rank: int, options: dict) -> None:
    model, _ = twins(**options)
    x, *_ = data(rank)
    with pytest.raises(TypeError, match="hook=3: expected a function"):
        model.register_comm_hook(None, 3)
    model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(TypeError, match="the communication hook returned a Tensor: expected"):
        model(x).sum().backward()


# ---- buffers, copies, files


@case(ONE, TWO, PROCESSES)
def buffers_are_those_of_the_first_process(rank: int, options: dict) -> None:
    """C8"""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(5), nn.Linear(5, 3)
            self.register_buffer("mask", torch.full((3,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(x)) * self.mask

    module = Counting().double()
    model = manyhands.DataParallel(module, **options)
    for sizes, first in (((4, 8), 0), ((0, 8), 1)):
        plain = copy.deepcopy(module)
        x, _, all_x, _ = data(rank, 0, sizes)
        out = model(x)
        out2 = model(x + 1)
        out.sum().backward(retain_graph=True)  # what graphs have kept of buffers is not written into
        out2.sum().backward()
        out.sum().backward()
        share = rows_of(first, list(sizes))
        share = slice(share.start, share.start + (share.stop - share.start + 1) // 2) if options else share
        plain(all_x[share])
        plain(all_x[share] + 1)
        for (name, one), two in zip(module.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13, msg=name)


@case(ONE, TWO)
def one_process_evaluates_between_forward_and_backward(rank: int, options: dict) -> None:
    """C8: whether buffers are sent is decided by the mode of the forward, which was the same everywhere."""
    module = nn.Sequential(nn.BatchNorm1d(5), perceptron()).double()
    model = manyhands.DataParallel(module, **options)
    x, *_ = data(rank)
    output = model(x)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(x)
    output.sum().backward()
    statistics = module[0].running_mean
    both = communicator_for().all_gather_object(statistics, "comparing buffers")
    assert torch.equal(*both)


@case(ONE, TWO)
def copies_and_files(rank: int, options: dict) -> None:
    """C7"""
    module = perceptron()
    with torch.no_grad():
        module[0].weight.fill_(rank)  # unequal, and then rank 0's
    model = manyhands.DataParallel(module, **options)
    assert not module[0].weight.any()
    assert list(model.module.state_dict()) == list(module.state_dict())
    with torch.no_grad():
        module[0].weight.normal_(generator=torch.Generator().manual_seed(1))
    oracle = perceptron()
    oracle.load_state_dict(module.state_dict())
    x, *_ = data(rank)

    saved = io.BytesIO()
    torch.save(model, saved)
    if rank == 0:  # alone: an average of the weights that is evaluated, and a model that is loaded and evaluated
        average = copy.deepcopy(model)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        with torch.no_grad():
            for each in (average, loaded):
                torch.testing.assert_close(each(x), oracle(x))
        average.eval()(x).sum()  # with a graph, but no backward
    step_and_compare(rank, model, oracle)

    trained = copy.deepcopy(model)  # by all
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    other, _ = twins(**options)
    for each in (trained, loaded, other, model):
        plain = perceptron()
        plain.load_state_dict(each.module.state_dict())
        step_and_compare(rank, each, plain)
    assert loaded.spans_processes
    local = manyhands.DataParallel(perceptron(), process_group=False, **options)
    assert not local.spans_processes
    torch.save(local, saved := io.BytesIO())
    saved.seek(0)
    local = torch.load(saved, weights_only=False)
    if rank == 0:
        local(x).sum().backward()
    assert not local.spans_processes


def test_a_file_of_several_processes_is_loaded_by_one(tmp_path):
    path = tmp_path / "model"
    run_ranks(2, lambda rank: torch.save(manyhands.DataParallel(perceptron()), path) if rank == 0 else
              manyhands.DataParallel(perceptron()))  # fmt: skip
    model = torch.load(path, weights_only=False)
    model(torch.zeros(2, 5).double()).sum().backward()
    assert not model.spans_processes
    assert model.module[0].weight.grad is not None


# ---- a forward that fails and is tried again


@case()
def a_forward_that_fails_is_tried_again(rank: int, options: dict) -> None:
    """C12: what the program takes care of itself is nobody else's affair."""

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.most_rows = perceptron(), 1000

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > self.most_rows:
                raise torch.OutOfMemoryError(f"{len(x)} rows")
            return self.body(x)

    model, oracle = twins(Greedy, **options)
    for step in range(3):
        model.zero_grad()
        oracle.zero_grad()
        x, y, all_x, all_y = data(rank, step)
        model.module.most_rows = 4 if rank else 1000
        if step == 2:
            model.set_batch_weight(len(x) if not rank else 3)
        while True:
            try:
                output = model(x)
                break
            except torch.OutOfMemoryError:
                x, y = x[:3], y[:3]
        mse_loss(output, y).backward()
        used = slice(0, 7) if not (options and step == 5) else slice(0, 13)
        mse_loss(oracle(all_x[used]), all_y[used]).backward()
        assert len(x) == (4, 3)[rank]
        assert_same_gradients(model.module, oracle)


@pytest.mark.parametrize(("function", "options"), CASES)
def test_case(function, options):
    """C1, C2, C3, C4, C5, C6, C7, C8, C10, C12, C15, C16: in two processes."""
    run_ranks(2, function, options)


def in_turn(rank: int, functions: list[Callable], options: dict) -> None:
    for function in functions:
        torch.manual_seed(rank)
        try:
            function(rank, options)
        except Exception as error:
            error.add_note(f"in {function.__name__}")
            raise


@pytest.mark.slow
def test_cases_over_processes():
    """C1, C2, C3, C4, C5, C8: each rank has a worker. In one program: fork servers take longer than all cases."""
    run_ranks(2, in_turn, OVER_PROCESSES, PROCESSES)


# ---- many buckets


def many_buckets(rank: int, world_size: int, options: dict) -> object:
    from manyhands.distributed import bucketed_all_reduce

    bucketed_all_reduce.FIRST_BUCKET_BYTES, bucketed_all_reduce.BUCKET_BYTES = 200, 700
    sizes = torch.randint(1, 20, (30,), generator=torch.Generator().manual_seed(1)).tolist()

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, size) for size in sizes)
            self.offsets = nn.ParameterList(torch.zeros(n % 4).double() for n in sizes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = sum(layer(x).tanh().sum(1) for layer in self.layers)
            return (total + sum(offset.sum() for offset in self.offsets))[:, None].expand(-1, 3)

    model, oracle = twins(lambda: Wide().double(), **options)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(rank)).tolist()
    model.module.layers = nn.ModuleList(model.module.layers)
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(200, 200)
    for _ in range(12):
        ranks_sizes = torch.randint(0, 5, (world_size,), generator=generator).tolist()
        x, y = batch(ranks_sizes, generator)
        rows = rows_of(rank, ranks_sizes)
        model.zero_grad()
        oracle.zero_grad()
        for _ in range(order[0]):  # not all at the same speed
            noise @ noise
        order = order[1:] + order[:1]
        mse_loss(model(x[rows]), y[rows]).backward()
        if sum(ranks_sizes):
            mse_loss(oracle(x), y).backward()
        assert_same_gradients(model.module, oracle)
    return same_bits([p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, ONE), (3, TWO), pytest.param(4, TWO, marks=pytest.mark.slow)],
    ids=["2x1", "3x2", "4x2"],
)
def test_many_buckets_in_flight(world_size, options):
    """C13"""
    ends = run_ranks(world_size, many_buckets, world_size, options)
    assert all(end == ends[0] for end in ends), "every process ends with the same bits"


# ---- memory


def memory_of_gradients(rank: int) -> list[int]:
    model = manyhands.DataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))))
    model(torch.randn(3, 64)).sum().backward()
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(3, 64)).sum().backward()
    later = len(os.listdir("/proc/self/task")) if threads else 0
    return [sum(storages.values()), sum(p.nbytes for p in model.parameters()), later - threads]


def test_gradients_lie_in_the_buckets_and_nowhere_else():
    for held, needed, more_threads in run_ranks(2, memory_of_gradients):
        assert held == needed
        assert more_threads <= 0
