"""What is active in a thread."""

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from helpers.modules import PassingMode
from unisono.runtime.torch_private import modes


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("question", "active"),
    [
        (modes.num_dispatch_modes, PassingMode),
        (modes.has_transforms, forward_ad.dual_level),
        (modes.function_modes, FunctionMode),
        (modes.default_device, lambda: torch.device("meta")),
        (modes.has_saved_tensor_hooks, partial(saved_tensors_hooks, id, id)),
        (modes.saved_tensor_hooks_disabled, partial(disable_saved_tensors_hooks, "no hooks here")),
        (modes.any_autocast, partial(torch.autocast, "cpu")),
    ],
)
def test_what_is_active_in_a_thread(question: Callable[[], Any], active: Any) -> None:
    """R14."""
    is_mode = question not in (modes.saved_tensor_hooks_disabled, modes.any_autocast)
    assert not question()
    assert not modes.any_mode()
    with active():
        assert question()
        assert modes.any_mode() == is_mode
    assert not question()


def test_the_innermost_default_device() -> None:
    """R14: whatever else is active."""
    with torch.device("cpu"), torch.device("meta"), FunctionMode() as mode:
        assert modes.default_device() == torch.device("meta")
        assert modes.function_modes()[2:] == [mode]
        assert not modes.is_default_device(mode)


def test_operations_are_watched() -> None:
    """N18: each with its tensors, also those in lists, and its device; outside of the block none is."""
    seen: list[Any] = []

    def watch(operation: Any, operands: list[torch.Tensor], device: Any, call: Any) -> Any:
        seen.append((operation.overloadpacket, [*map(id, operands)], device))
        return call()

    x = torch.ones(2)
    with modes.WatchedOperations(watch):
        joined = torch.cat([x, x])
        torch.zeros(1, device="cpu")
    assert torch.equal(joined, torch.ones(4))
    aten = torch.ops.aten
    assert seen == [(aten.cat, [id(x)] * 2, None), (aten.zeros, [], torch.device("cpu"))]
    assert not modes.num_dispatch_modes()


def test_function_modes_are_those_of_before_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: torch takes a mode off its stack while one of its functions runs, by a generator that puts it back.

    If Ctrl-C came in between, "trying to pop from empty mode stack" was raised in its place; and when the error was
    freed, the generator put the mode back, so that later steps ran whole on one device.
    """

    manager: Any = contextlib._GeneratorContextManager
    leave = manager.__exit__

    def interrupted(self: Any, *error: Any) -> Any:
        if self.gen.gi_code.co_name == "_pop_mode_temporarily":
            raise KeyboardInterrupt
        return leave(self, *error)

    def interrupt() -> None:
        before = modes.function_modes()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            patch.setattr(manager, "__exit__", interrupted)
            with modes.with_function_mode(FunctionMode()):
                nn.functional.dropout(torch.ones(3))
        assert modes.function_modes() == before

    with FunctionMode() as mode:
        interrupt()
        gc.collect()  # which frees the errors, and with them torch's generators
        assert modes.function_modes() == [mode]
    assert modes.function_modes() == []
