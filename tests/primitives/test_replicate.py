"""replicate: complete copies, linked to the original for autograd, whatever the module's class does."""

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from manyhands import DataParallel, data_parallel, replicate
from manyhands.primitives.replicate import collector_paused

CPU = ["cpu", "cpu"]


pytestmark = pytest.mark.usefixtures("float64")


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(5, 4, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(x)[0]


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(5), torch.randn(5)])
        self.shifts = nn.ParameterDict({"a": torch.randn(5), "b": torch.randn(5)})
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.heads = nn.ModuleDict({"x": nn.Linear(5, 2), "y": nn.Linear(5, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(self.scales) == len(self.shifts) == len(self.layers) == len(self.heads) == 2
        for scale, shift, layer in zip(self.scales, self.shifts.values(), self.layers, strict=True):
            x = layer(x * scale + shift)
        return torch.cat([head(x) for head in self.heads.values()], 1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(6, 5), nn.Linear(5, 6, bias=False)
        self.out.weight = self.embedding.weight
        self.block = nn.Linear(5, 5)
        self.again = self.block
        self.register_buffer("mean", torch.zeros(5))
        self.other = nn.Module()
        self.other.register_buffer("mean", self.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.again(self.block(self.embedding(x.long().abs() % 6))))


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    layer = nn.Linear(5, 5)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def transformer() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 2, 2)), (4, 2, 5, 5)),
    "rnn": (lambda: Recurrent(nn.RNN), (4, 3, 5)),
    "lstm": (lambda: Recurrent(nn.LSTM), (4, 3, 5)),
    "gru": (lambda: Recurrent(nn.GRU), (4, 3, 5)),
    "attention": (Attends, (4, 3, 8)),
    "transformer": (transformer, (4, 3, 8)),
    "lists and dicts": (Lists, (4, 5)),
    "tied": (Tied, (4, 3)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(5, 3)), (4, 5)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(5, 3)), (4, 5)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(5, 5)), (4, 5)),
    "parametrized": (parametrized, (4, 5)),
    "bilinear": (lambda: nn.Sequential(nn.LayerNorm(5), nn.PReLU(), nn.InstanceNorm1d(4, affine=True)), (2, 4, 5)),
}


@pytest.mark.filterwarnings("error")  # an RNN whose weights are not one block of memory warns
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_replicas_compute_what_the_original_computes(name: str, detach: bool) -> None:
    """R1, R2, R3, R10: outputs, names, counts; gradients arrive in the original's parameters, summed."""
    make, shape = MODULES[name]
    plain = make()
    network = copy.deepcopy(plain)
    x = torch.randn(shape)
    replicas = replicate(network, CPU, detach=detach)
    outputs = [replica(x) for replica in replicas]
    expected = plain(x)
    for replica, output in zip(replicas, outputs, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12, check_stride=False)
        assert type(replica) is type(network)
        assert [n for n, _ in replica.named_parameters()] == [n for n, _ in network.named_parameters()]
        assert [n for n, _ in replica.named_buffers()] == [n for n, _ in network.named_buffers()]
        assert [n for n, _ in replica.named_modules()] == [n for n, _ in network.named_modules()]
        assert replica.state_dict().keys() == network.state_dict().keys()
        assert next(replica.parameters()).requires_grad == (not detach)
        assert not {id(m) for m in replica.modules()} & {id(m) for m in network.modules()}
    if detach:
        return
    (outputs[0].pow(2).sum() + 2 * outputs[1].pow(2).sum()).backward()
    (3 * expected.pow(2).sum()).backward()
    for mine, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_old_norms(norm: Callable[[nn.Module], nn.Module]) -> None:
    """R10: a hook computes the weight, a plain attribute, before each forward."""
    network = norm(nn.Linear(5, 3))
    x = torch.randn(4, 5)
    expected = network.eval()(x).detach()
    for replica in replicate(network, CPU):
        network.zero_grad()
        output = replica(x)
        torch.testing.assert_close(output.detach(), expected, rtol=1e-12, atol=1e-12)
        output.sum().backward()
        assert all(p.grad is not None for p in network.parameters())


def test_ties_and_sharing_are_kept() -> None:
    """R3: within each replica; parameters, modules, buffers."""
    for replica in replicate(Tied(), CPU):
        assert replica.out.weight is replica.embedding.weight
        assert replica.again is replica.block
        assert replica.other.mean is replica.mean
        assert len(list(replica.parameters())) == 3


def test_frozen_parameters_stay_frozen() -> None:
    """R4"""
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].requires_grad_(False)
    for replica in replicate(network, CPU):
        assert [p.requires_grad for p in replica.parameters()] == [False, False, True, True]


def test_buffers_are_shared_by_the_first_replica_only() -> None:
    """R5"""
    network = nn.BatchNorm1d(2)
    first, second = replicate(network, CPU)
    assert first.running_mean is network.running_mean
    assert second.running_mean.data_ptr() != network.running_mean.data_ptr()
    second(torch.ones(3, 2))
    assert torch.equal(network.running_mean, torch.zeros(2))
    first(torch.ones(3, 2))
    assert torch.equal(network.running_mean, torch.full((2,), 0.1))


def test_zero_grad_of_a_replica_warns() -> None:
    """R11: as in torch, because it does nothing to the original."""
    network = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=r"Calling \.zero_grad\(\) from a module created with"):
        replicate(network, CPU)[1].zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network.zero_grad()


def test_attributes_are_copies_and_the_original_stays_as_it_is() -> None:
    """R6: what a replica assigns is its own; `training` too."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    before = {name: dict(module.__dict__) for name, module in network.named_modules()}
    (replica,) = replicate(network, ["cpu"])
    replica.eval()
    replica.answer = 42
    replica[0].weight = nn.Parameter(torch.zeros(3, 3))
    replica.append(nn.ReLU())
    del replica[1]
    assert {name: dict(module.__dict__) for name, module in network.named_modules()} == before


def test_training_mode_and_attributes_are_the_originals() -> None:
    """R8"""
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    network.note = ["text"]
    for replica in replicate(network, CPU):
        assert not replica.training
        assert not replica[1].training
        assert replica.note is network.note


# ---- attributes that lead back to the module -------------------------------------------------------


class SelfReferring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.op = self.run
        self.ops = {"run": self.run, "layers": [self.layer, (self.layer,)]}
        self.partial = functools.partial(self.run, flag=True)
        self.function = lambda x: self.layer(x) * 1
        self.weak = weakref.ref(self.layer)
        self.hook_calls: list[Any] = []
        self.register_forward_hook(self.count)
        self.layer.register_forward_pre_hook(lambda module, args: self.hook_calls.append((module, self)))
        self.children_know = nn.Module()
        self.children_know.parent = [self]

    def run(self, x: torch.Tensor, flag: bool = False) -> torch.Tensor:
        return self.layer(x)

    def count(self, module: nn.Module, args: Any, output: Any) -> None:
        self.hook_calls.append((module, self))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


def test_methods_lists_partials_lambdas_weak_references_and_hooks() -> None:
    """R7, R9: all lead to the replica's own."""
    network = SelfReferring()
    for replica in replicate(network, CPU):
        assert replica.op.__self__ is replica
        assert replica.ops["run"].__self__ is replica
        assert replica.ops["layers"] == [replica.layer, (replica.layer,)]
        assert replica.partial.func.__self__ is replica
        assert replica.function.__closure__[0].cell_contents is replica
        assert replica.weak() is replica.layer
        assert replica.children_know.parent == [replica]
        replica(torch.zeros(1, 2))
        assert [module is me or module is me.layer for module, me in network.hook_calls] == [True, True]
        assert all(me is replica for _, me in network.hook_calls)
        network.hook_calls.clear()
    assert network.op.__self__ is network


def test_a_weak_reference_to_a_module_outside() -> None:
    """R7, A10: a child that knows its parent, when the child alone is replicated."""

    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.layer, self.parent = nn.Linear(2, 2), weakref.ref(parent)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.parent().scale

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 3.0
            self.child = Child(self)

    parent = Parent()
    x = torch.randn(4, 2)
    expected = parent.child(x)
    for replica in replicate(parent.child, CPU):
        torch.testing.assert_close(replica(x), expected)


def test_modules_that_only_attributes_lead_to() -> None:
    """R7: found in plain lists and closures, at any depth, and linked like the others."""
    hidden, deeper = nn.Linear(2, 2), nn.Linear(2, 2)
    hidden.not_registered = [deeper]
    network = nn.Module()
    network.layers = [hidden]
    replica = replicate(network, CPU)[1]
    assert replica.layers[0] is not hidden
    assert replica.layers[0].not_registered[0] is not deeper
    replica.layers[0].not_registered[0](torch.ones(1, 2)).sum().backward()
    assert deeper.weight.grad is not None


def test_lists_of_parameters_are_each_replicas_own() -> None:
    """R6: also where the parameters in them are the original's own: an RNN writes into its list of weights."""
    network = nn.LSTM(2, 3)
    before = list(network._flat_weights)
    replica = replicate(network, ["cpu"])[0]
    replica.weight_ih_l0 = nn.Parameter(torch.zeros(12, 2))
    assert replica._flat_weights[0] is replica.weight_ih_l0
    assert all(now is then for now, then in zip(network._flat_weights, before, strict=True))


def test_modules_that_lack_what_todays_torch_gives_them() -> None:
    """R7: as in a file of an older torch; nothing of their own is overlooked."""
    network = HasParameterAndLength()
    network.layers = [network.layer]
    for missing in ("_load_state_dict_post_hooks", "_is_full_backward_hook"):
        del network.__dict__[missing]
        replica = replicate(network, CPU)[1]
        assert replica.layers[0] is replica.layer is not network.layer


def test_tensors_in_attributes() -> None:
    """R7: a leaf that needs a gradient is linked; a constant is used as it is."""
    network = nn.Linear(2, 2)
    network.temperature = torch.ones((), requires_grad=True)
    network.table = {"mask": torch.tensor([1.0, 0.0])}
    for replica in replicate(network, CPU):
        (replica(torch.ones(1, 2)) * replica.temperature * replica.table["mask"]).sum().backward()
    assert network.temperature.grad is not None
    assert network.weight.grad is not None


# ---- classes with ideas of their own ---------------------------------------------------------------


class Slotted(nn.Module):
    __slots__ = ("__private", "slot", "unset")

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        object.__setattr__(self, "slot", [self.layer])
        object.__setattr__(self, "_Slotted__private", 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slot[0](x) * self.__private


class GetsAndSets(nn.Module):
    """Counts assignments, redirects reads, has a property with a setter, and needs arguments to be made."""

    sets = 0

    def __new__(cls, width: int, *args: Any) -> "GetsAndSets":
        assert width > 0
        return super().__new__(cls)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = 2.0

    def __setattr__(self, name: str, value: Any) -> None:
        type(self).sets += 1
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("inner_"):
            return getattr(self.inner, name.removeprefix("inner_"))
        return super().__getattr__(name)

    @property
    def scale(self) -> float:
        return self.__dict__["_scale"]

    @scale.setter
    def scale(self, value: float) -> None:
        self.__dict__["_scale"] = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inner_weight * self.scale


class HasParameterAndLength(nn.Module):
    """Truth, equality and length of its own; attributes before nn.Module's."""

    def __init__(self) -> None:
        object.__setattr__(self, "early", [1])
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * len(self.early)


@pytest.mark.parametrize("make", [Slotted, lambda: GetsAndSets(2), HasParameterAndLength])
def test_unusual_classes(make: Callable[[], nn.Module]) -> None:
    """R10: nothing of the class is called and nothing assigned, so nothing interferes."""
    network = make()
    network.child = make()
    network.holds = [network.child]
    sets_before = GetsAndSets.sets
    x = torch.randn(3, 2)
    expected = network(x)
    for replica in replicate(network, CPU):
        torch.testing.assert_close(replica(x), expected)
        assert replica.holds[0] is replica.child
        assert replica.child is not network.child
    assert GetsAndSets.sets == sets_before
    replica(x).sum().backward()
    assert any(p.grad is not None for p in network.parameters())


def test_slots() -> None:
    """R7: what a slot holds is the replica's own; a slot without a value stays without."""
    network = Slotted()
    replica = replicate(network, CPU)[1]
    assert replica.slot[0] is replica.layer
    assert not hasattr(replica, "unset")


def test_slots_alone_find_what_they_hold() -> None:
    """R7: a module that only a slot leads to."""

    class OnlySlot(nn.Module):
        __slots__ = ("hidden",)

        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "hidden", [nn.Linear(2, 2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hidden[0](x)

    network = OnlySlot()
    replica = replicate(network, CPU)[1]
    assert replica.hidden[0] is not network.hidden[0]
    replica(torch.ones(1, 2)).sum().backward()
    assert network.hidden[0].weight.grad is not None


def test_a_subclass_of_parameter_with_attributes() -> None:
    """R1: replicas' parameters keep class and attributes."""

    class Tagged(nn.Parameter):
        pass

    network = nn.Linear(2, 2)
    network.weight = Tagged(torch.randn(2, 2))
    network.weight.group = "decay"
    for replica in replicate(network, CPU):
        assert type(replica.weight) is Tagged
        assert replica.weight.group == "decay"


def lazy() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), nn.ReLU(), nn.LazyLinear(2))


@pytest.mark.parametrize(
    "use",
    [
        lambda network, x: replicate(network, CPU),
        lambda network, x: data_parallel(network, x, CPU),
        lambda network, x: DataParallel(network, CPU)(x),
    ],
)
def test_lazy_modules_before_their_first_input(use: Callable[..., Any]) -> None:
    """R10: an error that names the layer and the remedy; after the remedy they work."""
    network, x = lazy(), torch.randn(6, 3)
    with pytest.raises(RuntimeError, match=r"layer '0.0' \(LazyLinear\) does not know the shape of its 'weight'"):
        use(network, x)
    with pytest.raises(RuntimeError, match="LazyLinear does not know"):
        use(nn.LazyLinear(2), x)
    hidden = nn.Identity()
    hidden.layers = [nn.LazyLinear(2)]
    with pytest.raises(RuntimeError, match=r"call the plain module once"):
        use(hidden, x)
    with torch.no_grad():
        network(x[:2])
    network.eval()
    use(network, x)
    torch.testing.assert_close(DataParallel(network, CPU)(x), network(x))
    torch.testing.assert_close(replicate(network, CPU)[1](x), network(x))


def test_a_lazy_module_that_only_lacks_its_buffers() -> None:
    """R10"""
    network = nn.Sequential(nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(RuntimeError, match=r"layer '0' .* 'running_mean'"):
        replicate(network, CPU)


def test_the_original_may_be_changed_and_replicated_again() -> None:
    """R8: nothing is remembered."""
    network = nn.Sequential(nn.Linear(2, 2))
    assert len(replicate(network, CPU)[1]) == 1
    network.append(nn.ReLU())
    network[0] = nn.Linear(2, 3)
    replica = replicate(network, CPU)[1]
    assert len(replica) == 2
    assert replica[0].out_features == 3


def test_one_replica_and_many() -> None:
    """A12: any number, on one device."""
    network = nn.Linear(2, 2)
    assert len(replicate(network, ["cpu"])) == 1
    assert len(replicate(network, [torch.device("cpu")] * 8)) == 8
    assert replicate(network, []) == []


def test_a_deep_tree_of_modules() -> None:
    """R7: no recursion over children."""
    network: nn.Module = nn.Identity()
    for _ in range(2000):
        outer = nn.Module()
        outer.inner = network
        network = outer
    replica = replicate(network, CPU)[1]
    depth = 0
    while not isinstance(replica, nn.Identity):
        replica, depth = replica.inner, depth + 1
    assert depth == 2000


def test_replicas_go_with_their_last_name() -> None:
    """N10: they refer to the original, not it to them."""
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    replicate(network, CPU)
    gc.collect()
    gc.disable()
    try:
        references = [weakref.ref(replica) for replica in replicate(network, CPU)]
        assert [reference() for reference in references] == [None, None]
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_garbage_collector_stays_on_when_calls_overlap() -> None:
    """F5: two threads that pause it at once: it is on again when the last one ends, and not before."""
    assert gc.isenabled()
    collector_paused.__enter__()
    collector_paused.__enter__()
    collector_paused.__exit__(None, None, None)
    assert not gc.isenabled()
    collector_paused.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused:
            pass
        assert not gc.isenabled()  # whoever switched it off keeps it off
    finally:
        gc.enable()


@pytest.mark.parametrize("gone", [False, True], ids=["there", "gone"])
def test_an_attribute_that_is_a_weak_proxy(gone: bool) -> None:
    """R7: it says that it is what it stands for, and raises if that has gone: an owner, or a tensor of another."""

    class Owner:
        pass

    kept = [Owner(), torch.ones(3)]
    model = nn.Linear(3, 2)
    model.owner, model.__dict__["shift"] = map(weakref.proxy, kept)
    if gone:
        kept.clear()
    x = torch.randn(4, 3)
    torch.testing.assert_close(DataParallel(model, CPU)(x), model(x))
