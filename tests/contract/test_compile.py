"""torch.compile, before wrapping and after it: the numbers of the plain module, few graphs."""

import copy
import gc
import shutil
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.comparisons import assert_same_state, train_both
from helpers.contract import DEVICES, ON_CPU, Wrap, in_turn
from helpers.losses import loss_of
from helpers.modules import Calls, Fn
from unisono import DataParallel, data_parallel, replicate


@pytest.fixture
def place() -> str:
    """One is enough: where the memory of compiled modules is does not matter."""
    return "one memory"


pytestmark = [
    pytest.mark.usefixtures("numerics"),
    # torch itself looks at the gradient of an input that is no leaf, where a compiled module follows another
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor"),
]

ROWS = [8, 8, 7, 5, 11, 13, 2, 9, 8, 3, 6, 12, 7, 8, 1]  # of 15 steps: shapes that come back, and new ones
FEW = [8, 7, 5, 8, 3]  # the last in eval mode
FEWER = FEW[:3]  # where what surrounds the module is compiled, and takes longer
KEEPS_ORDER = hasattr(torch._C._dynamo.eval_frame, "_set_lru_cache")  # else replicas may compile the same thing twice
NUM_DEVICES = len(set(DEVICES))  # compiled code is for one device
MOST_GRAPHS = 7 * NUM_DEVICES  # for training and eval, each with fixed rows, with any, with one; for a single replica


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(5, 8), nn.LayerNorm(8), nn.Dropout(0.0)
        self.last = nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(torch.relu(self.norm(self.first(x))))
        return self.last(x) * (self.scale if self.training else -self.scale)


def with_forward(forward: Callable[..., torch.Tensor]) -> nn.Module:
    return type("WithForward", (Net,), {"forward": forward})()


def batches(rows: list[int]) -> list[torch.Tensor]:
    return [torch.randn(number, 5) for number in rows]


def with_state_of(net: nn.Module, module: nn.Module) -> nn.Module:
    module.load_state_dict(net.state_dict())
    return module


def in_place(net: nn.Module, backend: Any) -> nn.Module:
    net.compile(backend=backend)
    return net


WAYS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "the eager backend": lambda net, backend: torch.compile(net, backend="eager"),
    "torch.compile": lambda net, backend: torch.compile(net, backend=backend),
    "module.compile": in_place,
    "module.compile of a child": lambda net, backend: nn.Sequential(in_place(net, backend), nn.Tanh()),
    "both": lambda net, backend: torch.compile(nn.Sequential(in_place(net, backend), nn.Tanh()), backend=backend),
    "decorated": lambda net, backend: with_state_of(net, with_forward(torch.compile(Net.forward, backend=backend))),
    "dynamic": lambda net, backend: torch.compile(net, backend=backend, dynamic=True),
    "a layer of torch's": lambda net, backend: nn.Sequential(
        torch.compile(nn.Linear(5, 5), backend=backend), torch.compile(nn.Sequential(net), backend=backend)
    ),
}


def uncompiled(module: nn.Module) -> nn.Module:
    """Return a copy with the same parameters that has nothing compiled in it."""
    module = getattr(module, "_orig_mod", module)
    if isinstance(module, Net):
        return with_state_of(module, Net())
    return nn.Sequential(*map(uncompiled, module)) if isinstance(module, nn.Sequential) else copy.deepcopy(module)


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_compile(way: str, wrap: Wrap) -> None:
    """R13: the numbers are the plain module's, graphs are few and shared, and the live module stays as it is."""
    graphs = CompileCounterWithBackend("aot_eager")
    module = WAYS[way](Net(), graphs)
    plain = uncompiled(module)
    names = [name for name, _ in module.named_modules()]
    many_steps = way == "torch.compile"
    train_both(plain, wrap(module, 3), batches(ROWS if many_steps else FEW))
    assert graphs.frame_count > 0 or way == "the eager backend"
    assert graphs.frame_count <= MOST_GRAPHS or not (many_steps and KEEPS_ORDER)
    assert [name for name, _ in module.named_modules()] == names


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_default_backend(wrap: Wrap) -> None:
    """R13: inductor."""
    net = Net()
    train_both(copy.deepcopy(net), wrap(torch.compile(net)), batches([8, 8]))


@pytest.mark.skipif(
    not KEEPS_ORDER, reason="needs a torch that can keep its list of compiled code in order (_set_lru_cache)"
)
def test_replicas_do_not_compile_the_same_thing_twice(wrap: Wrap) -> None:
    """R13: one compiles at a time when the inputs are of a new kind, in forward and in backward."""
    graphs = CompileCounterWithBackend("aot_eager")
    wrapped = wrap(torch.compile(Net(), backend=graphs, dynamic=False), 4)
    for num_rows, expected in ((8, 1), (8, 1), (12, 2), (8, 2), (12, 2)):
        wrapped(torch.randn(num_rows, 5)).sum().backward()
        assert graphs.frame_count == expected * NUM_DEVICES
    for num_rows in [8, 12] * 20:
        wrapped(torch.randn(num_rows, 5)).sum().backward()
    assert graphs.frame_count == 2 * NUM_DEVICES


@pytest.mark.skipif(
    not hasattr(torch.fx._symbolic_trace, "is_fx_symbolic_tracing"),
    reason="needs a torch in which compiled code may be called while another thread compiles",
)
def test_many_compilations_under_load(wrap: Wrap) -> None:
    """R13: another thread compiles and runs at the same time, and Python switches threads as often as it can."""
    before = sys.getswitchinterval()
    stop = threading.Event()

    def compile_others() -> None:
        while not stop.is_set():
            torch.compile(never_seen(), backend="aot_eager")(torch.randn(3, 5)).sum().backward()

    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(1) as other:
        other.submit(compile_others)
        try:
            net = never_seen()
            train_both(copy.deepcopy(net), wrap(torch.compile(net, backend="aot_eager"), 3), batches([6, 7]))
        finally:
            sys.setswitchinterval(before)
            stop.set()


def never_seen() -> nn.Module:
    """Return a module like Net whose forward no compiler has seen."""
    namespace: dict[str, Any] = {"torch": torch}
    exec("def forward(self, x): return self.last(torch.tanh(self.norm(self.first(x))))", namespace)
    return with_forward(namespace["forward"])


def test_a_replica_that_fails_lets_the_others_compile(wrap: Wrap) -> None:
    """F1, R13"""

    class Fails(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 3:
                raise ValueError("three rows")
            return super().forward(x)

    net = Fails()
    wrapped = wrap(torch.compile(net, backend="eager"), 3, shares=[2, 3, 1])
    with pytest.raises(ValueError, match="three rows"):
        wrapped(torch.randn(6, 5))
    x = torch.randn(12, 5)
    torch.testing.assert_close(wrapped(x), net(x))


def test_changes_between_steps_are_seen(wrap: Wrap) -> None:
    """R8, R13: buffers, frozen parameters, layers."""

    def freeze(net: nn.Module) -> None:
        net.first.requires_grad_(False)

    def exchange(net: nn.Module) -> None:
        torch.manual_seed(1)
        net.last = nn.Linear(8, 3)

    def scale(net: nn.Module) -> None:
        net.scale.mul_(3)

    net = Net()
    plain, wrapped = copy.deepcopy(net), wrap(torch.compile(net, backend="aot_eager"))
    for change in (lambda net: None, freeze, exchange, scale):  # a new hook is what compiled code does not look for
        for module in (plain, net):
            change(module)
            module.zero_grad()
        train_both(plain, wrapped, batches([6]))


def test_nothing_keeps_replicas_alive(wrap: Wrap, collector_off: None) -> None:
    """N10: neither the compiler nor a reference cycle."""
    alive: list[weakref.ref[nn.Module]] = []

    class Notes(Net):
        @torch.compiler.disable
        def note(self) -> None:
            alive.append(weakref.ref(self))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.note()
            return super().forward(x)

    for module in (torch.compile(Notes(), backend="aot_eager"), in_place(Notes(), "aot_eager")):
        wrapped = wrap(module)
        for _ in range(2):
            wrapped(torch.randn(6, 5)).sum().backward()
        gc.collect()
        alive.clear()
        wrapped(torch.randn(6, 5)).sum().backward()
        assert len(alive) == 2
        assert not any(reference() for reference in alive)


def test_the_verbs() -> None:
    """R13: replicate, and the plain composition."""
    net = Net()
    compiled = torch.compile(net, backend="aot_eager")
    x = torch.randn(7, 5)
    torch.testing.assert_close(data_parallel(compiled, x, in_turn(2)), net(x))
    for replica, device in zip(replicate(compiled, in_turn(2)), in_turn(2), strict=True):
        assert replica._orig_mod is not net
        torch.testing.assert_close(replica(x.to(device)).to(x.device), net(x))
        replica.eval()
        assert net.training
        torch.testing.assert_close(replica(x.to(device)).to(x.device), -net(x))


# ---- compiled after wrapping -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
def test_compiled_after_wrapping(way: str, wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    """R13: right numbers; the replicas are not compiled, as the log says with newer releases of torch."""
    net = Net()
    plain, wrapped = copy.deepcopy(net), wrap(net, 3)
    train_both(plain, WAYS[way](wrapped, "aot_eager"), batches(FEW))
    if torch.__version__ >= (2, 13):  # an older one does not begin to compile a wrapper
        assert "compile the module inside: DataParallel(torch.compile(model))" in caplog.text


@pytest.mark.skipif(not ON_CPU, reason="about machines without accelerators")
def test_compiled_where_there_is_one_device(no_accelerators: None) -> None:
    """R13, A2, A3: the plain module, compiled."""
    graphs = CompileCounterWithBackend("aot_eager")
    net = Net()
    plain = copy.deepcopy(net)
    train_both(plain, torch.compile(DataParallel(net), backend=graphs), batches(FEWER))
    assert graphs.frame_count > 0


Make = Callable[[nn.Module], nn.Module]


def between_layers(middle: nn.Module) -> nn.Module:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model.after(model.middle(torch.relu(model.before(x))))

    torch.manual_seed(1)
    return Calls(forward, before=nn.Linear(5, 5), middle=middle, after=nn.Linear(3, 2))


# Name -> what is made of a module by wrapping and compiling, and how many graphs that takes, at least.
NESTED: dict[str, tuple[Callable[[nn.Module, Make, Make], nn.Module], int]] = {
    "compiled, in a compiled model": (lambda net, wrap, compile: compile(between_layers(wrap(compile(net)))), 3),
    "in a replica of a compiled model": (lambda net, wrap, compile: wrap(compile(between_layers(wrap(net)))), 2),
}


@pytest.mark.parametrize("way", NESTED)
def test_wrappers_and_compiled_models_in_each_other(way: str, wrap: Wrap) -> None:
    """R13, A10: what is around a wrapper is compiled, and what is in it where that is compiled too."""
    make, num_graphs = NESTED[way]
    graphs, net = CompileCounterWithBackend("aot_eager"), Net()
    plain = make(copy.deepcopy(net), lambda module: module, lambda module: module)
    train_both(plain, make(net, wrap, lambda module: torch.compile(module, backend=graphs)), batches(FEWER))
    assert graphs.frame_count >= num_graphs


def test_a_map_compiles_once_for_all_lanes() -> None:
    """R13, I1: whichever lane is first; once a device."""
    counter = CompileCounterWithBackend("eager")
    net = Net().eval()
    model = DataParallel(torch.compile(net, backend=counter), in_turn(3))
    some = [torch.randn(4, 5) for _ in range(9)]
    with torch.no_grad():
        expected = [net(x) for x in some]
    for _ in range(2):
        for output, plain in zip(model.map(some), expected, strict=True):
            torch.testing.assert_close(output, plain)
    assert counter.frame_count == len(set(in_turn(3)))


def test_batch_norm_over_all_replicas_inside_what_is_compiled(wrap: Wrap) -> None:
    """R13, N5: torch.compile does not follow the exchange; what is between two batch norms is compiled."""
    layers = [nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()]
    plain = nn.Sequential(*layers)
    net = copy.deepcopy(plain)
    wrapped = wrap(torch.compile(net, backend="aot_eager"), sync_batch_norm=True)
    train_both(plain, wrapped, batches([8, 8]))
    assert_same_state(net, plain, 1e-10)


def test_a_tensor_that_is_not_the_modules_leaves_compiled_parts_their_donated_buffers(wrap: Wrap) -> None:
    """N1: graphs are kept for each other only where they share nodes, as by the history of such a tensor."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.body(x) * held.shift.to(x)

    def gradients(model: Any, history: bool) -> list[Any]:
        held.shift = leaf.exp() if history else leaf
        leaf.grad = None
        loss_of(model(torch.arange(20.0, dtype=torch.float64).sin().view(4, 5))).backward()
        return [leaf.grad, *[parameter.grad for parameter in model.parameters()]]

    leaf, held = torch.linspace(0, 1, 5, dtype=torch.float64, requires_grad=True), types.SimpleNamespace()
    body = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Fn(torch.sin), nn.Linear(5, 5))
    plain = Calls(forward, body=body)
    compiled = Calls(forward, body=torch.compile(copy.deepcopy(body), backend="aot_eager", dynamic=True))
    torch.testing.assert_close(gradients(wrap(compiled, 2), False), gradients(plain, False))
    plain.zero_grad()
    torch.testing.assert_close(gradients(wrap(copy.deepcopy(plain), 2), True), gradients(plain, True))


def test_gradients_between_outputs_of_compiled_parts(wrap: Wrap) -> None:
    """R13, N1: the way between runs twice, which torch's donated buffers do not allow: a note has the line to write."""

    def forward(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = net.body(x)
        return net.head(hidden), hidden

    def step(model: Any) -> torch.Tensor:
        output, hidden = model(torch.arange(20.0, dtype=torch.float64).sin().view(4, 5))
        hidden.retain_grad()
        (loss_of(output) + loss_of(hidden)).backward()
        return hidden.grad

    def made() -> nn.Module:
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Fn(torch.sin), nn.Linear(5, 5)) for _ in range(2)]
        body, head = (torch.compile(part, backend="aot_eager") for part in parts)
        return Calls(forward, body=body, head=head)

    expected = step(made())
    with pytest.raises(RuntimeError, match="donated buffers") as raised:
        step(wrap(made(), 2))
    assert any("torch._functorch.config.donated_buffer = False" in note for note in raised.value.__notes__)
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        torch.testing.assert_close(step(wrap(made(), 2)), expected)
