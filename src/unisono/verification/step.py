"""One step: a forward and its backward from a given state, with all draws switched off, and the record of it."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unisono.autograd.graph_search import leaves_and_nodes
from unisono.data_parallel import DataParallel
from unisono.leftovers.generators import generators_of
from unisono.leftovers.report import Kind as Left
from unisono.primitives import pytree
from unisono.primitives.change_tracking import GONE
from unisono.primitives.visitor import TRACKED
from unisono.runtime import devices as _devices
from unisono.runtime.contexts import contextmanager
from unisono.runtime.draws_off import DrawsOff
from unisono.runtime.errors import add_note, is_of_replica, text_of
from unisono.verification.call_recorder import CallRecorder
from unisono.verification.compare import difference, joined_numbers, largest, plain, tensors_in
from unisono.verification.state import (
    RandomState,
    attributes_in,
    contents_in,
    copied,
    fresh,
    marks_on,
    numbers_in,
    widen,
)

_TARGET = "If one of them is the target, write verify(model, inputs, target, criterion)"
_SEED = 0  # of the projection and the nudges, which are the same in every step


@dataclass(frozen=True)
class Example:
    """The inputs of a step, and how its loss is computed: target and criterion as `verify` takes them."""

    inputs: tuple[Any, ...]  # those by position
    kwargs: dict[str, Any]  # those by name
    target: Any
    criterion: Callable[..., Any] | None
    device: torch.device  # of the inputs
    output_device: torch.device  # of the outputs when they are compared
    forward: Callable[..., Any] | None = None  # what is called with the wrapper; None: the wrapper itself
    step: Callable[..., Any] | None = None  # what is called with the model and the inputs; None: the model itself

    def fresh_inputs(self, least: torch.dtype | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword inputs, whose tensors are copies and leaves of a new graph."""
        inputs, kwargs = fresh((self.inputs, self.kwargs), self.device, least)
        return inputs, kwargs

    def loss(
        self, output: Any, like: dict[str, torch.Tensor], off: DrawsOff, least: torch.dtype | None
    ) -> torch.Tensor | None:
        """Return the loss of an output; None if it has no tensors to compute one from, or not `like` one device."""
        if self.criterion is None:
            return _projection(dict(tensors_in(output)), like)
        criterion = self.criterion
        if isinstance(self.criterion, nn.Module):
            criterion = copied(self.criterion)
            widen(criterion, least, self.criterion)
        given = () if self.target is None else (fresh(self.target, self.output_device, least),)
        with off:
            loss = criterion(output, *given)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise ValueError(f"criterion: expected one number, such as a mean over the rows, but it returned {shape}")
        return loss.reshape(())


def _projection(outputs: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return a fixed random projection of all floating outputs; None if there are none, or they have other shapes."""
    generator = torch.Generator().manual_seed(_SEED)
    outputs = joined_numbers(like, outputs)
    total: torch.Tensor | None = None
    for path, expected in like.items():
        if not (expected.is_floating_point() or expected.is_complex()):
            continue
        tensor = outputs.get(path)
        if tensor is None or tensor.shape != expected.shape:
            return None
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        weights = torch.randn(tensor.shape, generator=generator, dtype=dtype, device="cpu")
        weights /= max(1, tensor.numel()) ** 0.5
        part = (tensor.to(dtype) * weights.to(tensor.device)).sum()
        total = part if total is None else total + part.to(total.dtype)
    return total


@dataclass
class RecordedStep:
    """The results of one step: tensors are detached, and by name."""

    recorder: CallRecorder  # the calls of every submodule
    output: Any = None  # on `output_device`
    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)  # of parameters, of inputs that need one
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # after the step
    updated_buffers: Collection[str] = ()  # the names of those that the step has changed
    parameters_before: Collection[str] = ()  # their names
    written: dict[str, torch.Tensor] = field(default_factory=dict)  # after the step, the parameters that it has changed
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # all of them, after the step
    attributes_before: dict[str, torch.Tensor] = field(default_factory=dict)  # the numbers in attributes
    attributes: dict[str, torch.Tensor] = field(default_factory=dict)  # after the step
    contents_before: dict[str, dict[str, Any]] = field(default_factory=dict)  # of containers and objects in attributes
    contents: dict[str, dict[str, Any]] = field(default_factory=dict)  # after the step
    containers: Collection[str] = ()  # attributes that are the same container as before
    marked: set[str] = field(default_factory=set)  # what it has left on tensors and in inputs, and does not return
    left: dict[Left, Sequence[str]] = field(default_factory=lambda: dict.fromkeys(Left, ()))  # behind, by forward
    rows: Sequence[int] = ()  # of each replica; one entry on one device, empty if not known
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # by the caller's `step`, to the wrapper at first
    error: ValueError | None = None  # why the replicas' outputs could not be gathered
    no_gradients: str = ""  # why the backward failed
    switched_off: Sequence[str] = ()  # the operations that would have drawn
    asked: Collection[torch.dtype] = ()  # the floating types that conversions and constants asked for
    drawn_from: Sequence[str] = ()  # which generators were drawn from nevertheless: see `RandomState.moved`

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The tensors of the output, by path."""
        return dict(tensors_in(self.output))

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The types of the outputs of every submodule, and of the parameters."""
        computed = [tensor for call in self.recorder.calls for _, tensor in call.outputs]
        return {each.dtype for each in (*computed, *self.outputs.values(), *self.parameters.values())}


def take_step(
    model: nn.Module,
    example: Example,
    random: RandomState,
    mode: str,
    like: RecordedStep | None = None,
    nudge: float = 0.0,
    repeated: bool = False,
    least: torch.dtype | None = None,
    record: bool = True,
    backward: bool = True,
    written: Collection[int] = (),
) -> RecordedStep:
    """Run one step of a copy of a model.

    Args:
        model: the plain module, or a wrapper around it.
        random: the state of the random number generators in which the step begins.
        mode: "training": with the module's own flags if it is in training mode, else after `train()`; "eval": after
            `eval()`.
        like: the step on one device, if this is one of a wrapper.
        nudge: relative size of a random change of every parameter and every input.
        repeated: run forward once before the step, with other copies of the inputs, which are not nudged.
        least: the floating type to compute in, where the model's own is narrower.
        record: the calls of submodules, too.
        backward: compute gradients, too.
        written: what is known of the parameters that forward writes (see `StepMemory`): it may find that out by running
            twice, and the recorded step runs once.
    """
    original: nn.Module = model if like is None else model.module  # type: ignore[assignment]
    given, model = model, copied(model)
    if isinstance(model, DataParallel):
        model._step_memory.written.update(written)
    module: nn.Module = model if like is None else model.module  # type: ignore[assignment]
    module.to(example.device)
    widen(module, least, original)
    if mode == "eval":
        model.eval()
    elif not module.training:
        model.train()
    run = model if like is None or example.forward is None else functools.partial(example.forward, model)
    run = run if example.step is None else functools.partial(example.step, run)
    if repeated:
        args, kwargs = example.fresh_inputs(least)
        with DrawsOff(least), contextlib.suppress(Exception):  # without warnings; what it raises, the step raises too
            run(*args, **kwargs)
        if isinstance(model, DataParallel):
            model._step_memory.first_steps.leftovers.found[Left.SHARED].clear()
    args, kwargs = example.fresh_inputs(least)
    leaves = [tensor for _, tensor in (*tensors_in(args), *tensors_in(kwargs))] + [*module.parameters()]
    with_gradient = [path for path, tensor in (*tensors_in(args), *tensors_in(kwargs)) if tensor.requires_grad]
    if nudge:
        _nudge(leaves, nudge, [*module.parameters()])
    random.restore()
    generators = generators_of(module)
    # The replicas' calls overlap: which of them has drawn cannot be seen.
    watch = (lambda: RandomState(generators).moved) if like is None else (lambda: lambda: False)
    step = RecordedStep(CallRecorder(watch), attributes_before=numbers_in(module), contents_before=contents_in(module))
    if isinstance(model, DataParallel) and example.step is not None:
        model.register_forward_pre_hook(functools.partial(_note_given, step), with_kwargs=True)
    off, before = DrawsOff(least), RandomState(generators)
    attributes, marks = attributes_in(module), marks_on(module, args, kwargs)
    with step.recorder.attached(module) if record else contextlib.nullcontext(), off:
        output = _run_forward(step, functools.partial(run, *args, **kwargs), len(args), on_one_device=like is None)
    if example.step is not None and record and not step.recorder.has_seen_calls():
        raise ValueError("step: it did not call the model that it is given; write step(model, *inputs), and call that")
    if isinstance(model, DataParallel) and not model._step_memory.written <= {*written}:
        same: dict[str, Any] = {"nudge": nudge, "repeated": repeated, "least": least, "record": record}
        same["written"] = model._step_memory.written
        return take_step(given, example, random, mode, like, backward=backward, **same)
    if isinstance(model, DataParallel):
        step.rows = [timing.rows for timing in model.replica_timings]
    kept = [name for name, each in attributes_in(module).items() if each is attributes.get(name)]
    step.containers = {name for name in kept if type(attributes[name]) in TRACKED}
    returned = set() if step.error else {*map(id, pytree.flatten(output)[0])}
    now = marks_on(module, args, kwargs)
    changed = {name for name in {**marks, **now} if now.get(name, GONE) is not marks.get(name, GONE)}
    step.marked = {name for name in changed if id(now.get(name)) not in returned}
    if step.error is None:
        output = pytree.map_tensors(lambda tensor: _devices.moved_to(tensor, example.output_device), output)
        loss = example.loss(output, dict(tensors_in(output)) if like is None else like.outputs, off, least)
        if loss is not None and loss.requires_grad and backward and not (like is not None and like.no_gradients):
            with off:
                step.no_gradients = _backward(loss, leaves, may_fail=mode == "eval" and least is None)
        gradients = {} if step.no_gradients else dict(_gradients(module, args, kwargs, with_gradient))
        if any(gradient is not None for gradient in gradients.values()):  # forward may have called backward, too
            step.gradients = gradients
        step.loss = None if loss is None else plain(loss)
        values, spec = pytree.flatten(pytree.map_tensors(lambda tensor: tensor.detach().clone(), output))
        step.output = pytree.unflatten(spec, values, rebuild_all=True)  # a list may be one to which forward appends
    step.switched_off, step.asked, step.drawn_from = [*off.operations], off.asked, before.moved()
    if isinstance(model, DataParallel):  # after backward, which hooks may see
        step.left = {kind: [*names] for kind, names in model._step_memory.first_steps.leftovers.found.items()}
    _record_state(step, module, original)
    return step


def _note_given(step: RecordedStep, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if step.given is None:
        step.given = args, kwargs


def _run_forward(step: RecordedStep, run: Callable[[], Any], num_inputs: int, *, on_one_device: bool) -> Any:
    """Run forward; return its output. What replicas' outputs could not be gathered for is noted as the step's error."""
    try:
        return run()
    except ValueError as error:
        if on_one_device or not step.recorder.root_calls() or is_of_replica(error):
            raise
        step.error = error
    except TypeError as error:
        if on_one_device and num_inputs > 1:
            add_note(error, f"the model got {num_inputs} positional inputs. {_TARGET}")
        raise
    return None


def _record_state(step: RecordedStep, module: nn.Module, original: nn.Module) -> None:
    """Record what the step has left in the module: its parameters, buffers and attributes; and what it has changed."""
    step.attributes, step.contents = numbers_in(module), contents_in(module)
    step.parameters = {name: plain(parameter) for name, parameter in module.named_parameters()}
    parameters_before = {name: plain(parameter) for name, parameter in original.named_parameters()}
    step.parameters_before = parameters_before.keys()
    step.written = {name: step.parameters[name] for name in _changed(step.parameters, parameters_before)}
    step.buffers = {name: plain(buffer).clone() for name, buffer in module.named_buffers()}
    step.updated_buffers = _changed(step.buffers, {name: plain(buffer) for name, buffer in original.named_buffers()})


def _changed(now: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are new, or have other values."""
    return [name for name, tensor in now.items() if name not in before or _differ(tensor, before[name])]


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape != other.shape or difference(one, other.to(one.dtype)) > 0


def _nudge(tensors: Sequence[torch.Tensor], by: float, parameters: Sequence[torch.Tensor]) -> None:
    """Change tensors by random parts of themselves; parameters by those of their largest, so that zeros change, too."""
    generator = torch.Generator().manual_seed(_SEED)
    known = {id(parameter) for parameter in parameters}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu").mul_(by)
            size = (largest(tensor) or 1.0) if id(tensor) in known else tensor.detach().cpu().double()
            tensor.data.add_((noise * size).to(tensor.device, tensor.dtype))


def _backward(loss: torch.Tensor, leaves: Sequence[torch.Tensor], *, may_fail: bool) -> str:
    """Run the backward; return why it failed. The backward of cuDNN's recurrent layers, say, works in training only."""
    with _gradients_kept(loss, leaves):
        try:
            torch.autograd.backward([loss])
        except RuntimeError as error:
            if not may_fail:
                raise
            return (text_of(error) or type(error).__name__).splitlines()[0]
    return ""


@contextmanager
def _gradients_kept(loss: torch.Tensor, own: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep `.grad` of other leaves of a loss, such as those of a criterion, while its backward runs."""
    known = {id(leaf) for leaf in own}
    leaves = [leaf for leaf in leaves_and_nodes([loss]) if isinstance(leaf, torch.Tensor)]
    before = [(leaf, leaf.grad) for leaf in leaves if id(leaf) not in known]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in before:
            leaf.grad = grad


def _gradients(
    module: nn.Module, args: Any, kwargs: Any, with_gradient: Collection[str]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the gradients of parameters, and of the inputs at the paths that had to get one: forward may add others."""
    for name, parameter in module.named_parameters():
        yield name, parameter.grad
    for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
        if path in with_gradient and tensor.is_leaf:
            yield f"inputs{path}", tensor.grad
