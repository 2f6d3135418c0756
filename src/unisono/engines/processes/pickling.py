"""Pickling for another process: modules of any class, with their tensors left out.

What the other process could not import by name goes by value (cloudpickle): classes and functions of `__main__`, of a
notebook cell, of a function, of a module that is on no path where Python looks. For each tensor a function returns the
reference that is pickled instead. A module is pickled as its `__dict__`, as in stamping: none of its methods are
called, so a module that refuses to be pickled works too.
"""

import functools
import importlib
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Set
from importlib.machinery import ExtensionFileLoader
from typing import Any

import cloudpickle
import torch
from torch import nn

from unisono.primitives.references import PROXIES, referent

ToReference = Callable[[torch.Tensor], Any]  # None: the tensor itself is pickled
FromReference = Callable[[Any], Any]

_importable: dict[str, bool] = {}
_COMMON = frozenset({torch.Tensor, nn.Parameter, bool, int, float, complex, str, bytes, type(None)})


class _ModulePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self, stream: io.BytesIO, to_reference: ToReference, modules: list[nn.Module], known: Set[type]
    ) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._to_reference, self._known = to_reference, known
        self._modules = set(map(id, modules))  # weak references to these are kept
        self.by_value: list[types.ModuleType] = []

    def persistent_id(self, value: Any) -> Any:
        if type(value) in PROXIES:  # its class is its referent's, and it raises if the referent is gone
            return None
        if isinstance(value, torch.Tensor):
            return self._to_reference(value)
        if isinstance(value, type) and value in self._known and (tracker := _tracker_of(value)) is not None:
            return _KnownClass(tracker)
        return None

    def reducer_override(self, value: Any) -> Any:
        if type(value) in PROXIES:
            target = referent(value)
            return (weakref.proxy, (target,)) if id(target) in self._modules else (_dead_proxy, ())
        if isinstance(value, nn.Module):
            return _new_module, (type(value),), value.__dict__, None, None, _fill_module
        if type(value) is weakref.ref:
            target = value()
            return (weakref.ref, (target,)) if id(target) in self._modules else (_dead_reference, ())
        if (
            type(value) is types.MethodType
            and isinstance(value.__self__, type)
            and getattr(value.__self__, value.__name__, None) == value
        ):
            # A class method, by name: cloudpickle may take its function apart, and in older releases of torch that of
            # an autograd.Function's `apply` refers to what cannot be pickled.
            return getattr, (value.__self__, value.__name__)
        if isinstance(value, types.ModuleType) and (
            type(value) is not types.ModuleType or _is_part_of_extension(value)
        ):
            # An object in place of a module (torch.backends.cudnn, torch.ops, torch.ops.aten), or torch._C._functions.
            parent, _, name = value.__name__.rpartition(".")
            if sys.modules.get(value.__name__) is value:
                return importlib.import_module, (value.__name__,)
            if getattr(sys.modules.get(parent), name, None) is value:
                return getattr, (sys.modules[parent], name)
        if isinstance(value, type | types.FunctionType):
            self._send_by_value_if_needed(value)
        if type(value) is functools.cached_property:  # before Python 3.12 it has a lock
            return _cached_property, (value.func, value.attrname)
        if isinstance(value, functools._lru_cache_wrapper) and isinstance(value.__wrapped__, types.FunctionType):
            self._send_by_value_if_needed(value)
            if _goes_by_value(value):
                return _cached_function, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)

    def _send_by_value_if_needed(self, value: Any) -> None:
        """Pickle by value what the module of a class or function defines, if the other process cannot import it."""
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if module is not None and not _can_be_imported(module) and module not in self.by_value:
            cloudpickle.register_pickle_by_value(module)
            self.by_value.append(module)


class _TensorPickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, to_reference: ToReference) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._to_reference = to_reference

    def persistent_id(self, value: Any) -> Any:
        return self._to_reference(value) if isinstance(value, torch.Tensor) else None


def _is_common(value: Any) -> bool:
    """Return whether a value is only tensors and plain values in plain containers, for which pickle is enough."""
    kind = type(value)
    if kind is tuple or kind is list:
        return all(map(_is_common, value))
    if kind is dict:
        return all(map(_is_common, value.values())) and all(map(_is_common, value))
    return kind in _COMMON


def dumps(
    value: Any,
    to_reference: ToReference = lambda tensor: None,
    modules: list[nn.Module] | None = None,
    known: Set[type] = frozenset(),
) -> bytes:
    """Return `value` pickled; `to_reference` returns what is pickled instead of each tensor, and is called once for it.

    References are pickled behind the value, which has their numbers: a pickler calls Python for all that it pickles.

    Args:
        modules: the modules that are part of `value`, where weak references lead to them.
        known: classes that the other process defined and has sent here by value: sent back by name.
    """
    stream = io.BytesIO()
    references: list[Any] = []
    numbers: dict[int, tuple[int | None, torch.Tensor]] = {}  # by id; with the tensor, so that no other gets its id

    def to_number(tensor: torch.Tensor) -> int | None:
        key = id(tensor)
        if key not in numbers:
            reference = to_reference(tensor)
            numbers[key] = None if reference is None else len(references), tensor
            if reference is not None:
                references.append(reference)
        return numbers[key][0]

    if _is_common(value):
        _TensorPickler(stream, to_number).dump(value)
    else:
        pickler = _ModulePickler(stream, to_number, modules or [], known)
        try:
            pickler.dump(value)
        finally:
            for module in pickler.by_value:
                cloudpickle.unregister_pickle_by_value(module)
    return pickle.dumps((stream.getvalue(), references), protocol=pickle.HIGHEST_PROTOCOL)


def loads(data: bytes, from_reference: FromReference = lambda reference: reference) -> Any:
    """Return what `dumps` was given; `from_reference` returns the tensor of a reference, and is called once for it."""
    value, references = pickle.loads(data)
    return _ModuleUnpickler(io.BytesIO(value), [*map(from_reference, references)]).load()


class _ModuleUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Any]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, reference: Any) -> Any:
        return _class_of(reference) if isinstance(reference, _KnownClass) else self._tensors[reference]


class _KnownClass(str):
    """The name by which both processes know a class that was sent by value."""

    __slots__ = ()


def classes_by_value() -> Iterator[type]:
    """Yield the classes that were sent by value, in either direction, and still exist."""
    yield from list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)


def _tracker_of(cls: type) -> str | None:
    tracker: str | None = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(cls)
    return tracker


def _class_of(tracker: str) -> type:
    cls: type = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[str(tracker)]
    return cls


def _new_module(cls: type) -> Any:
    return object.__new__(cls)


def _fill_module(module: nn.Module, attributes: dict[str, Any]) -> None:
    object.__setattr__(module, "__dict__", attributes)


class _Gone:
    pass


def _dead_reference() -> "weakref.ref[Any]":
    return weakref.ref(_Gone())


def _dead_proxy() -> Any:
    return weakref.proxy(_Gone())


def _cached_property(function: Callable[[Any], Any], name: str | None) -> "functools.cached_property[Any]":
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that caches its results, with an empty cache."""
    made: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return made


def _goes_by_value(function: Any) -> bool:
    """Return whether pickle would not find a function by its name in the other process."""
    found = cloudpickle.cloudpickle._lookup_module_and_qualname(function)
    return found is None or cloudpickle.cloudpickle._is_registered_pickle_by_value(found[0])


def _is_part_of_extension(module: types.ModuleType) -> bool:
    """Return whether an extension in C has made a module, which is in its parent and cannot be imported by itself."""
    parent = sys.modules.get(module.__name__.rpartition(".")[0])
    return module.__name__ not in sys.modules and isinstance(getattr(parent, "__loader__", None), ExtensionFileLoader)


def _can_be_imported(module: types.ModuleType) -> bool:
    """Return whether a fresh process with this one's `sys.path` would find the same module."""
    name = module.__name__
    if name not in _importable:
        _importable[name] = _is_found(module)
    return _importable[name]


def _is_found(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":  # built in, or made at run time: cloudpickle handles it
        return True
    path: Any = None
    name = ""
    for step in module.__name__.split("."):
        name = f"{name}.{step}" if name else step
        specs = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and (spec.origin == file or spec.origin is None)
