"""What the engines' contract (tests/contract) shares: the engines, the devices, modules, and ways to compare."""

import contextlib
import copy
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers.in_time import WAIT_S
from helpers.in_time import in_time as _in_time
from helpers.kept_workers import KeptWorkers
from helpers.late_copies import send_late
from helpers.twins import assert_same_gradients as _assert_same_gradients
from unisono import DataParallel
from unisono.autograd import broadcast
from unisono.engines.threads import Threads
from unisono.primitives import pytree
from unisono.runtime.buckets import buckets_of

Wrap = Callable[..., DataParallel]
EngineFor = Callable[[str, list[str]], Any]  # the argument `engine` for its name and the replicas' devices

# Replica i is on DEVICES[i % len(DEVICES)].
DEVICES = os.environ.get("UNISONO_TEST_DEVICES", "cpu").split(",")
ON_CPU = DEVICES == ["cpu"]
on_the_cpu = pytest.mark.skipif(not ON_CPU, reason="about random numbers that are drawn on the CPU")
in_one_memory = pytest.mark.skipif(len(set(DEVICES)) > 1, reason="several devices cannot share a tensor")

# ---- engines -------------------------------------------------------------------------------------


def threads_with_separate_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As on several GPUs: parameters are copied to the replicas, late, and gradients come back in several buckets."""
    if ON_CPU:
        send_late(monkeypatch)
    monkeypatch.setattr(broadcast, "buckets_of", functools.partial(buckets_of, full_bytes=300))
    return Threads(separate_memory=True)


# Name of an engine -> the argument `engine` of DataParallel, for replicas on these devices.
ENGINE_ARGUMENTS: dict[str, Callable[[list[str], KeptWorkers, pytest.MonkeyPatch], Any]] = {
    "threads": lambda *_: "threads",
    "threads with separate memory": lambda _, workers, monkeypatch: threads_with_separate_memory(monkeypatch),
    "processes": lambda devices, workers, _: workers.engine(devices),
    # As on several GPUs: parameters are sent to the processes, and gradients are all-reduced by gloo.
    "processes over gloo": lambda devices, workers, _: workers.engine(devices, share_memory=False),
}
# The two engines that imitate several GPUs are for `make test-all`, and in `make test` where a test asks for them.
ENGINES: list[Any] = [
    pytest.param(name, marks=[] if name in ("threads", "processes") else pytest.mark.slow) for name in ENGINE_ARGUMENTS
]
WITH_GLOO: list[Any] = ["threads", "processes", "processes over gloo", ENGINES[1]]
if not ON_CPU:  # processes have tests of their own there: to start one takes seconds
    ENGINES = WITH_GLOO = ["threads", "threads with separate memory"]


def on_engines(names: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test on these engines instead of ENGINES."""
    return pytest.mark.parametrize("engine", names, indirect=True)


over_gloo_too = on_engines(WITH_GLOO)
on_threads = on_engines(["threads"])  # where the engine cannot matter


def over_engines(
    names: str,
    threads: Iterable[tuple[Any, ...]],
    *,
    processes: Iterable[tuple[Any, ...]],
    gloo: Iterable[tuple[Any, ...]],
) -> pytest.MarkDecorator:
    """Parametrise a test whose axes multiply: with all cases on threads, with fewer on the other engines.

    What a module computes, and which rows a replica has, do not depend on how they are sent to another process. So each
    value of an axis that matters there is tested there, but not each with each.

    Args:
        names: the arguments of a case.
        threads: the cases on threads.
        processes: the cases on processes.
        gloo: the cases, in `make test-all`, on processes over gloo and on threads with separate memory.
    """
    gloo, slow = list(gloo), [pytest.mark.slow]
    product = [pytest.param("threads", *case) for case in threads]
    if ON_CPU:
        product += [pytest.param("processes", *case) for case in processes]
        product += [pytest.param("processes over gloo", *case, marks=slow) for case in gloo]
    product += [pytest.param("threads with separate memory", *case, marks=slow if ON_CPU else ()) for case in gloo]
    return pytest.mark.parametrize(f"engine, {names}", product, indirect=["engine"], ids=label)


def label(value: Any) -> str | None:
    """Return what a value is called in the name of a test, where pytest would give it a number."""
    return type(value).__name__ if isinstance(value, BaseException) else str(value) if isinstance(value, list) else None


def each_with(values: Iterable[Any], cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(value, *case) for value in values for case in cases]


def in_processes(engine: str) -> bool:
    return engine.startswith("processes")


def num_here(engine: str, num_replicas: int) -> int:
    """Return how many of the replicas are in this process, and so share Python objects with the caller."""
    return 1 if in_processes(engine) else num_replicas


# ---- devices, threads, time ----------------------------------------------------------------------


@contextlib.contextmanager
def on_first_device() -> Iterator[None]:
    """Let this thread make its tensors on the first device."""
    with contextlib.nullcontext() if ON_CPU else torch.device(DEVICES[0]):
        yield


def in_turn(num_replicas: int) -> list[str]:
    """Return the device of each replica."""
    return [DEVICES[i % len(DEVICES)] for i in range(num_replicas)]


in_time = functools.partial(_in_time, within=on_first_device)


def in_threads(num_threads: int, call: Callable[[int], None]) -> None:
    """Run `call(0)` to `call(num_threads - 1)` in threads that start together; raise what one of them raises."""
    together = threading.Barrier(num_threads)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            together.wait(WAIT_S)
            with on_first_device():  # which a thread does not inherit
                call(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


# ---- modules and batches -------------------------------------------------------------------------


def mlp(width: int = 5, out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, out))


class ForceField(nn.Module):
    """Differentiates inside its own forward, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(5, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -force


class FailureError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class FailsOn(nn.Module):
    """Raises in the replicas whose first row is in `on`, after it has written into its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.calls = nn.Buffer(torch.zeros(1))
        self.on: dict[float, BaseException] = {}
        self.in_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(self.norm(x))
        error = self.on.get(float(x[0, 0]))
        if error is not None and not self.in_backward:
            raise error
        if error is not None:

            def fail(grad: torch.Tensor) -> None:
                raise error

            y.register_hook(fail)
        return y


def numbered_rows() -> torch.Tensor:
    """Return a batch for FailsOn: the first rows of three replicas are 0, 3 and 6."""
    return torch.arange(8.0).repeat_interleave(2).view(8, 2)


# Of FailsOn on three replicas: the row that fails, and whether it fails in backward.
FAILURES = [(first_row, in_backward) for first_row in (0.0, 3.0, 6.0) for in_backward in (False, True)]


class Watched(nn.Module):
    """Keeps weak references to its intermediate results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        self.seen.append(weakref.ref(hidden))
        return self.b(torch.tanh(hidden) * hidden)  # hidden is saved for backward

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.seen)


def rows_of(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randn(rows, *shape)


# ---- losses and comparisons ----------------------------------------------------------------------


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


def loss_of(output: Any) -> torch.Tensor:
    """A scalar that depends on every entry of every differentiable output, with different weights."""
    total = torch.zeros(())
    for number, tensor in enumerate(tensors_in(output), 1):
        if tensor.requires_grad:
            weights = torch.linspace(0.5, 1.5, tensor.numel(), device=tensor.device).view(tensor.shape)
            total = total + number * (tensor.pow(2) * weights).sum()
    return total


def penalty_loss(module: Callable[..., Any], x: torch.Tensor, between: Callable[[], None] = lambda: None) -> Any:
    """The loss of a WGAN-GP critic: it uses the output and the output's gradient."""
    x = fresh(x)
    output = tensors_in(module(x))[0]
    (grad,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
    between()
    return output.mean() + (grad.flatten(1).norm(dim=1) - 1).pow(2).mean()


def fresh(x: torch.Tensor) -> torch.Tensor:
    """Return a leaf with the values of `x`, which needs a gradient if it can have one."""
    return x.detach().clone().requires_grad_(x.is_floating_point())


def twins(wrap: Wrap, plain: nn.Module, num_replicas: int = 2, **options: Any) -> tuple[nn.Module, DataParallel]:
    """Return a module and a wrapped copy of it."""
    return plain, wrap(copy.deepcopy(plain), num_replicas, **options)


def assert_alike(
    wrap: Wrap,
    module: nn.Module,
    steps: Callable[[Callable[..., Any], Any], Any],
    num_replicas: int = 2,
    tolerance: float = 1e-12,
    **options: Any,
) -> DataParallel:
    """Check steps of a wrapped copy of a module: what they return, all gradients, and the state are the plain module's.

    Args:
        steps: makes steps by `call(...)`, and returns tensors: `steps(call, root)`, of which `root` has the parameters.

    Returns:
        The wrapped copy.
    """
    plain, model = twins(wrap, module, num_replicas, **options)
    found = []
    for call, root in ((plain, plain), (model, model.module)):
        torch.manual_seed(1)
        found.append(_entries(in_time(lambda call=call, root=root: steps(call, root))))
    assert_all_same(found[1], found[0], tolerance)
    assert_same_gradients(model.module, plain, tolerance)
    assert_same_state(model.module, plain, tolerance)
    return model


def _entries(value: Any) -> list[Any]:
    return [entry for item in value for entry in _entries(item)] if isinstance(value, list | tuple) else [value]


def assert_same(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float = 1e-12) -> None:
    assert (actual is None) == (expected is None), f"got {actual}, expected {expected}"
    if expected is not None and actual is not None:
        assert actual.is_sparse == expected.is_sparse
        torch.testing.assert_close(actual.to_dense(), expected.to_dense(), rtol=tolerance, atol=tolerance)


def assert_all_same(actual: Iterable[Any], expected: Iterable[Any], tolerance: float = 1e-12) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert_same(mine, theirs, tolerance)


def assert_same_gradients(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-12) -> None:
    _assert_same_gradients(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same_state(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-12) -> None:
    mine, theirs = actual.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_unchanged(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Check that a module's state is, bit for bit, what `state_dict` returned before."""
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def assert_is_the_replicas(caught: BaseException, error: BaseException, replica: int, engine: str) -> None:
    """Check that an exception is the very object that a replica raised; from another process, an equal one."""
    if replica < num_here(engine, 3):
        assert caught is error
    else:
        assert (type(caught), caught.args) == (type(error), error.args)


def assert_failure_leaves_nothing(
    model: DataParallel, error: BaseException, first_row: float, in_backward: bool, engine: str
) -> BaseException:
    """Have one of three replicas of FailsOn fail: the error is its own, no gradient is left, and buffers are as before.

    Returns:
        The error. The module's state is what it was, and it fails no more.
    """
    before = copy.deepcopy(model.module.state_dict())
    model.module.on, model.module.in_backward = {first_row: error}, in_backward
    with pytest.raises(type(error)) as caught:
        in_time(lambda: loss_of(model(numbered_rows())).backward())
    assert_is_the_replicas(caught.value, error, int(first_row) // 3, engine)
    assert all(p.grad is None for p in model.parameters())
    if not in_backward:
        assert_unchanged(model.module, before)
    model.module.load_state_dict(before)
    model.module.on = {}
    return caught.value


def same_results(model: nn.Module, wrapped: nn.Module, inputs: tuple[Any, ...], leaves: list[torch.Tensor]) -> None:
    """Check outputs and gradients (of a loss over all floating outputs) against the plain module's."""

    def results(call: Callable[..., Any]) -> list[torch.Tensor]:
        outputs = [t for _, t in pytree.tensors(call(*inputs))]
        loss = torch.stack([t.square().sum() for t in outputs if t.is_floating_point()]).sum()
        return [*outputs, *torch.autograd.grad(loss, [*leaves, *model.parameters()])]

    torch.testing.assert_close(results(wrapped), results(model), rtol=1e-12, atol=1e-12)


def train_both(
    plain: nn.Module,
    wrapped: nn.Module,
    batches: Iterable[torch.Tensor],
    parameters: Callable[[nn.Module], Iterable[nn.Parameter]] = nn.Module.parameters,
) -> None:
    """Train both on the same batches, the fifth in eval mode; compare outputs and gradients in every step."""
    optimizers = [torch.optim.SGD(parameters(model), 0.1, momentum=0.9) for model in (plain, wrapped)]
    for number, x in enumerate(batches):
        for model in (plain, wrapped):
            model.train(number % 6 != 4)
        outputs = [plain(x), wrapped(x)]
        assert_same(outputs[1], outputs[0])
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.pow(2).mean().backward()
        assert_all_same((p.grad for p in parameters(wrapped)), (p.grad for p in parameters(plain)), 1e-10)
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        assert_same(wrapped(x), plain(x), 1e-10)
