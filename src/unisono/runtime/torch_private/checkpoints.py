"""Is an activation checkpoint around the caller, what does it keep, and how does it end?"""

import contextlib
import functools
import importlib
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.utils.checkpoint

from unisono.runtime.errors import cause_of, context_of, traceback_of
from unisono.runtime.torch_private.modes import top_saved_tensor_hooks


def has_checkpoint_hooks() -> bool:
    """Return whether a non-reentrant activation checkpoint takes what this thread saves for backward."""
    hooks = top_saved_tensor_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def add_to_checkpoint(devices: Iterable[torch.device], state_of: Callable[[torch.device], torch.Tensor]) -> None:
    """Have an activation checkpoint around the caller restore the random states of accelerators, where it restores any.

    torch's own keeps the states of the devices that its inputs are on. What it has kept of a device stays.
    Fallback, where torch's function keeps them in another way: nothing; then a checkpoint around replicas draws other
    random numbers when it computes again.

    Args:
        state_of: returns a device's random state.
    """
    kept = _kept_by_checkpoint()
    with contextlib.suppress(KeyError, AttributeError, TypeError):
        indices, states, kind = kept["fwd_devices"], kept["fwd_device_states"], kept["device_type"]
        for device in devices:
            if device.type == kind and device.index not in indices:
                states.append(state_of(device))
                indices.append(device.index)


def _kept_by_checkpoint() -> Mapping[str, Any]:
    """Return what the innermost activation checkpoint around the caller keeps, by torch's names; empty in none."""
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        if has_checkpoint_hooks():  # its hook refers to the function that computes again, and that to what is kept
            hook: Any = top_saved_tensor_hooks(True)[0]
            again: Any = inspect.getclosurevars(hook).nonlocals["frame"].recompute_fn
            return inspect.getclosurevars(again).nonlocals
        code = torch.utils.checkpoint.CheckpointFunction.forward.__code__
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        return {} if frame is None else vars(frame.f_locals["ctx"])
    return {}


class _Begun:
    """What has begun last, in any thread, that may run a part of forward again in backward: a new object each time.

    Attributes:
        hooks: saved-tensor hooks, those of an activation checkpoint that is not reentrant above all.
        reentrant: a reentrant activation checkpoint.
    """

    hooks: object = None
    reentrant: object = None


begun = _Begun()


def checkpoints_noted() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return the stand-ins (stand_ins.py) that note in `begun` what begins."""
    places: list[tuple[Any, str, str]] = [
        (torch.autograd.graph.saved_tensors_hooks, "__enter__", "hooks"),
        (torch.utils.checkpoint, "check_backward_validity", "reentrant"),  # which such a checkpoint calls first
    ]
    return [(owner, name, functools.partial(_noting, kind)) for owner, name, kind in places]


def _noting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        setattr(begun, kind, object())
        return function(*args, **kwargs)

    return noted


def checkpoints_allowed() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return the stand-in (stand_ins.py) with which reentrant checkpoints run in a backward for given inputs.

    torch refuses that, because such a backward may not reach all that the checkpoint's own backward does. A backward
    through a replica's graph reaches all.
    """
    return [(torch.autograd, "_is_checkpoint_valid", lambda value: lambda: True)]


def end_checkpoints(error: BaseException) -> None:
    """End the activation checkpoints through which `error` has passed in this thread.

    Older releases of torch leave them open until the error is freed. Until then their saved-tensor hooks stay active in
    this thread; and if another thread frees the error, theirs stay for good, and that thread loses others.
    """
    errors, known = [error], {id(error)}  # a class of the user's may not compare
    for each in errors:  # the list grows
        new = [other for other in (cause_of(each), context_of(each)) if other is not None and id(other) not in known]
        errors += new
        known.update(map(id, new))
    for each in reversed(errors):
        for frame in reversed([frame for frame, _ in traceback.walk_tb(traceback_of(each))]):
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                for local in frame.f_locals.values():
                    if isinstance(local, types.GeneratorType):  # it goes on to the end of the checkpoint
                        with contextlib.suppress(Exception):  # the error itself is what the caller is told
                            local.close()


def stops_recomputation(error: BaseException) -> bool:
    """Return whether `error` is how an activation checkpoint ends what it computes again, once it has enough.

    A tensor that is saved after it is one too many: CheckpointError.
    """
    return issubclass(type(error), torch.utils.checkpoint._StopRecomputationError)


def load_checkpoints() -> None:
    """Load what torch.utils.checkpoint loads when it is first called: torch's compiler, 70 MB of it.

    Where memory is short, that fails in the middle, and modules that are half imported can be used no more. So it is to
    be called before. Fallback, where it cannot be imported: nothing; then the first checkpoint loads what it needs.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")
