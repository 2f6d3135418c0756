"""Every private call of torch that unisono makes, each with its fallback for releases of torch that lack it.

Nothing else in the package may name a `torch._C` function. tests/runtime/test_torch_private.py tries the fallbacks.
"""

import contextlib
import contextvars
import copy
import ctypes
import functools
import importlib
import inspect
import operator
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import chain
from typing import Any, Self

import torch
import torch._functorch.eager_transforms
import torch.nn.utils.parametrize
from torch.utils import _python_dispatch

from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import cause_of, context_of, traceback_of
from unisono.runtime.interrupts import interruptible

# ---- tracing -------------------------------------------------------------------------------------


_FX_TRACES_BY_THREAD = hasattr(torch.fx._symbolic_trace, "_get_is_fx_tracing")  # from torch 2.14 on


def has_tracer() -> bool:
    """Return whether torch.jit or torch.fx traces in this thread; before torch 2.14, torch.fx in any.

    Fallback: False. Then a trace of a wrapper ends in an error of torch's.
    """
    of_fx: Any = torch.fx._symbolic_trace
    try:
        flag = of_fx._get_is_fx_tracing() if _FX_TRACES_BY_THREAD else of_fx._is_fx_tracing_flag
        return bool(torch._C._is_tracing() or flag)
    except AttributeError:
        return False


def traces_with_jit() -> bool:
    """Return whether torch.jit traces in this thread. Fallback: False."""
    try:
        return bool(torch._C._is_tracing())
    except AttributeError:
        return False


# ---- backward ------------------------------------------------------------------------------------


def backward_keeps_graph() -> bool:
    """Return whether the backward pass that is running was asked to keep its graph (`retain_graph=True`).

    Fallback: True. Then activations are freed with the loss, instead of while backward runs.
    """
    try:
        return bool(torch._C._autograd._get_current_graph_task_keep_graph())
    except AttributeError:
        return True


def backward_reaches(node: Any) -> bool:
    """Return whether the backward pass that is running computes the gradient that a node receives.

    `torch.autograd.grad` and `backward(inputs=...)` skip what they do not need. Fallback: True.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except AttributeError:
        return True
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
        return True


def backward_runs(node: Any) -> bool:
    """Return whether the backward pass that is running calls a node; a leaf's node adds to the leaf's `grad`.

    Fallback: True.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except AttributeError:
        return True
    except RuntimeError:
        return False


def backward_is_restricted() -> bool:
    """Return whether the backward pass that is running is for given inputs: then no reentrant checkpoint can run in it.

    Fallback: False. Then such a checkpoint raises torch's error.
    """
    try:
        return not torch.autograd.Variable._execution_engine.is_checkpoint_valid()
    except AttributeError:
        return False


def checkpoints_allowed() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return the stand-in (stand_ins.py) with which reentrant checkpoints run in a backward for given inputs.

    torch refuses that, because such a backward may not reach all that the checkpoint's own backward does. A backward
    through a replica's graph reaches all. Fallback: none; then torch's error is raised.
    """
    name = "_is_checkpoint_valid"
    return [(torch.autograd, name, lambda value: lambda: True)] if hasattr(torch.autograd, name) else []


def _engine() -> Callable[..., Any] | None:
    """Return what runs a backward in torch's engine; None where this torch lacks it.

    Fallback: torch's own function around the engine. With it, backward of what torch.compile has compiled fails on
    several accelerators.
    """
    around_engine: Callable[..., Any] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if around_engine is None or not hasattr(torch._C, "_remove_obj_from_tls"):
        return around_engine
    return _run_engine


def _run_engine(*args: Any, **kwargs: Any) -> Any:
    """Run a backward, and let compiled code in each of its threads see the caller's context variables.

    torch has one `contextvars.Context` for a backward, and calls its `run`. Two threads, of two devices, cannot enter
    it at once: "cannot enter context". Here each call has a copy.
    """
    context = contextvars.copy_context()
    run = functools.partial(_run_in_copy, context)  # until torch 2.13; from then on torch itself enters a copy
    torch._C._stash_obj_in_tls("context", types.SimpleNamespace(run=run, copy=context.copy))
    try:
        return torch.autograd.Variable._execution_engine.run_backward(*args, **kwargs)
    finally:
        torch._C._remove_obj_from_tls("context")


def _run_in_copy(context: contextvars.Context, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return context.copy().run(function, *args, **kwargs)


_SEEN = "unisono: seen in backward"  # a key among what torch takes along into the threads of a backward


class seen_by_backward:  # noqa: N801 - a context manager, as a class because a step enters it each time
    """Lets nodes that run in backwards called within the block, in whatever thread, find items: `seen_in_backward`.

    They find those of a block around it, too. Fallback: only nodes that run in the calling thread do, as all nodes of a
    CPU do. Where only the removal is missing, an empty dict stays in the thread's state.
    """

    def __init__(self, items: Mapping[Any, Any]) -> None:
        self._items = items

    def __enter__(self) -> None:
        self._before = seen_in_backward()
        self._seen = {**self._before, **self._items}
        _stash(self._seen)

    def __exit__(self, *_: object) -> None:
        _stash(self._before)
        # Collectives that were begun within the block keep the state of their thread, and the items may keep them.
        self._seen.clear()


def _stash(items: dict[Any, Any]) -> None:
    c: Any = torch._C
    try:
        if not items and hasattr(c, "_remove_obj_from_tls"):
            c._remove_obj_from_tls(_SEEN)
            return
        stash = c._stash_obj_in_tls
    except AttributeError:
        _thread.seen_in_backward = items
        return
    if _stash_keeps_no_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(items))
    stash(_SEEN, items)


@functools.cache
def _stash_keeps_no_reference() -> bool:
    """Return whether `_stash_obj_in_tls` gives back a reference that it has not taken, as in torch 2.11."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_SEEN, probe)
    keeps_none = sys.getrefcount(probe) == before
    if keeps_none:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return keeps_none


def seen_in_backward() -> dict[Any, Any]:
    """Return what `seen_by_backward` has been given; nothing outside of its block."""
    c: Any = torch._C
    try:
        items: dict[Any, Any] = c._get_obj_in_tls(_SEEN) if c._is_key_in_tls(_SEEN) else {}
    except AttributeError:
        return getattr(_thread, "seen_in_backward", {})
    return items


_thread = threading.local()


@interruptible
def run_backward(ends: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], *, keep: bool) -> None:
    """Run `torch.autograd.backward(ends, grads, retain_graph=keep)`, without its check of the gradients in Python.

    The check imports sympy, which takes a second and 33 MiB of each process. The engine, in C++, checks shapes again.
    Fallback, also for tensors that handle functions of torch themselves: torch's function.
    """
    engine = _engine()
    if engine is None or not _none_handles_functions(ends):
        _import_what_backward_imports()
        torch.autograd.backward(ends, grads, retain_graph=keep)
    else:
        engine(tuple(ends), tuple(grads), keep, False, (), allow_unreachable=True, accumulate_grad=True)


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
    engine = _engine()
    if engine is None or not _none_handles_functions((*ends, *inputs)):
        _import_what_backward_imports()
        options = {"retain_graph": keep or create_graph, "create_graph": create_graph, "allow_unused": True}
        found = torch.autograd.grad(ends, inputs, grads, **options)
    else:
        given = tuple(ends), tuple(grads), keep or create_graph, create_graph, tuple(inputs)
        found = engine(*given, allow_unreachable=True, accumulate_grad=False)
    return tuple(found)


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange what two tensor objects are in C++: memory, place in a graph. Classes and attributes stay.

    Unlike `torch.utils.swap_tensors`, which calls it, it does so also where a graph has saved them.
    Fallback: RuntimeError.
    """
    swap = getattr(torch._C, "_swap_tensor_impl", None)
    if swap is None:
        raise RuntimeError(
            "forward has called requires_grad_ of a parameter: this release of torch cannot do that in a replica. "
            "Call it before forward, on model.module."
        )
    swap(one, other)


_counted = torch.zeros((), device="cpu", requires_grad=True)
_numbers_nodes = hasattr(_counted.exp().grad_fn, "_set_sequence_nr")


def run_first(node: Any, number: int) -> None:
    """Add to the sequence number of a node: of the nodes that are ready, torch's engine runs the highest first.

    Fallback: nothing; then the node may run later, with the same result.
    """
    if _numbers_nodes:
        node._set_sequence_nr(number + node._sequence_nr())


def is_batch_norm_in_training(node: Any) -> bool:
    """Return whether a node of a graph belongs to a batch norm by the statistics of its input, which has several rows.

    An instance norm is the batch norm of one row to torch. Fallback: True for that, too, or False for every node.
    """
    if "BatchNorm" not in node.name() or not getattr(node, "_saved_training", False):
        return False
    inputs = getattr(node, "_input_metadata", None)
    return not inputs or bool(inputs[0].shape[0] > 1)


def sequence_number() -> int:
    """Return the sequence number of the next node: torch counts the nodes that each thread makes. Fallback: 0."""
    try:
        return torch.autograd._get_sequence_nr()
    except AttributeError:
        return 0


def number_nodes_from(number: int) -> None:
    """Have the next nodes that the calling thread makes a sequence number of at least this. Fallback: nothing.

    It makes nodes, so it costs what those have cost that are to be passed.
    """
    missing = number - sequence_number()
    with torch.enable_grad():
        for _ in range(missing):
            _counted.neg()


def number_of_backward() -> int:
    """Return a number that tells the backward that is running from all others of this process.

    Fallback: -1, as outside of a backward.
    """
    try:
        return int(torch._C._current_graph_task_id())
    except AttributeError:
        return -1


def call_at_end_of_backward(function: Callable[[], object]) -> bool:
    """Have `function` called when the backward that is running has ended; return whether it will be.

    Fallback: it will not.
    """
    queue = getattr(torch.autograd.Variable._execution_engine, "queue_callback", None)
    if queue is None:
        return False
    queue(function)
    return True


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _none_handles_functions(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no tensor handles functions of torch itself. A function mode does not count: it is ours."""
    others = {*map(type, tensors)} - _PLAIN
    if not others:
        return True
    disabled = getattr(torch._C, "_disabled_torch_function_impl", None)
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


def num_hooks(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many hooks are on tensors: of `register_hook`, and of `register_post_accumulate_grad_hook`.

    Fallback: 0.
    """
    try:
        return sum(map(len, filter(None, chain.from_iterable(map(_hooks_of, tensors)))))
    except AttributeError:
        return 0


_hooks_of = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether vmap has hidden an axis of `tensor`, as it does when many gradients are asked for at once.

    Fallback: False. Then such a backward raises torch's own error.
    """
    try:
        functorch = torch._C._functorch
        return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))
    except (AttributeError, NotImplementedError):
        return False


def is_of_transform(tensor: torch.Tensor) -> bool:
    """Return whether a `torch.func` transform, active or ended, has made `tensor`: it has no gradient edge then.

    Fallback: False.
    """
    try:
        return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
    except AttributeError:
        return False


# ---- modes that are active in a thread -----------------------------------------------------------


def any_mode() -> bool:
    """Return whether any of the states below may be active in this thread: they are asked only if so.

    Fallback: True.
    """
    c: Any = torch._C
    try:
        return bool(
            c._len_torch_function_stack()
            or c._len_torch_dispatch_stack()
            or c._functorch.maybe_current_level() is not None
            or torch.autograd.forward_ad._current_level >= 0
            or c._autograd._top_saved_tensors_default_hooks(True) is not None
        )
    except AttributeError:
        return True


def any_autocast() -> bool:
    """Return whether autocast is on for any kind of device in this thread. Fallback: True."""
    try:
        return bool(torch._C._is_any_autocast_enabled())
    except AttributeError:
        return True


def has_saved_tensor_hooks() -> bool:
    """Return whether default saved-tensor hooks (activation checkpointing, save_on_cpu) are active in this thread.

    Fallback: False. Then such hooks act on the caller's replica only.
    """
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    except AttributeError:
        return False


def _is_checkpoint_hook(hook: object) -> bool:
    return getattr(hook, "__module__", None) == "torch.utils.checkpoint"


def has_checkpoint_hooks() -> bool:
    """Return whether a non-reentrant activation checkpoint takes what this thread saves for backward. Fallback: False.

    Then such a checkpoint may fail in backward, where it is around several accelerators.
    """
    try:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    except AttributeError:
        return False
    return hooks is not None and _is_checkpoint_hook(hooks[0])


def add_to_checkpoint(devices: Iterable[torch.device], state_of: Callable[[torch.device], torch.Tensor]) -> None:
    """Have an activation checkpoint around the caller restore the random states of accelerators, where it restores any.

    torch's own keeps the states of the devices that its inputs are on. What it has kept of a device stays.
    Fallback: nothing; then a checkpoint around replicas draws other random numbers when it computes again.

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
            hook: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)[0]
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
    """Return the stand-ins (stand_ins.py) that note in `begun` what begins.

    Fallback: none for reentrant checkpoints; then these are seen where a graph is searched.
    """
    places: list[tuple[Any, str, str]] = [(torch.autograd.graph.saved_tensors_hooks, "__enter__", "hooks")]
    if hasattr(torch.utils.checkpoint, "check_backward_validity"):  # which such a checkpoint calls first
        places.append((torch.utils.checkpoint, "check_backward_validity", "reentrant"))
    return [(owner, name, functools.partial(_noting, kind)) for owner, name, kind in places]


def _noting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        setattr(begun, kind, object())
        return function(*args, **kwargs)

    return noted


def end_checkpoints(error: BaseException) -> None:
    """End the activation checkpoints through which `error` has passed in this thread.

    Older releases of torch leave them open until the error is freed. Until then their saved-tensor hooks stay active in
    this thread; and if another thread frees the error, theirs stay for good, and that thread loses others.
    Fallback: nothing; then that happens.
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


class _IfGiven:
    """A tensor hook on a leaf that is called only where there is a gradient."""

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        functools.update_wrapper(self, hook)
        self._hook = hook

    def __call__(self, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else self._hook(gradient)


class _IfAccumulated:
    """A hook for what has been accumulated in a leaf's `grad`, which is not called in `skipped` backwards."""

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self._hook = hook
        self.skipped: set[int] = set()

    def __call__(self, leaf: torch.Tensor) -> Any:
        number = number_of_backward()
        if number in self.skipped:
            self.skipped.remove(number)
            return None
        return self._hook(leaf)


def skip_hooks_without_gradient(leaves: Iterable[torch.Tensor]) -> None:
    """Let hooks that `leaves` have now be called only with a gradient, in this backward and in later ones.

    torch calls a leaf's tensor hooks with None where a node leads to the leaf and has no gradient for it, and those for
    what is accumulated although nothing is. Those of torch itself (`register_multi_grad_hook`) count their calls and
    expect None: they stay as they are. Fallback: nothing; then the hooks are called.
    """
    for leaf in leaves:
        call_with_gradient_only(getattr(leaf, "_backward_hooks", None) or {})
        hooks: dict[int, Any] = getattr(leaf, "_post_accumulate_grad_hooks", None) or {}
        for key, hook in [*hooks.items()]:
            ours = hook if isinstance(hook, _IfAccumulated) else _IfAccumulated(hook)
            if key in hooks:
                hooks[key] = ours
                ours.skipped.add(number_of_backward())


def call_with_gradient_only(hooks: dict[int, Any]) -> None:
    """Let tensor hooks, of `hooks_of`, be called only with a gradient; as above, not those of torch itself."""
    for key, hook in [*hooks.items()]:
        is_torchs = getattr(hook, "__module__", None) == "torch.autograd.graph"
        if key in hooks and not is_torchs and not isinstance(hook, _IfGiven):
            hooks[key] = _IfGiven(hook)


def note_hooks_of_nodes(function: type[torch.autograd.Function]) -> None:
    """Let the nodes of a function, which have one output, say in `has_hooks` whether a program has put hooks on them.

    The hooks are called only with a gradient. Fallback: nothing; then no node says so.
    """
    node_class: Any = getattr(function, "_backward_cls", None)
    for name in ("register_hook", "register_prehook") if node_class is not None else ():
        setattr(node_class, name, _noted_hook(getattr(node_class, name)))


def _noted_hook(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def noted(node: Any, hook: Callable[..., Any]) -> Any:
        node.has_hooks = True
        return register(node, lambda *gradients: None if gradients[-1][0] is None else hook(*gradients))

    return noted


def hooks_of(tensor: torch.Tensor) -> dict[int, Any]:
    """Return the dict of a tensor's hooks, of `register_hook`, which stays when the tensor is gone.

    Fallback: one that says that there is a hook. Then a backward does for it what it does for hooks.
    """
    handle: Any = tensor.register_hook(_no_change)  # type: ignore[no-untyped-call]
    handle.remove()  # the dict stays
    hooks = getattr(tensor, "_backward_hooks", None)
    return {-1: _no_change} if hooks is None else hooks


def _no_change(gradient: torch.Tensor | None) -> None:
    pass


def stops_recomputation(error: BaseException) -> bool:
    """Return whether `error` is how an activation checkpoint ends what it computes again, once it has enough.

    A tensor that is saved after it is one too many: CheckpointError. Fallback: False; then that is raised.
    """
    kind = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
    return issubclass(type(error), kind)


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


@contextmanager
def with_function_mode(mode: Any) -> Iterator[None]:
    """Enter a `TorchFunctionMode`; at the end this thread's modes are those of before, whatever happened meanwhile.

    torch takes a mode off its stack while a function of the mode runs, in Python, so Ctrl-C may come before it is put
    back; and a generator of torch's may put it back when the error is freed, if it is not told to do so before.
    Fallback: what the mode itself does at the end, which is then an error.
    """
    before = function_modes()
    mode.__enter__()
    try:
        yield
    except BaseException as error:
        _put_modes_back(error)
        raise
    finally:
        c: Any = torch._C
        try:
            while c._len_torch_function_stack():
                c._pop_torch_function_stack()
            for mode_before in before:
                c._push_on_torch_function_stack(mode_before)
        except AttributeError:
            mode.__exit__(None, None, None)


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
    """Return whether a function mode is the one behind `torch.set_default_device`. Fallback: False."""
    try:
        return isinstance(mode, torch.utils._device.DeviceContext)
    except AttributeError:
        return False


def default_device() -> torch.device | None:
    """Return the default device of this thread as it was set; None if none is, which torch's does not tell.

    An accelerator without an index is whichever device is current at the time. Fallback: None.
    """
    for mode in reversed(function_modes()):
        if is_default_device(mode):
            device: torch.device = mode.device
            return device
    return None


def has_dispatch_modes() -> bool:
    """Return whether a `TorchDispatchMode` is active in this thread. Fallback: False."""
    try:
        return bool(torch._C._len_torch_dispatch_stack())
    except AttributeError:
        return False


def dispatch_mode_flags() -> list[Any]:
    """Return the flags by which torch tells, for the whole process, that a `TorchDispatchMode` is active.

    A mode sets them, and at its end sets them to what it found. Where modes of several threads overlap, the flags stay
    set, and older releases of torch compile nothing any more. Fallback: those that there are.
    """
    return [*map(_namespace_of_flags.get, _DISPATCH_MODE_FLAGS)]


def clear_dispatch_mode_flags(before: Sequence[Any]) -> None:
    """Clear the flags that were not set when `dispatch_mode_flags` returned these.

    Those that were are left alone: the mode of another thread may have ended, or go on.
    """
    found = zip(_DISPATCH_MODE_FLAGS, before, strict=True)
    _namespace_of_flags.update([(name, False) for name, flag in found if flag is False])


_namespace_of_flags = vars(_python_dispatch)
_DISPATCH_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def has_transforms() -> bool:
    """Return whether a `torch.func` transform or forward-mode AD is active in this thread. Fallback: False."""
    try:
        if torch._C._functorch.maybe_current_level() is not None:
            return True
    except AttributeError:
        return False
    return is_forward_mode()


def is_forward_mode() -> bool:
    """Return whether this thread differentiates in forward mode: torch has one level for all. Fallback: False.

    It may be another thread's only where one has taken it (`take_forward_mode`).
    """
    is_open = getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0
    return bool(is_open and _forward_mode.thread in (None, threading.get_ident()))


def take_forward_mode(ident: int | None) -> None:
    """Note that a thread alone differentiates in forward mode from now on; None: any may."""
    _forward_mode.thread = ident


class _ForwardMode:
    thread: int | None = None


_forward_mode = _ForwardMode()


def is_tracing() -> bool:
    """Return whether operations are recorded in this thread, by torch.compile or export, rather than run.

    Fallback: False.
    """
    try:
        kinds = torch._C._TorchDispatchModeKey
        found = torch._C._get_dispatch_mode
        recording = (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL)
        return has_dispatch_modes() and any(found(kind) is not None for kind in recording)
    except AttributeError:
        return False


# ---- torch.compile -------------------------------------------------------------------------------


def is_compiled(function: object) -> bool:
    """Return whether torch.compile made `function`. Fallback: False."""
    return issubclass(type(function), types.FunctionType) and "_torchdynamo_orig_callable" in function.__dict__


def replays_cuda_graphs(function: object) -> bool:
    """Return whether torch.compile made `function` with CUDA graphs, as mode="reduce-overhead" does. Fallback: False.

    Compiled with the backend "cudagraphs", or with the global setting, it is not noticed.
    """
    if not is_compiled(function):
        return False
    found = _with_cuda_graphs.get(function)
    if found is None:
        config_of: Any = getattr(function, "get_compiler_config", None)
        config = config_of() if callable(config_of) else None
        found = _with_cuda_graphs[function] = bool(config and config.get("triton.cudagraphs"))
    return found


_with_cuda_graphs: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()  # to ask takes milliseconds


def settings_of_compiler() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield the settings of torch.compile that are others while compiled replicas run in threads.

    Each is an object, the name of an attribute, and a function from its value to the other one.

    - Compiled code belongs to one device, and torch keeps few versions of a function (8); the devices beyond run
      uncompiled. It keeps as many for each accelerator as for one.
    - A call that finds its version moves it to the front of the list. A call in another thread that searches the list
      at that moment misses it, and compiles the same code again. The list stays in its order.
    - Older releases count once a process what the compiler does, and two threads that compile at the same time, such as
      those of two replicas' backward passes, raise "Metric(s) have already been set". Each thread counts for itself.

    Fallback: what this release of torch lacks is left out.
    """
    with contextlib.suppress(ImportError):
        config: Any = importlib.import_module("torch._dynamo.config")
        num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        if num_devices > 1 and hasattr(config, "recompile_limit"):
            yield config, "recompile_limit", lambda limit: limit * num_devices
        keep_by_use = getattr(importlib.import_module("torch._C._dynamo.eval_frame"), "_set_lru_cache", None)
        if keep_by_use is not None:
            yield _OrderOfCode(keep_by_use), "is_by_use", lambda _: False
        utils: Any = importlib.import_module("torch._dynamo.utils")
        context = getattr(utils, "_METRICS_CONTEXT", None)
        if context is not None and not isinstance(context, threading.local):
            yield utils, "_METRICS_CONTEXT", _by_thread


class _OrderOfCode:
    """How torch.compile orders the versions of a function: those found last first, by default, or as they were made."""

    def __init__(self, set_by_use: Callable[[bool], None]) -> None:
        self._set_by_use, self._is_by_use = set_by_use, True

    @property
    def is_by_use(self) -> bool:
        return self._is_by_use

    @is_by_use.setter
    def is_by_use(self, value: bool) -> None:
        self._set_by_use(value)
        self._is_by_use = value


def _by_thread(context: Any) -> Any:
    return _class_by_thread(type(context))(on_exit=context._on_exit)  # type: ignore[arg-type]


@functools.cache  # a class refers to itself: only the garbage collector would free one of each pass
def _class_by_thread(of_context: type) -> type[Any]:
    return type("MetricsContextByThread", (of_context, threading.local), {})


def has_compiled_call(module: torch.nn.Module) -> bool:
    """Return whether calling `module` runs code that torch.compile made for this object."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile runs as it is written, with all that it calls, between two of its graphs.

    It is the same one where torch.compile has not been imported: nothing is compiled there, and to import it is slow.
    """
    return _disabled(function) if "torch._dynamo" in sys.modules else function


@functools.cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def mark_static(tensors: Iterable[torch.Tensor]) -> None:
    """Tell torch.compile that tensors keep their addresses: CUDA graphs need no copies of them, and may change them.

    Fallback: nothing. Then a compiled function that changes such a tensor is not captured in a CUDA graph.
    """
    with contextlib.suppress(ImportError, AttributeError):
        mark = importlib.import_module("torch._dynamo").mark_static_address
        for tensor in tensors:
            mark(tensor, guard=True)


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch.compile raises when it cannot compile; none where nothing has been compiled.

    Fallback: none, so that such an error is raised as it is.
    """
    try:
        return (sys.modules["torch._dynamo"].exc.TorchDynamoException,)
    except (KeyError, AttributeError):
        return ()


# ---- what was written, as torch.compile's guards see it ------------------------------------------

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_HAS_LOCK: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
# Returns a number for a dict, another one after any write into it. None: it is not known; nor where Python has no lock,
# and a write may come between.
dict_version: Callable[[dict[Any, Any]], int] | None = getattr(_guards, "dict_version", None) if _HAS_LOCK else None


def look_at_tensors(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Return a function that returns whether tensors have the class, form, flags and memory that they have now.

    It may return False where they have them, as it does where gradients are off now or then: guards do not see
    `requires_grad` there. Fallback: it always does.
    """
    kept = [*tensors]
    try:
        sizes, strides = [[*tensor.size()] for tensor in kept], [[*tensor.stride()] for tensor in kept]
        guards = _guards.TensorGuards(*kept, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check, address = guards.check, torch.Tensor.data_ptr
    except (AttributeError, TypeError, RuntimeError):
        return lambda: False
    if not kept or not torch.is_grad_enabled():
        return lambda: False
    before = [*map(address, kept)]
    return lambda: torch.is_grad_enabled() and check(*kept) and [*map(address, kept)] == before


# ---- modules and containers ----------------------------------------------------------------------


_HOOKS_OF_EVERY_MODULE = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


def hooks_of_every_module() -> dict[str, list[Any]]:
    """Return the hooks that are registered for all modules alike, by their registry. Fallback: those that are known."""
    registries = {name: getattr(torch.nn.modules.module, name, {}) for name in _HOOKS_OF_EVERY_MODULE}
    return {name: [*hooks.values()] for name, hooks in registries.items()}


def caches_parametrizations() -> bool:
    """Return whether `torch.nn.utils.parametrize.cached()` is on. Fallback: False."""
    return bool(getattr(torch.nn.utils.parametrize, "_cache_enabled", 0))


@contextmanager
def parametrizations_not_cached() -> Iterator[None]:
    """Switch `torch.nn.utils.parametrize.cached()` off: its cache is keyed by the live module, for all replicas alike.

    Fallback: nothing happens.
    """
    parametrize: Any = torch.nn.utils.parametrize
    cached = getattr(parametrize, "_cache_enabled", 0)  # how many `cached()` are open, in all threads
    if not cached:
        yield
        return
    parametrize._cache_enabled -= cached
    try:
        yield
    finally:
        parametrize._cache_enabled += cached


def flatten_registered(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Any] | None:
    """Return a container's children, a function that rebuilds it from new ones, and its context (what is no child).

    A library registers these functions with torch's pytree; None for a class that is not registered. Fallback: None;
    such a container is then an object like any other.
    """
    try:
        from torch.utils import _pytree

        node = _pytree.SUPPORTED_NODES.get(type(value))
        if node is None:
            return None
        children, context = node.flatten_fn(value)
        return list(children), lambda others: node.unflatten_fn(others, context), context
    except (ImportError, AttributeError):
        return None


# ---- what torch and Python keep once a process -----------------------------------------------------

# The functions that change it, in the releases of torch that have them: from 2.9 to 2.15 not all do. Left out are
# settings without a context manager that no forward changes for a while (preferred libraries, torch.set_warn_always).
_PROCESS_STATE_SETTERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        torch._C,
        (
            *(f"_set_sdp_use_{name}" for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")),
            *("_set_sdp_priority_order", "_set_default_dtype", "_set_default_tensor_type"),
            *("_set_deterministic_algorithms", "_set_deterministic_fill_uninitialized_memory"),
            *("_set_float32_matmul_precision", "_set_fp32_precision_setter", "_set_check_sparse_tensor_invariants"),
            *(f"_set_cudnn_{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
            *("_set_cudnn_depthwise_kernel", "_cuda_set_cudnn_benchmark_limit"),
            *("_set_mkldnn_enabled", "_set_mkldnn_deterministic", "_set_onednn_allow_tf32", "_set_nnpack_enabled"),
            *(f"_set_cublas_allow_{name}" for name in ("tf32", "fp16_accumulation")),
            *(f"_set_cublas_allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")),
        ),
    ),
    (torch, ("set_anomaly_enabled",)),
    (torch.backends.ContextProp, ("__set__",)),  # torch.backends.cudnn.benchmark = True
)


def process_state_setters() -> Iterator[tuple[Any, str]]:
    """Yield each function that changes what torch keeps once a process: the object that has it, and its name.

    Fallback: what this release of torch lacks is left out.
    """
    return ((owner, name) for owner, names in _PROCESS_STATE_SETTERS for name in names if name in vars(owner))


def forward_mode() -> Iterator[tuple[Any, str]]:
    """Yield the functions with which forward-mode differentiation begins and ends, as above. Fallback: as above."""
    of_func: Any = torch._functorch.eager_transforms
    by_hand = torch.autograd.forward_ad
    places = (by_hand, "enter_dual_level"), (by_hand, "exit_dual_level"), (of_func, "jvp_increment_nesting")
    return ((owner, name) for owner, name in places if hasattr(owner, name))


def tracing() -> Iterator[tuple[Any, str]]:
    """Yield the method that traces a function as torch.func does, with torch.fx, whose state is the process's.

    Fallback: none.
    """
    tracer = getattr(sys.modules.get("torch.fx.experimental.proxy_tensor"), "_MakefxTracer", None)
    if hasattr(tracer, "trace"):
        yield tracer, "trace"


def cell_of_cached_parametrizations() -> Iterator[Any]:
    """Yield the cell that has the generator function behind `torch.nn.utils.parametrize.cached()`. Fallback: none.

    A program that has imported `cached` calls what is in the cell, too.
    """
    cached: Any = getattr(torch.nn.utils.parametrize, "cached", None)
    for cell in getattr(cached, "__closure__", None) or ():
        if getattr(cell.cell_contents, "__name__", None) == getattr(cached, "__name__", ""):
            yield cell


# ---- TorchScript ---------------------------------------------------------------------------------
#
# A ScriptModule's state is in a TorchScript object, its `_c`; the Python object around it has views of that state where
# other modules have dicts. A traced module, or one of a user's own subclass of ScriptModule, is one more Python object
# around that one: it has nothing but `_actual_script_module`.


def batch_norms_in_script(module: torch.nn.Module) -> list[bool | None]:
    """Return, for each batch norm that a script calls, whether it takes statistics; None: a flag decides when it runs.

    Fallback: one of which nothing is known.
    """
    try:
        graph: Any = module.inlined_graph  # its nodes do not keep it
        return [[*node.inputs()][_TRAINING].toIValue() for node in graph.findAllNodes("aten::batch_norm")]
    except (AttributeError, RuntimeError, IndexError):
        return [None]


_TRAINING = 5  # the place of `training` among the inputs of aten::batch_norm


def is_scripted(module: torch.nn.Module) -> bool:
    """Return whether `module` has its parameters in TorchScript; False where PYTORCH_JIT=0 has disabled that."""
    return isinstance(module, torch.jit.ScriptModule) and not isinstance(module.__dict__.get("_parameters"), dict)


def can_take_scripts_apart() -> bool:
    """Return whether this release of torch has all that the functions below call. Fallback: False."""
    try:
        return None not in (
            torch._C.ScriptMethod,
            torch._C.ParameterDict,
            torch._C.BufferDict,
            torch._C.ConcreteModuleType.from_jit_type,
            torch.jit._script.OrderedDictWrapper,
            torch.jit._script.OrderedModuleDict,
        )
    except AttributeError:
        return False


def script_parts(module: torch.nn.Module) -> dict[str, Any]:
    """Return the `__dict__` that a scripted module would have as an ordinary module.

    Its `_c` is a new TorchScript object that still has the parameters, buffers and children of the old one.
    """
    attributes = {
        name: value for name, value in module.__dict__.items() if not isinstance(value, torch._C.ScriptMethod)
    }
    if "_actual_script_module" in attributes:
        return {**attributes, "_parameters": {}, "_buffers": {}, "_modules": {}}
    for part in ("_parameters", "_buffers", "_modules"):
        attributes[part] = dict(attributes[part].items())
    attributes["_c"] = copy.copy(attributes["_c"])
    return attributes


def script_from_parts(module: torch.nn.Module) -> None:
    """Turn a module whose `__dict__` is what `script_parts` returns into a scripted one. Inverse of `script_parts`."""
    attributes = module.__dict__
    parameters, buffers, children = (attributes.pop(part) for part in ("_parameters", "_buffers", "_modules"))
    if "_actual_script_module" in attributes:
        return
    script_object = attributes["_c"]
    for name, tensor in {**parameters, **buffers}.items():
        script_object.setattr(name, tensor)
    for name, child in children.items():
        if isinstance(child, torch.jit.ScriptModule):  # else one that only Python code in it uses
            script_object.setattr(name, child.__dict__.get("_actual_script_module", child).__dict__["_c"])
    attributes["_parameters"] = torch.jit._script.OrderedDictWrapper(torch._C.ParameterDict(script_object))
    attributes["_buffers"] = torch.jit._script.OrderedDictWrapper(torch._C.BufferDict(script_object))
    attributes["_modules"] = torch.jit._script.OrderedModuleDict(script_object, children)


def script_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return a scripted module's TorchScript attributes, without parameters, buffers and children; lists are copies."""
    if "_c" not in module.__dict__:
        return {}
    script_object = module.__dict__["_c"]
    names = torch._C.ConcreteModuleType.from_jit_type(script_object._type()).get_attributes()  # type: ignore[attr-defined]
    known = {*module._parameters.keys(), *module._buffers.keys()}
    return {name: script_object.getattr(name) for name in names if name not in known}


def set_script_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
    """Set one of the attributes that `script_attributes` returns."""
    module.__dict__["_c"].setattr(name, value)


# ---- memory, and many tensors at once ------------------------------------------------------------


def is_only_reference(holder: list[torch.Tensor]) -> bool:
    """Return whether a list of one tensor has the only reference to it, and nothing else shares its memory.

    Then it may be written into. Fallback: False.
    """
    return sys.getrefcount(holder[0]) == _REFERENCES_OF_ONE and _uses_of_memory(holder[0]) in _uses_of_one


def _uses_of_memory(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return how many references there are to a tensor's memory and, in C++, to the tensor.

    None: that is not known, or the memory is not torch's own (an array's, a file's, another process's).
    """
    try:
        storage = tensor.untyped_storage()
        if not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared()):
            return None
        in_cpp = torch._C._storage_Use_Count(storage._cdata), tensor._use_count()  # type: ignore[attr-defined]
        return *map(int, in_cpp), sys.getrefcount(storage)
    except (AttributeError, RuntimeError):  # the latter: a tensor without storage
        return None


def _find_uses_of_one() -> None:
    tensor = torch.empty(1, device="cpu")
    alone, alias = _uses_of_memory(tensor), tensor.detach()
    if alone is not None and alone != _uses_of_memory(alias):
        _uses_of_one.append(alone)


_an_object = [object()]
_REFERENCES_OF_ONE = sys.getrefcount(_an_object[0])  # the list's, and that of the call
_uses_of_one: list[tuple[int, ...]] = []  # of memory that one tensor has, in this release of torch; none: not known
_finds = threading.Thread(target=_find_uses_of_one)  # in which no mode is active, whatever this module is imported in
_finds.start()
_finds.join()


def add_all_in_place(targets: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Add each of `others` to its target. Fallback, also where a device lacks it for a dtype: one after the other."""
    if not targets:
        return
    try:
        torch._foreach_add_(targets, others)
    except (AttributeError, NotImplementedError):
        for target, other in zip(targets, others, strict=True):
            target.add_(other)


def add_all(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum of each pair, in memory of its own. Fallback, as above: one after the other."""
    try:
        return list(torch._foreach_add(tensors, others))
    except (AttributeError, NotImplementedError):
        return [tensor + other for tensor, other in zip(tensors, others, strict=True)]


def copy_all_in_place(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each of `sources` into its target. Fallback, as above: one after the other."""
    if not targets:
        return
    try:
        torch._foreach_copy_(targets, sources)
    except (AttributeError, NotImplementedError):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the entries of several tensors as one new flat tensor. Fallback: with a view of each."""
    try:
        flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
        return flat
    except (AttributeError, RuntimeError):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a clone of each tensor, in one call instead of one for each. Fallback: one for each."""
    if {*map(type, tensors)} == {torch.Tensor}:
        try:
            return list(torch._foreach_clone(tensors))
        except AttributeError:
            pass
    return [tensor.clone() for tensor in tensors]


def of_one_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors in lists of one dtype and device each, in which they keep their order.

    For the functions above: torch's CUDA kernels take one such list at once. Given several dtypes, as those of batch
    norm's buffers, torch launches a kernel for each tensor.
    """
    lists: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(lists.values())


# ---- random numbers ------------------------------------------------------------------------------


# Two keys of the dispatcher that torch has no kernels for: the first is that of an external library (deferred
# initialisation, torchdistx), the second is above all others, and is kept for torch's own tests.
OF_STREAMS, ABOVE_ALL = "DeferredInit", "TESTING_ONLY_GenericMode"


def catch_operations(
    handlers: Mapping[Any, Callable[..., Any]], key_name: str = OF_STREAMS
) -> Callable[[], AbstractContextManager[None]] | None:
    """Install a handler for each of some operations, for good; return a context in which a thread calls the handlers.

    `handler(keys, *args, **kwargs)` is called in place of `operation(*args, **kwargs)`, and calls the operation itself
    by `operation.redispatch(keys, *args, **kwargs)`. Calls in C++, inside another operation or during a backward pass
    in that thread, are intercepted too. Nothing else is slower, in the context or outside of it: the handlers are
    kernels for a dispatch key that nothing else uses, and the dispatcher skips keys for which an operation has no
    kernel.

    Args:
        handlers: by operation.
        key_name: `OF_STREAMS` or `ABOVE_ALL`; the handlers of the second are called before those of the first.

    Fallback: None, where the key is missing or taken. Then nothing is installed.
    """
    dispatcher: Any = torch._C
    library: Any = torch.library.Library
    try:
        key = dispatcher._parse_dispatch_key(key_name)
        if dispatcher._dispatch_has_backend_fallback(key):
            return None
        keys_after = dispatcher._dispatch_keyset_full_after(key)
        in_context = functools.partial(dispatcher._IncludeDispatchKeyGuard, key)
        higher_order_operators: Any = list(torch._ops._higher_order_ops.values())
        of_those_to_come: Any = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
        all_operations, aten = library("_", "IMPL"), library("aten", "IMPL")
        all_operations.fallback(torch.library.fallthrough_kernel, key_name)
        # Higher-order operators (flex_attention, cond) are dispatched in Python, which has no such fallback.
        of_those_to_come.append(key)
        for operator in higher_order_operators:
            operator.fallthrough(key)
        for operation, handler in handlers.items():
            name = operation.name().removeprefix("aten::")
            aten.impl(name, _on_remaining_keys(handler, keys_after), key_name, with_keyset=True)
    except (AttributeError, RuntimeError):
        return None
    _installed.extend([all_operations, aten])
    return in_context


_installed: list[torch.library.Library] = []  # a library's kernels last as long as it does


def is_caught(key_name: str) -> bool:
    """Return whether the calling thread is in the context of `catch_operations`. Fallback: False, as there is none."""
    try:
        dispatcher: Any = torch._C
        return bool(dispatcher._dispatch_tls_is_dispatch_key_included(dispatcher._parse_dispatch_key(key_name)))
    except (AttributeError, RuntimeError):
        return False


def _on_remaining_keys(handler: Callable[..., Any], keys_after: Any) -> Callable[..., Any]:
    return lambda keys, *args, **kwargs: handler(keys & keys_after, *args, **kwargs)


def is_default_generator(generator: torch.Generator) -> bool:
    """Return whether `generator` is the CPU's default one, or stands in for it. Fallback: False.

    Several Python objects may wrap one generator.
    """
    try:
        found: int = generator._cdata  # type: ignore[attr-defined]
        return found in [each._cdata for each in (torch.default_generator, *_of_threads)]  # type: ignore[attr-defined]
    except AttributeError:
        return False


class GeneratorOfThread(torch.Generator):
    """The CPU's default generator as `torch.manual_seed`, `get_rng_state` and `set_rng_state` are to see it.

    Its methods are those of the generator that `look_up` returns at each call.
    """

    look_up: Callable[[], torch.Generator]

    def __new__(cls, look_up: Callable[[], torch.Generator]) -> Self:
        generator = super().__new__(cls)
        generator.look_up = look_up
        _of_threads.add(generator)  # an operation that is given it gets another Python object with its `_cdata`
        return generator


_of_threads: "weakref.WeakSet[GeneratorOfThread]" = weakref.WeakSet()


def _method_of_thread(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.look_up(), name)(*args, **kwargs)


for _name, _method in vars(torch.Generator).items():
    if callable(_method) and _name not in ("__new__", "__init__"):
        setattr(GeneratorOfThread, _name, _method_of_thread(_name))


# ---- accelerators --------------------------------------------------------------------------------


def free_memory_bytes(device: torch.device) -> int:
    """Return how much memory of an accelerator is free. Fallback: as CUDA's own call says; where it has none, 0."""
    accelerator: Any = torch.accelerator
    if hasattr(accelerator, "get_memory_info"):
        free_bytes, _ = accelerator.get_memory_info(device)
        return int(free_bytes)
    module: Any = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        free_bytes, _ = module.mem_get_info(device)
        return int(free_bytes)
    return 0


# ---- process groups ------------------------------------------------------------------------------


@contextmanager
def default_group_unbound() -> Iterator[None]:
    """Let some ranks of the default group make a process group of their own, without the others.

    Where the default group is bound to a device (`init_process_group(device_id=...)`), torch splits the new group's
    NCCL communicator off that of the default group. All ranks of the default group have to take part in the split, so
    those of the new group would wait for ever. Unbound, the new group connects when it is first used.
    Fallback: nothing.
    """
    distributed: Any = torch.distributed
    default = distributed.group.WORLD
    device = getattr(default, "bound_device_id", None)
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


@contextmanager
def group_named(name: str) -> Iterator[None]:
    """Give this name to the process group that this thread makes with `use_local_synchronization=True`.

    The keys of a group in the store begin with its name. torch's own name follows from how many groups this process
    has: so it comes back after a group has been destroyed, with the addresses of the old one in the store; and ranks
    that have ended other groups, or later, look for each other under different names.
    Fallback: torch's name.
    """
    module: Any = getattr(torch.distributed, "distributed_c10d", None)
    original = getattr(module, "_process_group_name", None)
    if original is None:
        yield
        return
    thread = threading.get_ident()

    def name_of(*args: Any, **kwargs: Any) -> Any:
        return name if threading.get_ident() == thread else original(*args, **kwargs)

    module._process_group_name = name_of
    try:
        yield
    finally:
        module._process_group_name = original


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether FSDP, of either kind, has the parameters of a module, without those of its children.

    Fallback: False. Then torch raises an error of its own in forward.
    """
    return bool(module.__dict__.get("_is_fsdp_managed_module"))


def sharded_tensor_types() -> tuple[type, ...]:
    """Return the classes of tensors of which each process has a part; one that is not imported has no tensors.

    Fallback: none. Then torch raises an error of its own.
    """
    places = ("torch.distributed.tensor", "DTensor"), ("torch.distributed._shard.sharded_tensor", "ShardedTensor")
    found = [getattr(sys.modules.get(module), name, None) for module, name in places]
    return tuple([kind for kind in found if kind is not None])


def runs_in_ddp() -> bool:
    """Return whether the forward that is running is one of a DistributedDataParallel. Fallback: False."""
    return getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None


def load_checkpoints() -> None:
    """Load what torch.utils.checkpoint loads when it is first called: torch's compiler, 70 MB of it.

    Where memory is short, that fails in the middle, and modules that are half imported can be used no more. So it is to
    be called before. Fallback: nothing; then the first checkpoint loads what it needs.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")


def abort_group(group: Any) -> None:
    """End the collectives of a group of torch.distributed that wait on an accelerator; gloo's end by themselves.

    It does not wait: a thread of its own does, because a driver may take its time to end a kernel. Fallback: nothing.
    """
    gloo: Any = getattr(torch.distributed, "ProcessGroupGloo", ())
    backends: dict[int, Any] = {}
    for kind in getattr(group, "_device_types", ()):
        with contextlib.suppress(AttributeError, RuntimeError):
            backend = group._get_backend(kind)
            backends[id(backend)] = backend
    abort = [each.abort for each in backends.values() if hasattr(each, "abort") and not isinstance(each, gloo)]
    if abort:
        threading.Thread(target=lambda: [each() for each in abort], name="unisono-abort", daemon=True).start()


def all_reduce(tensor: torch.Tensor, group: Any) -> Any:
    """Begin to sum a tensor over the ranks of a group; return the work. Fallback: with torch's checks before it."""
    if not hasattr(group, "allreduce"):
        return torch.distributed.all_reduce(tensor, group=group, async_op=True)
    return group.allreduce([tensor])


def all_gather_into(flat: torch.Tensor, tensor: torch.Tensor, group: Any) -> Any:
    """Begin to all-gather a tensor into `flat`, whose first axis is the rank; return the work. gloo cannot do it."""
    distributed: Any = torch.distributed
    # Older releases have it under another name, which newer ones warn about.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    return gather(flat.view(-1), tensor.reshape(-1), group, True)


def timeout_of_group(group: Any) -> timedelta:
    """Return the timeout of a process group. Fallback: 30 minutes, which is gloo's default."""
    default = timedelta(minutes=30)
    for kind in getattr(group, "_device_types", ()):
        with contextlib.suppress(AttributeError, RuntimeError):
            timeout = group._get_backend(kind).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return default
