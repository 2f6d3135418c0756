"""Which modes, transforms and hooks are active in the calling thread?"""

import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import traceback_of

P = ParamSpec("P")
T = TypeVar("T")

_c: Any = torch._C
_functorch: Any = torch._C._functorch
_forward_ad: Any = torch.autograd.forward_ad

# Return whether autocast is on for any kind of device.
any_autocast: Callable[[], bool] = _c._is_any_autocast_enabled

# Return the message of `torch.autograd.graph.disable_saved_tensors_hooks` where that is active, else None.
saved_tensor_hooks_disabled: Callable[[], str | None] = _c._autograd._saved_tensors_hooks_get_disabled_error_message

# Return the innermost pair of default saved-tensor hooks (activation checkpointing, save_on_cpu), or None. The
# argument: also while torch.compile or export traces.
top_saved_tensor_hooks: Callable[[bool], Any] = _c._autograd._top_saved_tensors_default_hooks

# Return how many `TorchDispatchMode`s are active.
num_dispatch_modes: Callable[[], int] = _c._len_torch_dispatch_stack


def any_mode() -> bool:
    """Return whether any of the states below may be active in this thread: they are asked only if so."""
    return bool(
        _c._len_torch_function_stack()
        or num_dispatch_modes()
        or _functorch.maybe_current_level() is not None
        or _forward_ad._current_level >= 0
        or top_saved_tensor_hooks(True) is not None
    )


def has_saved_tensor_hooks() -> bool:
    """Return whether default saved-tensor hooks are active in this thread."""
    return top_saved_tensor_hooks(True) is not None


# ---- function modes ------------------------------------------------------------------------------


def function_modes() -> list[Any]:
    """Return this thread's active `TorchFunctionMode`s; the default device is one of them."""
    if not _c._len_torch_function_stack():
        return []
    return list(torch.overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]


@contextmanager
def with_function_mode(mode: Any) -> Iterator[None]:
    """Enter a `TorchFunctionMode`; at the end this thread's modes are those of before, whatever happened meanwhile.

    torch takes a mode off its stack while a function of the mode runs, in Python, so Ctrl-C may come before it is put
    back; and a generator of torch's may put it back when the error is freed, if it is not told to do so before.
    """
    before = function_modes()
    mode.__enter__()
    try:
        yield
    except BaseException as error:
        _put_modes_back(error)
        raise
    finally:
        _set_function_modes(before)


def _set_function_modes(modes: Iterable[Any]) -> None:
    while _c._len_torch_function_stack():
        _c._pop_torch_function_stack()
    for mode in modes:
        _c._push_on_torch_function_stack(mode)


def _put_modes_back(error: BaseException) -> None:
    """Close the generators of torch's that an error holds, and that would put modes back when it is freed."""
    each: BaseException | None = error
    while each is not None:  # where modes are nested, the interrupt of an inner one is the context of this
        for frame, _ in traceback.walk_tb(traceback_of(each)):
            generator = getattr(frame.f_locals.get("self"), "gen", None)
            if isinstance(generator, types.GeneratorType) and generator.gi_code.co_name == "_pop_mode_temporarily":
                generator.close()
        each = each.__context__


def is_default_device(mode: object) -> bool:
    """Return whether a function mode is the one behind `torch.set_default_device`."""
    device: Any = sys.modules.get("torch.utils._device")  # torch imports it with the first such mode
    return device is not None and isinstance(mode, device.DeviceContext)


def default_device() -> torch.device | None:
    """Return the default device of this thread as it was set; None if none is, which torch's does not tell.

    An accelerator without an index is whichever device is current at the time.
    """
    if not _c._len_torch_function_stack():
        return None
    for mode in reversed(function_modes()):
        if is_default_device(mode):
            device: torch.device = mode.device
            return device
    return None


def without_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs with this thread's dispatch and function modes off, but for the default device.

    It is for what runs forward again in backward, as one device does not: a mode around backward must not see that.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        of_functions = function_modes()
        of_dispatch = [_c._pop_torch_dispatch_stack(None) for _ in range(num_dispatch_modes())]
        _set_function_modes(filter(is_default_device, of_functions))
        try:
            return function(*args, **kwargs)
        finally:
            _set_function_modes(of_functions)
            for mode in reversed(of_dispatch):
                _c._push_on_torch_dispatch_stack(mode)

    return run


class WatchedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The context in which each operation of the calling thread is called by `watch`.

    Args:
        watch: called with the operation, the tensors that it is given, its argument `device` (None: it has none), and
            what calls it.
    """

    def __init__(self, watch: Callable[[Any, list[torch.Tensor], Any, Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        values = [each for value in given for each in (value if isinstance(value, list | tuple) else [value])]
        operands = [each for each in values if isinstance(each, torch.Tensor)]
        return self._watch(func, operands, kwargs.get("device"), lambda: func(*args, **kwargs))


# ---- transforms of torch.func, and forward-mode differentiation ----------------------------------


def has_transforms() -> bool:
    """Return whether a `torch.func` transform or forward-mode AD is active in this thread.

    torch has one level of forward mode for all threads. It may be another thread's only where one has taken it
    (`take_forward_mode`).
    """
    if _functorch.maybe_current_level() is not None:
        return True
    return _forward_ad._current_level >= 0 and _forward_mode.thread in (None, threading.get_ident())


def take_forward_mode(ident: int | None) -> None:
    """Note that a thread alone differentiates in forward mode from now on; None: any may."""
    _forward_mode.thread = ident


class _ForwardMode:
    thread: int | None = None


_forward_mode = _ForwardMode()


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether vmap has hidden an axis of `tensor`, as it does when many gradients are asked for at once."""
    return bool(_functorch.is_batchedtensor(tensor) or _functorch.is_legacy_batchedtensor(tensor))


def is_of_transform(tensor: torch.Tensor) -> bool:
    """Return whether a `torch.func` transform, active or ended, has made `tensor`: it has no gradient edge then."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))
