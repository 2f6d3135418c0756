"""What does the backward that is running do, and how is one run? All of it is said by torch's autograd engine."""

import contextlib
import contextvars
import ctypes
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from unisono.runtime.interrupts import interruptible

_c: Any = torch._C
_engine: Any = torch.autograd.Variable._execution_engine

# ---- the backward that is running ----------------------------------------------------------------

# Return a number that tells the backward that is running from all others of this process; -1 outside of a backward.
number_of_backward: Callable[[], int] = _c._current_graph_task_id

# Have a function called, without arguments, when the backward that is running has ended.
call_at_end_of_backward: Callable[[Callable[[], object]], None] = _engine.queue_callback

# Return whether the backward that is running was asked to keep its graph (`retain_graph=True`).
backward_keeps_graph: Callable[[], bool] = _c._autograd._get_current_graph_task_keep_graph


def backward_reaches(node: Any) -> bool:
    """Return whether the backward pass that is running computes the gradient that a node receives.

    `torch.autograd.grad` and `backward(inputs=...)` skip what they do not need.
    """
    try:
        return bool(_c._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
        return True


def backward_runs(node: Any) -> bool:
    """Return whether the backward pass that is running calls a node; a leaf's node adds to the leaf's `grad`."""
    try:
        return bool(_c._will_engine_execute_node(node))
    except RuntimeError:  # as above
        return False


def backward_is_restricted() -> bool:
    """Return whether the backward that is running is for given inputs: then no reentrant checkpoint can run in it."""
    return not _engine.is_checkpoint_valid()


# ---- what its nodes find -------------------------------------------------------------------------

_SEEN = "unisono: seen in backward"  # a key among what torch takes along into the threads of a backward
_CAN_REMOVE = hasattr(_c, "_remove_obj_from_tls")  # torch 2.9 lacks it


class with_backward_context:  # noqa: N801 - a context manager, as a class because a step enters it each time
    """Lets nodes that run in backwards called within the block, in whatever thread, find items: `backward_context`.

    They find those of a block around it, too. Fallback, where nothing can be removed from what torch takes along: an
    empty dict stays in the thread's state.
    """

    def __init__(self, items: Mapping[Any, Any]) -> None:
        self._items = items

    def __enter__(self) -> None:
        self._before = backward_context()
        self._seen = {**self._before, **self._items}
        _stash(self._seen)

    def __exit__(self, *_: object) -> None:
        _stash(self._before)
        # Collectives that were begun within the block keep the state of their thread, and the items may keep them.
        self._seen.clear()


def _stash(items: dict[Any, Any]) -> None:
    if not items and _CAN_REMOVE:
        _c._remove_obj_from_tls(_SEEN)
        return
    if _stash_keeps_no_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(items))
    _c._stash_obj_in_tls(_SEEN, items)


@functools.cache
def _stash_keeps_no_reference() -> bool:
    """Return whether `_stash_obj_in_tls` gives back a reference that it has not taken, as in torch 2.11."""
    probe = object()
    before = sys.getrefcount(probe)
    _c._stash_obj_in_tls(_SEEN, probe)
    keeps_none = sys.getrefcount(probe) == before
    if keeps_none:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return keeps_none


def backward_context() -> dict[Any, Any]:
    """Return what `with_backward_context` has been given; nothing outside of its block."""
    items: dict[Any, Any] = _c._get_obj_in_tls(_SEEN) if sees_anything() else {}
    return items


sees_anything: Callable[[], bool] = functools.partial(_c._is_key_in_tls, _SEEN)  # of `with_backward_context`


# ---- to run one ----------------------------------------------------------------------------------


@interruptible
def run_backward(ends: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], *, keep: bool) -> None:
    """Run `torch.autograd.backward(ends, grads, retain_graph=keep)`, without its check of the gradients in Python.

    The check imports sympy, which takes a second and 33 MiB of each process. The engine, in C++, checks shapes again.
    Fallback for tensors that handle functions of torch themselves: torch's function.
    """
    if _none_handles_functions(ends):
        _run(tuple(ends), tuple(grads), keep, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        _import_what_backward_imports()
        torch.autograd.backward(ends, grads, retain_graph=keep)


@interruptible
def gradients(
    ends: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    *,
    keep: bool = False,
    create_graph: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return `torch.autograd.grad(ends, inputs, grads, allow_unused=True)`, as `run_backward` runs backward.

    Without ends, or without inputs, there is nothing to compute.
    """
    if not ends or not inputs:
        return (None,) * len(inputs)
    if _none_handles_functions((*ends, *inputs)):
        given = tuple(ends), tuple(grads), keep or create_graph, create_graph, tuple(inputs)
        found = _run(*given, allow_unreachable=True, accumulate_grad=False)
    else:
        _import_what_backward_imports()
        options = {"retain_graph": keep or create_graph, "create_graph": create_graph, "allow_unused": True}
        found = torch.autograd.grad(ends, inputs, grads, **options)
    return tuple(found)


def _run_engine(*args: Any, **kwargs: Any) -> Any:
    """Run a backward, and let compiled code in each of its threads see the caller's context variables.

    torch has one `contextvars.Context` for a backward, and calls its `run`. Two threads, of two devices, cannot enter
    it at once: "cannot enter context". Here each call has a copy.
    """
    context = contextvars.copy_context()
    run = functools.partial(_run_in_copy, context)  # until torch 2.13; from then on torch itself enters a copy
    _c._stash_obj_in_tls("context", types.SimpleNamespace(run=run, copy=context.copy))
    try:
        return _engine.run_backward(*args, **kwargs)
    finally:
        _c._remove_obj_from_tls("context")


def _run_in_copy(context: contextvars.Context, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return context.copy().run(function, *args, **kwargs)


# Runs a backward in torch's engine. Fallback: torch's own function around the engine. With it, backward of what
# torch.compile has compiled fails on several accelerators.
_run: Callable[..., Any] = _run_engine if _CAN_REMOVE else torch.autograd.graph._engine_run_backward

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _none_handles_functions(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no tensor handles functions of torch itself. A function mode does not count: it is ours."""
    others = {*map(type, tensors)} - _PLAIN
    if not others:
        return True
    disabled = _c._disabled_torch_function_impl
    return all(getattr(cls, "__torch_function__", None) is disabled for cls in others)


@functools.cache
def _import_what_backward_imports() -> None:
    """Import, once, what torch's check imports.

    A thread of its own does it, because Ctrl-C in the middle of an import leaves half a module behind.
    """

    def run() -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch.fx.experimental.symbolic_shapes")

    importer = threading.Thread(target=run, name="unisono-importer")
    importer.start()
    importer.join()
