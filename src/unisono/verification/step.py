"""One step: a forward and its backward from a given state, and the record of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unisono.data_parallel import DataParallel
from unisono.engines.replica import leaves_and_nodes
from unisono.primitives import pytree
from unisono.runtime import devices as _devices
from unisono.verification.attributes import Numbers, numbers_in
from unisono.verification.call_recorder import CallRecorder
from unisono.verification.compare import in_one_number, plain, tensors_in
from unisono.verification.state import Snapshot

_SEED = 0  # of the projection and the nudges, which are the same in every step


@dataclass(frozen=True)
class Example:
    """The inputs of a step, and how its loss is computed.

    Attributes:
        inputs: a tuple of positional inputs, a dict of keyword inputs, or the only input.
        target: the second argument of the criterion; None for none.
        criterion: returns the loss; None for a fixed random projection of all floating outputs.
    """

    inputs: Any
    target: Any = None
    criterion: Callable[..., Any] | None = None

    def fresh_inputs(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword inputs, whose tensors are copies on `device` and leaves of a new graph."""
        if isinstance(self.inputs, dict):
            return (), {name: _fresh(value, device) for name, value in self.inputs.items()}
        inputs = self.inputs if type(self.inputs) is tuple else (self.inputs,)  # a named tuple is one input
        return tuple(_fresh(value, device) for value in inputs), {}

    def loss(self, output: Any, like: Any) -> torch.Tensor | None:
        """Return the loss of `output`; None if it has no tensors to compute one from.

        `like` is the output on one device, whose shapes the projection expects.
        """
        if self.criterion is None:
            return _projection(output, like)
        tensor = next((tensor for _, tensor in tensors_in(output)), None)
        device = tensor.device if tensor is not None else torch.device("cpu")
        given = () if self.target is None else (_fresh(self.target, device),)
        loss = self.criterion(output, *given)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise ValueError(f"criterion: expected one number, such as a mean over the rows, and it returned {shape}")
        return loss.reshape(())


def _fresh(value: Any, device: torch.device) -> Any:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    return pytree.map_all_tensors(copied, value)


def _projection(output: Any, like: Any) -> torch.Tensor | None:
    """Return a fixed random projection of all floating outputs; None if there are none, or they have other shapes."""
    generator = torch.Generator().manual_seed(_SEED)
    of_output = dict(tensors_in(output))
    total: torch.Tensor | None = None
    for path, expected in tensors_in(like):
        if not (expected.is_floating_point() or expected.is_complex()):
            continue
        tensor = of_output.get(path)
        if tensor is not None and expected.dim() == 0 and tensor.dim() == 1:
            tensor = in_one_number(expected, tensor)
        if tensor is None or tensor.shape != expected.shape:
            return None
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        weights = torch.randn(tensor.shape, generator=generator, dtype=dtype) / max(1, tensor.numel()) ** 0.5
        part = (tensor.to(dtype) * weights.to(tensor.device)).sum()
        total = part if total is None else total + part.to(total.dtype)
    return total


@dataclass
class RecordedStep:
    """The results of one step.

    Attributes:
        output: detached.
        loss: detached; None if there was none.
        gradients: of each parameter, by name, and of each input that requires one; empty without a backward.
        buffers: after the step, by name.
        attributes_before, attributes: the numbers in attributes, before and after the step, by name.
        recorder: the calls of every submodule.
        rows: of each replica; one entry on one device, empty if not known.
        error: why the replicas' outputs could not be gathered.
        no_gradients: why the backward failed.
    """

    recorder: CallRecorder
    output: Any = None
    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes_before: dict[str, Numbers] = field(default_factory=dict)
    attributes: dict[str, Numbers] = field(default_factory=dict)
    rows: Sequence[int] = ()
    error: ValueError | None = None
    no_gradients: str = ""

    def shape_of(self, path: str) -> torch.Size | None:
        """Return the shape of the output at `path`; None if there is no tensor."""
        tensor = dict(tensors_in(self.output)).get(path)
        return None if tensor is None else tensor.shape


def take_step(
    module: nn.Module,
    example: Example,
    state: Snapshot,
    mode: str,
    device: torch.device,
    output_device: torch.device,
    model: nn.Module,
    like: RecordedStep | None = None,
    nudge: float = 0.0,
) -> RecordedStep:
    """Run one step from a state; the model keeps the changes of the step.

    Args:
        module: the plain module, whose calls are recorded.
        mode: "training": with the module's own flags if it is in training mode, else after `train()`; "eval": after
            `eval()`.
        device, output_device: of the inputs, and of the outputs when they are compared.
        model: the module that is called: `module` itself, or the wrapper around it.
        like: the step on one device; None if this is it.
        nudge: relative size of a random change of every parameter and every input.
    """
    state.restore(gradients=False)
    if mode == "eval":
        model.eval()
    elif not module.training:
        model.train()
    step = RecordedStep(CallRecorder(state.random.has_moved if like is None else lambda: False))
    args, kwargs = example.fresh_inputs(device)
    if nudge:
        _nudge([*module.parameters(), *(tensor for _, tensor in (*tensors_in(args), *tensors_in(kwargs)))], nudge)
    step.attributes_before = numbers_in(module)
    with step.recorder.attached(module):
        try:
            output = model(*args, **kwargs)
        except ValueError as error:
            if like is None or not step.recorder.root_calls() or _is_of_a_replica(error):
                raise
            step.error = error
    if isinstance(model, DataParallel):
        step.rows = [timing.rows for timing in model.replica_timings]
    if step.error is None:
        output = pytree.map_all_tensors(lambda tensor: _devices.copy_to(tensor, output_device), output)
        loss = example.loss(output, output if like is None else like.output)
        if loss is not None and loss.requires_grad and not (like is not None and like.no_gradients):
            _backward(step, loss, state, mode, module, args, kwargs)
        step.loss = None if loss is None else plain(loss)
        step.output = pytree.map_all_tensors(lambda tensor: tensor.detach().clone(), output)
    step.attributes = numbers_in(module)
    step.buffers = {name: plain(buffer).clone() for name, buffer in module.named_buffers()}
    return step


def _nudge(tensors: Sequence[torch.Tensor], by: float) -> None:
    generator = torch.Generator().manual_seed(_SEED)
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).mul_(by).add_(1)
            tensor.data.mul_(noise.to(tensor.device, tensor.dtype))


def _is_of_a_replica(error: Exception) -> bool:
    return any(note.startswith("raised in ") for note in getattr(error, "__notes__", ()))


def _backward(
    step: RecordedStep, loss: torch.Tensor, state: Snapshot, mode: str, module: nn.Module, args: Any, kwargs: Any
) -> None:
    """Run the backward, and record the gradients."""
    leaves = [leaf for leaf in leaves_and_nodes([loss]) if isinstance(leaf, torch.Tensor)]
    state.set_gradients_aside(leaves)
    try:
        torch.autograd.backward([loss])
    except RuntimeError as error:
        if mode != "eval":  # the backward of cuDNN's recurrent layers, for example, works in training mode only
            raise
        step.no_gradients = str(error).splitlines()[0]
        return
    step.gradients = dict(_gradients(module, args, kwargs))


def _gradients(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, parameter in module.named_parameters():
        yield name, parameter.grad
    for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
        if tensor.requires_grad and tensor.is_leaf:
            yield f"inputs{path}", tensor.grad
