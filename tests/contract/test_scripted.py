"""TorchScript modules, scripted and traced, alone and as children: they work like the modules they were made from."""

import copy
import io
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_same_state, assert_unchanged, train_both
from helpers.contract import KIND, Wrap, in_turn
from helpers.garbage import no_garbage
from unisono import data_parallel, replicate
from unisono.runtime.torch_private import torchscript


@pytest.fixture
def place() -> str:
    """One is enough: where the memory of scripted modules is does not matter."""
    return "one memory"


pytestmark = [
    pytest.mark.usefixtures("numerics"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TWO = in_turn(2)


class Net(nn.Module):
    """Tied weights, a list of tensors, a constant, a branch on the mode, and a child."""

    factors: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.head = nn.Sequential(nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.shift = torch.ones(3)
        self.factors = [torch.full((5,), 3.0), self.first.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x))) * self.factors[0].to(x.device) + self.factors[1]
        x = self.head(x) * self.scale + self.shift
        return x if self.training else -x


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def traced() -> nn.Module:
    return torch.jit.trace(linear(), torch.zeros(2, 5))


def from_file(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(Net()),
    "traced": traced,
    "from a file": lambda: from_file(Net()),
    "children": lambda: nn.Sequential(nn.Linear(5, 5), torch.jit.script(Net()), nn.Linear(3, 5), traced()),
    "scripted with a traced child": lambda: torch.jit.script(nn.Sequential(traced(), nn.Tanh())),
}


@pytest.mark.parametrize("name", MODULES)
def test_training(name: str, wrap: Wrap) -> None:
    """R10: outputs, gradients and parameters, in training and eval, while TorchScript profiles and optimises."""
    plain, module = MODULES[name](), MODULES[name]()
    module.load_state_dict(plain.state_dict())
    train_both(plain, wrap(module, 3), [torch.randn(rows, 5) for rows in (6, 7, 6, 4, 5, 1)])


@pytest.mark.parametrize("name", MODULES)
def test_replicas_are_complete(name: str) -> None:
    """R1: names, classes, sharing; nothing of the original's but its parameters and, in the first, its buffers."""
    module = MODULES[name]()
    state = copy.deepcopy(module.state_dict())
    x = torch.randn(4, 5)
    expected = module(x)
    for number, (replica, device) in enumerate(zip(replicate(module, TWO), TWO, strict=True)):
        assert type(replica) is type(module)
        assert replica.state_dict().keys() == module.state_dict().keys()
        if device == TWO[0]:
            assert [*map(id, replica.parameters())] == [*map(id, module.parameters())]
        assert [*dict(replica.named_parameters())] == [*dict(module.named_parameters())]
        for own, original in zip(replica.buffers(), module.buffers(), strict=True):
            assert (own is original) == (number == 0)
        torch.testing.assert_close(replica(x.to(device)).to(x.device), expected)
        with torch.no_grad():
            assert not any(p.requires_grad for p in replicate(module, TWO[:1], detach=True)[0].parameters())
        replica.eval()
        replica.train()
        assert module.training
    assert_unchanged(module, state)
    torch.testing.assert_close(data_parallel(module, x, TWO), expected)


def test_the_original_keeps_its_own_mode_and_attributes(wrap: Wrap) -> None:
    """R6, R8: a replica's mode is its own; what is changed on the original between steps is seen."""
    module = torch.jit.script(Net())
    replica = replicate(module, TWO)[1]
    replica.eval()
    replica.scale = torch.zeros(3)
    assert module.training
    assert module.head.training
    assert torch.equal(module.scale, torch.full((3,), 2.0))
    wrapped = wrap(module)
    x = torch.randn(4, 5)
    for change in (lambda: module.scale.mul_(3), lambda: setattr(module, "shift", torch.zeros(3)), module.eval):
        change()
        torch.testing.assert_close(wrapped(x), module(x))
    module.head[2].weight.requires_grad_(False)
    wrapped(x).sum().backward()
    assert module.head[2].weight.grad is None
    assert module.head[2].bias.grad is not None


def test_buffers_of_the_first_replica_persist(wrap: Wrap) -> None:
    """R5, N11: in place, as for other modules; a step that fails changes nothing."""
    module, other = torch.jit.script(nn.BatchNorm1d(5)), nn.BatchNorm1d(5)
    x = torch.randn(6, 5)
    wrap(module, sync_batch_norm=False)(x)
    wrap(other, sync_batch_norm=False)(x)
    assert_same_state(module, other)
    wrapped = wrap(
        module, 2, shares=[5, 1], sync_batch_norm=False
    )  # one row has no variance: the second replica raises
    with pytest.raises(torch.jit.Error, match="more than 1 value"):
        wrapped(x)
    assert_same_state(module, other)


def test_attributes_of_the_python_side() -> None:
    """R7: modules in lists, and methods that have been called before."""
    module = torch.jit.script(Net())
    module(torch.randn(2, 5))
    module.layers = [module.head]
    for replica, device in zip(replicate(module, TWO), TWO, strict=True):
        assert replica.layers[0] is replica.head is not module.head
        replica.scale = torch.zeros(3, device=device)
        torch.testing.assert_close(replica(torch.randn(2, 5, device=device)), torch.ones(2, 3, device=device))
    assert module.layers == [module.head]


def test_nothing_keeps_replicas_alive(wrap: Wrap) -> None:
    """N10"""
    for name in ("scripted", "children"):
        module = MODULES[name]()
        replicate(module, TWO)
        with no_garbage():
            references = [weakref.ref(replica) for replica in replicate(module, TWO)]
            assert [reference() for reference in references] == [None, None]
            if KIND != "queued":  # it asks kernels for meta tensors, and those in Python leave cycles: torch's own
                wrap(module)(torch.randn(4, 5)).sum().backward()


def test_where_torch_does_it_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: an error with the remedy."""
    assert torchscript.can_take_scripts_apart()
    assert not torchscript.is_scripted(linear())
    module = nn.Sequential(traced())
    monkeypatch.delattr(torch.jit._script, "OrderedModuleDict")
    assert not torchscript.can_take_scripts_apart()
    with pytest.raises(TypeError, match="wrap the Python module that it was made from"):
        replicate(module, TWO)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.batch_norm(x, None, None, training=True)


class ByFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalised(x)


def with_batch_norm(**options: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, **options))


def frozen() -> nn.Module:
    module = with_batch_norm()
    module[1].eval()
    return torch.jit.script(module)


def traced_with(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.randn(3, 5), check_trace=False)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("make", "is_refused"),
    [
        (lambda: torch.jit.script(with_batch_norm()), True),
        (lambda: nn.Sequential(nn.Linear(5, 4), torch.jit.script(nn.BatchNorm1d(4))), True),
        (lambda: nn.Sequential(nn.Linear(5, 4), torch.jit.script(ByFunction())), True),
        (lambda: traced_with(with_batch_norm()), True),
        (lambda: torch.jit.script(with_batch_norm(track_running_stats=False)).eval(), True),
        (lambda: torch.jit.script(with_batch_norm()).eval(), False),
        (frozen, False),
        (lambda: traced_with(with_batch_norm().eval()).train(), False),  # a trace keeps the mode
    ],
    ids=["module", "layer", "function", "trace", "no running statistics", "eval", "frozen", "trace of eval"],
)
def test_a_scripted_batch_norm_is_not_left_out_in_silence(wrap: Wrap, make: Callable, is_refused: bool) -> None:
    """N5, R10: with sync_batch_norm=True, which cannot reach it, it normalised each replica's own rows."""
    model, x = wrap(make(), sync_batch_norm=True), torch.randn(6, 5)
    for mode in (torch.no_grad, torch.enable_grad):
        for _ in range(3):  # and in steady steps
            with mode():
                if not is_refused:
                    torch.testing.assert_close(model(x), model.module(x))
                    continue
                with pytest.raises(
                    RuntimeError, match=r"batch norm.* in spite of sync_batch_norm=True.*torch\.batch_norm"
                ):
                    model(x)
    wrap(make(), sync_batch_norm=False)(x)
