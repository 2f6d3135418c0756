"""What a step begins with: copies of the model and of its inputs, the state of all random number generators, numbers in
attributes.

Each step runs on a copy, so whatever it does, the caller's model is not touched. Gradients do not belong to a copy, nor
do hooks of parameters, such as an optimizer's that steps in backward.
"""

import contextlib
import copy
import types
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from unisono.data_parallel import DataParallel
from unisono.leftovers.attributes import is_computed
from unisono.leftovers.generators import GeneratorStates
from unisono.primitives import pytree
from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.object_state import state_of as state_of_object
from unisono.primitives.references import references
from unisono.primitives.visitor import INERT, filled_slots
from unisono.runtime import devices as _devices
from unisono.runtime.widening import widened
from unisono.verification.compare import plain, tensors_in

_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_NO_CONTENTS = (torch.Tensor, nn.Module, types.FunctionType, types.MethodType, torch.Generator)
_TOO_LARGE = 2**62  # for an integer tensor
_SHARED = INERT | {object}  # a plain object marks something, by its identity
_NO_OBJECTS = (torch.Tensor, types.FunctionType, types.MethodType, torch.Generator, type, Iterator)


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model. Tensors with a history that it keeps, which torch does not copy, lose the history."""
    found = [each for module in model.modules() for each in references(vars(module))]
    without_history = {
        id(each): each.detach().clone() for each in found if isinstance(each, torch.Tensor) and not each.is_leaf
    }
    try:
        with torch.no_grad():  # a scripted module would keep the history of the copying
            new = copy.deepcopy(model, without_history)
            for module, own in zip(model.modules(), new.modules(), strict=True):
                for _, slot, value in filled_slots(module):  # which torch leaves empty
                    slot.__set__(own, copy.deepcopy(value, without_history))
    except Exception as error:
        raise TypeError(
            "verify runs each step on a copy of the model, but copy.deepcopy cannot copy "
            f"{type(model).__name__}: {error}"
        ) from error
    for parameter, before in zip(new.parameters(), model.parameters(), strict=True):
        if parameter is not before:  # a class may share what it has
            parameter.requires_grad_(before.requires_grad)
            parameter.grad = None  # a copy of a parameter on some devices has that of the last step
    return new


def widen(module: nn.Module, least: torch.dtype | None, original: nn.Module) -> None:
    """Give the tensors of a copy the floating type `least` where theirs is narrower; None: leave them.

    Raises:
        TypeError: the copy shares tensors with the original, or has two that are parts of one memory.
    """
    if least is None:
        return
    registered = [*module.parameters(), *module.buffers()]
    attributes = [
        (vars(part), name)
        for part in module.modules()
        for name, value in vars(part).items()
        if not _is_of_torch(part, name) and isinstance(value, torch.Tensor | list | tuple | dict)
    ]
    kept = [each for own, name in attributes for _, each in tensors_in(own[name]) if each.is_leaf]
    every = {id(each): each for each in (*registered, *kept)}
    if any(id(each) in every for each in chain(original.parameters(), original.buffers())) or _overlap(every.values()):
        raise TypeError("tensors of the model share memory with others, so they cannot get another type")
    for tensor in registered:
        tensor.data = tensor.data.to(widened(tensor.dtype, least))
    wide = {id(each): each.to(widened(each.dtype, least)) for each in kept}
    for own, name in attributes:
        if any(wide.get(id(each), each) is not each for _, each in tensors_in(own[name])):
            own[name] = pytree.map_tensors(lambda tensor: wide.get(id(tensor), tensor), own[name])


def _overlap(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether two tensors have entries in the same memory."""
    ends: list[tuple[int, int]] = []
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            ends.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize))
    ends.sort()
    return any(begin < end for (_, end), (begin, _) in pairwise(ends))


def fresh(value: Any, device: torch.device | None = None, least: torch.dtype | None = None) -> Any:
    """Return a copy of inputs, so that forward does not change those of the program.

    Tensors are leaves of a new graph, on `device` if it is given, and at least of the floating type `least`.
    Containers and objects are copied too. An object that has something that cannot be copied, such as a lock, gets a
    shallow copy; one that cannot be copied at all, such as a file, stays the same.
    """

    def tensor_copied(tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype if least is None else widened(tensor.dtype, least)
        return tensor.detach().to(device or tensor.device, dtype, copy=True).requires_grad_(tensor.requires_grad)

    leaves, spec = pytree.flatten(value)
    new = pytree.unflatten(spec, map(_object_copied, leaves), rebuild_all=True)
    return pytree.map_tensors(tensor_copied, new)


def _object_copied(value: Any) -> Any:
    if type(value) in _SHARED or isinstance(value, _NO_OBJECTS) or batch_type_of(value) is not None:
        return value
    with contextlib.suppress(Exception):  # an object of any class
        if isinstance(value, nn.Module):
            return copied(value)
        state = state_of_object(value, without=(nn.Module, nn.Parameter))
        tensors = [each for each in state.values() if isinstance(each, torch.Tensor) and not each.is_leaf]
        return copy.deepcopy(value, {id(each): each.detach().clone() for each in tensors})
    with contextlib.suppress(Exception):
        return copy.copy(value)
    return value


class RandomState:
    """The state of every generator that a script seeds, when this is created, and of `own`, which are not restored."""

    def __init__(self, own: Sequence[Any] = ()) -> None:
        self._torch = _devices.random_states()
        self._others = GeneratorStates(own)

    def restore(self) -> None:
        _devices.set_random_states(self._torch)
        self._others.restore()

    def moved(self) -> list[str]:
        """Return which generators have been drawn from or seeded since, in words."""
        of_torch = all(map(torch.equal, self._torch, _devices.random_states()))
        return ["torch's generator"] * (not of_torch) + self._others.moved()


def attributes_in(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of modules, by name. Those of a scripted one are not in its `__dict__`."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule | DataParallel)
        for name, value in vars(module).items()
        if not _is_of_torch(module, name)
    }


def _is_of_torch(module: nn.Module, name: str) -> bool:
    return name in _OF_TORCH or is_computed(module, name)


def marks_on(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return what forward may leave on tensors of a model, in its inputs, and in `__slots__`, by name.

    A replica has tensors, inputs and slots of its own.
    """
    leaves = {**dict(pytree.leaves(args, "inputs")), **dict(pytree.leaves(kwargs, "kwargs"))}
    slots = {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, _, value in filled_slots(module)
    }
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    tensors |= {**dict(model.named_parameters()), **dict(model.named_buffers())}
    of_tensors = {f"{name}.{key}": value for name, tensor in tensors.items() for key, value in vars(tensor).items()}
    own = {name: value for name, value in of_tensors.items() if "._dynamo_" not in name}  # not torch.compile's
    return leaves | slots | own


def contents_in(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what the containers and objects hold that are attributes of modules, by name; tensors are copied.

    Replicas share them: what they change there is changed by each, in the order of arrival.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, value in attributes_in(model).items():
        if type(value) not in INERT and not isinstance(value, _NO_CONTENTS):
            with contextlib.suppress(Exception):  # an object of any class
                state = state_of_object(value, without=(nn.Module, nn.Parameter))
                found[name] = {where: _copied(each) for where, each in state.items()}
    return found


def _copied(value: Any) -> Any:
    return plain(value).to("cpu", copy=True) if type(value) is torch.Tensor and not value.is_meta else value


def numbers_in(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the numbers and tensors that are attributes of modules, by name: metrics, counters, features.

    What a replica assigns is lost when its forward ends, so an attribute that forward updates differs from the plain
    module's, and nothing else shows it.
    """
    found: dict[str, torch.Tensor] = {}
    for name, value in attributes_in(model).items():
        if isinstance(value, bool | float | complex) or (isinstance(value, int) and abs(value) < _TOO_LARGE):
            dtype = torch.float64 if isinstance(value, float) else None
            found[name] = torch.tensor(value, dtype=dtype, device="cpu")
        elif type(value) is torch.Tensor and not (value.requires_grad or value.is_nested or value.is_meta):
            found[name] = plain(value).to("cpu", copy=True)
    return found
