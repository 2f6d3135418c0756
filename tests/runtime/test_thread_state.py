"""R14: a replica sees the thread-local state of its caller, and leaves none behind."""

import contextlib
import contextvars
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.modules import Fn
from unisono import DataParallel, parallel_apply, verify
from unisono.testing import simulated_accelerators

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


# ---- state that is carried -------------------------------------------------------------------------

NOTHING = contextlib.nullcontext


@contextlib.contextmanager
def inference_with_grad() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


@contextlib.contextmanager
def set_for_good(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """For what is set without a context: undone at the end."""
    setter(value)
    yield
    setter(before)


def simulated_default_device() -> torch.device:
    with simulated_accelerators(2) as devices:  # which makes them known for good
        return devices[1]


def inference_and_grad() -> tuple[bool, bool]:
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


def denormals_flushed() -> bool:
    """Return a flag of the processor, one a thread."""
    return bool((torch.tensor(1e-310, dtype=torch.float64) * 0.5 == 0).item())


def autocast() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


LOOKS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "enable_grad": (torch.enable_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, inference_and_grad),
    "grad in inference_mode": (inference_with_grad, inference_and_grad),
    "autocast bf16": (lambda: torch.autocast("cpu", torch.bfloat16), autocast),
    "autocast fp16, no cache": (lambda: torch.autocast("cpu", torch.float16, cache_enabled=False), autocast),
    "default device": (lambda: torch.device("meta"), lambda: (torch.get_default_device(), torch.ones(1).device)),
    "default device cpu": (lambda: torch.device("cpu"), lambda: torch.ones(1).device),
    "set_default_device": (lambda: set_for_good(torch.set_default_device, "meta", None), lambda: torch.ones(1).device),
    "simulated default device": (simulated_default_device, lambda: str(torch.ones(1).device)),
    "set_default_dtype": (
        lambda: set_for_good(torch.set_default_dtype, torch.float64, torch.get_default_dtype()),
        lambda: torch.ones(1).dtype,
    ),
    "set_flush_denormal": (lambda: set_for_good(torch.set_flush_denormal, True, False), denormals_flushed),
    "contextvar": (lambda: set_for_good(variable.set, "something", "nothing"), variable.get),
    "hooks disabled": (
        lambda: disable_saved_tensors_hooks("not here"),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
}


SAME_AS_BEFORE = ["enable_grad", "default device cpu"]
if not torch.set_flush_denormal(False):
    SAME_AS_BEFORE.append("set_flush_denormal")  # this processor cannot


@pytest.mark.parametrize("name", LOOKS)
def test_every_replica_sees_the_callers_state(name: str) -> None:
    """R14: and is back as it was in the next call. (The default dtype belongs to the process.)"""
    enter, look = LOOKS[name]
    before = look()
    with enter():
        expected = look()
        assert expected != before or name in SAME_AS_BEFORE
        assert in_every_replica(look) == [expected] * 3
        assert look() == expected
    assert in_every_replica(look) == [before] * 3


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


@pytest.mark.parametrize(
    "run", [lambda model, x: model(x), lambda model, x: list(model.map([x] * 9, method="forward"))]
)
def test_a_threading_local_that_the_caller_has_filled(run: Callable[..., Any]) -> None:
    """R14: it is empty in other threads. The error says so, if that is the cause."""

    class Settings(threading.local):
        known = 1.0

    settings, by_thread = Settings(), threading.local()

    def forward(x: torch.Tensor) -> torch.Tensor:
        by_thread.calls = getattr(by_thread, "calls", 0) + 1  # each thread's own
        if threading.current_thread() is not threading.main_thread():
            there.set()
        elif not there.wait(10):
            raise TimeoutError("no other thread has a batch")
        return x * settings.known * settings.rate

    there = threading.Event()
    model, x = DataParallel(Fn(forward), ["cpu"] * 2, timeout=60.0), torch.ones(4, 3)
    with pytest.raises(AttributeError, match="rate") as raised:
        run(model, x)
    assert not [note for note in raised.value.__notes__ if "threading" in note], "it is nowhere"
    settings.rate = 2.0
    there.clear()
    with pytest.raises(AttributeError, match="rate") as raised:
        run(model, x)
    (note,) = [note for note in raised.value.__notes__ if "threading" in note]
    assert "the calling thread has set 'rate' in a threading.local" in note
    assert "contextvars.ContextVar" in note


class Scale(threading.local):
    scale = 1.0

    def __init__(self) -> None:
        self.shift, self.cache, self.calls = 0.0, {}, 0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


plain_local, scales = threading.local(), Scale()


def counted(x: torch.Tensor) -> torch.Tensor:
    scales.calls += 1
    scales.cache[len(x)] = x.shape
    plain_local.workspace = getattr(plain_local, "workspace", x.new_zeros(3))
    return x


DEFAULTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "getattr": (lambda x: x * getattr(plain_local, "rate", 1.0), ["plain_local.rate"]),
    "__init__": (lambda x: x + scales.shift, ["scales.shift"]),
    "a method": (lambda x: scales.scaled(x + 1), ["scales.scale"]),
    "each thread's own": (counted, []),
    "not read": (lambda x: x * getattr(plain_local, "other", 1.0), []),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_value_in_a_threading_local_that_code_reads_with_a_default(name: str) -> None:
    """R14: a warning names what only the calling thread has set, and not what forward keeps for each thread."""
    function, names = DEFAULTS[name]
    x = torch.ones(4, 3)
    plain_local.rate = scales.shift = scales.scale = 2.0
    try:
        function(x)
        for run in (lambda model: model(x), lambda model: list(model.map([x] * 9))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run(DataParallel(Fn(function), ["cpu"] * 2, timeout=60.0))
            texts = [str(each.message) for each in caught if "in a threading.local" in str(each.message)]
            assert len(texts) == len(names)
            assert all(f"read {each} (global of test_thread_state.py)" in texts[0] for each in names)
        report = " ".join(str(verify(Fn(function), (x,), device_ids=["cpu"] * 2)).split())
        assert [each for each in names if f"read {each}" in report] == names
        assert ("in a threading.local" in report) == bool(names)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(DataParallel(Fn(function), ["cpu"])(x), function(x))
            with save_on_cpu():  # all replicas are in the calling thread
                assert torch.equal(DataParallel(Fn(function), ["cpu"] * 2)(x), function(x))
    finally:
        plain_local.__dict__.clear()
        scales.__dict__.clear()
        scales.__init__()


@pytest.fixture
def model() -> DataParallel:
    torch.manual_seed(0)
    return DataParallel(nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double(), ["cpu"] * 3)


def step(
    module: nn.Module, forward: Callable[[], Any] = NOTHING, backward: Callable[[], Any] = NOTHING
) -> list[torch.Tensor]:
    """Return the output and the gradients of one step, of which both halves are in a context."""
    module.zero_grad()
    x = torch.arange(21, dtype=torch.float64).sin().view(7, 3)
    with forward():
        output = module(x)
    with backward():
        output.pow(2).sum().backward()
    return [output.detach(), *(parameter.grad for parameter in module.parameters())]


# ---- modes that stay in the caller's thread --------------------------------------------------------

noted: list[tuple[str, int]] = []  # what a mode has been called for, and in which thread


def note(what: str, tensor: torch.Tensor | None = None) -> torch.Tensor | None:
    noted.append((what, threading.get_ident()))
    return None if tensor is None else tensor.clone()


class NotesOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "addmm" in str(func):
            note("forward")
        return func(*args, **(kwargs or {}))


class NotesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh:
            note("forward")
        return func(*args, **(kwargs or {}))


MODES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dispatch mode": (NotesOperations, NotesOperations),
    "dispatch mode in backward only": (NOTHING, NotesOperations),
    "function mode": (NotesFunctions, NotesFunctions),
    "hooks": (lambda: saved_tensors_hooks(partial(note, "pack"), partial(note, "unpack")), NOTHING),
    "save_on_cpu": (save_on_cpu, NOTHING),
    "hooks disabled": (lambda: disable_saved_tensors_hooks("no hooks here"), NOTHING),
}


@pytest.mark.parametrize("name", MODES)
def test_a_step_under_a_mode(model: DataParallel, name: str) -> None:
    """R14: it is called in the caller's thread, for each replica as often as for the plain module."""
    noted.clear()
    expected, of_plain = step(model.module, *MODES[name]), noted * 3
    noted.clear()
    torch.testing.assert_close(step(model, *MODES[name]), expected)
    assert Counter(noted) == Counter(of_plain)
    assert bool(noted) == (name in ("dispatch mode", "function mode", "hooks"))


def test_func_transforms(model: DataParallel) -> None:
    """R14: torch.func's grad, vmap, jvp, jacrev over a wrapped module; forward-mode AD by hand."""
    x, v = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)

    def forward_mode(f: Callable[..., torch.Tensor]) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent

    transforms: list[Callable[[Callable[..., torch.Tensor]], Any]] = [
        lambda f: torch.func.grad(lambda x: f(x).pow(2).sum())(x),
        lambda f: torch.func.vmap(f)(torch.stack([x, v])),
        lambda f: torch.func.jvp(f, (x,), (v,))[1],
        lambda f: torch.func.jacrev(f)(x),
        lambda f: torch.func.vjp(f, x)[1](torch.ones(4, 2, dtype=torch.float64))[0],
        lambda f: torch.func.hessian(lambda x: f(x).pow(2).sum())(x),
        forward_mode,
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(model), transform(model.module))
