"""replicate: complete copies, linked to the original for autograd, whatever the module's class does."""

import copy
import gc
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from helpers.garbage import no_garbage
from helpers.modules import Calls
from unisono import DataParallel, data_parallel, replicate
from unisono.primitives.blueprint import collector_paused

CPU = ["cpu", "cpu"]


pytestmark = pytest.mark.usefixtures("float64")


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


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 2, 2)), (4, 2, 5, 5)),
    "lstm": (lambda: Calls(lambda self, x: self.inner(x)[0], inner=nn.LSTM(5, 4, 2, bidirectional=True)), (3, 4, 5)),
    "tied": (Tied, (4, 3)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(5, 3)), (4, 5)),
    "frozen": (lambda: nn.Sequential(nn.Linear(5, 3).requires_grad_(False), nn.Linear(3, 3)), (4, 5)),
}


@pytest.mark.filterwarnings("error")  # an RNN whose weights are not one block of memory warns
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_replicas_compute_what_the_original_computes(name: str, detach: bool) -> None:
    """R1, R2, R3, R4, R10: outputs, names, counts, ties; gradients arrive in the original's parameters, summed."""
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
        for names in ("named_parameters", "named_buffers", "named_modules"):  # what is shared is named once
            assert [n for n, _ in getattr(replica, names)()] == [n for n, _ in getattr(network, names)()]
        assert replica.state_dict().keys() == network.state_dict().keys()
        for mine, theirs in zip(replica.parameters(), network.parameters(), strict=True):
            assert mine.requires_grad == (theirs.requires_grad and not detach)
        assert not {id(m) for m in replica.modules()} & {id(m) for m in network.modules()}
    if detach:
        return
    (outputs[0].pow(2).sum() + 2 * outputs[1].pow(2).sum()).backward()
    (3 * expected.pow(2).sum()).backward()
    for mine, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_zero_grad_of_a_replica_warns() -> None:
    """R11: as in torch, because it does nothing to the original."""
    network = nn.Linear(2, 2)
    replica = replicate(network, CPU)[1]
    with pytest.warns(UserWarning, match=r"Calling \.zero_grad\(\) from a module created with"):
        replica.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network.zero_grad()


def test_below_the_root_a_replica_does_not_say_that_it_has_no_parameters() -> None:
    """R1: torchdiffeq takes `_is_replica` for that, and found none: the gradients of an ODE's module were missing."""
    replica = replicate(nn.Sequential(nn.Linear(2, 2)), CPU)[1]
    assert not hasattr(replica[0], "_is_replica")
    assert len(list(replica[0].parameters())) == 2


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
    assert replicate(network, []) == []


# ---- attributes that lead back to the module -------------------------------------------------------


def test_weak_references_hooks_and_parents() -> None:
    """R7, R9: all lead to the replica's own."""
    calls: list[Any] = []

    def note(self: nn.Module, module: nn.Module, args: Any, output: Any) -> None:
        calls.append((module, self))

    network = Calls(lambda module, x: module.layer(x), layer=nn.Linear(2, 2), child=nn.Module())
    network.weak, network.child.parent = weakref.ref(network.layer), [network]
    network.register_forward_hook(types.MethodType(note, network))
    network.layer.register_forward_pre_hook(lambda module, args: calls.append((module, network)))
    for replica in replicate(network, CPU):
        assert replica.weak() is replica.layer
        assert replica.child.parent == [replica]
        replica(torch.zeros(1, 2))
        assert calls == [(replica.layer, replica), (replica, replica)]
        calls.clear()


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
    network = Peculiar(2)
    network.layers = [network.layer]
    for missing in ("_load_state_dict_post_hooks", "_is_full_backward_hook"):
        del network.__dict__[missing]
        replica = replicate(network, CPU)[1]
        assert replica.layers[0] is replica.layer is not network.layer


def test_modules_and_tensors_that_only_attributes_lead_to() -> None:
    """R7: found at any depth, and linked like parameters; a constant is used as it is."""
    network, hidden, deeper = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    network.layers, hidden.not_registered = [hidden], [deeper]
    network.temperature = torch.ones((), requires_grad=True)
    network.table = {"mask": torch.tensor([1.0, 0.0])}
    for replica in replicate(network, CPU):
        own = replica.layers[0].not_registered[0]
        assert own is not deeper
        (own(replica(torch.ones(1, 2))) * replica.temperature * replica.table["mask"]).sum().backward()
    for tensor in (network.temperature, network.weight, deeper.weight):
        assert tensor.grad is not None


# ---- classes with ideas of their own ---------------------------------------------------------------


class Peculiar(nn.Module):
    """Truth, equality, length, call and assignment of its own; arguments; attributes before nn.Module's."""

    def __new__(cls, width: int) -> "Peculiar":
        assert width > 0
        return super().__new__(cls)

    def __init__(self, width: int) -> None:
        object.__setattr__(self, "early", [1])
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.doubled = 0.5

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value * 2 if name == "doubled" else value)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * self.doubled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.doubled = 1.5
        return self.layer(x) * len(self.early)


def test_a_peculiar_class() -> None:
    """R10: nothing of the class is called, so nothing interferes."""
    network = Peculiar(2)
    network.child = Peculiar(2)
    network.holds = [network.child]
    x = torch.randn(3, 2)
    for replica in replicate(network, CPU):
        torch.testing.assert_close(replica(x), network(x))
        assert replica.holds[0] is replica.child
        assert replica.child is not network.child
    replica(x).sum().backward()
    assert network.layer.weight.grad is not None


def test_a_subclass_of_parameter_with_attributes() -> None:
    """R1: replicas' parameters keep class and attributes."""
    network = nn.Linear(2, 2)
    network.weight = type("Tagged", (nn.Parameter,), {})(torch.randn(2, 2))
    network.weight.group = "decay"
    for replica in replicate(network, CPU):
        assert type(replica.weight) is type(network.weight)
        assert replica.weight.group == "decay"


@pytest.mark.parametrize(
    "use",
    [
        lambda network, x: replicate(network, CPU),
        lambda network, x: data_parallel(network, x, CPU),
        lambda network, x: DataParallel(network, CPU)(x),
    ],
)
def test_lazy_modules_before_their_first_input(use: Callable[..., Any]) -> None:
    """R10: an error that has torch's words, for callers that match them, and names the layer and the remedy; after the
    remedy they work."""
    network = nn.Sequential(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), nn.ReLU(), nn.LazyLinear(2))
    hidden, x = nn.Identity(), torch.randn(6, 3)
    hidden.layers = [nn.LazyLinear(2)]
    for module, message in (
        (network, r"layer '0.0' \(LazyLinear\) does not know the shape of its 'weight'"),
        (nn.LazyLinear(2), "LazyLinear does not know"),
        (nn.Sequential(nn.LazyBatchNorm1d(affine=False)), r"layer '0' .* 'running_mean'"),
        (hidden, "call the plain module once"),
    ):
        with pytest.raises(ValueError, match=f"Attempted to use an uninitialized parameter.*{message}"):
            use(module, x)
    with torch.no_grad():
        network(x[:2])
    network.eval()
    use(network, x)


def test_a_deep_tree_of_modules() -> None:
    """R7: no recursion over children."""
    network: nn.Module = nn.Identity()
    for _ in range(2000):
        network = nn.Sequential(network)
    replica, depth = replicate(network, CPU)[1], 0
    while not isinstance(replica, nn.Identity):
        replica, depth = replica[0], depth + 1
    assert depth == 2000


def test_the_garbage_collector_stays_on_when_calls_overlap() -> None:
    """F5: two threads that pause it at once: it is on again when the last one ends, and not before."""
    assert gc.isenabled()
    with collector_paused:
        with collector_paused:
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with no_garbage():
        with collector_paused:
            pass
        assert not gc.isenabled()  # a program that has switched it off keeps it off


@pytest.mark.parametrize("freed", [False, True])
def test_an_attribute_that_is_a_weak_proxy(freed: bool) -> None:
    """R7: a proxy claims to be its object, and raises if that has been freed: an owner, or a tensor of another."""

    class Owner:
        pass

    kept = [Owner(), torch.ones(3)]
    model = nn.Linear(3, 2)
    model.owner, model.__dict__["shift"] = map(weakref.proxy, kept)
    if freed:
        kept.clear()
    x = torch.randn(4, 3)
    torch.testing.assert_close(DataParallel(model, CPU)(x), model(x))
