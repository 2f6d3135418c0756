"""Gradients over processes are those of one device over all processes' rows. The oracle is the plain module there."""

import contextlib
import copy
import hashlib
import io
import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import unisono
from helpers.comparisons import assert_same_gradients
from helpers.contract import ON_CPU
from helpers.garbage import live_tensors
from helpers.modules import Calls
from helpers.ranks import drawn, drawn_by, on_two_ranks, own_devices, run_on_devices, run_ranks
from helpers.twins import rows_of, twins
from unisono.distributed.bucketed_all_reduce import plan_for_ranks
from unisono.distributed.process_group import Communicator, communicator_for
from unisono.primitives.measured_shares import MeasuredShares
from unisono.runtime import timeline

ONE, TWO = 1, 2  # replicas of a rank


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def data(rank: int, seed: int = 0, sizes: Sequence[int] = (4, 9)) -> tuple[torch.Tensor, ...]:
    """Return this rank's inputs and targets, and those of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (drawn_by(generator, sum(sizes), width) for width in (5, 3))
    rows = rows_of(rank, sizes)
    return x[rows], y[rows], x, y


def step(module: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: str = "mean") -> None:
    mse_loss(module(x), y, reduction=loss).backward()


def both(rank: int, model: nn.Module, oracle: nn.Module, *which) -> list[tuple[nn.Module, torch.Tensor, torch.Tensor]]:
    """Return the model with this rank's inputs and targets, and the oracle with those of all ranks."""
    x, y, all_x, all_y = data(rank, *which)
    return [(model, x, y), (oracle, all_x, all_y)]


def compare(
    rank: int,
    model: nn.Module,
    oracle: nn.Module,
    run: Callable[[nn.Module, torch.Tensor, torch.Tensor], None] = step,
    seed: int = 0,
    sizes: Sequence[int] = (4, 9),
    **tolerance: float,
) -> None:
    """Run a step with the model and with the oracle, from no gradients, and compare the gradients."""
    for module, x, y in both(rank, model, oracle, seed, sizes):
        module.zero_grad()
        run(module, x, y)
    assert_same_gradients(model.module, oracle, **tolerance)


def inner(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, unisono.DataParallel) else module


def without_sync(module: nn.Module, wanted: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return no_sync() of a wrapped module; nothing for the oracle."""
    return module.no_sync() if wanted and inner(module) is not module else contextlib.nullcontext()


# What follows runs in two processes, with 4 and 9 rows where nothing else is said.


@on_two_ranks(TWO)
def test_processes_may_choose_different_measured_shares(rank: int, options: dict) -> None:
    """S16, C13: one device in one process, both in the other: weights follow rows, not shares."""
    model, oracle = twins(perceptron, shares="measured", **options)
    of_ranks = [((1, 1), (1, 0)), ((1, 0), (2, 1)), ((0, 1), (1, 0)), ((1, 3), (0, 1))]
    for seed, weights in enumerate(of_ranks):
        measured = MeasuredShares(model.device_ids, "training")
        measured._use(weights[rank])
        measured.skip = 2  # not timed: these stay
        model._options.measured[True, None] = measured
        compare(rank, model, oracle, lambda module, x, y: step(module, x, y, "mean"), seed)
        assert measured.skip == 1


@on_two_ranks(TWO)
def test_a_first_replica_without_rows_beside_saved_tensor_hooks(rank: int, options: dict) -> None:
    """C1, R14: the module runs whole, on its own device, whichever replicas have rows."""
    model, oracle = twins(perceptron, shares=(0, 1), **options)
    with torch.autograd.graph.save_on_cpu():
        compare(rank, model, oracle)


# ---- which parameters


@on_two_ranks(ONE)
def test_a_bucket_without_contiguous_parameters(rank: int, options: dict) -> None:
    """C1, G7: a bucket of tensors that all have other strides is not the bucket of their entries in order."""
    conv = {"kernel_size": 3, "bias": False, "dtype": torch.float64}
    model, oracle = twins(lambda: nn.Conv2d(2, 4, **conv).to(memory_format=torch.channels_last), **options)

    def run(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        mse_loss(module(x[:, None, None].expand(-1, 2, 3, -1)).mean((1, 2)), y).backward()

    compare(rank, model, oracle, run)


class ReturnsWeight(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x).tanh(), self.weight


@on_two_ranks()
def test_a_parameter_that_is_an_output(rank: int, options: dict) -> None:
    """G11, C1: what the loss computes with it and this rank's rows is summed over the ranks, too."""
    model, oracle = twins(lambda: ReturnsWeight(5, 3).double(), **options)

    def run(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        output, weight = module(x)
        mse_loss(output + x @ weight.T, y).backward()

    for seed in range(2):
        compare(rank, model, oracle, run, seed)


@on_two_ranks(ONE)
def test_one_device_returns_what_the_module_returns(rank: int, options: dict) -> None:
    """A3: nothing is joined, so what is 0-dim stays so, and objects of any class come out as they are."""

    def forward(module: nn.Module, x: torch.Tensor) -> dict:
        return {"loss": module.layer(x).square().mean(), "rows": len(x), "ok": True, "kept": module.kept}

    def run(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        output = module(x)
        assert (output["loss"].shape, output["rows"], output["ok"]) == ((), len(x), True)
        assert output["kept"] is inner(module).kept
        output["loss"].backward()

    compare(rank, *twins(lambda: Calls(forward, layer=nn.Linear(5, 3).double(), kept=object()), **options), run)


@on_two_ranks(ONE)
def test_what_does_not_go_through_the_wrapper(rank: int, options: dict) -> None:
    """C16"""
    model, oracle = twins(perceptron, **options)

    def with_penalty(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        (mse_loss(module(x), y) + sum(parameter.square().sum() for parameter in module.parameters())).backward()

    compare(rank, model, oracle, with_penalty)
    for module in (model, oracle):
        module.zero_grad()
        inner(module)(data(rank)[0]).square().mean().backward()
    assert_same_gradients(model.module, oracle)


@on_two_ranks()
def test_sparse_gradients(rank: int, options: dict) -> None:
    """C1, C3, C6, S15: in one rank only, and in some backwards only: torch adds a sparse tensor to a dense one only.

    Dense gradients of no_sync() were lost, or could not be added to the sparse ones of the last backward. torch warned
    of a sparse tensor that it was given.
    """
    warnings.filterwarnings("error", "Sparse invariant checks")

    def forward(module: nn.Module, index: torch.Tensor, how: str) -> torch.Tensor:
        words = module.words(index)
        y = module.rest(words.detach() if how == "none" else words)
        return y + (words @ module.words.weight.t()).mean(1, keepdim=True) if how == "dense" else y

    def make() -> nn.Module:
        return Calls(forward, words=nn.Embedding(20, 4, sparse=True), rest=nn.Linear(4, 3)).double()

    index = torch.arange(13) % 6
    sparse, none, dense = ("sparse", "sparse"), ("none", "sparse"), ("dense", "dense")  # the gradients of both ranks
    # Of each step of a model the backwards, all but the last one inside no_sync().
    for steps in (
        [[sparse], [sparse], [none], [sparse]],
        [[dense, sparse], [dense, dense], [sparse, dense], [dense, sparse]],
    ):
        model, oracle = twins(make, **options)
        for backwards in steps:

            def run(module: nn.Module, x: torch.Tensor, y: torch.Tensor, backwards: list = backwards) -> None:
                for number, of_ranks in enumerate(backwards, 1):
                    parts = [*zip((index[:4], index[4:]), of_ranks, strict=True)]
                    with without_sync(module, number < len(backwards)):
                        of_module = parts if module is inner(module) else [parts[rank]]
                        mse_loss(torch.cat([module(*part) for part in of_module]), y).backward()

            compare(rank, model, oracle, run)


# ---- how backward is called


@on_two_ranks()
def test_derivatives_of_higher_order(rank: int, options: dict) -> None:
    """C5"""

    def penalty(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        output = module(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().add(output.square().mean()).backward()

    def of_parameters(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        grads = torch.autograd.grad(module(x).square().mean(), list(module.parameters()), create_graph=True)
        sum(grad.pow(3).sum() for grad in grads).backward()

    def of_grad(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        module(x).square().mean().backward(create_graph=True)
        sum(p.grad.square().sum() for p in module.parameters()).backward()

    model, oracle = twins(perceptron, **options)
    for run in (penalty, of_parameters, of_grad):
        compare(rank, model, oracle, run, rtol=1e-9)


@on_two_ranks()
def test_a_backward_for_inputs_only_waits_for_no_rank(rank: int, options: dict) -> None:
    """C4, C5"""
    model, oracle = twins(perceptron, **options)
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
    compare(rank, model, oracle)


@on_two_ranks()
def test_two_models_that_train_each_other(rank: int, options: dict) -> None:
    """C4: as in adversarial training: parts are frozen in turn."""
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


@on_two_ranks()
def test_a_wrapper_inside_a_wrapped_module(rank: int, options: dict) -> None:
    """C15"""

    def outer(wraps: bool) -> nn.Module:
        layer = nn.Linear(5, 5).double()
        layer = unisono.DataParallel(layer, **options) if wraps else layer
        return Calls(lambda m, x: m.last(torch.relu(m.inner(x))), inner=layer, last=nn.Linear(5, 3).double())

    def copy_of(module: nn.Module) -> nn.Module:
        plain = outer(False)
        plain.load_state_dict({name.replace("module.", ""): value for name, value in module.state_dict().items()})
        return plain

    for loss in ("mean", "sum"):
        model = unisono.DataParallel(outer(True), loss=loss, **options)
        for context in (contextlib.nullcontext, torch.autograd.graph.save_on_cpu):
            with context():
                compare(rank, model, copy_of(model.module), lambda module, x, y, loss=loss: step(module, x, y, loss))
    torch.manual_seed(0)  # no wrapper makes the last layer equal on both ranks here
    inner_only = outer(True)
    oracle = copy_of(inner_only)
    for module, x, y in both(rank, inner_only, oracle):
        step(module, x, y)
    assert_same_gradients(inner_only.inner.module, oracle.inner)


# ---- accumulation


@on_two_ranks(ONE)
def test_what_was_accumulated_can_be_dropped_or_scaled(rank: int, options: dict) -> None:
    """C6"""
    model, oracle = twins(perceptron, **options)
    for sets_to_none in (True, False):
        with model.no_sync():
            step(model, *data(rank, 7)[:2])
        model.zero_grad(set_to_none=sets_to_none)
        compare(rank, model, oracle, seed=8)
    model.zero_grad()
    oracle.zero_grad()
    for seed, local in ((1, True), (2, False)):
        for module, x, y in both(rank, model, oracle, seed):
            with without_sync(module, local):
                step(module, x, y)
            for parameter in module.parameters():
                parameter.grad.mul_(0.5)
    assert_same_gradients(model.module, oracle)


@on_two_ranks()
def test_inside_no_sync_only_backward_counts(rank: int, options: dict) -> None:
    """C6, C5: a gradient penalty, an attack on the inputs, and gradients that are only looked at."""
    model, oracle = twins(perceptron, **options)
    for seed in (1, 2):
        looked_at = []
        for module, x, y in both(rank, model, oracle, seed):
            with without_sync(module, seed == 1):
                x = x.clone().requires_grad_()
                (attack,) = torch.autograd.grad(mse_loss(module(x), y), x)
                attacked = (x + attack.sign()).detach().requires_grad_()
                output = module(attacked)
                (slope,) = torch.autograd.grad(output.sum(), attacked, create_graph=True)
                (mse_loss(output, y) + slope.square().mean()).backward()
            # Looking at gradients leaves what has been accumulated as it is.
            looked_at.append(torch.autograd.grad(mse_loss(module(x), y), list(module.parameters())))
        torch.testing.assert_close(*looked_at, rtol=1e-9, atol=1e-13)
    assert_same_gradients(model.module, oracle, rtol=1e-9)


# ---- what surrounds the module, and what is in it


def checkpointed(reentrant: bool) -> nn.Module:
    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = module.one(x)
        for layer in (module.one, module.two, module.one):  # gradients of one come in several parts
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=reentrant)
        return module.last(x)

    return Calls(forward, one=nn.Linear(5, 5), two=nn.Linear(5, 5), last=nn.Linear(5, 3)).double()


@on_two_ranks()
def test_activation_checkpoints(rank: int, options: dict) -> None:
    """C4"""
    for reentrant in (False, True):
        model, oracle = twins(lambda r=reentrant: checkpointed(r), **options)

        def around(module: nn.Module, x: torch.Tensor, y: torch.Tensor, reentrant: bool = reentrant) -> None:
            mse_loss(checkpoint(module, x.clone().requires_grad_(), use_reentrant=reentrant), y).backward()

        for seed in range(2):
            compare(rank, model, oracle, seed=seed)
        # Threads of several accelerators would recompute it at once.
        refused = not reentrant and not ON_CPU and len(model.device_ids) > 1
        with pytest.raises(RuntimeError, match="inside the module") if refused else contextlib.nullcontext():
            compare(rank, model, oracle, around)
        with torch.autograd.graph.save_on_cpu():
            if reentrant:
                with pytest.raises(RuntimeError, match="reentrant activation checkpoint inside the module"):
                    model(data(rank)[0])
            else:
                compare(rank, model, oracle)


@on_two_ranks()
def test_a_module_whose_output_is_its_loss(rank: int, options: dict) -> None:
    """C2, C1"""
    make = lambda: Calls(lambda module, x, y: mse_loss(module.body(x), y), body=perceptron())  # noqa: E731
    model, oracle = twins(make, scalars="mean", **options)
    for sizes in ((4, 9), (0, 3)):
        compare(rank, model, oracle, lambda module, x, y: module(x, y).backward(), sizes=sizes)


@on_two_ranks(ONE)
def test_losses_over_tokens(rank: int, options: dict) -> None:
    """C1"""
    for loss in ("mean", "sum"):
        model, oracle = twins(perceptron, loss=loss, **options)
        for none_on_rank_0 in (True, False, False):
            target = torch.arange(13) % 4 - 1
            target[target < 0] = -100  # not counted
            target[: 4 if none_on_rank_0 else 0] = -100

            def run(module: nn.Module, x: torch.Tensor, y: torch.Tensor, target=target, loss=loss) -> None:
                if module is not inner(module):
                    target = target[rows_of(rank, [4, 9])]
                    module.set_batch_weight((target >= 0).sum())
                nn.functional.cross_entropy(module(x), target, reduction=loss).backward()

            compare(rank, model, oracle, run)


def own_hook(state: list, bucket: object) -> torch.futures.Future:
    state.append((bucket.index(), bucket.is_last(), len(bucket.parameters()), len(bucket.gradients())))
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / torch.distributed.get_world_size())


@on_two_ranks(ONE)
def test_communication_hooks(rank: int, options: dict) -> None:
    """C10"""
    calls: list = []
    low_rank = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=16,
        start_powerSGD_iter=2,
        use_error_feedback=ON_CPU
        or torch.cuda.is_available(),  # on other accelerators torch's hook does not wait for it
    )
    for hook, state, tolerance in (
        (default_hooks.allreduce_hook, None, 1e-6),
        (default_hooks.bf16_compress_hook, None, 2e-2),
        (default_hooks.fp16_compress_hook, None, 2e-3),
        (own_hook, calls, 1e-6),
        (powerSGD_hook.powerSGD_hook, low_rank, 1e-4),
    ):
        model, oracle = twins(lambda: perceptron().float(), **options)
        model.register_comm_hook(state, hook)
        for seed in range(4):

            def run(module: nn.Module, x: torch.Tensor, y: torch.Tensor, accumulates: bool = seed == 1) -> None:
                for local in (True, False) if accumulates else (False,):
                    with without_sync(module, local):
                        step(module, x.float(), y.float())

            compare(rank, model, oracle, run, seed, rtol=tolerance, atol=tolerance / 10)
    assert calls == [(0, True, 6, 6)] * 4
    model, _ = twins(perceptron, **options)
    model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(TypeError, match="the communication hook returned a Tensor: expected"):
        step(model, *data(rank)[:2])


# ---- buffers, copies, files


@on_two_ranks()
def test_buffers_are_those_of_the_first_process(rank: int, options: dict) -> None:
    """C8"""

    module = Calls(lambda m, x: m.last(m.norm(x)) * m.mask, norm=nn.BatchNorm1d(5), last=nn.Linear(5, 3)).double()
    module.register_buffer("mask", torch.full((3,), 2.0).double())
    model = unisono.DataParallel(module, **options)
    for sizes, first in (((4, 8), 0), ((0, 8), 1)):
        plain = copy.deepcopy(module)
        x, _, all_x, _ = data(rank, 0, sizes)
        out = model(x)
        out2 = model(x + 1)
        out.sum().backward(retain_graph=True)  # what graphs have kept of buffers is not written into
        out2.sum().backward()
        out.sum().backward()
        share = rows_of(first, list(sizes))
        if len(options["device_ids"]) > 1:  # of whose replicas the first counts
            share = slice(share.start, share.start + (share.stop - share.start + 1) // 2)
        plain(all_x[share])
        plain(all_x[share] + 1)
        for (name, one), two in zip(module.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13, msg=name)


@on_two_ranks(ONE)
def test_forwards_before_one_backward_read_the_process_own_buffers(rank: int, options: dict) -> None:
    """C8: the second process has no rows in the first forward, and does not know of what that has written."""

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        net.count.add_(1)
        return net.last(x) * net.count.clone()

    module = Calls(forward, last=nn.Linear(5, 3).double(), count=nn.Buffer(torch.zeros(()).double()))
    model = unisono.DataParallel(module, **options)
    x, *_ = data(rank, 0, (4, 8))
    first, second = model(x if rank == 0 else x[:0]), model(x)
    torch.testing.assert_close(second, module.last(x) * (2 if rank == 0 else 1))
    (first.sum() + second.sum()).backward()
    assert module.count == 2
    torch.testing.assert_close(model(x), module.last(x) * 3)


@on_two_ranks()
def test_buffers_that_forward_reassigns(rank: int, options: dict) -> None:
    """C8, R5, C11: those of the first process persist. If their form depends on the rows, the processes would receive
    buffers of another size than their own."""

    def forward(net: nn.Module, x: torch.Tensor, keep: bool = False) -> torch.Tensor:
        net.late = x.sum(0) if net.late is None else torch.cat([net.late, x.sum(0)])
        if keep:
            net.rows = x
        return net.last(x) * net.late.sum()

    module = Calls(forward, last=nn.Linear(5, 3).double(), late=nn.Buffer(None), rows=nn.Buffer(torch.ones(1)))
    model = unisono.DataParallel(module, **options)
    for _ in range(2):
        x, *_ = data(rank, 0, (4, 8))
        model(x).sum().backward()
        mine, theirs = communicator_for().all_gather_object(module.late.cpu(), "comparing buffers")
        assert torch.equal(mine, theirs)
    assert len(module.late) == 10
    with pytest.raises(RuntimeError, match=r"rank 0 has buffer rows .* rank 1 has buffer rows .* must not be a buffer"):
        model(x, keep=True).sum().backward()


@on_two_ranks(ONE)
def test_one_process_evaluates_between_forward_and_backward(rank: int, options: dict) -> None:
    """C8: whether buffers are sent is decided by the mode of the forward, which was the same everywhere."""
    module = nn.Sequential(nn.BatchNorm1d(5), perceptron()).double()
    model = unisono.DataParallel(module, **options)
    x, *_ = data(rank)
    output = model(x)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(x)
    output.sum().backward()
    assert torch.equal(*communicator_for().all_gather_object(module[0].running_mean.cpu(), "comparing buffers"))


@on_two_ranks()
def test_copies_and_files(rank: int, options: dict) -> None:
    """C7"""
    module = perceptron()
    with torch.no_grad():
        module[0].weight.fill_(rank)  # unequal, and then rank 0's
    model = unisono.DataParallel(module, **options)
    assert not module[0].weight.any()
    assert list(model.module.state_dict()) == list(module.state_dict())
    with torch.no_grad():
        module[0].weight.copy_(drawn(*module[0].weight.shape, seed=1))
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
    compare(rank, model, oracle)

    trained = copy.deepcopy(model)  # by all
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for each in (trained, loaded, model):
        plain = perceptron()
        plain.load_state_dict(each.module.state_dict())
        compare(rank, each, plain)
    assert loaded.spans_processes
    local = unisono.DataParallel(perceptron(), process_group=False, **options)
    torch.save(local, saved := io.BytesIO())
    saved.seek(0)
    local = torch.load(saved, weights_only=False)
    if rank == 0:
        local(x).sum().backward()
    assert not local.spans_processes


def save(rank: int, path: Path) -> None:
    (device,) = own_devices(rank)
    model = unisono.DataParallel(perceptron().to(device), [device])
    if rank == 0:
        torch.save(model, path)


def test_a_file_of_several_processes_is_loaded_by_one(tmp_path):
    path = tmp_path / "model"
    run_ranks(2, save, path)
    model = torch.load(path, weights_only=False)
    model(torch.zeros(2, 5).double().to(model.device_ids[0])).sum().backward()
    assert not model.spans_processes
    assert model.module[0].weight.grad is not None


@on_two_ranks()
def test_a_forward_that_fails_is_tried_again(rank: int, options: dict) -> None:
    """C12: an error that the program handles itself is not reported to the other ranks."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(x) > module.most_rows:
            raise torch.OutOfMemoryError(f"{len(x)} rows")
        return module.body(x)

    model, oracle = twins(lambda: Calls(forward, body=perceptron(), most_rows=1000), **options)
    model.module.most_rows = 4 if rank else 1000
    for seed in range(3):
        model.zero_grad()
        oracle.zero_grad()
        x, y, all_x, all_y = data(rank, seed)
        if seed == 2:
            model.set_batch_weight(len(x) if not rank else 3)
        while True:
            try:
                output = model(x)
                break
            except torch.OutOfMemoryError:
                x, y = x[:3], y[:3]
        mse_loss(output, y).backward()
        mse_loss(oracle(all_x[:7]), all_y[:7]).backward()
        assert len(x) == (4, 3)[rank]
        assert_same_gradients(model.module, oracle)


def train_with_many_buckets(rank: int, world_size: int, **options: list[str]) -> object:
    from unisono.distributed import bucketed_all_reduce

    bucketed_all_reduce.FIRST_BUCKET_BYTES, bucketed_all_reduce.BUCKET_BYTES = 200, 700
    on_host: dict = {"device": "cpu"}
    widths = torch.randint(1, 20, (30,), generator=torch.Generator().manual_seed(1), **on_host).tolist()

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        total = sum(layer(x).tanh().sum(1) for layer in module.layers)
        return (total + sum(offset.sum() for offset in module.offsets))[:, None].expand(-1, 3)

    def wide() -> nn.Module:
        offsets = nn.ParameterList(torch.zeros(n % 4) for n in widths)
        return Calls(forward, layers=nn.ModuleList(nn.Linear(5, width) for width in widths), offsets=offsets).double()

    model, oracle = twins(wide, **options)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(rank), **on_host).tolist()
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(200, 200, **on_host)

    def step_of_model(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        if module is model:  # without any rows the oracle has no gradients
            step(module, x, y)

    for seed in range(12):
        for _ in range(order[seed]):  # not all at the same speed
            noise @ noise
        sizes = torch.randint(0, 5, (world_size,), generator=generator, **on_host).tolist()
        compare(rank, model, oracle, step if sum(sizes) else step_of_model, seed, sizes)
    return [p.grad.cpu().numpy().tobytes() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("world_size", "num_replicas"),
    [(2, ONE), (3, TWO), pytest.param(4, TWO, marks=pytest.mark.slow)],
    ids=["2x1", "3x2", "4x2"],
)
def test_many_buckets_in_flight(world_size, num_replicas):
    """C13"""
    ends = run_on_devices(world_size, train_with_many_buckets, world_size, num_replicas=num_replicas)
    assert all(end == ends[0] for end in ends), "every process ends with the same bits"


def num_collectives() -> int:
    """Return how many collectives this process has begun, in all process groups, as the groups count them."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def counted_steps(rank: int, width: int, dtype: torch.dtype, **options: list[str]) -> tuple[list[int], str]:
    model, oracle = twins(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(10))).to(dtype), **options)
    generator = torch.Generator().manual_seed(1)
    rtol = 1e-5 if dtype == torch.float32 else 1e-11
    counts = []
    for sizes in [4, 9], [4, 9], [7, 3], [0, 5], [2, 0], [4, 9]:
        x = drawn_by(generator, sum(sizes), width).to(dtype)
        model.zero_grad()
        oracle.zero_grad()
        loss = model(x[rows_of(rank, sizes)]).square().mean()
        before = num_collectives()
        loss.backward()
        counts.append(num_collectives() - before)
        oracle(x).square().mean().backward()
        assert_same_gradients(model.module, oracle, rtol, rtol / 100)
    bits = b"".join(p.grad.cpu().numpy().tobytes() for p in model.parameters())
    return counts, hashlib.sha256(bits).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("width", "on_cpu", "on_accelerator"), [(16, 1, 1), (256, 3, 2)])
def test_a_step_has_one_collective_a_bucket_and_one_for_the_weights(width, on_cpu, on_accelerator, dtype):
    """C1, C2, C3: a small model's one bucket brings the weights and flags, a larger one's last bucket the flags.

    An accelerator would have to be waited for; there they are in two collectives of the host's.
    """
    (counts, bits), other = run_on_devices(2, counted_steps, width, dtype)
    assert (counts, bits) == other
    assert counts == [on_cpu if ON_CPU else on_accelerator + 2] * len(counts)


def test_a_large_gradient_waits_for_no_larger_one():
    """The third weight of this model shared a bucket with the second, larger one, and was sent when that was known."""
    widths = [1024, 4096, 3072, 1024, 10]
    layers = [nn.Linear(*pair, device="meta") for pair in itertools.pairwise(widths)]
    tensors = [parameter for layer in layers for parameter in layer.parameters()]
    plan = plan_for_ranks(tensors, without=lambda tensor: False)
    assert [bucket.numbers for bucket in plan.buckets] == [(7, 6, 5, 4), (3, 2), (1, 0)]


@on_two_ranks()
def test_a_profile_shows_the_backward_of_a_step_and_the_sum(rank: int, options: dict) -> None:
    """C1: the numbers are those of a step that is not recorded."""
    model, oracle = twins(perceptron, **options)
    with model.profile() as profile:
        for each, x, y in [*both(rank, model, oracle), *both(rank, model, oracle, 1)]:
            step(each, x, y)
    assert_same_gradients(model.module, oracle, 1e-12, 1e-14)
    steps = profile.steps()
    assert [span.phase for each in steps for span in each.passes] == ["forward", "backward"] * 2
    for each in steps:
        phases = [each.phases(lane) for lane in each.lanes]
        for phase in ("forward", "backward", "reduce"):
            assert sum(of_lane.get(phase, 0) for of_lane in phases) > 0
    with model.profile() as profile:  # two forwards in one backward
        for each, x, y in both(rank, model, oracle, 2):
            (mse_loss(each(x), y) + each(2 * x).square().mean()).backward()
    assert_same_gradients(model.module, oracle, 1e-12, 1e-14)
    (both_forwards,) = profile.steps()
    assert [span.phase for span in both_forwards.passes] == ["forward"] * 2 + ["backward"] * 2
    assert timeline.current_step() is None


@pytest.mark.skipif(not ON_CPU, reason="recorded accelerators have a boundary, whose failed backward ends the training")
@on_two_ranks(ONE)
def test_a_backward_that_fails_is_none_of_a_profiles_passes(rank: int, options: dict) -> None:
    """C1: one for given tensors, after which the ranks go on."""
    model, _ = twins(perceptron, **options)
    x, *_ = data(rank)
    hook = model.module.register_forward_hook(lambda _, __, output: output.register_hook(divided_by_zero) and None)
    with model.profile() as profile:
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(model(x).sum(), [*model.parameters()])
        hook.remove()
        model(x).sum().backward()
    assert [[span.phase for span in each.passes] for each in profile.steps()] == [["forward"], ["forward", "backward"]]
    assert timeline.current_step() is None


@on_two_ranks()
def test_a_backward_that_fails_inside_no_sync_is_this_ranks_own(rank: int, options: dict) -> None:
    """C2, C12: nothing is sent there, so no other rank waits, and the next step goes on."""
    model, oracle = twins(perceptron, **options)
    x, *_ = data(rank)
    hook = model.module.register_forward_hook(lambda _, __, output: output.register_hook(divided_by_zero) and None)
    with model.no_sync(), pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    hook.remove()
    for each, x, y in both(rank, model, oracle):
        step(each, x, y)
    assert_same_gradients(model.module, oracle, 1e-12, 1e-14)


def divided_by_zero(grad: torch.Tensor) -> torch.Tensor:
    return grad / (1 // 0)


class Carries(nn.Module):
    """Keeps a state with its history from one forward to the next, as a recurrent net does, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(5, 4).double(), nn.Linear(4, 4).double()
        self.state, self.count, self.seen = None, 0, {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.state is not None:
            hidden = hidden + self.again(self.state.mean(0))
        self.state, self.count = hidden.tanh(), self.count + 1
        self.seen, self.layer = {"rows": len(x)}, [self.first]
        return self.state


@on_two_ranks(ONE)
def test_what_forward_assigns_stays_with_its_history(rank: int, options: dict) -> None:
    """R6, C4: as with one device in a process; what holds a layer is lost, with a warning."""
    model, oracle = twins(Carries, **options)
    oracles = [oracle, copy.deepcopy(oracle)]
    modules = [*enumerate(oracles), (rank, model)]

    def train(number: int) -> None:
        inputs = [drawn_by(torch.Generator().manual_seed(number * 9 + k), 4, 5) for k in range(6)]
        for each, module in modules:
            own = module.module if module is model else module
            own.zero_grad()
            total = 0
            for x in inputs[each * 3 : each * 3 + 3]:
                total = total + module(x).square().mean()
                own.flag = total.item()  # makes the wrapper look at the module again, with the state that it has
            total.backward()
            own.state = own.state.detach()
        for parameter, *each in zip(*(module.parameters() for module in (model, *oracles)), strict=True):
            torch.testing.assert_close(parameter.grad, (each[0].grad + each[1].grad) / 2, rtol=1e-12, atol=1e-14)

    with pytest.warns(UserWarning, match="assigns layer: that is lost"):
        train(0)
    for number in range(1, 4):
        train(number)
    assert (model.module.count, model.module.seen) == (12, {"rows": 4})
    assert not hasattr(model.module, "layer")


@on_two_ranks(ONE)
def test_the_graph_is_freed_before_the_other_ranks_are_waited_for(rank: int, options: dict) -> None:
    """N10, C1"""
    activations: list[weakref.ref] = []
    alive: list[bool] = []

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = module.first(x).tanh()
        activations.append(weakref.ref(hidden))
        return module.second(hidden)

    def wait(communicator: Communicator, *args, **kwargs) -> None:
        alive.append(activations[-1]() is not None)
        waits(communicator, *args, **kwargs)

    model = unisono.DataParallel(Calls(forward, first=nn.Linear(5, 4), second=nn.Linear(4, 3)), **options)
    waits = Communicator.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "wait", wait)
        model(torch.randn(3, 5)).sum().backward()
    assert set(alive) == {False}


@on_two_ranks()
def test_steps_leave_nothing(rank: int, options: dict) -> None:
    """N10, C1: a collective keeps the state of the thread that began it; the sums of the step may not be in that."""
    several_buckets = nn.Sequential(nn.Linear(5, 256), nn.Linear(256, 256), nn.Linear(256, 3)).double()
    model = unisono.DataParallel(several_buckets, **options)
    found = []
    for _ in range(12):
        step(model, *data(rank)[:2])
        found.append(live_tensors())
    # Threads of the process group free a step's tensors a little later.
    assert min(found[-4:]) <= max(found[1:5])
