"""The layers from which random models are made: rows of WIDTH numbers in, rows of WIDTH numbers out.

They differ in what a wrapper has to do for them. Each class of torch.nn is in tests/contract/test_nn_sweep.py.

A block has a name, "family/variant". A family is drawn first, so that one with many variants is not drawn more often.
Rows do not interact, but for batch norm. Traits say what a family does that matters elsewhere, in words:

    batch norm  needs sync_batch_norm=True to have the numbers of the plain module
    sparse      has sparse gradients
    scripted    is compiled by torch.jit
    compiled    is compiled by torch.compile, which takes long
    float64     computes in double precision, whatever its parameters' dtype
    buffers     writes into its buffers, or leaves something else behind, in each forward
    reentrant   checkpoints in a way that allows no autograd.grad
    written in backward  has a checkpoint that reads buffers, and may write them
"""

import functools
import random
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from unisono.runtime.draws_off import DrawsOff

WIDTH = 12


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


class Block(nn.Module):
    """Has a linear layer, and one of several ways to use it."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.linear, self.how = linear(), how


class Layer(nn.Module):
    """A layer of torch's, applied to rows in a shape of their own."""

    def __init__(self, layer: nn.Module, *shape: int, channels_last: bool = False) -> None:
        super().__init__()
        self.layer, self.shape, self.channels_last = layer, shape or (WIDTH,), channels_last

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, *self.shape)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return self.layer(x).reshape(-1, WIDTH)


class Tied(nn.Module):
    """Shares a weight between two layers, and perhaps a layer between two places and a list."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.b.weight = self.a.weight
        self.c = self.a if "layer" in shared else linear()
        self.listed = [self.a, self.b] if "list" in shared else []

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x)) + self.b(x) * 0.5
        for layer in self.listed:
            x = torch.tanh(layer(x))
        return self.c(x)


class BatchNormTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm(x.tanh())


def numbers_of(x: Tensor) -> Tensor:
    """Return integers from 0 to 6 that follow from the rows."""
    return (x.detach().abs() * 10).nan_to_num().clamp(0, 1e6).long() % 7


class SparseEmbedding(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding, self.how = nn.Embedding(7, WIDTH, sparse=True), how

    def forward(self, x: Tensor) -> Tensor:
        numbers = numbers_of(x)
        y = x + self.embedding(numbers[:, 0])
        return y + self.embedding(numbers[:, 1:3]).sum(1) if self.how == "twice" else y


def normed(norm: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """Return a linear layer with a normed weight; the older functions for it are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return norm(linear(), **options)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Parametrized(Block):
    def __init__(self, how: str) -> None:
        super().__init__(how)
        parametrize.register_parametrization(self.linear, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.linear(x)
        with parametrize.cached():
            return self.linear(torch.tanh(self.linear(x)))


class Checkpointed(Block):
    """Runs two layers in checkpoints: once, in a lambda, one in another, reentrant, or from a leaf made in forward."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.second = linear()

    def layers(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.linear(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "lambda":
            return (
                checkpoint(
                    lambda x: self.second(self.linear(x).tanh()), x, use_reentrant=False, determinism_check="none"
                )
                + x
            )
        if self.how == "nested":
            return checkpoint(self.layers, checkpoint(self.layers, x, use_reentrant=False), use_reentrant=False)
        if self.how == "reentrant":
            return checkpoint(self.linear, self.second(x), use_reentrant=True)
        if self.how == "reentrant, from a leaf":
            return checkpoint(self.linear, x.detach().requires_grad_() * 2, use_reentrant=True)
        return checkpoint(self.layers, x, use_reentrant=False)


class CheckpointedBuffer(Block):
    """Reads a buffer in a checkpoint, and writes it there or before: what runs again in backward finds another one."""

    count: Tensor

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.register_buffer("count", torch.zeros(()))

    def counted(self, x: Tensor) -> Tensor:
        if self.training and self.how.startswith("in place"):
            self.count.add_(1)
        elif self.training and self.how.startswith("reassigned"):
            self.count = self.count + 1
        return self.linear(x) * (1 + self.count % 4 * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.how.startswith("before"):
            self.count.add_(1)
        return checkpoint(self.counted, x, use_reentrant=self.how.endswith("reentrant"))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(-1, 6, 2).contiguous().to(torch.float64)) @ self.weight
        return torch.view_as_real(z).reshape(-1, WIDTH).to(x.dtype) + torch.fft.fft(x).real


def _stretch_inputs(module: nn.Module, args: Any) -> Any:
    return (args[0] * 1.5,)


def _add_inputs(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.5 + args[0]


def _shift_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] + 1,), {}


def _double_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 2 for grad in inputs)


def _treble_gradients(module: nn.Module, outputs: Any) -> Any:
    return (outputs[0] * 3,)


def _double(grad: Tensor) -> Tensor:
    return grad * 2


def _double_and_shift(grad: Tensor) -> Tensor:
    """Tells the gradient of all rows from those of shards."""
    return grad * 2 + 1


def _halve(parameter: Tensor) -> None:
    if parameter.grad is not None:  # behaviour.md, R9
        parameter.grad.mul_(0.5)


class Hooked(Block):
    def __init__(self, how: str) -> None:
        super().__init__(how)
        if how == "forward":
            self.linear.register_forward_pre_hook(_stretch_inputs)
            self.linear.register_forward_hook(_add_inputs)
            self.linear.register_forward_pre_hook(_shift_inputs, with_kwargs=True, prepend=True)
        elif how == "backward":
            self.linear.register_full_backward_hook(_double_gradients)
            self.linear.register_full_backward_pre_hook(_treble_gradients)
        elif how == "parameter":
            self.linear.weight.register_hook(_double_and_shift)
            self.linear.bias.register_post_accumulate_grad_hook(_halve)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "output" and y.requires_grad:
            y.register_hook(_double)
        return y


class Counting(Block):
    """Writes into its buffers in training, in one way or another, or assigns others to their names."""

    steps: Tensor
    mean: Tensor

    def __init__(self, how: str, persistent: bool = True) -> None:
        super().__init__(how)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH, WIDTH), persistent=persistent)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.how == "in place":
            self.steps += 1
            self.mean.mul_(0.9).add_(self.linear.weight.detach(), alpha=0.1)
        elif self.training and self.how == "without gradients":
            with torch.no_grad():
                self.mean.lerp_(self.linear.weight, 0.1)
        elif self.training and self.how == "reassigned":
            self.steps = self.steps + 1
            self.mean = self.mean * 0.9 + 0.1
        return self.linear(x) + x @ self.mean * 0.1 + (self.steps % 3)


class Containers(nn.Module):
    """Reaches its layers by a method, a partial, a lambda, a dict, a list: what an attribute can refer to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.2 for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH), "b": nn.Parameter(torch.randn(WIDTH), False)})
        self.layers: Any = nn.ModuleDict({"x": linear(), "y": nn.ModuleList([linear()])})
        self.plain: dict[str, Any] = {"layer": self.layers["x"], "tensors": [torch.ones(WIDTH), (self.listed[0],)]}
        functions = {
            "method": self.inner,
            "partial": functools.partial(self.inner, factor=2.0),
            "lambda": lambda z: self.layers["x"](z) * 2,
            "dict": self.from_dict,
        }
        self.function = functions[how]

    def inner(self, z: Tensor, factor: float = 1.0) -> Tensor:
        return self.layers["y"][0](z) * factor

    def from_dict(self, z: Tensor) -> Tensor:
        return self.plain["layer"](z) * self.plain["tensors"][0] + z @ self.plain["tensors"][1][0]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = x @ weight
        x = x * self.named["a"] + self.named["b"]
        return self.function(x) + self.layers["x"](x)


class Transformed(Block):
    """Uses torch.func inside forward."""

    def row(self, row: Tensor) -> Tensor:
        return self.linear(row).tanh()

    def forward(self, x: Tensor) -> Tensor:
        parameters = dict(self.linear.named_parameters())
        if self.how == "functional_call":
            return torch.func.functional_call(self.linear, {name: p * 2 for name, p in parameters.items()}, (x,))
        if len(x) == 0:
            return self.linear(x)
        if self.how == "vmap":
            return torch.vmap(self.row)(x)
        if self.how == "vmap of grad":
            return torch.vmap(torch.func.grad(lambda row: self.row(row).sum()))(x)
        if self.how == "vmap of jacrev":
            return torch.vmap(torch.func.jacrev(self.row))(x).sum(1)

        def of_parameters(parameters: Any, row: Tensor) -> Tensor:
            return torch.func.functional_call(self.linear, parameters, (row,)).tanh().sum()

        return torch.vmap(torch.func.grad(of_parameters), (None, 0))(parameters, x)["weight"].sum(1)


class InnerGradient(Block):
    """Differentiates inside its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.linear(leaf).tanh().sum()
            (grad,) = torch.autograd.grad(energy, leaf, create_graph=self.how == "kept")
        return x + grad


class Modes(Block):
    """Switches gradients off for a part of forward, in one way or another."""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                return x + self.linear(x)
        if self.how == "training":
            with torch.set_grad_enabled(self.training):
                y = self.linear(x)
            return x + y
        if self.how == "inference_mode":
            with torch.inference_mode():
                y = self.linear(x)
            return x + y.clone()
        if self.how == "detach":
            return self.linear(x.detach()) + x
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            y = self.linear(x) * 2
        finally:
            torch.set_grad_enabled(before)
        return y + self.linear(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, 0] = 0
        y.add_(1)
        z = torch.zeros_like(y)
        z[:, ::2] = y[:, ::2]
        return z.clamp_(-3, 3)


class Unused(Block):
    """Has parameters that are not used, frozen, empty, and 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.frozen = linear(), linear().requires_grad_(False)
        self.empty, self.scale = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.frozen(x) + self.empty.sum()


class Views(nn.Module):
    """Has a parameter that is not contiguous, and returns views of several kinds."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH * 2, WIDTH).t() * 0.2)
        self.row, self.how = nn.Parameter(torch.randn(1, WIDTH)), how

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight[:, :WIDTH] + self.row.expand(len(x), WIDTH)
        if self.how == "transposed":
            return y.t().contiguous().t()
        if self.how == "strided":
            return torch.cat([y, y], 1)[:, ::2]
        if self.how == "unfolded":
            return y.unfold(1, 1, 1).squeeze(-1)
        return y[:, torch.arange(WIDTH - 1, -1, -1)]


class DrawsNothing(nn.Module):
    """A layer whose draws are switched off: replicas would draw other numbers than the plain module."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with DrawsOff():
            return self.layer(x)


class CheckpointedDropout(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = DrawsNothing(nn.Dropout(0.4))

    def dropped(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.dropped, x, use_reentrant=False)


class Compiled(Block):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.function = torch.compile(self.inner, backend=backend, dynamic=True)

    def inner(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class ByRow(nn.Module):
    """Runs another layer for each row, as its numbers say: a replica may not use all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.layers[int(numbers_of(row).sum()) % 3](row) for row in x.unbind(0)]
        return torch.stack(rows) if rows else x * 1


class Remembers(Block):
    """Assigns to attributes in forward, which a replica's next forward must not see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.seen = x, len(x)
        y = self.linear(x)
        return y * (x.tanh() if self.last is None else self.last.tanh() + self.seen / max(len(y), 1))


class ReadsAttributes(Block):
    """Reads attributes that are the program's, of a weight, a buffer or a plain tensor, and others in each forward."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.register_buffer("buffer", torch.ones(WIDTH))
        self.tensor = torch.ones(WIDTH)
        named = {"of a weight": self.linear.weight, "of a buffer": self.buffer, "of a tensor": self.tensor}
        named[how].scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        for tensor in (self.linear.weight, self.buffer, self.tensor):
            x = x * getattr(tensor, "scale", 1.0)
        return self.linear(x)


class Leaves(Block):
    """Assigns to attributes in forward what one device would have afterwards: of the block, a parameter, a module."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.steps = 0
        self.last: Tensor | None = None
        self.state: Tensor | None = None
        self.made: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "count":
            self.steps += 1
        elif self.how == "flag":
            y = y if self.steps else y * 2
            self.steps = 1
        elif self.how == "tensor":
            self.last = y.detach()
        elif self.how == "loss":
            self.last = y.square().mean()
        elif self.how == "state":
            y = y if self.state is None else y + self.state.to(y.dtype)
            self.state = y.detach().mean(0)
        elif self.how == "layer":
            if self.made is None:
                with torch.inference_mode(False):  # else it could not be trained
                    self.made = nn.Linear(WIDTH, WIDTH, bias=False, dtype=x.dtype)
                    nn.init.eye_(self.made.weight)
            y = self.made(y)
        return y

    def left(self) -> list[Any]:
        """Return what forwards have left."""
        return [self.steps, self.last, self.state, None if self.made is None else self.made.weight.grad]


class Appends(Block):
    """Appends to a list or a dict, which all replicas share: in any order all that one device would have there."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.listed: list[Tensor] = []
        self.named: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        (self.listed if self.how == "list" else self.named.setdefault("rows", [])).append(y.detach().float())
        return y

    def left(self) -> list[Any]:
        """Return the rows, in the order of their numbers."""
        listed = self.listed or self.named.get("rows", [])
        rows = torch.cat([each.cpu() for each in listed]) if listed else torch.zeros(0, WIDTH)
        return [rows[rows[:, 0].argsort()]]


class Meter:
    def __init__(self) -> None:
        self.calls = 0
        self.last = torch.zeros(0)
        self.counter = nn.BatchNorm1d(1)  # a module outside of the model


class WritesShared(Block):
    """Writes into something that all replicas share, which one device would leave otherwise."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.meter, self.named, self.sums = Meter(), {"calls": 0}, numpy.zeros(1)
        self.total = torch.zeros(())
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        self.counted = counted if how == "closure" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "object":
            self.meter.calls += 1
        elif self.how == "object, tensor":
            self.meter.last = y.detach()
        elif self.how == "object, buffer":
            self.meter.counter.num_batches_tracked.add_(1)
        elif self.how == "dict":
            self.named["calls"] += 1
        elif self.how == "array":
            self.sums += 1
        elif self.how == "tensor" and not torch.is_inference_mode_enabled():
            self.total.add_(1 + len(y))
        elif self.counted is not None:
            self.named["calls"] = self.counted()
        return y

    def left(self) -> list[Any]:
        """Return what forwards have left."""
        tracked = self.meter.counter.num_batches_tracked
        return [self.meter.calls, self.meter.last, tracked, self.named["calls"], self.sums.tolist(), self.total]


class UsesOutside(Block):
    """Uses a tensor that is no input and not the module's: an object holds it, in which nothing is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.held = types.SimpleNamespace(shift=torch.randn(WIDTH, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * self.held.shift.to(x)

    def left(self) -> list[Any]:
        """Return the gradient of the tensor."""
        return [self.held.shift.grad]


class AttributeTensor(Block):
    """Has a tensor that is neither a parameter nor a buffer; `to` moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.randn(WIDTH)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AttributeTensor":
        self.shift = fn(self.shift)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


class KeepsLosses(Block):
    """Keeps two losses of its rows: of what the output is computed from, and of a layer that nothing else uses."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.side, self.kept = linear(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.how == "plain":
            hidden = hidden.tanh()
        else:
            hidden = checkpoint(torch.tanh, hidden, use_reentrant=self.how == "reentrant")
        self.kept += [hidden.square().sum(), self.side(x).tanh().pow(3).sum()]
        return hidden


class HooksInForward(Block):
    """Registers hooks in forward: for a while, or for good."""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "for a while":
            with self.linear.register_forward_hook(lambda module, args, output: output * 2):
                return self.linear(x) + torch.tanh(self.linear(x * 0.5))
        if self.how == "before it":
            with self.linear.register_forward_pre_hook(_stretch_inputs):
                return self.linear(x)
        if self.how == "backward":
            with self.linear.register_full_backward_pre_hook(_treble_gradients):
                return self.linear(x)
        if self.how == "for good":
            self.linear.register_forward_hook(_shrink_output)
        elif self.linear.weight.requires_grad:
            self.linear.weight.register_hook(_double)
        return self.linear(x)


def _shrink_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.9


class WritesWeights(Block):
    """Writes into a parameter in forward, in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.is_new = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "decay":
                self.weight.mul_(0.9)
            elif self.how == "momentum":
                self.weight.lerp_(self.linear.weight.mean(0), 0.1)
            elif self.how == "clamp":
                self.linear.weight.clamp_(-0.2, 0.2)
            elif self.how == "first batch" and self.is_new and len(x):
                self.weight.copy_(x.mean(0))
                self.is_new = False
            elif self.how == "copy":
                nn.init.constant_(self.linear.bias, 0.5)
            elif self.how == "data":
                with torch.inference_mode(False):
                    self.weight.data = self.weight.data.clamp(-0.9, 0.9)
        return self.linear(x) * self.weight


class DrawsElsewhere(Block):
    """Draws from Python's generator, from numpy's, or from one of its own."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.own: Any = {"own of Python": random.Random(7), "own of torch": torch.Generator().manual_seed(7)}.get(how)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "own of torch":
            return self.linear(x) * torch.rand(1, generator=self.own).to(x.dtype)
        draw = numpy.random.rand if self.how == "numpy" else random.random if self.own is None else self.own.random
        return self.linear(x) * draw()


def lazy() -> nn.Module:
    layer = nn.LazyLinear(WIDTH)
    layer(torch.zeros(1, WIDTH))
    return layer


def scripted() -> Any:
    return torch.jit.script(nn.Sequential(linear(), nn.Tanh(), linear()))


class Family(NamedTuple):
    variants: dict[str, Callable[[], nn.Module]]
    traits: tuple[str, ...] = ()
    said: tuple[str, ...] = ()  # what a message says, in part, where the numbers are not those of the plain module


ASSIGNED, _SHARED, _WRITTEN = " assigns ", " writes into ", "forward has written into"
_DRAWN = "was drawn from while "


def _of(kind: type[nn.Module], *names: str) -> dict[str, Callable[[], nn.Module]]:
    """Return a variant for each value of the only argument of a class."""
    return {name: functools.partial(kind, name) for name in names}


FAMILIES: dict[str, Family] = {
    "linear": Family(
        {
            "plain": linear,
            "no bias": lambda: linear(bias=False),
            "lazy": lazy,
            "relu": lambda: nn.Sequential(linear(), nn.ReLU()),
            "silu_inplace": lambda: nn.Sequential(linear(), nn.SiLU(inplace=True)),
        }
    ),
    "tied": Family(_of(Tied, "weight", "weight, layer", "weight, layer, list")),
    "norm": Family({"layer": lambda: nn.LayerNorm(WIDTH), "instance": lambda: Layer(nn.InstanceNorm1d(3), 3, 4)}),
    "batch norm": Family(
        {
            "1d": lambda: nn.BatchNorm1d(WIDTH),
            "cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
            "not tracked": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
            "2d, channels last": lambda: Layer(nn.BatchNorm2d(3), 3, 2, 2, channels_last=True),
            "twice": BatchNormTwice,
        },
        ("batch norm", "buffers"),
    ),
    "sparse": Family(_of(SparseEmbedding, "once", "twice"), ("sparse",)),
    "normed weight": Family(
        {
            "weight_norm": lambda: normed(nn.utils.weight_norm),
            "parametrized weight_norm": lambda: normed(parametrizations.weight_norm),
            "spectral_norm": lambda: normed(nn.utils.spectral_norm),
            "parametrized spectral_norm": lambda: normed(parametrizations.spectral_norm),
            "orthogonal": lambda: normed(parametrizations.orthogonal, orthogonal_map="cayley"),
        },
        ("buffers",),
    ),
    "parametrized": Family(_of(Parametrized, "plain", "cached")),
    "checkpoint": Family(_of(Checkpointed, "plain", "lambda", "nested") | {"dropout": CheckpointedDropout}),
    "reentrant": Family(_of(Checkpointed, "reentrant", "reentrant, from a leaf"), ("reentrant",)),
    "checkpointed buffer": Family(
        _of(CheckpointedBuffer, "in place", "reassigned", "before"), ("checkpoint", "buffers", "written in backward")
    ),
    "reentrant buffer": Family(
        _of(CheckpointedBuffer, "in place, reentrant", "reassigned, reentrant", "before, reentrant"),
        ("reentrant", "buffers", "written in backward"),
    ),
    "scripted": Family({"layers": scripted}, ("scripted",)),
    "complex": Family({"product": Complex}, ("float64",)),
    "hooked": Family(_of(Hooked, "forward", "backward", "parameter", "output")),
    "buffers": Family(
        _of(Counting, "in place", "without gradients", "reassigned")
        | {"in place, not saved": lambda: Counting("in place", persistent=False)},
        ("buffers",),
    ),
    "containers": Family(_of(Containers, "method", "partial", "lambda", "dict")),
    "torch.func": Family(
        _of(Transformed, "functional_call", "vmap", "vmap of grad", "vmap of jacrev", "gradient by row")
    ),
    "inner gradient": Family(_of(InnerGradient, "kept", "freed")),
    "modes": Family(_of(Modes, "no_grad", "training", "inference_mode", "detach", "switched")),
    "in place": Family({"rows": InPlace}),
    "unused": Family({"parameters": Unused}),
    "views": Family(_of(Views, "transposed", "strided", "unfolded", "indexed")),
    "random": Family({"dropout": lambda: DrawsNothing(nn.Dropout(0.3))}),
    "compiled": Family(_of(Compiled, "eager", "aot_eager"), ("compiled",)),
    "by row": Family({"layers": ByRow}),
    "attributes": Family({"assigned": Remembers}),
    "read attributes": Family(_of(ReadsAttributes, "of a weight", "of a buffer", "of a tensor")),
    "left alike": Family(_of(Leaves, "count", "flag"), ("buffers",), (ASSIGNED,)),  # said of parts and maps
    "left attributes": Family(
        _of(Leaves, "tensor", "loss", "state", "layer"),
        ("attributes", "buffers"),
        (ASSIGNED,),
    ),
    "lists": Family(_of(Appends, "list", "dict"), ("buffers",)),
    "shared writes": Family(
        _of(WritesShared, "object", "object, tensor", "object, buffer", "dict", "array", "tensor", "closure"),
        ("attributes", "buffers"),
        (_SHARED, ASSIGNED),
    ),
    "outside": Family({"tensor": UsesOutside}, ("attributes",)),
    "attribute tensors": Family({"plain": AttributeTensor}),
    "losses": Family(_of(KeepsLosses, "plain", "checkpoint"), ("attributes",)),
    "reentrant losses": Family(_of(KeepsLosses, "reentrant"), ("attributes", "losses", "reentrant")),
    "hooks in forward": Family(_of(HooksInForward, "for a while", "before it", "backward")),
    "hooks alike": Family(_of(HooksInForward, "for good"), ("buffers",), (ASSIGNED,)),  # said of parts and maps
    "hooks for good": Family(_of(HooksInForward, "of a parameter"), ("attributes", "buffers"), (ASSIGNED,)),
    "weights written alike": Family(  # said of parts and maps
        _of(WritesWeights, "decay", "momentum", "clamp", "copy", "data"), ("buffers", "weights"), (_WRITTEN,)
    ),
    "written weights": Family(
        _of(WritesWeights, "first batch"),
        ("attributes", "buffers"),
        (_WRITTEN, ASSIGNED),  # the latter: that the weights are not new any more
    ),
    "drawn elsewhere": Family(
        _of(DrawsElsewhere, "Python", "numpy", "own of Python", "own of torch"), ("buffers",), (_DRAWN,)
    ),
}


def make_block(name: str) -> nn.Module:
    """Return a new block. Its values follow from torch's random state."""
    family, _, variant = name.partition("/")
    return FAMILIES[family].variants[variant]()


def traits_of(name: str) -> tuple[str, ...]:
    """Return the traits of a block, by its name."""
    return FAMILIES[name.partition("/")[0]].traits


def said_of(name: str) -> tuple[str, ...]:
    """Return what messages say of a block, by its name."""
    return FAMILIES[name.partition("/")[0]].said
