"""Batch norm over all replicas: which calls are replaced, and the ways of running replicas.

What every engine must do is in tests/contract. Here are also the plain composition (a verb is overridden) and
accelerators, where one call runs backward of all replicas' graphs as one; simulated devices stand in for them.
"""

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.batch_norm_kernels import use_kernels
from helpers.batch_norms import BATCH_NORMS, CheckpointedBatchNorm
from helpers.in_time import in_time
from helpers.kept_workers import KeptWorkers
from helpers.modules import Calls, Composed
from helpers.one_graph import simulated_accelerators_with_one_graph
from unisono import DataParallel
from unisono.runtime.exchange import LocalExchange, taking_part
from unisono.sync_batch_norm.function_mode import BackwardMode, BatchNormOverReplicas

pytestmark = pytest.mark.usefixtures("float64")

CPUS = ["cpu"] * 2


# ---- which calls are replaced --------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers() -> Iterator[KeptWorkers]:
    """The process that they are forked from has imported torch, and what checkpoints import in older releases.

    On a busy machine that takes longer than `in_time` waits for what may hang.
    """
    importlib.import_module("torch._dynamo")
    workers = KeptWorkers()
    DataParallel(nn.Identity(), CPUS, engine=workers.engine(CPUS))(torch.ones(2, 1))
    workers.take_back()
    yield workers
    workers.end()


@pytest.fixture(params=["threads", "processes"])
def over_replicas(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Call a function as a replica's forward, on its rows and a batch norm; return what is gathered of two replicas."""
    workers = request.getfixturevalue("workers") if request.param == "processes" else None

    def call(function: Callable[..., Any], x: torch.Tensor) -> Any:
        module = Calls(lambda module, x: function(x, module.norm), norm=nn.BatchNorm1d(3))
        engine = workers.engine(CPUS) if workers else "threads"
        model = DataParallel(module, CPUS, engine=engine, sync_batch_norm=True)
        return in_time(lambda: model(x))

    yield call
    if workers:
        workers.take_back()


OverReplicas = Callable[..., Any]
ROWS = torch.zeros(4, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"input": torch.ones(3)},
        {"input": torch.ones(2, 3), "weight": torch.ones(4)},
    ],
    ids=["one axis", "weight"],
)
def test_wrong_arguments_raise_what_torch_raises(over_replicas: OverReplicas, arguments: dict[str, Any]) -> None:
    def call(*_: Any) -> None:
        F.batch_norm(running_mean=None, running_var=None, training=True, **arguments)

    with pytest.raises((ValueError, RuntimeError, IndexError)) as expected:
        call()
    with pytest.raises(expected.type):
        over_replicas(call, ROWS)


def test_an_eps_of_zero(over_replicas: OverReplicas) -> None:
    """Newer releases of torch refuse it; older ones compute with it, and then the rows of all replicas count."""
    x = torch.randn(6, 3)

    def call(x: torch.Tensor, _: nn.Module | None = None) -> torch.Tensor:
        return F.batch_norm(x, None, None, training=True, eps=0.0)

    try:
        whole = call(x)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)):
            over_replicas(call, x)
    else:
        torch.testing.assert_close(over_replicas(call, x), whole, rtol=1e-12, atol=1e-12)


def test_transforms_inside_a_replica_are_refused(over_replicas: OverReplicas) -> None:
    x = torch.randn(4, 5, 3)

    def call(*_: Any) -> torch.Tensor:
        return torch.vmap(lambda x: F.batch_norm(x, None, None, training=True))(x)

    with pytest.raises(RuntimeError, match=r"inside a torch.func transform that forward applies"):
        over_replicas(call, ROWS)


def backward_takes_a_dict() -> bool:
    leaf = torch.ones(1, requires_grad=True)
    try:
        (leaf * 2).backward(inputs={"leaf": leaf})
    except RuntimeError:
        return False
    return True


IN_FORWARD = ["Tensor.backward", "autograd.backward", "autograd.grad", "of some inputs", "of named inputs"]


@pytest.mark.parametrize(
    ("over_replicas", "how", "reentrant"),
    [
        *(("threads", how, False) for how in IN_FORWARD),
        *(("threads", how, True) for how in IN_FORWARD[:2]),  # torch refuses the others
        ("processes", "Tensor.backward", False),  # where a function mode is off by the same code
    ],
    indirect=["over_replicas"],
)
def test_a_backward_inside_forward_runs_checkpoints_over_all_replicas(
    over_replicas: OverReplicas, how: str, reentrant: bool
) -> None:
    """However it is called: a function mode is off while a torch function runs, such as backward."""
    if how == "of named inputs" and not backward_takes_a_dict():
        pytest.skip("needs a torch whose backward takes a dict of inputs")
    x = torch.randn(6, 3)

    def gradient(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        leaf = x.detach().clone().requires_grad_()
        loss = checkpoint(norm, leaf, use_reentrant=reentrant).pow(3).sum()
        if how == "autograd.grad":
            return torch.autograd.grad([loss], [leaf])[0]
        if how == "Tensor.backward":
            loss.backward()
        elif how == "autograd.backward":
            torch.autograd.backward([loss.view(1)], [torch.ones(1)])
        else:
            loss.backward(inputs=[leaf] if how == "of some inputs" else {"leaf": leaf})
        assert leaf.grad is not None
        return leaf.grad

    whole = gradient(x, nn.BatchNorm1d(3))
    torch.testing.assert_close(over_replicas(gradient, x), whole, rtol=1e-12, atol=1e-12)


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "vjp": lambda function, x: torch.func.vjp(function, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda function, x: torch.func.jacrev(lambda x: function(x).sum(0))(x).sum(0),
    "vmap of jacrev": lambda function, x: torch.vmap(torch.func.jacrev(function))(x).sum(1),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_beside_a_batch_norm_have_their_own_backward(over_replicas: OverReplicas, name: str) -> None:
    """N5: a backward in forward is run by gradient edges, so that it sees batch norms. Tensors of a transform have
    none, also after it has ended: vjp and jacrev returned zeros, jacrev under vmap raised an AttributeError."""
    x = torch.randn(6, 3)

    def call(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        return TRANSFORMS[name](lambda x: x.pow(3), norm(x).detach())

    torch.testing.assert_close(over_replicas(call, x), call(x, nn.BatchNorm1d(3)), rtol=1e-12, atol=1e-12)


def test_mistakes_in_a_backward_inside_forward_raise_what_torch_raises(over_replicas: OverReplicas) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        over_replicas(lambda x, _: torch.ones(2).sum().backward(), ROWS)


def test_the_graph_holds_no_more_than_torchs_own(over_replicas: OverReplicas) -> None:
    """The input, and some numbers a channel."""

    def saved_bytes(x: torch.Tensor, norm: nn.Module) -> int:
        held: dict[int, int] = {}
        parameters = {parameter.untyped_storage().data_ptr() for parameter in norm.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = norm(x.detach().requires_grad_() * 1)
        del output
        return sum(held.values())

    x = torch.randn(8, 3, 256)
    of_torch = [saved_bytes(shard, nn.BatchNorm1d(3)) for shard in x.tensor_split(2)]
    for mine, theirs in zip(over_replicas(saved_bytes, x), of_torch, strict=True):
        assert mine <= theirs + 100


# ---- ways of running replicas ---------------------------------------------------------------


Wrap = Callable[[nn.Module, int], DataParallel]


@pytest.fixture(params=["composition", "accelerators", "accelerators with kernels"])
def wrap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wrap]:
    """Wrap a copy of a module, synchronised, for a number of replicas, whose graphs are one."""
    way = request.param
    cls = Composed if way == "composition" else DataParallel
    devices = ["cpu"] if way == "composition" else request.getfixturevalue("sim")
    accelerators = way != "composition"

    def make(module: nn.Module, n: int) -> DataParallel:
        ids = [devices[i % len(devices)] for i in range(n)]
        return cls(copy.deepcopy(module).to(ids[0]), ids, sync_batch_norm=True)

    with simulated_accelerators_with_one_graph(monkeypatch) if accelerators else contextlib.nullcontext():
        if way == "accelerators with kernels":
            use_kernels(monkeypatch)
        yield make


Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def with_second_derivatives(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = module(x)
    (gradient,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
    (output.cpu().sin().sum() + gradient.pow(2).sum() / 100).backward()
    return output


def assert_like_plain(
    model: DataParallel, plain: nn.Module, x: torch.Tensor, step: Call = with_second_derivatives
) -> None:
    """Compare output, gradients and buffers after a step."""
    results = []
    for module in (plain, model):
        module.zero_grad()
        inputs = x.clone().requires_grad_()
        output = in_time(lambda module=module, inputs=inputs: step(module, inputs))
        tensors = [output, inputs.grad, *(p.grad for p in module.parameters()), *module.buffers()]
        results.append([tensor.detach().cpu() for tensor in tensors])
    for mine, theirs in zip(*reversed(results), strict=True):
        scale = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11 * scale)


@pytest.mark.parametrize("name", ["residual block", "used twice", "functional"])
def test_one_graph(wrap: Wrap, name: str) -> None:
    """N3, N5: as the plain module, first and second derivatives, several steps; a replica without rows."""
    make_model, make_batch = BATCH_NORMS[name]
    plain = make_model()
    model = wrap(plain, 4)
    for rows in (7, 6):
        assert_like_plain(model, plain, make_batch(rows))
    for module in (plain, model):
        module.eval()
    assert_like_plain(model, plain, make_batch(7))


def step_of_cubes(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = module(x)
    output.pow(3).sum().backward()
    return output


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
# A checkpoint puts autocast back as it was: off, about which older releases of torch warn on a simulated device.
@pytest.mark.filterwarnings("ignore:In sim autocast, but the target dtype:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_one_graph_and_checkpoints_inside(wrap: Wrap, reentrant: bool, request: pytest.FixtureRequest) -> None:
    """N5, R13: right, or refused: a checkpoint may recompute a batch norm when the other replicas do not run."""
    way = request.node.callspec.params["wrap"]
    plain = CheckpointedBatchNorm(reentrant)
    model = wrap(plain, 3)
    x = torch.randn(7, 5)
    if way != "composition" and not reentrant:
        for _ in range(2):
            assert_like_plain(model, plain, x, step_of_cubes)
    else:
        with pytest.raises(RuntimeError, match="inside an activation checkpoint: on accelerators"):
            in_time(lambda: model(x))
    model.module.load_state_dict(plain.state_dict())
    with torch.no_grad():  # where nothing will be run again
        torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-12, atol=1e-12)


def test_accelerators_and_a_checkpoint_around_a_batch_norm_without_tensors(sim: Any, monkeypatch: Any) -> None:
    """N5, R13: the recomputation could not be matched with forward, so it is refused in forward."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: F.batch_norm(x, None, None, training=True), module.linear(x), use_reentrant=False)

    plain = Calls(forward, linear=nn.Linear(2, 2))
    with simulated_accelerators_with_one_graph(monkeypatch):
        model = DataParallel(plain.to(sim[0]), [0, 1], sync_batch_norm=True)
        with pytest.raises(RuntimeError, match="the batch norm has to have a tensor of its own"):
            in_time(lambda: model(torch.randn(4, 2)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_graph_and_a_checkpoint_around_the_wrapper(wrap: Wrap, reentrant: bool) -> None:
    """N5, R14"""
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return step_of_cubes(lambda x: checkpoint(module, x, use_reentrant=reentrant), x)

    assert_like_plain(wrap(plain, 3), plain, torch.randn(7, 2), step)


def test_one_graph_and_a_derivative_inside_forward(wrap: Wrap) -> None:
    """N5: a replica has only its own part of the derivative; refused, not computed wrongly."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(module.norm(x).pow(3).sum(), x, create_graph=True)[0]

    model = wrap(Calls(forward, norm=nn.BatchNorm1d(2)), 2)
    with pytest.raises(RuntimeError, match="was differentiated inside forward"):
        in_time(lambda: model(torch.randn(6, 2)))


def test_replicas_that_go_different_ways(wrap: Wrap) -> None:
    """N5: an error, and the next call is right."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = module.linear(x)
        if x[0, 0] > 5:
            return hidden
        return module.left(hidden) if x[0, 0] < 3 else module.right(hidden)

    plain = Calls(forward, linear=nn.Linear(2, 2), left=nn.BatchNorm1d(2), right=nn.BatchNorm1d(2))
    model = wrap(plain, 2)
    for last, at in ((4.0, "replica 1 called the batch norm of right"), (6.0, "replica 1 called no further one")):
        x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [last, 2.0], [last, 0.0]])
        with pytest.raises(RuntimeError, match=f"replica 0 called the batch norm of left.running_mean, {at}"):
            in_time(lambda x=x: model(x))
    x = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 2.0], [1.0, -3.0]])
    torch.testing.assert_close(in_time(lambda: model(x)).cpu(), plain(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["subclass", "attribute"])
def test_a_parallel_apply_of_ones_own_is_refused(how: str) -> None:
    """A9, N5: it may run replicas one after the other, and the first would wait for ever."""

    def one_by_one(replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        return [replica(*args, **kw) for replica, args, kw in zip(replicas, inputs, kwargs, strict=True)]

    cls = type("OneByOne", (DataParallel,), {"parallel_apply": staticmethod(one_by_one)})
    model = (cls if how == "subclass" else DataParallel)(nn.BatchNorm1d(2), ["cpu"] * 2, sync_batch_norm=True)
    if how == "attribute":
        model.parallel_apply = one_by_one
    with pytest.raises(RuntimeError, match="sync_batch_norm=True with a parallel_apply of your own"):
        in_time(lambda: model(torch.randn(4, 2)))


def test_a_replicate_of_ones_own(wrap: Wrap) -> None:
    """A9, N5: replicas may be anything that can be called."""

    class Functions(DataParallel):
        def replicate(self, module: nn.Module, device_ids: Any) -> list[Any]:
            return [lambda x, replica=replica: replica(x) for replica in super().replicate(module, device_ids)]

    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = Functions(copy.deepcopy(plain), ["cpu"] * 3, sync_batch_norm=True)
    assert_like_plain(model, plain, torch.randn(8, 2))


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_the_option_is_true_or_false(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"sync_batch_norm={value!r}: expected True or False"):
        DataParallel(nn.BatchNorm1d(2), ["cpu"] * 2, sync_batch_norm=value)


def test_a_backward_of_one_replica_in_another_thread() -> None:
    """N5, A6: torch runs it in the accelerator's thread where the caller's loss is on the CPU."""
    norm, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    over_replicas = BatchNormOverReplicas([norm], BackwardMode.PER_REPLICA)
    leaves = [torch.randn(6, 3).requires_grad_()]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    with taking_part(LocalExchange(1), 0), over_replicas.in_replica(0, tracked=True):
        output = norm(leaves[0])
    with over_replicas.single_replica(LocalExchange), ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: output.pow(3).sum().backward()).result()
    plain(leaves[1]).pow(3).sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-12, atol=1e-12)
    others = BatchNormOverReplicas([norm], BackwardMode.PER_REPLICA)
    with taking_part(LocalExchange(1), 0), others.in_replica(0, tracked=True):
        output = norm(leaves[0])
    with pytest.raises(RuntimeError, match="they do not run at the same time"):
        output.sum().backward()
