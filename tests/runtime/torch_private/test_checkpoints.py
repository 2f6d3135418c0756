"""Activation checkpoints: what they keep, and how they end."""

import contextlib
import sys
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from unisono.runtime.torch_private import checkpoints, modes


def test_a_checkpoint_around_the_caller() -> None:
    """R14: by its saved-tensor hooks; others are no checkpoint's."""
    assert not checkpoints.has_checkpoint_hooks()
    with saved_tensors_hooks(id, id):
        assert not checkpoints.has_checkpoint_hooks()
        with torch.utils.checkpoint._checkpoint_hook(SimpleNamespace(unpack_error_cb=None)):
            assert checkpoints.has_checkpoint_hooks()


def test_checkpoints_that_older_releases_leave_open() -> None:
    """R13, F1: those around an error, and around the errors that led to it, are ended, even by another error."""

    def opened():
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            try:
                yield
            finally:
                raise KeyError("at the end of a checkpoint")

    def checkpoint(function):
        generator = opened()
        next(generator)
        function()

    def fails() -> None:
        raise ValueError("in forward")

    def raises_another() -> None:
        try:
            older(lambda: older(fails))
        except ValueError as error:
            raise RuntimeError("and so") from error

    older = FunctionType(checkpoint.__code__, {"__name__": "torch.utils.checkpoint"}, closure=checkpoint.__closure__)
    with pytest.raises(RuntimeError, match="and so") as raised:
        older(raises_another)
    assert modes.has_saved_tensor_hooks()
    checkpoints.end_checkpoints(raised.value)
    assert not modes.has_saved_tensor_hooks()


@pytest.mark.parametrize("reentrant", [True, False])
def test_random_states_that_a_checkpoint_keeps(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R13, N6: those of other accelerators are added once, to the innermost checkpoint; elsewhere nothing happens."""
    asked: list[torch.device] = []
    restored: list[int] = []
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.utils.checkpoint.DefaultDeviceType, "_default_device_type", "cuda")
    monkeypatch.setattr(torch.utils.checkpoint, "get_device_states", lambda *_: ([0], ["state of the inputs' device"]))
    monkeypatch.setattr(torch.utils.checkpoint, "set_device_states", lambda indices, *_, **__: restored.extend(indices))
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: contextlib.nullcontext())

    def add() -> None:
        checkpoints.add_to_checkpoint(gpus, lambda device: asked.append(device) or torch.zeros(1))

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            add()
        return x.sin()

    add()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.delattr(torch.utils.checkpoint, "CheckpointFunction")  # as in a torch that keeps them in another way
        add()
    assert asked == []
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert asked == gpus[1:]
    assert restored == [0, 1]


def test_what_a_checkpoint_would_load_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: it is there afterwards; where it cannot be imported, nothing happens."""
    checkpoints.load_checkpoints()
    assert "torch._dynamo" in sys.modules
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it raises ImportError
    checkpoints.load_checkpoints()
