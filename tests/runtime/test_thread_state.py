"""R14: a replica sees the thread-local state of its caller, and leaves none behind."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands import DataParallel, parallel_apply
from manyhands.runtime.thread_state import ThreadState, modes_that_stay

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")


def in_every_replica(look: Callable[[], Any]) -> list[Any]:
    """Return what `look()` says in each of three replicas, and check that they were in different threads."""
    together = threading.Barrier(3)

    def task() -> tuple[Any, int]:
        together.wait(30)
        return look(), threading.get_ident()

    results = parallel_apply([task] * 3, [()] * 3)
    assert len({ident for _, ident in results}) == 3
    return [value for value, _ in results]


class SeesThread(nn.Module):
    """Reports the thread that it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.threads: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.threads.append(threading.get_ident())
        return torch.tanh(self.linear(x))


# ---- state that is carried -------------------------------------------------------------------------

NOTHING = contextlib.nullcontext


@contextlib.contextmanager
def variable_set(value: str) -> Iterator[None]:
    token = variable.set(value)
    yield
    variable.reset(token)


@contextlib.contextmanager
def inference_with_grad() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


LOOKS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "enable_grad": (torch.enable_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled())),
    "grad in inference_mode": (
        inference_with_grad,
        lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()),
    ),
    "autocast bf16": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
    ),
    "autocast fp16, no cache": (
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
    ),
    "matmul under autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
    ),
    "default device": (
        lambda: torch.device("meta"),
        lambda: (torch.get_default_device(), torch.ones(1).device),
    ),
    "default device cpu": (lambda: torch.device("cpu"), lambda: torch.ones(1).device),
    "contextvar": (lambda: variable_set("something"), variable.get),
    "hooks disabled": (
        lambda: disable_saved_tensors_hooks("not here"),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
}


@pytest.mark.parametrize("name", LOOKS)
def test_every_replica_sees_the_callers_state(name: str) -> None:
    """R14: and is back as it was in the next call."""
    enter, look = LOOKS[name]
    before = look()
    with enter():
        expected = look()
        assert in_every_replica(look) == [expected] * 3
        assert look() == expected
    assert in_every_replica(look) == [before] * 3


def test_default_dtype_is_seen() -> None:
    """R14: it belongs to the process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert in_every_replica(lambda: torch.ones(1).dtype) == [torch.float64] * 3
    finally:
        torch.set_default_dtype(before)


def test_set_default_device_is_seen() -> None:
    """R14: not only the context manager."""
    torch.set_default_device("meta")
    try:
        assert in_every_replica(lambda: torch.ones(1).device.type) == ["meta"] * 3
    finally:
        torch.set_default_device(None)
    assert in_every_replica(lambda: torch.ones(1).device.type) == ["cpu"] * 3


def test_a_simulated_default_device_is_seen() -> None:
    """R14"""
    import manyhands.testing  # noqa: F401 - it makes sim:1 known

    with torch.device("sim:1"):
        assert in_every_replica(lambda: str(torch.ones(1).device)) == ["sim:1"] * 3


def test_flush_denormal_is_seen() -> None:
    """R14: a flag of the processor, one a thread; on and off again."""
    tiny = torch.tensor(1e-310, dtype=torch.float64)

    def flushed() -> bool:
        return bool((tiny * 0.5 == 0).item())

    assert in_every_replica(flushed) == [False] * 3
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert in_every_replica(flushed) == [True] * 3
        assert flushed()
    finally:
        torch.set_flush_denormal(False)
    assert in_every_replica(flushed) == [False] * 3


def test_what_a_worker_sets_is_not_the_callers() -> None:
    """R14: a contextvar that the caller's own replica sets stays set, as with the plain module; others' are lost."""
    caller = str(threading.get_ident())
    token = variable.set("before")
    try:
        in_every_replica(lambda: variable.set(str(threading.get_ident())))
        assert variable.get() == caller
        assert in_every_replica(variable.get) == [caller] * 3
    finally:
        variable.reset(token)


# ---- state in a whole step -------------------------------------------------------------------------


@pytest.fixture
def model() -> DataParallel:
    torch.manual_seed(0)
    return DataParallel(SeesThread().double(), ["cpu"] * 3)


def test_bf16_autocast_in_a_step() -> None:
    """R14: outputs and gradients are the plain module's under bf16 autocast; torch's own use fp16."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    wrapped = DataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), ["cpu"] * 2)
    wrapped.module.load_state_dict(plain.state_dict())
    x = torch.randn(8, 6)
    for module in (plain, wrapped):
        with torch.autocast("cpu", torch.bfloat16):
            output = module(x)
        assert output.dtype is torch.bfloat16
        output.float().pow(2).sum().backward()
    for mine, theirs in zip(wrapped.module.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype is torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-2, atol=2e-2)


def test_saved_tensor_hooks_in_a_step(model: DataParallel) -> None:
    """R14: pack and unpack are called for what every replica saves, in the caller's thread; gradients are right."""
    packed: list[int] = []
    unpacked: list[int] = []
    x = torch.randn(7, 3, dtype=torch.float64)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(threading.get_ident())
        return tensor.clone()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(threading.get_ident())
        return tensor

    with saved_tensors_hooks(pack, unpack):
        output = model(x)
    output.sum().backward()
    assert set(packed) == set(unpacked) == {threading.get_ident()}
    assert len(unpacked) == len(packed)
    mine = [p.grad.clone() for p in model.module.parameters()]
    model.zero_grad()
    model.module(x).sum().backward()
    for grad, parameter in zip(mine, model.module.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


def test_save_on_cpu_and_hooks_disabled_in_a_step(model: DataParallel) -> None:
    """R14"""
    x = torch.randn(7, 3, dtype=torch.float64)
    for context in (save_on_cpu(), disable_saved_tensors_hooks("no hooks here")):
        model.zero_grad()
        with context:
            model(x).sum().backward()
        mine = [p.grad.clone() for p in model.module.parameters()]
        model.zero_grad()
        model.module(x).sum().backward()
        for grad, parameter in zip(mine, model.module.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


# ---- modes that stay in the caller's thread --------------------------------------------------------


class CountsOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "addmm" in str(func)
        return func(*args, **(kwargs or {}))


class CountsFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.tanh
        return func(*args, **(kwargs or {}))


def test_modes_that_stay_are_known() -> None:
    """R14: a default device is no reason to stay."""
    assert not modes_that_stay()
    with torch.device("cpu"):
        assert not modes_that_stay()
    for mode in (CountsOperations(), CountsFunctions()):
        with mode:
            assert modes_that_stay()
    with forward_ad.dual_level():
        assert modes_that_stay()
    assert torch.func.vmap(lambda x: x * modes_that_stay())(torch.ones(2)).tolist() == [1.0, 1.0]
    assert not modes_that_stay()


@pytest.mark.parametrize("make_mode", [CountsOperations, CountsFunctions])
def test_dispatch_and_function_modes_see_every_replica(model: DataParallel, make_mode: Callable[[], Any]) -> None:
    """R14: replicas run in the caller's thread, with right outputs and gradients."""
    x = torch.randn(7, 3, dtype=torch.float64)
    with make_mode() as mode:
        output = model(x)
        output.pow(2).sum().backward()
    assert mode.count == 3
    assert set(model.module.threads) == {threading.get_ident()}
    mine = [p.grad.clone() for p in model.module.parameters()]
    model.zero_grad()
    expected = model.module(x)
    expected.pow(2).sum().backward()
    torch.testing.assert_close(output, expected)
    for grad, parameter in zip(mine, model.module.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


def test_shares_hold_under_a_mode_too() -> None:
    """R14, S2: the plain composition splits rows as the wrapper was told to."""
    seen: list[int] = []

    class Sees(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return x

    model = DataParallel(Sees(), ["cpu"] * 4, shares=[3, 1, 0, 2])
    with CountsOperations():
        output = model(torch.arange(12.0))
    assert seen == [6, 2, 4]
    assert torch.equal(output, torch.arange(12.0))


def test_a_mode_that_is_entered_before_backward(model: DataParallel) -> None:
    """R14: forward in the workers, backward under a mode of the caller's."""
    x = torch.randn(7, 3, dtype=torch.float64)
    loss = model(x).pow(2).sum()
    with CountsOperations():
        loss.backward()
    mine = [p.grad.clone() for p in model.module.parameters()]
    model.zero_grad()
    model.module(x).pow(2).sum().backward()
    for grad, parameter in zip(mine, model.module.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use
def test_func_transforms(model: DataParallel) -> None:
    """R14: torch.func's grad, vmap, jvp, jacrev over a wrapped module."""
    plain = model.module
    x = torch.randn(4, 3, dtype=torch.float64)
    v = torch.randn(4, 3, dtype=torch.float64)
    transforms: list[Callable[[Callable[..., torch.Tensor]], Any]] = [
        lambda f: torch.func.grad(lambda x: f(x).pow(2).sum())(x),
        lambda f: torch.func.vmap(f)(torch.stack([x, v])),
        lambda f: torch.func.jvp(f, (x,), (v,))[1],
        lambda f: torch.func.jacrev(f)(x),
        lambda f: torch.func.vjp(f, x)[1](torch.ones(4, 2, dtype=torch.float64))[0],
        lambda f: torch.func.hessian(lambda x: f(x).pow(2).sum())(x),
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(model), transform(plain))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use
def test_forward_mode_ad(model: DataParallel) -> None:
    """R14"""
    x, v = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        tangent = forward_ad.unpack_dual(model(dual)).tangent
        expected = forward_ad.unpack_dual(model.module(dual)).tangent
    torch.testing.assert_close(tangent, expected)


# ---- the class -------------------------------------------------------------------------------------


def test_capture_and_applied() -> None:
    """R14: what one thread captures, another one has while `applied` lasts, and not longer."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        state = ThreadState.capture()
    found: list[Any] = []

    def look() -> None:
        def now() -> tuple[bool, bool]:
            return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

        found.append(now())
        with state.applied():
            found.append(now())
        found.append(now())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(True, False), (False, True), (True, False)]
