"""Parameters that forward writes into: once, where all replicas write the same, else an error that names them."""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_same, assert_same_gradients, assert_same_state, twins
from helpers.contract import DEVICES, ON_CPU, Wrap, at_one_place, in_turn, label, on_the_cpu
from helpers.losses import loss_of
from helpers.modules import Calls, Composed
from unisono import data_parallel
from unisono.engines import replica
from unisono.leftovers import written_parameters

WRITTEN = "forward has written into parameter "


def decay(net: Any, x: torch.Tensor) -> None:
    net.shift.mul_(0.9)


def codebook(net: Any, x: torch.Tensor) -> None:
    net.key.weight[0] = x[0, :5]


def clamp(net: Any, x: torch.Tensor) -> None:
    nn.init.constant_(net.query.bias, 0.5)
    torch._foreach_clamp_max_([*net.key.parameters()], 0.1)


def swap(net: Any, x: torch.Tensor) -> None:
    net.key.load_state_dict(net.query.state_dict())


def noise(net: Any, x: torch.Tensor) -> None:
    net.shift.view(-1)[:1].normal_()


def in_place(net: Any, x: torch.Tensor) -> None:
    net.shift.data.mul_(0.9)


def as_list(net: Any, x: torch.Tensor) -> None:
    torch._foreach_mul_([parameter.data for parameter in net.query.parameters()], 0.9)


def as_vector(net: Any, x: torch.Tensor) -> None:
    vector = nn.utils.parameters_to_vector(net.query.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.9, net.query.parameters())


def of_frozen(net: Any, x: torch.Tensor) -> None:
    for key, query in zip(net.key.parameters(), net.query.parameters(), strict=True):
        key.data = key.data * 0.9 + query.data * 0.1


def by_hand(net: Any, x: torch.Tensor) -> None:
    """A power iteration's norm, written into the weight."""
    net.query.weight.data.div_(torch.linalg.matrix_norm(net.query.weight.data, 2))


def cast(net: Any, x: torch.Tensor) -> None:
    net.key._apply(lambda tensor: tensor * 0.9)


def replaced(net: Any, x: torch.Tensor) -> None:
    """Of which the values change in later steps only, when the optimizer has made them larger."""
    net.query.weight.data = net.query.weight.data.clamp(-0.5, 0.5)


def binarised(net: Any, x: torch.Tensor) -> None:
    net.query.weight.data = net.query.weight.full.sign()


def of_constant(net: Any, x: torch.Tensor) -> None:
    """On one device the weight is the constant from then on: the optimizer's steps go into it."""
    net.query.weight.data = net.full


def through_numpy(net: Any, x: torch.Tensor) -> None:
    net.shift.detach().numpy()[:] *= 0.9


def added(net: Any, x: torch.Tensor) -> None:
    """To a buffer that needs a gradient, and a leaf in an attribute."""
    net.scale.add_(1)
    net.table.add_(1)


def from_rows(net: Any, x: torch.Tensor) -> None:
    net.key.weight.data[0] = x[0, :5]


def replaced_from_rows(net: Any, x: torch.Tensor) -> None:
    net.key.weight.data = net.key.weight + 1e-9 * x.mean(0)


COUNTED = [decay, clamp, swap, added]
UNCOUNTED = [in_place, as_list, as_vector, of_frozen, by_hand, cast, replaced, binarised, of_constant]
if ON_CPU:
    UNCOUNTED.append(through_numpy)
OF_ROWS: dict[str, tuple[Callable[[Any, torch.Tensor], None], str]] = {
    "by rows": (codebook, "'key.weight'"),
    "through a view": (noise, "'shift'"),
    "no counter": (from_rows, "'key.weight'"),
    "other memory": (replaced_from_rows, "'key.weight'"),
}


def network(write: Callable[[Any, torch.Tensor], None]) -> Any:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        if net.is_writing:
            with torch.no_grad():
                write(net, x)
        return net.key(x) + net.query(x) + net.shift * net.scale + net.mean + net.table

    net = Calls(forward, key=nn.Linear(5, 3), query=nn.Linear(5, 3), shift=nn.Parameter(torch.rand(3)), is_writing=True)
    net.mean = nn.Buffer(torch.zeros(3))
    net.key.requires_grad_(requires_grad=False)
    net.scale, net.table = nn.Buffer(torch.ones(3)).requires_grad_(), [torch.zeros(3, requires_grad=True)][0]
    net.query.weight.full = net.full = net.query.weight.detach().clone()
    return net


def train_alike(pairs: list[tuple[nn.Module, torch.optim.Optimizer]], x: torch.Tensor) -> None:
    """Take a step of the plain module and of the wrapper; outputs and gradients have to be the same."""
    outputs = []
    for net, optimizer in pairs:
        optimizer.zero_grad()
        outputs.append(net(x))
        loss_of(outputs[-1]).backward()
    assert_same(*outputs)
    (plain, _), (model, _) = pairs
    assert_same_gradients(model.module, plain)  # type: ignore[arg-type]
    for _, optimizer in pairs:
        optimizer.step()


@pytest.mark.parametrize("write", COUNTED + UNCOUNTED)
def test_what_all_replicas_write_alike(wrap: Wrap, write: Callable[[Any, torch.Tensor], None]) -> None:
    """R22: as on one device, from the first step on; with an optimizer, a batch of one row, and without gradients."""
    plain, model = network(write), wrap(network(write), 3)
    model.module.load_state_dict(plain.state_dict())
    for net in (plain, model.module):
        net.query.weight.full.copy_(plain.full)  # type: ignore[union-attr]
        net.full.copy_(plain.full)  # type: ignore[union-attr, operator]
    pairs = [(each, torch.optim.SGD(net.parameters(), 0.1)) for each, net in ((plain, plain), (model, model.module))]
    for rows in (6, 6, 1, 6, 7):
        x = torch.randn(rows, 5)
        train_alike(pairs, x)
        with torch.no_grad():
            assert_same(model(x), plain(x))
        assert_same_state(model.module, plain)


@pytest.mark.parametrize("name", OF_ROWS)
def test_what_depends_on_rows_is_an_error(wrap: Wrap, name: str) -> None:
    """R22: each parameter is named, in the step in which forward begins with it."""
    write, named = OF_ROWS[name]
    x = torch.randn(6, 5)
    for around in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        model = wrap(network(write), 3)
        model.module.is_writing = False
        with around():
            model(x)
            model.module.is_writing = True
            with pytest.raises(RuntimeError, match=f"{WRITTEN}{named}, with other values in each.*register_buffer"):
                model(x)
        model.module.is_writing = False
        loss_of(model(x)).backward()


def test_what_is_not_named_but_a_parameter(wrap: Wrap) -> None:
    """R22: a buffer that needs a gradient, and a leaf in an attribute."""
    model = wrap(network(lambda net, x: (net.scale.add_(x.mean()), net.table.add_(x.mean()))))  # type: ignore[func-returns-value, arg-type]
    with pytest.raises(RuntimeError, match="forward has written into buffer 'scale', attribute 'table'"):
        model(torch.randn(6, 5))


def test_a_later_step_of_a_structure_that_writes(wrap: Wrap, place: str) -> None:
    """R22: replicas that share memory have written several times by then."""
    writes: list[int] = []
    plain, model = twins(wrap, network(lambda net, x: decay(net, x) if writes else None), 2)
    x = torch.randn(6, 5)
    for _ in range(2):
        assert_same(model(x), plain(x))
    writes.append(1)
    if place == "one memory" and len(set(DEVICES)) == 1:
        with pytest.raises(RuntimeError, match=f"{WRITTEN}'shift', once in each of 2.*from the first step on"):
            model(x)
        model.module.load_state_dict(plain.state_dict())  # as the error says; and then it works
    assert_same(model(x), plain(x))
    assert_same_state(model.module, plain)


@at_one_place
def test_parameters_too_large_for_memory_of_their_own(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: in the first step of replicas that share memory."""
    monkeypatch.setattr(replica, "_MOST_BYTES", 100)
    with pytest.raises(RuntimeError, match=f"{WRITTEN}'shift', once in each of 3"):
        wrap(network(decay), 3)(torch.randn(6, 5))


def test_a_first_step_that_writes_runs_once(wrap: Wrap) -> None:
    """R22, N1: draws, a list and a dict of the module."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        by_hand(net, x)
        net.kept[0]["rows"].append(len(x))
        return torch.dropout(net.query(x), 0.5, train=True)

    net, x, outputs = Calls(forward, query=nn.Linear(5, 3), kept=[{"rows": []}]), torch.randn(6, 5), []
    model = wrap(net)
    with warnings.catch_warnings(action="ignore"):  # of the list
        for number in (1, 2):
            torch.manual_seed(1)
            outputs.append(model(x))
            assert net.kept == [{"rows": [3, 3] * number}]
    assert_same(*outputs)


@pytest.mark.parametrize("write", [replaced, binarised])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_several_forwards_before_one_backward(
    wrap: Wrap, write: Callable[[Any, torch.Tensor], None], num_replicas: int
) -> None:
    """R22: each writes the same through `.data`, also one without gradients."""
    plain, model = twins(wrap, network(write), num_replicas)
    for net in (plain, model.module):
        net.query.weight.full = net.query.weight.detach().clone()  # type: ignore[union-attr, operator]
    for _ in range(2):
        x, other = torch.randn(6, 5), torch.randn(6, 5)
        for each in (plain, model):
            outputs = [each(x), each(other)]
            with torch.no_grad():
                each(other)
            sum(map(loss_of, outputs)).backward()
        assert_same_gradients(model.module, plain)
    assert_same_state(model.module, plain)


def test_values_that_differ() -> None:
    """R22: by more than rounding; in half precision at all."""
    one = torch.tensor([1.0, math.nan, math.inf, -3.0])
    tensors = [one, one.half(), one.bfloat16(), torch.arange(3), torch.ones(0)]
    assert not written_parameters._differing([[each, each.clone()] for each in tensors])
    rounded = [[one, one * (1 + 2**-22)], [one.double(), one.double() * (1 + 2**-51)]]
    assert not written_parameters._differing(rounded)
    other = [[each, each * (1 + by)] for each, by in ((one, 2**-17), (one.double(), 2**-45), (one.half(), 2**-10))]
    other += [[torch.arange(3), torch.arange(3) + 1], [one, one[:2]], [one, one.double()], [one, one.nan_to_num()]]
    assert written_parameters._differing(other) == {*range(len(other))}


@pytest.mark.parametrize("write", [decay, in_place, of_frozen, as_vector])
def test_in_a_wrapper_in_a_wrapper(wrap: Wrap, write: Callable[[Any, torch.Tensor], None]) -> None:
    """R22, N3: one replica of the outer model has several of the inner one."""
    net = network(write)
    net.table = 0.0
    plain, model = twins(wrap, nn.Sequential(nn.Linear(4, 5), net), 2)
    model.module[1] = wrap(model.module[1], 2)  # type: ignore[index, operator]
    for _ in range(3):
        x = torch.randn(8, 4)
        outputs = [each(x) for each in (model, plain)]
        assert_same(*outputs)
        for output in outputs:
            loss_of(output).backward()
    for one, other in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert_same(one, other)
        if one.requires_grad:
            assert_same(one.grad, other.grad)
    model.module[1].module.is_writing = False  # type: ignore[index, union-attr]
    model(x)


@on_the_cpu
def test_parameters_that_are_inference_tensors(wrap: Wrap) -> None:
    """R22: they have no version counter."""
    with torch.inference_mode():
        plain, model = twins(wrap, network(decay), 2)
        for _ in range(3):
            x = torch.randn(6, 5)
            assert_same(model(x), plain(x))


def test_memory_that_recurrent_layers_replace(wrap: Wrap) -> None:
    """R22: as `flatten_parameters` on a GPU: it has the same values, and they are not compared in later steps."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        for parameter in net.layer.parameters():
            parameter.data = parameter.data.clone()
        return net.layer(x[:, None])[0][:, 0]

    plain, model = twins(wrap, Calls(forward, layer=nn.GRU(5, 3, batch_first=True)), 2)
    for _ in range(3):
        x = torch.randn(6, 5)
        assert_same(model(x), plain(x))
    assert not model._step_memory.written


def test_other_memory_with_the_same_values_in_a_map(wrap: Wrap) -> None:
    """R22: nothing is lost."""

    def write(net: Any, x: torch.Tensor) -> None:
        net.query.weight.data = net.query.weight.data.clamp(-9, 9)

    plain, model = twins(wrap, network(write), 2)
    batches = [torch.randn(3, 5) for _ in range(4)]
    with torch.no_grad():
        for output, x in zip(model.map(batches), batches, strict=True):
            assert_same(output, plain(x))


def test_parts_would_each_write(wrap: Wrap) -> None:
    """R22, N13"""
    with pytest.raises(RuntimeError, match=f"{WRITTEN}'shift', once in each of"):
        wrap(network(decay), 3, parts=2)(torch.randn(6, 5))


def test_a_map_says_so_too(wrap: Wrap) -> None:
    """R22: of the first batch that writes. With one device a map writes batch by batch, as a loop does."""
    batches = [torch.randn(3, 5) for _ in range(4)]
    model = wrap(network(decay), 2)
    with pytest.raises(RuntimeError, match=f"{WRITTEN}'shift', in several replicas at once"):
        list(model.map(batches))
    with pytest.raises(RuntimeError, match=f"{WRITTEN}'shift', in several replicas at once"):
        model.evaluate([(x, x[:, :3]) for x in batches], nn.functional.mse_loss)
    plain, model = twins(wrap, network(decay), 1)
    with torch.no_grad():
        for output, x in zip(model.map(batches), batches, strict=True):
            assert_same(output, plain(x))


def test_the_plain_composition_says_so_too(wrap: Wrap) -> None:
    """R22: with an overridden verb, and by the function."""
    x = torch.randn(6, 5)
    with pytest.raises(RuntimeError, match=f"{WRITTEN}'shift', once in each of 2"):
        Composed(network(decay), in_turn(2))(x)
    with pytest.raises(RuntimeError, match=f"{WRITTEN}'shift', once in each of 3"):
        data_parallel(network(decay), x, in_turn(3))


MAX_NORM: dict[str, Callable[[], nn.Module]] = {"an embedding": lambda: nn.Embedding(20, 4, max_norm=1.0)}
if ON_CPU:  # the asynchronous device has no bags
    MAX_NORM["a bag"] = lambda: nn.EmbeddingBag(20, 4, max_norm=0.7)


@pytest.mark.parametrize("name", MAX_NORM)
def test_rows_that_max_norm_shortens(wrap: Wrap, name: str) -> None:
    """R22: to the same values in every replica."""
    plain, model = twins(wrap, MAX_NORM[name](), 3)
    pairs = [(each, torch.optim.SGD(each.parameters(), 0.1)) for each in (plain, model)]
    for _ in range(3):
        train_alike(pairs, torch.randint(20, (7, 3)))
    assert_same_state(model.module, plain)


def test_the_remedies(wrap: Wrap) -> None:
    """R22, R5: a buffer, and one forward of the plain module for an initialisation from the first batch."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        if not net.is_set:
            with torch.no_grad():
                net.scale.copy_(x.std(0))
                net.is_set.fill_(True)
        net.teacher.mul_(0.9)
        return x * net.scale + net.teacher

    state = {"teacher": nn.Buffer(torch.ones(5)), "is_set": nn.Buffer(torch.tensor([False]))}
    plain, model = twins(wrap, Calls(forward, scale=nn.Parameter(torch.ones(5)), **state), 3)
    x = torch.randn(6, 5)
    with pytest.raises(RuntimeError, match="To initialise from the first batch, call the plain module once"):
        model(x)
    assert not model.module.is_set  # type: ignore[truthy-bool]
    with torch.no_grad():
        assert_same(model.module(x), plain(x))
    assert_same(model(x), plain(x))
    assert_same_state(model.module, plain)


@pytest.mark.parametrize("error", [KeyError("theirs"), torch.OutOfMemoryError("full")], ids=label)
def test_a_first_step_that_writes_and_fails_is_not_run_again(wrap: Wrap, error: Exception) -> None:
    """R22, F1: its error is the replica's own. Of what several replicas have written into one memory nothing stays."""
    calls: list[int] = []

    def write_and_fail(net: Any, x: torch.Tensor) -> None:
        decay(net, x)
        calls.append(len(x))
        raise error

    model = wrap(network(write_and_fail), 2)
    before = model.module.shift.detach().clone()
    with pytest.raises(type(error)) as caught:
        model(torch.randn(6, 5))
    assert caught.value is error
    assert calls == [3, 3]
    assert any(torch.equal(model.module.shift, before * factor) for factor in (1, 0.9))
