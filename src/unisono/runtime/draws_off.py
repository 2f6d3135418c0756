"""Draws switched off: in a context, whatever torch draws has one fixed value, for the whole batch and for shards alike.

Two runs of a model with dropout can only be compared number by number if they draw the same for each row. How a batch
is split decides which numbers a row gets, so only a value that does not depend on the place in a tensor is the same:

    uniform, rand                 three quarters of the way from the lowest number to the highest; randint, random_ too
    normal, randn, cauchy         the mean (or median) and one standard deviation (or scale)
    log_normal                    the exponential of that
    bernoulli                     its probability: dropout divides by the same number, and keeps all as it is
    exponential, geometric,       the mean
    poisson, binomial, gamma, dirichlet
    multinomial                   the most probable categories, in order; with replacement the most probable one
    randperm                      the reverse order: a permutation of the rows shows as a difference, as it should
    dropout inside a kernel       a probability of 0: LSTM, GRU, RNN, attention; rrelu: its slope in eval mode

Why not always the mean: with noise of 0, and with masks such as `torch.rand(n) > 0.5`, there would be nothing behind
the draw to compare, and its gradients would be 0.

The draws are caught where torch dispatches an operation, so those of C++, of scripted code and of a backward pass are,
too, and those that name a generator (`generator=...`). No random state moves. What is not caught moves a random state,
so the caller can tell: custom operators that draw in a kernel, code that torch.compile has compiled with draws in it,
threads that forward starts, `random`, `numpy.random`.

A loop that draws until a condition holds (rejection sampling) may never end with fixed values: after `_MOST_DRAWS`
draws in one context the next one raises an error.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

import torch

from unisono.runtime import widening
from unisono.runtime.torch_private import dispatcher

_UNIFORM = 0.75
_MOST_DRAWS = 100_000
_ENDLESS = (
    "random draws are switched off (each has one fixed value), and this forward asked for {most} of them, "
    "last by {operation}. Is it a loop that draws until a condition holds? It may never end. Draw outside "
    "the model, and pass the result as an input."
)
_SEEDS_OF_INDUCTOR = (-(2**63), 2**63 - 1)  # the bounds of the seeds that code compiled by Inductor draws

Given = Mapping[str, Any]  # the arguments of an operation, by name


class DrawsOff:
    """The context in which all that torch draws has a fixed value, in this thread and in replicas that it runs.

    >>> off = DrawsOff()
    >>> with off:
    ...     torch.nn.functional.dropout(torch.ones(3)), torch.rand(2)
    (tensor([1., 1., 1.]), tensor([0.7500, 0.7500]))
    >>> [*off.operations]
    ['bernoulli_', 'rand']

    It may be entered several times, one after the other. Where a release of torch does not allow it, draws are as
    always, and move random states.

    Args:
        least: the floating type to compute in where the code asks for a narrower one: see runtime/widening.py.

    Attributes:
        operations: the names of the operations that had a fixed value to draw, in the order of their first calls.
        asked: the floating types that conversions, sums and constants asked for.
    """

    def __init__(self, least: torch.dtype | None = None) -> None:
        self.operations: dict[str, None] = {}
        self.asked: set[torch.dtype] = set()
        self._least = least
        self._count = 0

    def __enter__(self) -> Self:
        with _lock:
            if not _caught:
                caught = dict([*widening.handlers(_type_to_compute_in), *_handlers()])
                _caught.append(dispatcher.catch_operations(caught, dispatcher.ABOVE_ALL))
        self._token, self._in_this_thread = _current.set(self), in_this_thread()
        self._in_this_thread.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._in_this_thread.__exit__(*error)
        _current.reset(self._token)

    def widened(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type to compute in where the code asks for `dtype`."""
        if dtype.is_floating_point or dtype.is_complex:
            self.asked.add(dtype)
        return dtype if self._least is None else widening.widened(dtype, self._least)

    def note(self, operation: str) -> None:
        """Count a call; raise RuntimeError if there have been too many."""
        self._count += 1  # threads may lose a count: the limit is a round number
        self.operations[operation] = None
        if self._count > _MOST_DRAWS:
            raise RuntimeError(_ENDLESS.format(most=_MOST_DRAWS, operation=operation))


_current: ContextVar[DrawsOff | None] = ContextVar("draws_off", default=None)
_lock = threading.Lock()
_caught: list[Callable[[], AbstractContextManager[None]] | None] = []


def in_this_thread() -> AbstractContextManager[None]:
    """Return the context in which draws are off in the calling thread, once they are in the one that it works for."""
    return contextlib.nullcontext() if not _caught or _caught[0] is None else _caught[0]()


def _type_to_compute_in(dtype: torch.dtype) -> torch.dtype:
    off = _current.get()
    return dtype if off is None else off.widened(dtype)


def are_off() -> bool:
    """Return whether draws are off in the calling thread."""
    return bool(_caught) and dispatcher.is_caught(dispatcher.ABOVE_ALL)


# ---- the handlers --------------------------------------------------------------------------------


def _between(low: Any, high: Any) -> Any:
    """Return the integer three quarters of the way from `low` to `high`, which is not included itself."""
    return low + 1 if high is None else low + 3 * (high - low) // 4


def _probability(given: Given) -> Any:
    probability, target = given.get("p", given["self"]), given["self"]
    if target.is_floating_point():
        return probability
    return probability > 0  # an integer or a boolean is kept, too


# What an operation draws, by its name without "_", "_like" and "_functional": a number, or a tensor.
_VALUES: dict[str, Callable[[Given], Any]] = {
    "rand": lambda given: _UNIFORM,
    "randn": lambda given: 1.0,
    "randint": lambda given: _between(given.get("low", 0), given["high"]),
    "random": lambda given: _between(given.get("from", 0), given.get("to")),
    "uniform": lambda given: given["from"] + _UNIFORM * (given["to"] - given["from"]),
    "normal": lambda given: given["mean"] + given["std"],
    "cauchy": lambda given: given["median"] + given["sigma"],
    "log_normal": lambda given: math.exp(given["mean"] + given["std"]),
    "bernoulli": _probability,
    "exponential": lambda given: 1 / given["lambd"],
    "geometric": lambda given: 1 / given["p"],
    "poisson": lambda given: given["self"],
    "binomial": lambda given: given["count"] * given["prob"],
    "_standard_gamma": lambda given: given["self"],
    "_sample_dirichlet": lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
    "multinomial": lambda given: _categories(given["self"], given["num_samples"], given.get("replacement", False)),
    "randperm": lambda given: torch.arange(given["n"] - 1, -1, -1, **_tensor_options(given)),
}
_WITH_GRADIENT = ("_standard_gamma", "_sample_dirichlet")
_FORMS = ("{}", "{}_", "{}_like", "{}_functional")
# Operations whose kernels drop by a probability that they are given.
_DROP = (
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn", "miopen_rnn", "scaled_dot_product_attention"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"),
    *("_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace", "_efficient_attention_forward"),
    *("_cudnn_attention_forward", "_triton_scaled_dot_attention"),
)


def _handlers() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield each operation with its handler. Operations that are not here call these, or move a random state."""
    for name, value_of in _VALUES.items():
        for form in _FORMS:
            for operation in _overloads(form.format(name)):
                yield operation, partial(_draw, operation, _Signature(operation), name in _WITH_GRADIENT, value_of)
    for name in _DROP:
        for operation in _overloads(name):
            if not operation._overloadname.endswith("out"):
                yield operation, partial(_without_dropout, operation, _Signature(operation))
    for name in ("native_dropout", "_fused_dropout"):
        for operation in _overloads(name):
            if operation._overloadname == "default":
                yield operation, partial(_keep_all, operation, _Signature(operation))
    yield torch.ops.aten.native_dropout_backward.default, partial(_unscaled, torch.ops.aten.native_dropout_backward)
    for name in ("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"):
        for operation in _overloads(name):
            yield operation, partial(_rrelu, operation, _Signature(operation))


def _overloads(name: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, name, None)
    return (getattr(packet, overload) for overload in (packet.overloads() if packet is not None else ()))


class _Signature:
    """The names of an operation's arguments, and their defaults, which calls leave out."""

    def __init__(self, operation: Any) -> None:
        arguments = operation._schema.arguments
        self.name = operation._schema.name.removeprefix("aten::")
        self.names = [argument.name for argument in arguments]
        # The default of `dtype` is a number of C++'s; what an operation fills in decides it as well.
        self._defaults = {a.name: a.default_value for a in arguments if a.has_default_value() and a.name != "dtype"}

    def given(self, args: tuple[Any, ...], kwargs: Given) -> dict[str, Any]:
        return {**self._defaults, **dict(zip(self.names, args, strict=False)), **kwargs}

    def note(self) -> None:
        if (off := _current.get()) is not None:
            off.note(self.name)


def _draw(
    operation: Any,
    signature: _Signature,
    with_gradient: bool,
    value_of: Callable[[Given], Any],
    keys: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace an operation that draws by one that fills in its fixed value."""
    given = signature.given(args, kwargs)
    if (given.get("low"), given.get("high")) == _SEEDS_OF_INDUCTOR:  # equal seeds are no equal rows: let them be seen
        return operation.redispatch(keys, *args, **kwargs)
    signature.note()
    value = value_of(given)
    if isinstance(value, torch.Tensor) and not with_gradient:
        value = value.detach()
    if signature.name.endswith("_"):
        return _write(given["self"], value)
    if given.get("size") is not None:
        result = torch.full(given["size"], value, **_tensor_options(given))
    elif signature.name.endswith("_like"):
        result = torch.full_like(given["self"], value, **_tensor_options(given))
    elif isinstance(value, torch.Tensor):
        result = value.clone()
    else:
        result = torch.full_like(given["self"], value)
    out = given.get("out")
    return result if out is None else _write(out.resize_(result.shape), result)


def _write(target: torch.Tensor, value: Any) -> torch.Tensor:
    return target.copy_(value) if isinstance(value, torch.Tensor) else target.fill_(value)


def _tensor_options(given: Given) -> dict[str, Any]:
    names = ("dtype", "layout", "device", "pin_memory", "memory_format", "names")
    return {name: given[name] for name in names if given.get(name) is not None}


def _categories(probabilities: torch.Tensor, num_samples: int, replacement: bool) -> torch.Tensor:
    ordered = probabilities.sort(dim=-1, descending=True, stable=True).indices
    if replacement:
        return ordered[..., :1].expand(*ordered.shape[:-1], num_samples)
    return ordered[..., :num_samples]


def _without_dropout(operation: Any, signature: _Signature, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace an operation by itself with a dropout of 0."""
    given = signature.given(args, kwargs)
    name = next(name for name in ("dropout", "dropout_p") if name in signature.names)
    if not given[name] or given.get("train") is False:
        return operation.redispatch(keys, *args, **kwargs)
    signature.note()
    number = signature.names.index(name)
    if number < len(args):
        args = (*args[:number], 0.0, *args[number + 1 :])
    else:
        kwargs[name] = 0.0
    return operation.redispatch(keys, *args, **kwargs)


def _keep_all(operation: Any, signature: _Signature, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a dropout whose kernel draws: it returns its input, and a mask that keeps all."""
    given = signature.given(args, kwargs)
    if given.get("train") is False or given["p"] in (0, 1):  # it draws nothing
        return operation.redispatch(keys, *args, **kwargs)
    signature.note()
    tensor = args[0]
    return tensor.clone(), torch.ones_like(tensor, dtype=_MASKS[signature.name])


def _unscaled(operation: Any, keys: Any, grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """Replace the backward of that dropout, which scripted code calls with a scale of its own computation."""
    return operation.default.redispatch(keys, grad, mask, 1.0)


_MASKS = {"native_dropout": torch.bool, "_fused_dropout": torch.uint8}


def _rrelu(operation: Any, signature: _Signature, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a leaky ReLU of random slope in training mode by the one of eval mode."""
    given = signature.given(args, kwargs)
    if not given["training"]:
        return operation.redispatch(keys, *args, **kwargs)
    signature.note()
    given["noise"].detach().fill_((given["lower"] + given["upper"]) / 2)
    given["training"] = False
    by_position = [given.pop(name) for name in signature.names[: signature.names.index("training") + 1]]
    return operation.redispatch(keys, *by_position, **given)
