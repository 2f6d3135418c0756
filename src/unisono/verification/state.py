"""Snapshots of everything that a forward and a backward can change; each can be restored any number of times.

A snapshot has, of every module that can be reached from the roots (also through lists, closures and hooks): its
attributes, and the contents of its plain containers (parameters, buffers, children and hooks are in such); of every
tensor: its values and `.grad`; and the random state of torch, on the host and on each accelerator, of Python, of numpy
if that is loaded, and of generators in the modules' attributes. Restoring puts the same `.grad` objects back, and
values without a new tensor version, so that a graph that was built before still works.
"""

import copy
import pickle
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from unisono.primitives.references import references
from unisono.runtime import devices as _devices

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


class RandomState:
    """The state of every random number generator that a script seeds, when this is created."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        """Save the state of the global generators, and of these."""
        self._own = [(generator, generator.get_state()) for generator in generators]
        self._torch = _devices.random_states()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def restore(self) -> None:
        for generator, state in self._own:
            generator.set_state(state)
        _devices.set_random_states(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(pickle.loads(self._numpy))

    def has_moved(self) -> bool:
        """Return whether random numbers have been drawn since."""
        before = [*(state for _, state in self._own), *self._torch]
        now = [*(generator.get_state() for generator, _ in self._own), *_devices.random_states()]
        if not all(torch.equal(a, b) for a, b in zip(before, now, strict=True)):
            return True
        return self._python != random.getstate() or self._numpy != _numpy_state()


class Snapshot:
    """The state of everything that can be reached from the roots, when this is created."""

    def __init__(self, *roots: Any) -> None:
        self._attributes: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        tensors: dict[int, torch.Tensor] = {}
        modules: dict[int, nn.Module] = {}
        pending: list[Any] = [found for root in roots for found in references(root)]
        while pending:
            found = pending.pop()
            if isinstance(found, torch.Tensor):
                tensors[id(found)] = found
            elif isinstance(found, nn.Module) and id(found) not in modules:
                modules[id(found)] = found
                pending += [*found.children(), *found._parameters.values(), *found._buffers.values()]
                pending += references(vars(found))
        generators: dict[int, torch.Generator] = {}
        for module in modules.values():
            if isinstance(module, torch.jit.ScriptModule):  # its attributes are not in its `__dict__`
                continue
            attributes = dict(vars(module))
            generators.update((id(value), value) for value in attributes.values() if isinstance(value, torch.Generator))
            contents = {name: copy.copy(value) for name, value in attributes.items() if type(value) in _CONTAINERS}
            self._attributes.append((module, attributes, contents))
        self.random = RandomState(generators.values())
        with torch.no_grad():
            self._values = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self.tensors = list(tensors.values())
        self._save_gradients(self.tensors)

    def set_gradients_aside(self, leaves: Iterable[torch.Tensor]) -> None:
        """Save `.grad` of leaves that the roots do not reach, such as those of a criterion, and set it to None."""
        outside = [leaf for leaf in leaves if id(leaf) not in self._gradients]
        self._save_gradients(outside)
        for leaf in outside:
            leaf.grad = None

    def _save_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_leaf and tensor.requires_grad:
                self._gradients[id(tensor)] = (tensor, tensor.grad)

    def restore(self, *, gradients: bool) -> None:
        """Restore everything; with `gradients` also each `.grad`, which becomes None otherwise."""
        for module, attributes, contents in self._attributes:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            for name, content in contents.items():
                _refill(attributes[name], content)
        for tensor, values in self._values:
            tensor.data.copy_(values)
        for tensor, grad in self._gradients.values():
            tensor.grad = grad if gradients else None
        self.random.restore()


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)


def _numpy_state() -> bytes | None:
    """Return the state of numpy's global generator as bytes, to compare; None if numpy is not loaded."""
    numpy: Any = sys.modules.get("numpy")
    return pickle.dumps(numpy.random.get_state()) if hasattr(numpy, "random") else None
