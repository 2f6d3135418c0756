"""N10: what a call was given and what it returned is freed with its last reference, whatever containers it is in.

With the garbage collector off, each kind of input and of output leaves nothing behind: no tensor of the batch, no
graph, and nothing that only the collector would free. The model is `test_no_refcycles` of torch's own tests.
"""

import gc
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import unisono
from helpers.garbage import collected, wait_for_workers

ROWS, WIDTH = 6, 3
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Batch:
    x: torch.Tensor
    name: str


class Bag:
    """An object of a class that is no container: it is made anew from its items."""

    def __init__(self, items: Any) -> None:
        self.items = list(items)

    def __iter__(self) -> Any:
        return iter(self.items)


class Net(nn.Module):
    """Computes on all tensors that it is given, and returns what `output` makes of the result."""

    def __init__(self, output: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output(self.linear(sum(tensors_of((args, kwargs)))))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value with WIDTH columns, found without a function of unisono's."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_of([*value.values()])
    if isinstance(value, tuple | list | Bag):
        return [tensor for each in value for tensor in tensors_of(each)]
    return tensors_of([*vars(value).values()]) if hasattr(value, "__dict__") else []


INPUTS: dict[str, Callable[[torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "tensor": lambda x: ((x,), {}),
    "keyword": lambda x: ((), {"x": x}),
    "numbers and None": lambda x: ((x, 2, None), {"mode": "a"}),
    "tuple": lambda x: (((x, x + 1),), {}),
    "list": lambda x: (([x, [x]],), {}),
    "dict": lambda x: (({"x": x, "deep": {"y": [x]}},), {}),
    "ordered dict": lambda x: ((OrderedDict(x=x),), {}),
    "named tuple": lambda x: ((Pair(x, x),), {}),
    "dataclass": lambda x: ((Batch(x, "a"),), {}),
    "list of strings": lambda x: ((x, ["a"] * ROWS), {}),
    "dict with a list of strings": lambda x: (({"x": x, "names": ["a"] * ROWS},), {}),
    "SampleList": lambda x: ((x, unisono.SampleList("abcdef")), {}),
    "object": lambda x: ((x, object()), {}),
}
OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda y: y,
    "scalar": lambda y: y.mean(),
    "number": lambda y: (y, 3.0),
    "string and None": lambda y: (y, "text", None),
    "tuple": lambda y: (y, (y + 1,)),
    "list": lambda y: [y, [y]],
    "list of rows": list,
    "dict": lambda y: {"y": y, "deep": {"z": [y]}},
    "named tuple": lambda y: Pair(y, y),
    "dataclass": lambda y: Batch(y, "a"),
    "object of an unknown class": lambda y: Bag([y, Bag([y])]),
    "SampleList": unisono.SampleList,
    "packed sequence": lambda y: pack_sequence([*y[:, None]]),
}


@pytest.mark.parametrize("synchronised", [False, True])
@pytest.mark.parametrize(
    ("inputs", "output"),
    [*((name, "tensor") for name in INPUTS), *(("tensor", name) for name in OUTPUTS if name != "tensor")],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # lists that look like lists of rows
def test_a_step_leaves_nothing(collector_off: None, inputs: str, output: str, synchronised: bool) -> None:
    """N10: after a step, without the garbage collector, its batch, its outputs and its graph are gone."""
    model = unisono.DataParallel(Net(OUTPUTS[output]), ["cpu"] * 2, sync_batch_norm=synchronised)
    references_after_a_step(model, inputs, True)  # what the first step sets up stays
    gc.collect()
    for with_gradients in (True, True, False):
        left = references_after_a_step(model, inputs, with_gradients)
        wait_for_workers()
        assert [name for name, reference in left.items() if reference() is not None] == []
        assert collected() == []


def references_after_a_step(model: nn.Module, inputs: str, with_gradients: bool) -> dict[str, Any]:
    """Take a step, and return weak references to its batch, its outputs and its graph."""
    x = torch.randn(ROWS, WIDTH)
    args, kwargs = INPUTS[inputs](x)
    with torch.set_grad_enabled(with_gradients):
        output = model(*args, **kwargs)
    left = {"x": x, **{f"output {i}": tensor for i, tensor in enumerate(tensors_of(output))}}
    references = {name: weakref.ref(tensor) for name, tensor in left.items()}
    if with_gradients:
        loss = sum(tensor.sum() for tensor in tensors_of(output))
        loss.grad_fn.metadata["marker"] = marker = Bag([])  # a node cannot have weak references
        references["graph"] = weakref.ref(marker)
        loss.backward()
        model.zero_grad()
    return references
