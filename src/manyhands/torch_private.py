"""Every private call of torch that manyhands makes, each with what happens where a release of torch lacks it.

Nothing else in the package may name a `torch._C` function; tests/test_torch_private.py calls each of these.
"""

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def backward_keeps_graph() -> bool:
    """Return whether the backward pass that is running was asked to keep its graph (`retain_graph=True`).

    Fallback: True. Then activations go when the loss goes, instead of while backward runs.
    """
    try:
        return bool(torch._C._autograd._get_current_graph_task_keep_graph())
    except AttributeError:
        return True


@functools.cache
def import_what_backward_imports() -> None:
    """Import, once, what the first backward of a process imports, so that workers do not do it all at the same time.

    It is done in a thread of its own, because Ctrl-C in the middle of an import leaves half a module behind.
    Fallback: nothing; they do.
    """

    def run() -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch.fx.experimental.symbolic_shapes")

    importer = threading.Thread(target=run, name="manyhands-importer")
    importer.start()
    importer.join()


def has_saved_tensor_hooks() -> bool:
    """Return whether default saved-tensor hooks (activation checkpointing, save_on_cpu) are active in this thread.

    Fallback: False. Then such hooks act on the caller's replica only.
    """
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    except AttributeError:
        return False


def saved_tensor_hooks_disabled() -> str | None:
    """Return the message of `torch.autograd.graph.disable_saved_tensors_hooks` where that is active, else None."""
    try:
        return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    except AttributeError:
        return None


def function_modes() -> list[Any]:
    """Return this thread's active `TorchFunctionMode`s; the default device is one of them. Fallback: none."""
    try:
        if not torch._C._len_torch_function_stack():
            return []
        return list(torch.overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    except AttributeError:
        return []


def is_default_device(mode: object) -> bool:
    """Return whether a function mode is the one behind `torch.set_default_device`. Fallback: False."""
    try:
        return isinstance(mode, torch.utils._device.DeviceContext)
    except AttributeError:
        return False


def has_dispatch_modes() -> bool:
    """Return whether a `TorchDispatchMode` is active in this thread. Fallback: False."""
    try:
        return bool(torch._C._len_torch_dispatch_stack())
    except AttributeError:
        return False


def has_transforms() -> bool:
    """Return whether a `torch.func` transform or forward-mode AD is active in this thread. Fallback: False."""
    try:
        if torch._C._functorch.maybe_current_level() is not None:
            return True
        return bool(torch.autograd.forward_ad._current_level >= 0)
    except AttributeError:
        return False


@contextlib.contextmanager
def without_post_accumulate_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keep what `register_post_accumulate_grad_hook` was given, such as an optimizer's step, from being called.

    Fallback: they are called.
    """
    registered = [hooks for tensor in tensors if (hooks := getattr(tensor, "_post_accumulate_grad_hooks", None))]
    held = [dict(hooks) for hooks in registered]
    for hooks in registered:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registered, held, strict=True):
            hooks.update(before)


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calling `module` runs code that torch.compile made for this very object."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def owns_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor shares the memory of `tensor`, so that it may be written into.

    Fallback: False.
    """
    try:
        storage = tensor.untyped_storage()
        return bool(torch._C._storage_Use_Count(storage._cdata) == 2)  # the tensor's reference, and `storage`'s
    except (AttributeError, RuntimeError):  # RuntimeError: a tensor without storage
        return False


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether vmap has hidden an axis of `tensor`, as it does when many gradients are asked for at once.

    Fallback: False. Then such a backward raises torch's own error.
    """
    try:
        functorch = torch._C._functorch
        return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))
    except AttributeError:
        return False


def taken_apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return a container's children and what rebuilds it from others, as registered with torch's pytree by its library.

    None for what is not registered. Fallback: None; such a container is then an object like any other.
    """
    try:
        from torch.utils import _pytree

        node = _pytree.SUPPORTED_NODES.get(type(value))
        if node is None:
            return None
        children, context = node.flatten_fn(value)
        return list(children), lambda others: node.unflatten_fn(others, context)
    except (ImportError, AttributeError):
        return None


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a clone of each tensor, in one call instead of one for each. Fallback: one for each."""
    if tensors and {torch.Tensor}.issuperset(map(type, tensors)):
        with contextlib.suppress(AttributeError):
            return list(torch._foreach_clone(tensors))
    return [tensor.clone() for tensor in tensors]
