"""State that torch and Python keep once a process, changed inside replicas that run at the same time."""

import contextlib
import copy
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import cached
from torch.utils.checkpoint import checkpoint

from helpers.in_time import WAIT_S, in_time
from helpers.modules import Calls
from unisono import DataParallel, ReplicaTimeout
from unisono.runtime import process_state
from unisono.runtime.torch_private import process_wide

TWO = ["cpu"] * 2
TIMES = 30  # replicas overlap in another way each time


def meeting(num_replicas: int = 2) -> Callable[[], None]:
    """Return a function in which replicas wait for each other."""
    barrier = threading.Barrier(num_replicas)
    return lambda: barrier.wait(WAIT_S) and None


def two_rows() -> torch.Tensor:
    return torch.tensor([[1.0], [-2.0]])


def with_dual_level(cube: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(cube(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


FORWARD_MODE: dict[str, Callable[[Callable[..., Any], torch.Tensor], torch.Tensor]] = {
    "jvp": lambda cube, x: torch.func.jvp(cube, (x,), (torch.ones_like(x),))[1],
    "hessian": lambda cube, x: torch.func.hessian(lambda z: cube(z).sum())(x).sum((2, 3)),
    "dual_level": with_dual_level,
}


@pytest.mark.parametrize("way", FORWARD_MODE)
@pytest.mark.parametrize("inside", [False, True])
def test_forward_mode(way: str, inside: bool, caplog: pytest.LogCaptureFixture) -> None:
    """R16, A10: replicas take turns, also in a wrapper inside a replica; the log says so, once.

    torch has one level for all threads. What left it first took the tangents of the other replica along: zeros.
    """

    def cubed(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return FORWARD_MODE[way](lambda z: net.layer(z) ** 3, x)

    torch.manual_seed(0)
    layer = nn.Linear(1, 1, bias=False)
    net = Calls(cubed, layer=layer)
    wrapped = DataParallel(Calls(lambda net, x: net.inner(x), inner=DataParallel(net, TWO)) if inside else net, TWO)
    x = two_rows()
    output = FORWARD_MODE[way](lambda z: layer(z) ** 3, x)
    expected = output, *torch.autograd.grad(output.square().sum(), layer.weight)
    for _ in range(TIMES):
        output = wrapped(x)
        torch.testing.assert_close((output, *torch.autograd.grad(output.square().sum(), layer.weight)), expected)
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.search("one after the other.*reverse mode.*torchrun", message)


def linearised(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    parameters = dict(net.net.named_parameters())
    moved = {name: net.get_parameter(f"change.{name.replace('.', '_')}") for name in parameters}
    output, change = torch.func.jvp(lambda p: torch.func.functional_call(net.net, p, (x,)), (parameters,), (moved,))
    return output + change


def of_an_equation(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def u(z: torch.Tensor) -> torch.Tensor:
        return net.net(z).sum()

    laplacian = torch.vmap(lambda z: torch.func.hessian(u)(z).diagonal().sum())(x)
    gradient = torch.vmap(torch.func.jacfwd(u))(x)
    return laplacian + gradient.square().sum(1) - net.net(x)[:, 0]


@pytest.mark.parametrize("function", [linearised, of_an_equation])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_models_that_differentiate_in_forward_mode(function: Any, checkpointed: bool) -> None:
    """R16, N1: outputs and gradients of a linearised model and of an equation's residual are the plain module's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    change = nn.ParameterDict({n.replace(".", "_"): torch.randn_like(p) for n, p in net.named_parameters()})
    run = functools.partial(checkpoint, function, use_reentrant=True) if checkpointed else function
    plain = Calls(run, net=net, change=change)
    wrapped, x = DataParallel(copy.deepcopy(plain), ["cpu"] * 3), torch.randn(7, 3, dtype=torch.float64)
    for _ in range(3):
        found = []
        for model in (plain, wrapped):
            rows = x.clone().requires_grad_()
            output = model(rows)
            output.square().sum().backward()
            found.append([output, rows.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
        torch.testing.assert_close(found[1], found[0])


def test_other_replicas_are_not_in_forward_mode() -> None:
    """R16, N5: torch has one level for all threads. A replica normalises while another one differentiates."""
    begun, ended = threading.Event(), threading.Event()

    def waiting(z: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert ended.wait(60)
        return z**3

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x[0] > 0:
            return torch.func.jvp(waiting, (x,), (torch.ones_like(x),))[1]
        assert begun.wait(60)
        try:
            return net.norm(x)
        finally:
            ended.set()

    norm = DataParallel(nn.BatchNorm1d(1, affine=False, track_running_stats=False), TWO, sync_batch_norm=True)
    x = torch.tensor([[1.0], [2.0], [-1.0], [-3.0]])
    output = in_time(lambda: DataParallel(Calls(forward, norm=norm), TWO, sync_batch_norm=False)(x))
    torch.testing.assert_close(output, torch.cat([3 * x[:2] ** 2, norm.module(x[2:])]))


def test_a_level_that_forward_leaves_open() -> None:
    """R16, F7: the next one to begin gets torch's error, as with the plain module; none waits for ever."""
    net = Calls(lambda net, x: (forward_ad.enter_dual_level(), x * 2)[1])
    try:
        with pytest.raises(RuntimeError, match="Nested forward mode AD is not supported") as caught:
            in_time(lambda: DataParallel(net, TWO)(two_rows()))
        assert "write `with torch.autograd.forward_ad.dual_level():`" in "".join(caught.value.__notes__)
        assert "in_dims" not in "".join(caught.value.__notes__)
    finally:
        forward_ad.exit_dual_level()
    done = DataParallel(Calls(lambda net, x: with_dual_level(lambda z: z**3, x)), TWO)(two_rows())
    torch.testing.assert_close(done, 3 * two_rows() ** 2)


def test_settings_and_batch_norm_inside_forward_mode_are_errors() -> None:
    """R16, N5: the other replicas wait for their turn, and would never come. Around it, they work."""

    def in_double(x: torch.Tensor) -> torch.Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return x**3

    def jvp(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]

    with pytest.raises(RuntimeError, match=r"inside forward-mode differentiation.* Change it around"):
        in_time(lambda: DataParallel(Calls(lambda net, x: jvp(in_double, x)), TWO)(two_rows()))
    norm = DataParallel(
        Calls(lambda net, x: jvp(net.norm, x), norm=nn.BatchNorm1d(1, track_running_stats=False)),
        TWO,
        sync_batch_norm=True,
    )
    with pytest.raises(RuntimeError, match=r"inside a torch.func transform"):
        in_time(lambda: norm(two_rows()))

    def around(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            tangent = jvp(lambda z: z**3, net.norm(x) if net.training else x)
            return tangent if not torch.backends.cudnn.enabled else tangent * 0

    model = DataParallel(Calls(around, norm=nn.BatchNorm1d(1, track_running_stats=False)), TWO, sync_batch_norm=True)
    plain = copy.deepcopy(model.module)
    for _ in range(TIMES):
        torch.testing.assert_close(in_time(lambda: model(two_rows())), plain(two_rows()))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # linearize, in the plain module too
def test_torch_fx_traces_in_turns() -> None:
    """R16: its state is the process's: two at a time left `nn.Module.__call__` replaced."""
    net = Calls(lambda net, x: torch.func.linearize(lambda z: z**3, x)[1](torch.ones_like(x)))
    called = nn.Module.__call__
    torch.testing.assert_close(DataParallel(net, TWO)(two_rows()), 3 * two_rows() ** 2)
    assert nn.Module.__call__ is called


Setting: TypeAlias = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]


@contextlib.contextmanager
def set_and_reset(get: Callable[[], Any], set_to: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


def set_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


def switched(get: Callable[[], Any], set_to: Callable[[Any], None], value: Any) -> Setting:
    return lambda: set_and_reset(get, set_to, value), get


# A context in which the state is another one, and what tells the state.
SETTINGS: dict[str, Setting] = {
    "sdpa": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "flags": (lambda: torch.backends.cudnn.flags(enabled=False), lambda: torch.backends.cudnn.enabled),
    "flag": switched(lambda: torch.backends.cudnn.benchmark, set_benchmark, True),
    "default dtype": switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "precision": switched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "deterministic": switched(
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda value: torch.use_deterministic_algorithms(value, warn_only=value),
        True,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("where", ["forward", "forward, sync_batch_norm", "backward"])
def test_a_setting(name: str, where: str) -> None:
    """R16: contexts of two replicas overlapped, and an inner value stayed for good.

    In backward a checkpoint runs forward again.
    """
    context, state = SETTINGS[name]
    meet, seen, before = meeting(), [], state()

    def part(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(TIMES):
            seen.append(state() == before)
            with context():
                meet()
                seen.append(state() != before)
                x = net.norm(x)
        return x

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(part, net, x, use_reentrant=False) if where == "backward" else part(net, x)

    net = Calls(forward, norm=nn.BatchNorm1d(1))
    output = DataParallel(net, TWO, sync_batch_norm="sync" in where)(torch.rand(4, 1))
    if where == "backward":
        output.sum().backward()
    assert len(seen) == 4 * TIMES * (1 + (where == "backward"))
    assert all(seen)
    assert state() == before


def test_cached_parametrizations_in_forward(caplog: pytest.LogCaptureFixture) -> None:
    """R16, R10: the cache was keyed by the live module, so a replica got the value of another one, with its graph."""
    meet = meeting()

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(TIMES):
            with cached():
                meet()
                x = (x + net.linear(x) + net.linear(x)).tanh()
        return x

    net = Calls(forward, linear=nn.Linear(1, 1))
    parametrize.register_parametrization(net.linear, "weight", nn.Tanh())
    DataParallel(net, TWO)(two_rows()).sum().backward()
    assert "parametrize.cached() has no effect" in caplog.text
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    meet = lambda: None  # noqa: E731 - the plain module is alone
    net(two_rows()).sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in net.parameters()])
    assert not process_wide.caches_parametrizations()


def test_warnings_are_caught_in_forward() -> None:
    """R16: the filters of the replica that entered second stayed; one context inside another restores its own."""
    meet, before, seen = meeting(), list(warnings.filters), []

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(TIMES):
            meet()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                meet()
                warnings.warn("in both", stacklevel=1)
        return x

    def alone(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] > 0:
            with warnings.catch_warnings():
                outer = list(warnings.filters)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                seen.append(list(warnings.filters) == outer)
        return x

    for each in (forward, alone):
        DataParallel(Calls(each), TWO)(two_rows())
        assert list(warnings.filters) == before
    assert seen == [True]


# ---- replicas that the data leads different ways -----------------------------------------------------


def states() -> list[Any]:
    return [state() for _, state in SETTINGS.values()]


def enter(name: str) -> AbstractContextManager[Any]:
    return SETTINGS[name][0]()


either_first = pytest.mark.parametrize("rows", [two_rows(), -two_rows()], ids=["first", "second"])


def different(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with enter("sdpa" if x[0, 0] > 0 else "precision"), enter("flags"):
        return x * 1


def one_is_ahead(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with enter("sdpa"):
        try:
            with enter("flags"):
                if x[0, 0] > 0:
                    raise ValueError("the user's")
                with enter("precision"):
                    return x * 1
        except ValueError:
            return x * 3


def one_waits_for_statistics(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x[0, 0] > 0:
        with enter("sdpa"):
            return x * 1
    return net.norm(x)


CHANGES = r"but they differ: replica 0 called _set_.*, replica 1 called _set_"


@pytest.mark.parametrize(
    ("forward", "sync_batch_norm", "message"),
    [(different, False, CHANGES), (one_is_ahead, False, CHANGES), (one_waits_for_statistics, True, "but they differ")],
)
@either_first
def test_different_changes(
    forward: Callable[..., torch.Tensor], sync_batch_norm: bool, message: str, rows: torch.Tensor
) -> None:
    """R16, N5: are an error, also for a replica that catches its own, and all is as before."""
    before = states()
    with pytest.raises(RuntimeError, match=message):
        DataParallel(Calls(forward, norm=nn.BatchNorm1d(1)), TWO, sync_batch_norm=sync_batch_norm)(rows)
    assert states() == before


@either_first
def test_a_change_of_one_replica(rows: torch.Tensor) -> None:
    """R16: it waits until the other one has ended."""
    seen: list[bool] = []

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with enter("sdpa") if x[0, 0] > 0 else contextlib.nullcontext():
            seen.append(torch.backends.cuda.flash_sdp_enabled())
        return x * 1

    assert DataParallel(Calls(forward), TWO)(rows).tolist() == rows.tolist()
    assert seen == [True, False]
    assert torch.backends.cuda.flash_sdp_enabled()


@either_first
def test_a_replica_that_fails_in_a_context(rows: torch.Tensor) -> None:
    """R16, F1: its exception is the one that is raised, and the other replica leaves what both have entered."""
    before = states()

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with enter("sdpa"):
            if x[0, 0] > 0:
                raise ValueError("the user's")
            with enter("flags"):
                return x * 1

    with pytest.raises(ValueError, match="the user's"):
        DataParallel(Calls(forward), TWO)(rows)
    assert states() == before


@pytest.mark.parametrize("timeout", [None, 2.0])
def test_a_step_that_is_cut_off_in_a_context(timeout: float | None) -> None:
    """R16, F3, F7: all is as before at once, and not only when the replica that is left alone comes to its end."""
    before, may_end, ended = states(), threading.Event(), threading.Event()

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with enter("sdpa"), enter("default dtype"):
            if x[0, 0] < 0:
                may_end.wait(WAIT_S)
                ended.set()
            elif timeout is None:
                raise KeyboardInterrupt
        return x * 1

    try:
        with pytest.raises((KeyboardInterrupt, ReplicaTimeout)):
            DataParallel(Calls(forward), TWO, timeout=timeout)(two_rows())
        assert states() == before
    finally:
        may_end.set()
    assert ended.wait(WAIT_S)
    assert states() == before


def test_a_compiled_module() -> None:
    """R16, R13: while one replica compiles, the others wait for it, and it changes the state alone."""

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return net.linear(x)

    net = Calls(forward, linear=nn.Linear(1, 1))
    model = DataParallel(torch.compile(net, backend="eager"), TWO)
    for _ in range(3):
        torch.testing.assert_close(model(two_rows()), net(two_rows()))
    assert torch.backends.cuda.flash_sdp_enabled()


# ---- a map -------------------------------------------------------------------------------------------


def test_lanes_take_turns() -> None:
    """R16, I1: lanes compute different batches, so a lane that changes the state runs the rest of its batch alone."""
    started = threading.Event()
    seen: list[bool] = []

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == 1:  # goes on while the other lane wants to change the state
            assert started.wait(WAIT_S)
        seen.append(torch.get_default_dtype() is torch.float32)
        if x[0, 0] != 1:
            started.set()
            with enter("default dtype"):
                seen.append(torch.ones(()).dtype is torch.float64)
        seen.append(torch.ones(()).dtype is torch.float32)
        return torch.func.jvp(lambda z: z * z, (x,), (torch.ones_like(x),))[1]

    batches = [torch.full((2, 1), float(i)) for i in range(12)]
    with DataParallel(Calls(forward), ["cpu"] * 3).map(batches) as outputs:
        assert [output[0, 0].item() for output in outputs] == [2.0 * i for i in range(12)]
    assert all(seen)
    assert torch.get_default_dtype() is torch.float32


# ---- outside of replicas -------------------------------------------------------------------------------


def test_outside_of_replicas() -> None:
    """R16: other threads set what they like meanwhile, as in the plain module."""
    assert process_state.change("anything", lambda: "done") == "done"
    before = states()

    def elsewhere() -> None:
        for name in SETTINGS:
            with enter(name):
                assert states() != before

    DataParallel(Calls(lambda net, x: (in_time(elsewhere) if x[0, 0] > 0 else None) or x * 1), TWO)(two_rows())
    assert states() == before
