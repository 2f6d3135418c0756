"""A random module: blocks one after the other, a head, and inputs and outputs in one of many forms."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuzz.blocks import WIDTH, make_block, numbers_of
from helpers.modules import WithBackward
from unisono import SampleList
from unisono.runtime.thread_pool import inside_replica

NUM_OUTPUTS = 5
MOST_ROWS = 2  # of a replica that runs out of memory


@dataclass
class Bundle:
    first: Any
    second: Any
    name: str = "bundle"


Triple = namedtuple("Triple", "a b c")


class InputForm(NamedTuple):
    """How rows, and something that has no rows, reach the module."""

    pack: Callable[[Tensor, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]  # the positional and keyword inputs
    unpack: Callable[..., tuple[Tensor, Any]]  # the inverse: the rows, and what is added to them
    options: Mapping[str, Any] = {}  # of the wrapper
    said: tuple[str, ...] = ()  # what a message says, in part, where the numbers are not those of the plain module


_WHOLE = "has as many entries as the batch has rows"
_SPLIT = ("with different numbers of rows", "the inputs were split by rows")


def marked(x: Tensor) -> Tensor:
    x.shift = 0.75  # type: ignore[attr-defined]
    return x


def stacked(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack([*rows]) if len(rows) else torch.zeros(0, WIDTH)


def first_column(x: Tensor) -> Tensor:
    return x[:, 0].detach().double().clone()


INPUTS = {
    "tensor": InputForm(lambda x, _: ((x,), {}), lambda x: (x, 0)),
    "keyword": InputForm(lambda x, _: ((), {"x": x}), lambda x: (x, 0)),
    "nested": InputForm(
        lambda x, _: (({"pair": (0.5, [x]), "none": None, "text": "a"},), {}),
        lambda given: (given["pair"][1][0], given["pair"][0]),
    ),
    "with a 0-dim tensor": InputForm(lambda x, table: ((x, table.sum()), {}), lambda x, scalar: (x, scalar)),
    "with a table": InputForm(
        lambda x, table: ((x,), {"table": table}), lambda x, table: (x, table.sum(0)[0]), {"in_dims": {"table": None}}
    ),
    "on axis 1": InputForm(lambda x, _: ((x.t(),), {}), lambda x: (x.t(), 0), {"in_dims": 1}),
    "list": InputForm(lambda x, _: (([x[:, :5], x[:, 5:]],), {}), lambda parts: (torch.cat(parts, 1), 0)),
    "dataclass": InputForm(
        lambda x, _: ((Bundle(x, {"z": x[:, :2] * 2}),), {}), lambda b: (b.first, b.second["z"].mean(1, keepdim=True))
    ),
    "with an attribute": InputForm(lambda x, _: ((marked(x),), {}), lambda x: (x, getattr(x, "shift", 0.0))),
    "sample list": InputForm(lambda x, _: ((SampleList(x.unbind()),), {}), lambda rows: (stacked(rows), 0)),
    "samples": InputForm(
        lambda x, _: (([*x.unbind()],), {}),
        lambda rows: (stacked(rows), 0),
        said=(" rows (samples), but has ", *_SPLIT),
    ),
    "array": InputForm(
        lambda x, _: ((x, first_column(x).numpy()), {}),
        lambda x, array: (x, torch.from_numpy(array)[: len(x), None].to(x.dtype)),
        said=(_WHOLE,),
    ),
    "numbers": InputForm(
        lambda x, _: ((x,), {"numbers": first_column(x).tolist()}),
        lambda x, numbers: (x, x.new_tensor(numbers)[: len(x), None]),
        said=(_WHOLE,),
    ),
    # Where it broadcasts, and has as many rows as the batch by accident, nothing can be said.
    "with a table that is split": InputForm(
        lambda x, table: ((x, table), {}), lambda x, table: (x, table[:, 0] @ x.new_ones(3)), said=_SPLIT
    ),
}


class OutputForm(NamedTuple):
    """What the module returns."""

    pack: Callable[[Tensor, Tensor, Tensor], Any]  # of the head's output, the rows before, and the head's weight
    options: Mapping[str, Any] = {}  # of the wrapper
    axis: int = 0  # of the rows, of the last tensor in it; of all others it is 0
    said: tuple[str, ...] = ()  # as of an input form


# More than a batch has rows: what has that many entries is never taken for rows by accident.
MANY = 23
_OTHER_ROWS = (" rows (samples), but has ", "Is the batch on dimension", "rows it returns tensors of lengths")
_LISTS = (
    "with as many entries as each replica has rows",
    "return unisono.SampleList(entries)",
    "it returns numbers, one for each part",
    "you get a list with one entry for each replica",  # where one replica has all rows
)


def grouped(x: Tensor) -> Tensor:
    """Return the sums of groups of rows."""
    return x.new_zeros(MANY, WIDTH).index_add(0, numbers_of(x)[:, 0], x)


OUTPUTS = {
    "tensor": OutputForm(lambda y, x, _: y),
    "tuple": OutputForm(lambda y, x, _: (y, x, None)),
    "dict": OutputForm(lambda y, x, _: {"y": y, "x": [x, (y * 2,)], "none": None}),
    "dataclass": OutputForm(lambda y, x, _: Bundle(y, {"x": x, "same": y})),
    "namedtuple": OutputForm(lambda y, x, _: Triple(y, x.detach(), "text")),
    "0-dim": OutputForm(lambda y, x, _: {"y": y, "loss": y.square().mean()}, {"scalars": "mean"}),
    "number": OutputForm(lambda y, x, _: {"y": y, "rows": float(len(y)), "text": "a"}, {"scalars": "sum"}),
    "integers": OutputForm(lambda y, x, _: (y, y.argmax(1), y > 0)),
    "column": OutputForm(lambda y, x, _: (x[:, 0], y[:, 0])),
    "strided": OutputForm(
        lambda y, x, _: OrderedDict(a=y, b=y.t().contiguous().t(), c=x.unsqueeze(1).expand(-1, 2, -1))
    ),
    "on axis 1": OutputForm(lambda y, x, _: (y, x.unsqueeze(0)), {"out_dims": (0, 1)}, axis=1),
    "narrow dtypes": OutputForm(lambda y, x, _: (y.float(), x.to(torch.bfloat16).detach(), y)),
    "sample list": OutputForm(lambda y, x, _: (y, SampleList(x.unbind()))),
    "folded": OutputForm(lambda y, x, _: (y.reshape(-1, 1), x)),
    "a parameter": OutputForm(lambda y, x, weight: (y, weight, {"same": weight})),
    "state": OutputForm(lambda y, x, _: (y, {"state": x.expand(MANY, -1, -1) * 1}), said=_OTHER_ROWS),
    "groups": OutputForm(lambda y, x, _: (grouped(x), y), said=_OTHER_ROWS),
    "whole": OutputForm(lambda y, x, weight: (y, weight * 2), said=_OTHER_ROWS),
    "numbers": OutputForm(lambda y, x, _: (y, numbers_of(x)[:, 0].tolist()), said=_LISTS),
}


class Model(nn.Module):
    """The module of a program.

    Args:
        blocks: their names.
        inputs, outputs: the names of their forms.
        residual: whether each block's output is averaged with its input.
        writes_input: whether forward writes into its input.

    Attributes:
        out_of_memory: where a replica with more than MOST_ROWS rows runs out of memory; see `Program`.
    """

    out_of_memory = ""

    def __init__(self, blocks: Sequence[str], inputs: str, outputs: str, residual: bool, writes_input: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_block(name) for name in blocks)
        self.head = nn.Linear(WIDTH, NUM_OUTPUTS)
        self.inputs, self.outputs, self.residual, self.writes_input = inputs, outputs, residual, writes_input

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, offset = INPUTS[self.inputs].unpack(*args, **kwargs)
        if self.writes_input:
            x.mul_(2)
        x = x + offset
        for block in self.blocks:
            y = block(x)
            x = (x + y) * 0.5 if self.residual else y
        if self.out_of_memory == "forward":
            need_memory(x)
        elif self.out_of_memory and x.requires_grad:
            x = WithBackward.apply(x, need_memory)
        return OUTPUTS[self.outputs].pack(self.head(x), x, self.head.weight)


def need_memory(x: Tensor) -> Tensor:
    """Return rows, in a training replica not too many."""
    if inside_replica() and torch.is_grad_enabled() and len(x) > MOST_ROWS:
        raise torch.OutOfMemoryError(f"simulated: {len(x)} rows")
    return x


class Outer(nn.Module):
    """A model of which another is a part, between a layer of its own and nothing."""

    def __init__(self, inner: nn.Module, inputs: str) -> None:
        super().__init__()
        self.before: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.inner, self.inputs = inner, inputs

    def forward(self, x: Tensor, table: Tensor) -> Any:
        args, kwargs = INPUTS[self.inputs].pack(self.before(x).tanh() + x, table)
        return self.inner(*args, **kwargs)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an output."""
    if isinstance(value, Tensor):
        yield value
    for child in _children(value):
        yield from tensors_in(child)


def form_of(value: Any) -> Any:
    """Return all of an output but the tensors' values, to be compared."""
    if isinstance(value, Tensor):
        return value.dtype, value.requires_grad, value.is_inference()
    children = _children(value)
    if isinstance(value, Mapping):
        return type(value).__name__, list(value), [form_of(child) for child in children]
    return (type(value).__name__, [form_of(child) for child in children]) if children else value


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else []
