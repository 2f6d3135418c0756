"""Nested inputs and outputs: tuples, lists, dicts and dataclasses, to any depth, with their types kept.

`flatten` walks a value once; what is to be known about its leaves is then in lists beside them.

Everything that is not one of these containers is a *leaf*: tensors, numbers, strings, None, batches of a registered
class (batch_types.py), and objects of unknown classes. Containers of other libraries are containers if they are in
torch's pytree registry. Leaves are visited in order; a container is rebuilt as its own type, and only where
something inside it changed: a container without changes stays the object it was.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.containers import container_like
from unisono.runtime.errors import add_note
from unisono.runtime.torch_private import process_wide

ENTRIES_OF_ROWS = "If the list has one entry for each row, return unisono.SampleList(entries)."

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


def is_flat(value: tuple[Any, ...] | dict[str, Any]) -> bool:
    """Return whether everything in a tuple or dict is a leaf of the usual kinds: tensors and plain values."""
    return _PLAIN.issuperset(map(type, value.values() if isinstance(value, dict) else value))


def children(value: object) -> dict[Any, Any] | None:
    """Return the children of a container by index, key or field name; None for a leaf.

    >>> children({"x": 1}), children([2, 3]), children("text")
    ({'x': 1}, {0: 2, 1: 3}, None)
    """
    if isinstance(value, torch.Tensor | str | bytes | torch.Size) or batch_type_of(value) is not None:
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    registered = _registered(value)
    return dict(enumerate(registered[0])) if registered is not None else None


@dataclass(frozen=True, slots=True)
class Spec:
    """The structure of a value."""

    value: Any  # the container, like which another one is made; or the leaf
    keys: tuple[Any, ...] | None = None  # of its children: indices, keys or field names; None for a leaf
    specs: tuple["Spec", ...] = ()  # of its children

    def paths(self, path: str = "") -> Iterator[str]:
        """Yield the path to each leaf, in order; it reads like `[0]['mask'].lengths`."""
        if self.keys is None:
            yield path
        for key, spec in zip(self.keys or (), self.specs, strict=True):
            yield from spec.paths(path + step(self.value, key))

    def parts(self, path: str, start: int = 0) -> Iterator[tuple[str, "Spec", range]]:
        """Yield the path and the structure of each part, and the numbers of the leaves in it; outer ones first."""
        yield path, self, range(start, start + self.num_leaves())
        for key, spec in zip(self.keys or (), self.specs, strict=True):
            yield from spec.parts(path + step(self.value, key), start)
            start += spec.num_leaves()

    def kind(self) -> Hashable:
        """Return what is equal for values of the same structure: types and keys, without the leaves."""
        if self.keys is None:
            return None
        kind: type[Any] = type(self.value)
        return kind.__module__, kind, self.keys, tuple([spec.kind() for spec in self.specs])

    def num_leaves(self) -> int:
        return 1 if self.keys is None else sum([spec.num_leaves() for spec in self.specs])


def is_in_list(spec: Spec, number: int) -> bool:
    """Return whether the leaf with a number is in a list."""
    for child in spec.specs:
        if number < child.num_leaves():
            return isinstance(spec.value, list) or is_in_list(child, number)
        number -= child.num_leaves()
    return False


def flatten(value: Any, path: str = "") -> tuple[list[Any], Spec]:
    """Return the leaves of a value, in order, and its structure.

    >>> leaves, spec = flatten({"a": [1, 2], "b": (3,)})
    >>> leaves, [*spec.paths("x")], unflatten(spec, [leaf * 2 for leaf in leaves])
    ([1, 2, 3], ["x['a'][0]", "x['a'][1]", "x['b'][0]"], {'a': [2, 4], 'b': (6,)})

    Raises:
        ValueError: containers that contain themselves, or are nested beyond Python's recursion limit.
    """
    leaves: list[Any] = []
    try:
        return leaves, _flattened(value, leaves)
    except RecursionError:
        raise ValueError(
            f"{path or 'value'} contains itself, or is nested deeper than Python's recursion limit: flatten it."
        ) from None


def _flattened(value: Any, leaves: list[Any]) -> Spec:
    inside = children(value)
    if inside is None:
        leaves.append(value)
        return Spec(value)
    return Spec(value, (*inside,), tuple([_flattened(child, leaves) for child in inside.values()]))


def unflatten(spec: Spec, leaves: Iterable[Any], *, rebuild_all: bool = False) -> Any:
    """Return a value of a structure from its leaves.

    A container in which nothing has changed is not rebuilt, unless `rebuild_all`.
    """
    return _unflattened(spec, iter(leaves), rebuild_all)


def _unflattened(spec: Spec, leaves: Iterator[Any], rebuild_all: bool) -> Any:
    if spec.keys is None:
        return next(leaves)
    new = [_unflattened(child, leaves, rebuild_all) for child in spec.specs]
    if not rebuild_all and all(value is child.value for value, child in zip(new, spec.specs, strict=True)):
        return spec.value
    return _rebuild(spec.value, new)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return (path, leaf) for every leaf of `value`, in order.

    Raises:
        ValueError: as `flatten`.
    """
    found, spec = flatten(value, path)
    return zip(spec.paths(path), found, strict=True)


def tensors(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Return (path, tensor) for every tensor in `value`, in order."""
    return ((where, leaf) for where, leaf in leaves(value, path) if isinstance(leaf, torch.Tensor))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `function` applied to every leaf, in order; see `unflatten`.

    >>> map_leaves(lambda leaf: leaf * 2, {"a": [1, 2], "b": (3,)})
    {'a': [2, 4], 'b': (6,)}

    Raises:
        ValueError: as `flatten`.
    """
    if type(value) in _PLAIN:  # the common case, without a structure's cost
        return function(value)
    found, spec = flatten(value)
    return unflatten(spec, map(function, found))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return `value` with `function` applied to every tensor in it, also to those in batches of registered classes."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        batch_type = batch_type_of(leaf)
        if batch_type is None:
            return leaf
        tensors, rebuild = batch_type.parts(leaf)
        return rebuild([function(tensor) for tensor in tensors])

    return map_leaves(of_leaf, value)


def all_tensors(value: Any) -> list[torch.Tensor]:
    """Return every tensor in `value`, also those in batches of registered classes."""
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found


def flatten_together(values: Sequence[Any], path: str = "") -> tuple[list[tuple[Any, ...]], Spec]:
    """Flatten values of one structure: return the leaves of all at each place, in the first one's order, and its spec.

    Raises:
        ValueError: the structures differ; names the path, and what each of the values has there. Or as `flatten`.
    """
    specs = [flatten(value, path)[1] for value in values]
    return [*_matched(specs, path)], specs[0]


def _matched(specs: Sequence[Spec], path: str) -> Iterator[tuple[Any, ...]]:
    """Yield the leaves of all specs at each place of the first; raise ValueError where they differ."""
    if all(spec.keys is None for spec in specs):
        yield tuple([spec.value for spec in specs])
        return
    first = specs[0]
    kinds = [type(spec.value) for spec in specs]
    all_keys = [spec.keys for spec in specs if spec.keys is not None]
    if len(all_keys) < len(specs) or any(kind is not kinds[0] for kind in kinds):
        raise disagreement(path, "types", [kind.__name__ for kind in kinds])
    if any({*keys} != {*all_keys[0]} for keys in all_keys):
        if isinstance(first.value, tuple | list):
            error = disagreement(path, "lengths", [*map(len, all_keys)])
            add_note(error, ENTRIES_OF_ROWS)
            raise error
        raise disagreement(path, "keys", [[*keys] for keys in all_keys])
    contexts = [taken[2] for spec in specs if (taken := _registered(spec.value)) is not None]
    if any(context != contexts[0] for context in contexts):
        raise disagreement(path, f"{type(first.value).__name__}s", contexts)
    by_key = [dict(zip(keys, spec.specs, strict=True)) for keys, spec in zip(all_keys, specs, strict=True)]
    for key in all_keys[0]:
        yield from _matched([below[key] for below in by_key], path + step(first.value, key))


def _registered(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Any] | None:
    """Return `process_wide.flatten_registered` of a container that is none of the usual ones, else None."""
    if isinstance(value, tuple | list | MutableMapping) or dataclasses.is_dataclass(value):
        return None
    return process_wide.flatten_registered(value)


def disagreement(path: str, what: str, given: Sequence[object]) -> ValueError:
    """Return the error for replicas' outputs that do not have one structure; it shows what each replica returned."""
    each = "; ".join(f"replica {i}: {value}" for i, value in enumerate(given))
    rule = "Every replica must return the same structure; only the number of rows (samples) may differ."
    if what == "values":
        rule = "Values that depend on the rows (samples) need one entry for each row: return a unisono.SampleList."
    elif what.startswith("values"):
        rule = "Leave this None out, or return the same value in every replica."
    elif type(None).__name__ in given:
        rule += " Return an empty tensor in place of None."
    return ValueError(f"cannot gather {path or 'the output'}: replicas returned different {what} ({each}). {rule}")


def step(container: object, key: object) -> str:
    """Return the last step of the path to a child of `container`: `[0]`, `['x']` or `.field`."""
    if isinstance(container, MutableMapping) or (isinstance(container, tuple | list) and not isinstance(key, str)):
        return f"[{key!r}]"
    return f".{key}"


def _rebuild(value: Any, new: list[Any]) -> Any:
    """Return a container like `value`, of the same type, with the children `new`: past a class that refuses it."""
    try:
        if isinstance(value, tuple) and hasattr(value, "_make"):  # namedtuple
            return value._make(new)
        if isinstance(value, tuple):
            return type(value)(new)
        registered = _registered(value)
        if registered is not None:
            return registered[1](new)
        rebuilt: Any = copy.copy(value)  # keeps a subclass's other attributes
        if isinstance(value, list):
            rebuilt[:] = new
            return rebuilt
        if isinstance(value, MutableMapping):  # dict, OrderedDict, defaultdict, UserDict
            return _fill_mapping(rebuilt, value, new)
        for field, child in zip(dataclasses.fields(value), new, strict=True):
            object.__setattr__(rebuilt, field.name, child)  # also where the dataclass is frozen
        return rebuilt
    except Exception:
        if not isinstance(value, dict | list | tuple):
            raise
        replaced = {id(old): now for old, now in zip((children(value) or {}).values(), new, strict=True)}
        items = zip(value, new, strict=True) if isinstance(value, dict) else new
        return container_like(value, items, lambda held: replaced.get(id(held), held))


def _fill_mapping(copied: Any, original: Any, new: list[Any]) -> Any:
    """Give `copied`, a copy of a mapping, new items, also where the mapping shows its items as attributes."""
    own = getattr(copied, "__dict__", None)
    if own is not None and vars(original) is original:  # the idiom self.__dict__ = self
        copied.__dict__ = copied
        own = None
    for key, item in zip([*original], new, strict=True):
        if own is not None and isinstance(key, str) and key in own and own[key] is original[key]:
            own[key] = item
        copied[key] = item
    return copied
