"""What is a tensor's memory, who else refers to it, and has it changed?"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

_c: Any = torch._C

# Exchange what two tensor objects are in C++: memory, place in a graph. Classes and attributes stay. Unlike
# `torch.utils.swap_tensors`, which calls it, it does so also where a graph has saved them.
exchange: Callable[[torch.Tensor, torch.Tensor], None] = _c._swap_tensor_impl

# ---- what was written, as torch.compile's guards see it ------------------------------------------

_guards: Any = _c._dynamo.guards
_HAS_LOCK: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
# Returns a number for a dict, another one after any write into it. None where Python has no lock: a write may come
# between.
dict_version: Callable[[dict[Any, Any]], int] | None = _guards.dict_version if _HAS_LOCK else None


def look_at_tensors(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Return a function that returns whether tensors have the class, form, flags and memory that they have now.

    It may return False where they have them, as it does where gradients are off now or then: guards do not see
    `requires_grad` there. Fallback, for tensors that guards do not take, and for guards of a later torch that take
    other arguments: it always does.
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


# ---- who refers to memory ------------------------------------------------------------------------


def is_only_reference(holder: list[torch.Tensor]) -> bool:
    """Return whether a list of one tensor has the only reference to it, and nothing else shares its memory.

    Then it may be written into. False where that is not known.
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
        in_cpp = _c._storage_Use_Count(storage._cdata), tensor._use_count()  # type: ignore[attr-defined]
        return *map(int, in_cpp), sys.getrefcount(storage)
    except RuntimeError:  # a tensor without storage
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
