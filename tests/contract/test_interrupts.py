"""Ctrl-C at any moment of a step: it comes out, once, and the next step is the one that there would have been.

Found by KeyboardInterrupt at every place of a step where CPython looks for signals. Of 1,530 moments of a step with two
threads 48 left something behind: the number of intra-op threads at a replica's, so that the rest of the program ran at
half speed; gradients off; Python's garbage collector off; a replica's random stream as the caller's own. Maps had
others: "release unlocked lock" in the place of KeyboardInterrupt, and the interrupt swallowed by a finalizer, which
failed, too, for an object whose `__init__` had not been done.

CPython runs signal handlers at a few places only: when a function begins, after a call of a C function, and where a
loop jumps back. A `Moment` counts these places and trips SIGINT at the n-th one, without a Python instruction in
between. So the handler runs at the first place where a real signal would have run it; a run can be repeated exactly.
"""

import _thread
import contextlib
import dis
import functools
import gc
import random
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from helpers.contract import ON_CPU
from unisono import DataParallel
from unisono.runtime.torch_private import modes

pytestmark = pytest.mark.skipif(not ON_CPU, reason="the moments are those of the host")

_CHECKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}
_ROWS, _WIDTH = 7, 3


@functools.cache
def _places(code: types.CodeType) -> frozenset[int]:
    """Return the offsets in a function after which CPython looks for signals."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname in _CHECKS)


class Moment:
    """While entered, counts the places where CPython looks for signals in this thread, and trips a signal at one.

    Args:
        number: of the place; None: none.
        kind: the signal, whose handler raises KeyboardInterrupt.
    """

    def __init__(self, number: int | None = None, kind: signal.Signals = signal.SIGINT) -> None:
        self.number, self.kind = number, kind
        self.count = 0
        self.where = ""

    def __enter__(self) -> "Moment":
        self._trip = map(_thread.interrupt_main, (self.kind,))
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event != "opcode" or frame.f_lasti not in _places(frame.f_code):
            return self._trace
        self.count += 1
        if self.count == self.number:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            sys.settrace(None)  # a trace function is a function: the handler would run at its beginning
            for _ in self._trip:  # from here to the traced code CPython does not look for signals
                return None
        return self._trace


class Model(nn.Module):
    """A small model with batch norm, dropout, and an attribute that refers to a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.Dropout(0.5))
        self.head = nn.Linear(_WIDTH, 2)
        self.of_head = self.apply_head

    def apply_head(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_head(self.layers(x))


OPTIONS: dict[str, dict[str, Any]] = {
    "training": {"sync_batch_norm": False},
    "sync_batch_norm": {"sync_batch_norm": True},
}


class Step:
    """One step of a case, from equal weights, buffers and random state each time, and what it gives undisturbed.

    Args:
        case: "plain", "map", "evaluate", or one of `OPTIONS`.
    """

    def __init__(self, case: str) -> None:
        torch.manual_seed(0)
        self.module = module = Model()
        self.model: Any = module if case == "plain" else DataParallel(module, ["cpu"] * 2, **OPTIONS.get(case, {}))
        self.inputs = [torch.randn(_ROWS, _WIDTH) for _ in range(6 if case in ("map", "evaluate") else 1)]
        self.targets = [torch.randn(_ROWS, 2) for _ in self.inputs]
        self.run = {"map": self._map, "evaluate": self._evaluate}.get(case, self._train)
        self._before = {name: value.clone() for name, value in module.state_dict().items()}
        self._num_threads = torch.get_num_threads()
        for _ in range(4):
            self.reset()
            self.run()
        self.random_before = self.reset()
        self.run()
        self.after = self.numbers()

    def reset(self) -> torch.Tensor:
        with torch.no_grad():
            for name, value in self.module.state_dict().items():
                value.copy_(self._before[name])
        for parameter in self.module.parameters():
            parameter.grad = None
        torch.manual_seed(1)
        self.result: Any = None
        return torch.get_rng_state()

    def _train(self) -> None:
        loss = self.model(self.inputs[0]).square().mean()
        self.result = loss.detach()
        loss.backward()

    def _map(self) -> None:
        with self.model.map(self.inputs) as outputs:
            self.result = torch.stack(list(outputs))

    def _evaluate(self) -> None:
        pairs = list(zip(self.inputs, self.targets, strict=True))
        self.result = torch.tensor(self.model.evaluate(pairs, nn.functional.mse_loss))

    def numbers(self) -> dict[str, torch.Tensor]:
        """Return all that a step leaves behind."""
        grads = {f"grad of {n}": p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None}
        buffers = {name: value.clone() for name, value in self.module.named_buffers()}
        return {"result": self.result, "random state": torch.get_rng_state(), **grads, **buffers}

    def wrong_after(self, caught: "Caught") -> list[str]:
        """Return what is wrong after a step that has been interrupted; the next step is made, and compared."""
        error = caught.error
        wrong = [text for text, is_so in _thread_state(self._num_threads).items() if not is_so]
        if error is None:
            wrong.append("no KeyboardInterrupt")
        elif type(error) is not KeyboardInterrupt:
            wrong.append(f"{type(error).__name__} in its place: {str(error)[:80]}")
        wrong += [f"swallowed: {type(each).__name__}" for each in caught.unraisable]
        found = self.numbers()
        grads = {name: value for name, value in self.after.items() if name.startswith("grad")}
        if grads.keys() & found.keys() and not all(
            n in found and torch.equal(found[n], value) for n, value in grads.items()
        ):
            wrong.append("some gradients, not all")
        before = {**self._before, "random state": self.random_before}
        for name in [*dict(self.module.named_buffers()), "random state"]:
            if not torch.equal(found[name], before[name]) and not torch.equal(found[name], self.after[name]):
                wrong.append(f"{name} is neither as before nor as after")
        if any(not torch.equal(value, before[name]) for name, value in self.module.named_parameters()):
            wrong.append("a parameter has changed")
        if wrong:
            return wrong
        self.reset()
        try:
            self.run()
        except BaseException as after:  # noqa: BLE001 - reported
            return [*wrong, f"the next step raises {type(after).__name__}: {str(after)[:80]}"]
        found = self.numbers()
        if found.keys() != self.after.keys() or any(not torch.equal(found[n], v) for n, v in self.after.items()):
            wrong.append("the next step has other numbers")
        wrong += [f"after the next step: {text}" for text, ok in _thread_state(self._num_threads).items() if not ok]
        return wrong


def _thread_state(num_threads: int) -> dict[str, bool]:
    """Return statements about the calling thread, each with whether it holds."""
    return {
        f"torch.get_num_threads() is {torch.get_num_threads()}": torch.get_num_threads() == num_threads,
        "gradients are off": torch.is_grad_enabled(),
        "inference mode is on": not torch.is_inference_mode_enabled(),
        "autocast is on": not modes.any_autocast(),
        "the garbage collector is off": gc.isenabled(),
        "a function mode is left": not torch._C._len_torch_function_stack(),
        "a dispatch mode is left": not torch._C._len_torch_dispatch_stack(),
        "saved-tensor hooks are left": not modes.has_saved_tensor_hooks(),
        "a stand-in is left": vars(torch.random)["default_generator"] is torch.default_generator,
        "another handler of SIGINT is left": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }


def interrupted_at(step: Step, number: int, kind: signal.Signals) -> tuple[str, list[str]]:
    """Interrupt a step at a moment; return where, and what was wrong after it.

    Since Python 3.12 a function has no opcode events in its first call after `sys.settrace`, so a step that has been
    over before the moment is made once more.
    """
    for _ in range(2):
        step.reset()
        moment = Moment(number, kind)
        with _caught() as caught:
            with moment:
                step.run()
            for _ in range(3):  # if the last moment was tripped
                pass
        if moment.count >= number:
            return moment.where, step.wrong_after(caught)
    return "", []  # a step may take fewer moments, where it waits for other threads


@dataclass
class Caught:
    """What a block has raised, and the exceptions that nobody could catch, such as those in finalizers."""

    error: BaseException | None = None
    unraisable: list[BaseException | None] = field(default_factory=list)


@contextlib.contextmanager
def _caught() -> Iterator[Caught]:
    caught = Caught()
    before, sys.unraisablehook = sys.unraisablehook, lambda args: caught.unraisable.append(args.exc_value)
    try:
        yield caught
    except BaseException as error:  # noqa: BLE001 - judged by `wrong_after`
        caught.error = error.with_traceback(None)
        error.__context__ = None
    finally:
        sys.unraisablehook = before


def campaign(
    case: str, numbers: Callable[[int], Iterable[int]], kind: signal.Signals = signal.SIGINT
) -> tuple[int, dict[int, str]]:
    """Interrupt a case's step at moments that `numbers` picks, given how many there are, until one goes wrong.

    Returns:
        The number of interrupts, and what was wrong, by moment.
    """
    step, count = Step(case), 0
    for _ in range(2):  # the second one is a steady step; see `interrupted_at`
        step.reset()
        with Moment() as steady:
            step.run()
    for number in numbers(steady.count):
        where, wrong = interrupted_at(step, number, kind)
        count += bool(where)
        if wrong:
            return count, {number: f"{where}: {'; '.join(wrong)}"}
    return count, {}


SAMPLES = {**dict.fromkeys(OPTIONS, 30), "map": 8, "evaluate": 8}
_MORE = 4  # times as many, for `make test-all`


@pytest.fixture(autouse=True)
def two_intra_op_threads() -> Iterator[None]:
    """So that a replica has fewer than the caller."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", SAMPLES)
@pytest.mark.parametrize("times", [1, pytest.param(_MORE, marks=pytest.mark.slow)])
def test_an_interrupt_leaves_nothing_behind(case: str, times: int) -> None:
    """F3: KeyboardInterrupt comes out, the thread's state is as before, and so are the next step's numbers."""
    number = times * SAMPLES[case]
    count, wrong = campaign(case, lambda last: [1, *random.Random(times).sample(range(1, last + 1), number)])
    assert not wrong
    # A step that waits for lanes may be over before a later moment.
    assert count > (number / 2 if case in OPTIONS else 0)


@pytest.mark.only_on("linux", "macos", because="time limits by SIGALRM")
@pytest.mark.parametrize(("case", "every"), [("training", 7), ("map", 500)])
def test_a_time_limit_that_raises_leaves_nothing_behind(case: str, every: int) -> None:
    """F3: test runners set time limits by SIGALRM, with a handler that raises.

    Of 2,000 steps that were cut off so, three left gradients off, the number of intra-op threads at a
    replica's, or raised a KeyError of the thread pool.
    """
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        count, wrong = campaign(case, lambda last: range(1, last + 1, every), signal.SIGALRM)
        assert signal.getsignal(signal.SIGALRM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not wrong
    assert count > 2
