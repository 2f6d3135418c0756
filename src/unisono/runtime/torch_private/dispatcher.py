"""What runs in one thread in place of an operation, or of the CPU's default generator?"""

import functools
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

_c: Any = torch._C

# ---- operations ----------------------------------------------------------------------------------

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

    Fallback: None, where torch lacks the key, or another library has it. Then nothing is installed.
    """
    library: Any = torch.library.Library
    try:
        key = _c._parse_dispatch_key(key_name)
        if key is None or _c._dispatch_has_backend_fallback(key):
            return None
        keys_after = _c._dispatch_keyset_full_after(key)
        in_context = functools.partial(_c._IncludeDispatchKeyGuard, key)
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
    except RuntimeError:
        return None
    _installed.extend([all_operations, aten])
    return in_context


_installed: list[torch.library.Library] = []  # a library's kernels last as long as it does


def is_caught(key_name: str) -> bool:
    """Return whether the calling thread is in the context of `catch_operations`. Fallback: False, as there is none."""
    key = _c._parse_dispatch_key(key_name)
    return key is not None and bool(_c._dispatch_tls_is_dispatch_key_included(key))


def _on_remaining_keys(handler: Callable[..., Any], keys_after: Any) -> Callable[..., Any]:
    return lambda keys, *args, **kwargs: handler(keys & keys_after, *args, **kwargs)


# ---- the generator -------------------------------------------------------------------------------


def is_default_generator(generator: torch.Generator) -> bool:
    """Return whether `generator` is the CPU's default one, or stands in for it.

    Several Python objects may wrap one generator.
    """
    found: int = generator._cdata  # type: ignore[attr-defined]
    return found in [each._cdata for each in (torch.default_generator, *_of_threads)]  # type: ignore[attr-defined]


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
