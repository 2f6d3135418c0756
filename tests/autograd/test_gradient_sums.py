"""Gradients that reach buckets: the right sums, in an order that repeats, and soon.

Replicas share the parameters' memory, or have memory of their own, where the gradients of a bucket are one flat tensor.
"""

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.modules import Calls
from helpers.small_buckets import use_small_buckets
from unisono import DataParallel
from unisono.autograd.gradient_sums import BucketSums, OnReady
from unisono.autograd.live_gradients import Collector, joined_gradients, own_tensors, token_of
from unisono.runtime.buckets import SHARED_BUCKET_BYTES, BucketPlan, Gradients
from unisono.runtime.streams import Copies
from unisono.runtime.torch_private import engine, tensor_objects
from unisono.testing import separate_memory

SIZE = 8
FULL_BYTES = 2 * SIZE * 4  # of two tensors of float32
CPU = torch.device("cpu")


class Replicas(NamedTuple):
    """Replicas of some live tensors: `own[i][k]` is replica i's of live tensor k."""

    plan: BucketPlan
    collector: Collector
    token: torch.Tensor
    own: Sequence[Sequence[torch.Tensor]]

    @classmethod
    def of(cls, live: Sequence[torch.Tensor], num_replicas: int) -> "Replicas":
        plan = BucketPlan.of_replicas(live, FULL_BYTES)
        collector = Collector(live, lambda contributions: joined_gradients(live, plan, contributions))
        token = token_of(collector)
        own = []
        for replica in range(num_replicas):
            found: dict[int, torch.Tensor] = {}
            for b, numbers in enumerate(plan.numbers):
                tensors = own_tensors(token, collector, b, replica, [live[n].detach() for n in numbers])
                found.update(zip(numbers, tensors, strict=True))
            own.append([found[n] for n, _ in enumerate(live)])
        return cls(plan, collector, token, own)

    def give(self, *pairs: tuple[torch.Tensor, float], keep: bool = False) -> None:
        """Give own tensors of one replica gradients, by a backward that ends at the buckets."""
        loss = sum((tensor * value).sum() for tensor, value in pairs)
        torch.autograd.grad(loss, self.token, retain_graph=keep, allow_unused=True)


class Reduce(NamedTuple):
    """Sums what backwards bring."""

    is_flat: bool

    def __call__(self, replicas: Replicas, backward: Callable[[], None], on_ready: OnReady | None = None) -> Gradients:
        """Return the sum of each live tensor's gradients in what `backward` does."""
        devices = [CPU for _ in replicas.own]
        with BucketSums(replicas.plan, devices, is_flat=self.is_flat, on_ready=on_ready) as sums:
            with engine.with_backward_context({replicas.collector: sums.add}):
                backward()
            return sums.end()


@pytest.fixture(params=[False, True], ids=["shared memory", "flat"])
def reduce(request: pytest.FixtureRequest) -> Reduce:
    return Reduce(request.param)


def zeros(count: int, *, size: int = SIZE, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype, requires_grad=True) for _ in range(count)]


def values(gradients: Gradients) -> list[list[float] | None]:
    """Return the different entries of each gradient."""
    return [None if each is None else each.unique().tolist() for each in gradients]


# ---- which sums ----------------------------------------------------------------------------------


ONCE = [[1e8], [1.0], [-1e8]]  # what each replica adds; in float32 the sums depend on the order
TWICE = [[1e8, 3.0], [1.0, -1e8], [5.0]]
ARRIVALS = [(ONCE, order) for order in itertools.permutations(range(3))]
ARRIVALS += [(TWICE, order) for order in sorted(set(itertools.permutations([0, 0, 1, 1, 2])))]


@pytest.mark.parametrize(("given", "arrivals"), ARRIVALS, ids=str)
def test_the_sum_is_made_in_replica_order(reduce: Reduce, given: list[list[float]], arrivals: tuple[int, ...]) -> None:
    """N1: whichever replica is first; where buckets receive twice, first contributions, then second ones."""
    replicas = Replicas.of(zeros(3), 3)
    left = [iter(of_replica) for of_replica in given]

    def backward() -> None:
        for replica in arrivals:
            value = next(left[replica])
            replicas.give(*((tensor, value) for tensor in replicas.own[replica]))

    in_order = [value for nth in itertools.zip_longest(*given) for value in nth if value is not None]
    expected = sum(torch.tensor(in_order)).item()
    assert values(reduce(replicas, backward)) == [[expected]] * 3


def test_what_has_no_gradient(reduce: Reduce) -> None:
    """N2: replicas hold nothing up, nor do tensors of a bucket; where no replica has a gradient there is none."""
    replicas = Replicas.of(zeros(5), 3)  # in buckets: 4 and 3, 2 and 1, 0
    (_, one, two, three, four) = zip(*replicas.own, strict=True)

    def backward() -> None:
        replicas.give((four[2], 1.0), (two[2], 2.0))
        replicas.give((three[0], 5.0))
        replicas.give((two[1], 1.0), (one[1], 7.0))

    assert values(reduce(replicas, backward)) == [None, [7.0], [3.0], [5.0], [1.0]]


def test_large_and_small_tensors_of_several_dtypes(reduce: Reduce) -> None:
    """N1: each dtype has buckets of its own; a tensor that fills one has one for itself."""
    live = [*zeros(2), *zeros(2, dtype=torch.float64), *zeros(1, size=100), *zeros(1, size=0)]
    replicas = Replicas.of(live, 3)

    def backward() -> None:
        for i in (2, 0, 1):
            replicas.give(*((tensor, 2.0**i) for tensor in replicas.own[i]))

    found = reduce(replicas, backward)
    assert values(found) == [[7.0]] * 5 + [[]]
    assert [each.dtype for each in found if each is not None] == [tensor.dtype for tensor in live]


@pytest.mark.parametrize("kinds", [*itertools.product(["sparse", "dense", "none"], repeat=3)], ids="-".join)
def test_sparse_and_dense_gradients(reduce: Reduce, kinds: tuple[str, ...]) -> None:
    """N1, N2: in one bucket, and of one tensor in several replicas; nothing that was given is written into."""
    live = [torch.zeros(4, 2, requires_grad=True), *zeros(1)]
    replicas = Replicas.of(live, 3)
    dense = torch.arange(8.0).reshape(4, 2)
    of_kind = {"sparse": dense.to_sparse(), "dense": dense, "none": None}
    given = [None if (each := of_kind[kind]) is None else (i + 1) * each for i, kind in enumerate(kinds)]
    before = [None if each is None else each.clone() for each in given]

    def backward() -> None:
        (bucket,) = range(len(replicas.plan.numbers))
        for i in (1, 2, 0):
            by_number = {0: given[i], 1: torch.full((SIZE,), 2.0**i)}
            replicas.collector.receive(bucket, i, [by_number[n] for n in replicas.plan.numbers[bucket]])

    total, other = reduce(replicas, backward)
    factor = sum(i + 1 for i, kind in enumerate(kinds) if kind != "none")
    assert (total is None) == (factor == 0)
    if total is not None:
        assert torch.equal(total.to_dense(), factor * dense)
        assert total.is_sparse == ("dense" not in kinds)
    assert values([other]) == [[7.0]]
    for now, then in zip(given, before, strict=True):
        assert now is then is None or torch.equal(now.to_dense(), then.to_dense())


@pytest.mark.parametrize(
    "summed", [lambda a, b: a.view(-1) + b.view(-1), lambda a, b: a + b, lambda a, b: a.view(2, -1) + b.view(2, -1)]
)
@pytest.mark.parametrize("num_times", [1, 2])
def test_gradients_in_the_callers_memory_are_not_written_into(
    reduce: Reduce, summed: Callable[..., torch.Tensor], num_times: int
) -> None:
    """N1: a gradient may be a view of what was given to backward, or share memory with another tensor's."""
    replicas = Replicas.of(zeros(2), 3)
    ends = [summed(*of_replica) for of_replica in replicas.own]
    given = [torch.full(end.shape, 2.0**i) for i, end in enumerate(ends)]

    def backward() -> None:
        for end, grad in zip(ends * num_times, given * num_times, strict=True):
            torch.autograd.grad(end, replicas.token, grad, retain_graph=True, allow_unused=True)

    assert values(reduce(replicas, backward)) == [[7.0 * num_times]] * 2
    assert [tensor.unique().item() for tensor in given] == [1.0, 2.0, 4.0]


def test_a_kept_graph_runs_backward_again(reduce: Reduce) -> None:
    """N10: each backward has sums of its own, also after one that has failed."""
    replicas = Replicas.of(zeros(2), 2)
    loss = sum((tensor * 3.0).sum() for tensor in replicas.own[1])

    def backward() -> None:
        torch.autograd.grad(loss, replicas.token, retain_graph=True, allow_unused=True)

    def fails() -> None:
        backward()
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            reduce(replicas, fails)
        assert values(reduce(replicas, backward)) == [[3.0]] * 2
    assert all(tensor.grad is None for tensor in replicas.collector.live)


def test_what_a_replica_adds_after_a_failure_is_dropped(reduce: Reduce) -> None:
    """F3: a backward does not wait for a replica that is stuck, whose gradients would come to memory that is freed."""
    replicas = Replicas.of(zeros(2), 2)
    with pytest.raises(KeyError), BucketSums(replicas.plan, [CPU] * 2, is_flat=reduce.is_flat) as sums:
        raise KeyError
    for replica in range(2):
        sums.add(0, replica, [torch.ones(SIZE)] * len(replicas.plan.numbers[0]))
    assert sums.end() == [None, None]


# ---- soon ----------------------------------------------------------------------------------------


def test_a_bucket_is_summed_while_backward_runs(reduce: Reduce, monkeypatch: pytest.MonkeyPatch) -> None:
    """N10: the last parameters first. What is missing is not waited for, and is not copied."""
    copied: list[int] = []
    pass_on = Copies.pass_on

    def noting(self: Copies, tensor: torch.Tensor, made: Any, reader: int) -> Any:
        copied.append(tensor.numel())
        return pass_on(self, tensor, made, reader)

    monkeypatch.setattr(Copies, "pass_on", noting)
    replicas = Replicas.of(zeros(4), 2)
    first, second = replicas.own
    ready: list[tuple[int, list[list[float] | None]]] = []

    def on_ready(bucket: int, sums: Any) -> None:
        given = [*sums.split(SIZE)] if isinstance(sums, torch.Tensor) else sums
        ready.append((bucket, values(given)))

    def backward() -> None:
        replicas.give((second[3], 1.0), (second[2], 1.0), (second[0], 1.0))
        assert not ready
        replicas.give((first[3], 1.0), (first[2], 1.0))
        assert ready == [(0, [[2.0], [2.0]])]
        replicas.give((second[3], 5.0))

    # The second contribution of replica 1 to the first bucket has none of replica 0 to wait for.
    assert values(reduce(replicas, backward, on_ready)) == [[1.0], None, None, [5.0]]
    assert len(ready) == 1
    assert not copied  # all are on one device


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_gradients_go_as_soon_as_they_are_added(reduce: Reduce, order: tuple[int, ...]) -> None:
    """N10: a replica's gradient stays while it waits for those before it, and the first one while it is the sum."""
    replicas = Replicas.of(zeros(1, size=1000), 3)
    gone: dict[int, weakref.ref[torch.Tensor]] = {}
    for i, (tensor,) in enumerate(replicas.own):
        tensor.register_hook(lambda gradient, i=i: gone.__setitem__(i, weakref.ref(gradient)))

    def backward() -> None:
        for count, i in enumerate(order, 1):
            replicas.give((replicas.own[i][0], 1.0))
            arrived = set(order[:count])
            added = [k for k in range(3) if {*range(k + 1)} <= arrived]
            waiting = {k for k in arrived if k not in added or added == [0]}
            alive = {k for k, reference in gone.items() if reference() is not None}
            assert alive <= (set() if reduce.is_flat else waiting)

    assert values(reduce(replicas, backward)) == [[3.0]]


# ---- without a boundary --------------------------------------------------------------------------


def test_a_backward_of_the_callers_goes_on_to_the_live_tensors() -> None:
    """R15: it has the sum of what all replicas bring, in replica order, added once."""
    live = zeros(3)
    replicas = Replicas.of(live, 3)
    calls: list[int] = []
    live[0].register_post_accumulate_grad_hook(lambda _: calls.append(1))
    for _ in range(2):
        given = zip(replicas.own[::-1], (-1e8, 1.0, 1e8), strict=True)
        sum((tensor * value).sum() for own, value in given for tensor in own[:2]).backward()
    expected = sum(torch.tensor([1e8, 1.0, -1e8])).item()
    assert values([tensor.grad for tensor in live]) == [[2 * expected], [2 * expected], None]
    assert len(calls) == 2


@pytest.mark.usefixtures("collector_off")
def test_replicas_refer_to_no_cycle() -> None:
    """N10: their tensors and nodes go when the last reference to them goes, without the garbage collector."""
    live = zeros(3)
    replicas = Replicas.of(live, 2)
    references = [weakref.ref(tensor) for own in replicas.own for tensor in own]
    collector = weakref.ref(replicas.collector)
    replicas.own[0][0].requires_grad_(False)
    replicas.own[0][0].requires_grad_(True)
    sum(tensor.sum() for own in replicas.own for tensor in own).backward()
    Reduce(False)(replicas, lambda: None)
    del replicas
    assert [reference() for reference in [*references, collector]] == [None] * 7


# ---- whole steps ---------------------------------------------------------------------------------


def wide(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Use one layer twice, inside reentrant checkpoints and outside of them."""
    x = torch.tanh(checkpoint(model.a, model.b(x), use_reentrant=True))
    return checkpoint(model.a, model.a(x), use_reentrant=True)


@pytest.fixture(params=[False, True], ids=["one memory", "separate memory"])
def _memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_small_buckets(monkeypatch, 1 << 16)
    with separate_memory() if request.param else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize("num_replicas", [2, 5])
def test_large_layers(num_replicas: int) -> None:
    """N1, R13: the plain module's gradients, and the same bits every time."""
    model = Calls(wide, a=nn.Linear(256, 256), b=nn.Linear(256, 256))  # weights of 256 KiB
    x = torch.randn(13, 256)
    model(x).pow(2).mean().backward()
    seen = [[parameter.grad for parameter in model.parameters()]]
    wrapped = DataParallel(model, ["cpu"] * num_replicas)
    for _ in range(5):
        model.zero_grad()
        wrapped(x).pow(2).mean().backward()
        seen.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(seen[1], seen[0])
    for gradients in seen[2:]:
        torch.testing.assert_close(gradients, seen[1], rtol=0, atol=0)


@pytest.mark.usefixtures("_memory")
@pytest.mark.filterwarnings("ignore:forward of Calls assigns")
def test_large_gradients_are_freed_while_backward_runs() -> None:
    """N10: when backward comes to the first layer, no replica's gradient of the last one is left."""
    alive: list[int] = []
    of_last: list[weakref.ref[torch.Tensor]] = []

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if model.first.weight.requires_grad:
            model.last.weight.register_hook(lambda gradient: of_last.append(weakref.ref(gradient)))
        y = model.first(x)
        if y.requires_grad:
            y.register_hook(lambda _: alive.append(sum(reference() is not None for reference in of_last)))
        return model.last(y)

    model = DataParallel(Calls(forward, first=nn.Linear(256, 256), last=nn.Linear(256, 256)), ["cpu"] * 4)
    for _ in range(3):
        alive.clear()
        of_last.clear()
        model(torch.randn(8, 256)).sum().backward()
        assert len(alive) == len(of_last) == 4
        assert min(alive) == 0
        assert not any(reference() is not None for reference in of_last)


@pytest.mark.parametrize("of", ["one sum", "views", "the caller's"])
def test_a_large_gradient_that_others_refer_to_is_not_written_into(of: str) -> None:
    """N1: autograd gives both addends the same gradient, in the memory of what backward was given.

    In the first step replicas have memory of their own.
    """
    torch.manual_seed(0)
    size = SHARED_BUCKET_BYTES // 4

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = (net.a.view(1, -1), net.b.view(1, -1)) if of == "views" else (net.a, net.b)
        return (a + b).expand(len(x), size) if of == "the caller's" else (a + b) * x

    plain = Calls(forward)
    plain.a, plain.b = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size))
    model = DataParallel(copy.deepcopy(plain), ["cpu"] * 3)
    given = torch.rand(6, size)
    kept, x = given.clone(), torch.rand(6, 1)
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(x).backward(given)
        assert torch.equal(given, kept)
        for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)


def test_which_tensor_may_be_written_into() -> None:
    """N1: what shares its memory, with a view, an array or another process, may not; a fresh tensor may."""
    fresh = [torch.ones(4)]
    assert tensor_objects.is_only_reference(fresh)
    for make in (torch.Tensor.detach, lambda tensor: tensor[:2], lambda tensor: tensor):
        other = [make(fresh[0])]
        assert not tensor_objects.is_only_reference(fresh)
        assert not tensor_objects.is_only_reference(other)
        other.clear()
        assert tensor_objects.is_only_reference(fresh)
    for keep in (torch.Tensor.untyped_storage, torch.Tensor.numpy, torch.utils.dlpack.to_dlpack):
        shared = [torch.ones(4)]
        kept = keep(shared[0])
        assert not tensor_objects.is_only_reference(shared)
        del kept
    for foreign in (
        torch.from_numpy(np.ones(4)),
        torch.frombuffer(bytearray(8), dtype=torch.float32),
        torch.ones(4).share_memory_(),
    ):
        assert not tensor_objects.is_only_reference([foreign])
    assert not tensor_objects.is_only_reference([torch.ones(2, 2).to_sparse()])
