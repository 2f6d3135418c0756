"""One visitor: everything to which some values lead, each object once, with its path, within one bound.

What is inside an object is read past the methods of its class, which may refuse a length, load something, or answer for
another object, as a proxy does:

    entries        of a container, by key or index
    attributes_of  what an object has in its `__dict__` and in slots of its class
    references_of  what a function, method, partial, weak reference or proxy refers to

Who visits says which of these are inside.
"""

import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, Union

import torch

MOST = 50_000  # entries that one visit reads
DEEP = 100  # levels
LARGE = 1000  # entries of a container; a larger one, such as a vocabulary, is not searched

# Values of exactly these types refer to no module or tensor.
INERT = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type, range, slice}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
    | {types.BuiltinFunctionType, types.ModuleType}
)
# Containers of exactly these types are compared with what they held (change_tracking.py).
TRACKED = (dict, OrderedDict, defaultdict, list, set, deque)
PROXIES = frozenset({weakref.ProxyType, weakref.CallableProxyType})
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)

Step: TypeAlias = tuple[str, Any]  # its text, with {} for a key, and "=" in front where the path begins anew; the key
Inside: TypeAlias = Callable[[Any], Iterable[tuple[Step, Any]]]


class Place(NamedTuple):
    """A value, and where it was found."""

    value: Any
    holder: Union["Place", str]  # of the root, its name
    step: Step = ("", None)

    def __str__(self) -> str:
        text = self.step[0].format(self.step[1])
        return text[1:] if text.startswith("=") else f"{self.holder}{text}"

    @property
    def root(self) -> str:
        """The name of the value from which it was reached."""
        return self.holder.root if isinstance(self.holder, Place) else self.holder


def visit(
    roots: Iterable[Place],
    inside: Inside,
    most: float = MOST,
    skipped: frozenset[type] = INERT,
    seen: set[int] | None = None,
) -> Iterator[tuple[Place, list[Place]]]:
    """Yield each object that is found, near ones first, with what is inside it.

    Args:
        roots: where the search begins.
        inside: returns what is inside an object.
        most: entries that are read in all.
        skipped: values of exactly these types are not visited.
        seen: ids of what is not visited; ids of what is found are added.
    """
    seen = set() if seen is None else seen
    left = deque((place, DEEP) for place in roots)
    while left and most > 0:
        place, levels = left.popleft()
        if type(place.value) in skipped or id(place.value) in seen:
            continue
        seen.add(id(place.value))
        found = [Place(value, place, step) for step, value in inside(place.value)]
        most -= 1 + len(found)
        if levels > 1:
            left += [(each, levels - 1) for each in found if type(each.value) not in skipped]
        yield place, found


def is_a(value: object, classes: Any) -> bool:
    """Return whether an object is of one of some classes. isinstance asks the object, which may be a proxy, too."""
    return issubclass(type(value), classes)


def num_entries(value: Any) -> int | None:
    """Return how many entries a container has; None if it is none."""
    kind = _kind_of(type(value))
    return None if kind is None else kind.__len__(value)


def _kind_of(cls: type) -> Any:
    """Return the class of `CONTAINERS` from which a class derives; None if it does from none."""
    return next(kind for kind in CONTAINERS if issubclass(cls, kind)) if issubclass(cls, CONTAINERS) else None


def entries(value: Any) -> list[tuple[Step, Any]]:
    """Return the entries of a container; of a large one none.

    >>> entries({"a": 1}), entries([2])
    ([(('[{!r}]', 'a'), 1)], [(('[{}]', 0), 2)])
    """
    kind = _kind_of(type(value))
    if kind is None or kind.__len__(value) > LARGE:
        return []
    if kind is dict:
        return [(("[{!r}]" if type(key) in INERT else "[...]", key), each) for key, each in [*kind.items(value)]]
    if kind in (set, frozenset):
        return [(("", each), each) for each in [*kind.__iter__(value)]]
    return [(("[{}]", index), each) for index, each in enumerate([*kind.__iter__(value)])]


def attributes_of(value: object) -> dict[str, Any]:
    """Return what an object has in its `__dict__`, and in the slots of its class; no code of the class is called."""
    found: dict[str, Any] = {}
    of_dict = dict_of(type(value))
    if of_dict is not None:
        found.update(of_dict.__get__(value))
    for name, _, held in filled_slots(value):
        found.setdefault(name, held)
    return found


def dict_of(cls: type) -> Any:
    """Return the descriptor of the `__dict__` of a class's objects; None if they have none.

    A property of that name is another object's, as a proxy's.
    """
    found: Any = next((vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base)), None)
    return found if type(found) in _DESCRIPTORS else None


def filled_slots(value: object) -> Iterator[tuple[str, types.MemberDescriptorType, Any]]:
    """Yield the attributes that an object has in slots of its class (`__slots__`), with the slots."""
    for base in type(value).__mro__:
        for name, slot in [*vars(base).items()] if "__slots__" in vars(base) else ():
            if type(slot) is types.MemberDescriptorType:
                try:
                    held = slot.__get__(value)
                except AttributeError:  # it is empty
                    continue
                yield name, slot, held


def references_of(value: Any) -> list[tuple[Step, Any]]:
    """Return what a function has around it and as defaults, and what a method, partial or weak reference refers to."""
    if type(value) in PROXIES:
        return [(("", None), referent(value))]
    if type(value) is weakref.ref:
        return [(("", None), value())]
    if is_a(value, types.MethodType):
        return [(("", None), value.__self__)]
    if is_a(value, functools.partial):
        given = [value.func, *value.args, *value.keywords.values(), *value.__dict__.values()]
        return [(("[{}]", number), each) for number, each in enumerate(given)]
    if is_a(value, types.FunctionType):
        return [(("={}", name), each) for name, each in variables_of(value).items()]
    return []


def variables_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function closes over, its defaults, and its attributes, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    with_default = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {
        **function.__dict__,
        **dict(zip(with_default, defaults, strict=True)),
        **(function.__kwdefaults__ or {}),
        **{name: cell.cell_contents for name, cell in cells if is_set(cell)},
    }


def is_set(cell: types.CellType) -> bool:
    """Return whether the variable of a closure has been assigned."""
    try:
        cell.cell_contents  # noqa: B018 - raises ValueError where it has not
    except ValueError:
        return False
    return True


def referent(proxy: Any) -> Any:
    """Return the object of a weak proxy; None if it has been freed, or is unknown."""
    try:
        return proxy.__repr__.__self__  # only a bound method has it
    except (ReferenceError, AttributeError):
        return None


def held(value: Any) -> list[tuple[Step, Any]]:
    """Return the entries of a container, and the attributes of an object."""
    found: Mapping[str, Any] = attributes_of(value)
    return [*entries(value), *[((".{}", name), each) for name, each in found.items()]]
