"""The caller's thread-local state, carried into the worker threads.

torch keeps much of what a user has switched on per thread: grad mode, inference mode, autocast, the default device,
the current streams, denormal flushing; and draws may be switched off (draws_off.py). A replica must see all of it as
the caller does. (The default dtype and the deterministic flags belong to the process.) Some state cannot be carried
into other threads: dispatch and function modes, torch.func transforms, and saved-tensor hooks, which depend on the
order in which tensors are saved (activation checkpointing above all). While such a mode is active, `modes_that_stay()`
says so and replicas run in the caller's thread, one after the other.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from unisono.runtime import draws_off
from unisono.runtime.contexts import contextmanager
from unisono.runtime.torch_private import modes

# Device types that autocast knows; asking about one that this build of torch lacks is harmless.
_AUTOCAST_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "ipu", "privateuseone")


@dataclass(slots=True)  # not frozen: a step makes several, and that would take three times as long
class ThreadState:
    """The state of one thread (`capture`), to be set in other threads (`applied`)."""

    grad_enabled: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    saved_tensor_hooks_disabled: str | None
    default_device: torch.device | None
    flush_denormal: bool
    draws_off: bool

    @classmethod
    def capture(cls) -> "ThreadState":
        """Return the calling thread's state."""
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=autocast_types() if modes.any_autocast() else (),
            autocast_cache=torch.is_autocast_cache_enabled(),
            saved_tensor_hooks_disabled=modes.saved_tensor_hooks_disabled(),
            default_device=modes.default_device(),
            flush_denormal=_flushes_denormals(),
            draws_off=draws_off.are_off(),
        )

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which this state is the calling thread's."""
        is_usual = self.default_device is None and self.saved_tensor_hooks_disabled is None
        is_usual = is_usual and not (self.inference or self.autocast or self.draws_off)
        if is_usual and not (self.flush_denormal or _flushes_denormals()):
            return torch.set_grad_enabled(self.grad_enabled) if self.grad_enabled else torch.no_grad()
        return self._applied()

    @contextmanager
    def _applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            for device_type, dtype in self.autocast:
                stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=self.autocast_cache))
            if self.saved_tensor_hooks_disabled is not None:
                message = self.saved_tensor_hooks_disabled
                stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(message))
            if self.flush_denormal != _flushes_denormals():
                torch.set_flush_denormal(self.flush_denormal)
                stack.callback(torch.set_flush_denormal, not self.flush_denormal)
            if self.draws_off:
                stack.enter_context(draws_off.in_this_thread())
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            yield


def modes_that_stay() -> bool:
    """Return whether this thread is under a mode or transform that no other thread can join."""
    return modes.any_mode() and (
        modes.num_dispatch_modes() > 0
        or modes.has_transforms()
        or modes.has_saved_tensor_hooks()
        or any(not modes.is_default_device(mode) for mode in modes.function_modes())
    )


def autocast_types() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the kinds of device for which autocast is on in the calling thread, each with its dtype."""
    return tuple([(t, torch.get_autocast_dtype(t)) for t in _AUTOCAST_TYPES if torch.is_autocast_enabled(t)])


_smallest_denormal = 5e-324


def _flushes_denormals() -> bool:
    # torch.set_flush_denormal cannot be read back; Python's own float arithmetic obeys the same processor flag.
    return _smallest_denormal * 1.0 == 0.0
