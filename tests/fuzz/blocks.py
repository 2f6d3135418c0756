"""The layers from which random models are made: rows of WIDTH numbers in, rows of WIDTH numbers out.

A block has a name, "family/variant". A family is drawn first, so that one with many variants is not drawn more often.
Rows do not interact, but for batch norm. Traits say what a family does that matters elsewhere, in words:

    random      draws random numbers
    batch norm  needs sync_batch_norm=True to have the numbers of the plain module
    sparse      has sparse gradients
    scripted    is compiled by torch.jit
    compiled    is compiled by torch.compile, which takes long
    float64     computes in double precision, whatever its parameters' dtype
    buffers     writes into its buffers
    reentrant   checkpoints in a way that allows no autograd.grad
    order 1     has first derivatives only
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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


class Convolutions(nn.Module):
    def __init__(self, padding_mode: Any) -> None:
        super().__init__()
        self.one = nn.Conv1d(3, 3, 3, padding=1, padding_mode=padding_mode)
        self.transposed = nn.ConvTranspose1d(3, 3, 3, padding=1)
        self.grouped = nn.Conv2d(3, 6, 1, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transposed(self.one(x.reshape(-1, 3, 4)))
        y = self.grouped(x.reshape(-1, 3, 2, 2))
        return (y[:, :3] * y[:, 3:]).reshape(-1, WIDTH)


class Attention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=how == "batch first")

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 3, 4)
        if self.attention.batch_first:
            return self.attention(x, x, x, need_weights=False)[0].reshape(-1, WIDTH)
        x = x.transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 1).reshape(-1, WIDTH)


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, **options)


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 2 if options.get("bidirectional") else 4, **options)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(-1, 3, 4)
        y = self.rnn(y)[0] if self.rnn.batch_first else self.rnn(y.transpose(0, 1))[0].transpose(0, 1)
        return self.cell(x, y.reshape(-1, WIDTH))


def numbers_of(x: Tensor) -> Tensor:
    """Return integers from 0 to 6 that follow from the rows."""
    return (x.detach().abs() * 10).nan_to_num().clamp(0, 1e6).long() % 7


class Embeddings(nn.Module):
    def __init__(self, mode: Any, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH, padding_idx=padding_idx)
        self.bag = nn.EmbeddingBag(7, WIDTH, mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        numbers = numbers_of(x)
        return x + self.embedding(numbers[:, 0]) + self.bag(numbers)


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


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(-1, 6, 2).contiguous().to(torch.float64)) @ self.weight
        return torch.view_as_real(z).reshape(-1, WIDTH).to(x.dtype) + torch.fft.fft(x).real


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * x * weight * grad, (x * x * grad).sum(0)


class Doubled(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Rounded(torch.autograd.Function):
    """Has two outputs, of which one is not used: its gradient is None."""

    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.round(), x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Any, other: Any) -> Any:
        return grad if other is None else other if grad is None else grad + other


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(Rounded.apply(Square.apply(x, self.weight))[0] * 1.0) * 0.1 + x


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
        y = self.linear(x) * 2
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


class Operations(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH * 3), how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).reshape(-1, 3, 3, 4).unbind(1)
        if self.how == "attention":
            y = F.scaled_dot_product_attention(q, k, v)
        elif self.how == "einsum":
            y = torch.einsum("bij,bkj->bik", q, k).softmax(-1).bmm(v)
        elif self.how == "sort":
            y = q.cumsum(1) * k.sort(-1)[0] + v.logsumexp(-1, keepdim=True)
        else:
            y = F.normalize(q * k + v, dim=-1)
        return y.reshape(-1, WIDTH)


class Draws(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.how == "bernoulli":
            return x * torch.bernoulli(torch.full((len(x), 1), 0.7, dtype=x.dtype))
        if self.how == "randn_like":
            return x + torch.randn_like(x) * 0.1
        return torch.where(torch.rand(x.shape) < 0.5, x, x * 0.5)


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


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.cosine = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.CosineSimilarity()
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, x.tanh()) * self.cosine(x, x + 1)[:, None]


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


def lazy() -> nn.Module:
    layer = nn.LazyLinear(WIDTH)
    layer(torch.zeros(1, WIDTH))
    return layer


def scripted() -> Any:
    return torch.jit.script(nn.Sequential(linear(), nn.Tanh(), linear()))


class Family(NamedTuple):
    variants: dict[str, Callable[[], nn.Module]]
    traits: tuple[str, ...] = ()


def _of(kind: type[nn.Module], *names: str) -> dict[str, Callable[[], nn.Module]]:
    """Return a variant for each value of the only argument of a class."""
    return {name: functools.partial(kind, name) for name in names}


def _after_linear(**layers: Callable[[], nn.Module]) -> dict[str, Callable[[], nn.Module]]:
    return {name: lambda make=make: nn.Sequential(linear(), make()) for name, make in layers.items()}


FAMILIES: dict[str, Family] = {
    "linear": Family(
        {"plain": linear, "no bias": lambda: linear(bias=False), "lazy": lazy}
        | _after_linear(
            relu=nn.ReLU,
            silu_inplace=lambda: nn.SiLU(inplace=True),
            prelu=lambda: nn.PReLU(WIDTH),
            softmax=lambda: nn.Softmax(-1),
            no_dropout=lambda: nn.Dropout(0.0),
        )
        | {"glu": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())}
    ),
    "tied": Family(_of(Tied, "weight", "weight, layer", "weight, layer, list")),
    "norm": Family(
        {
            "layer": lambda: nn.LayerNorm(WIDTH),
            "group": lambda: nn.GroupNorm(3, WIDTH),
            "rms": lambda: nn.RMSNorm(WIDTH),
            "local response": lambda: Layer(nn.LocalResponseNorm(2), WIDTH, 1),
            "instance": lambda: Layer(nn.InstanceNorm1d(3), 3, 4),
            "instance, affine": lambda: Layer(nn.InstanceNorm1d(3, affine=True), 3, 4),
        }
    ),
    "batch norm": Family(
        {
            "1d": lambda: nn.BatchNorm1d(WIDTH),
            "cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
            "not affine": lambda: nn.BatchNorm1d(WIDTH, affine=False),
            "not tracked": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
            "1d of three axes": lambda: Layer(nn.BatchNorm1d(3), 3, 4),
            "2d, channels last": lambda: Layer(nn.BatchNorm2d(3), 3, 2, 2, channels_last=True),
            "twice": BatchNormTwice,
        },
        ("batch norm", "buffers"),
    ),
    "convolution": Family(_of(Convolutions, "zeros", "circular", "reflect")),
    "attention": Family(
        _of(Attention, "batch first", "batch second")
        | {
            "encoder": lambda: Layer(encoder(), 3, 4),
            "encoder, norm first": lambda: Layer(encoder(norm_first=True), 3, 4),
        }
    ),
    "recurrent": Family(
        {
            "lstm": lambda: Recurrent(nn.LSTM),
            "lstm, two layers": lambda: Recurrent(nn.LSTM, batch_first=True, num_layers=2),
            "gru, bidirectional": lambda: Recurrent(nn.GRU, batch_first=True, bidirectional=True),
            "rnn": lambda: Recurrent(nn.RNN, batch_first=True),
        }
    ),
    "embedding": Family(
        {
            "sum": lambda: Embeddings("sum"),
            "mean, padding": lambda: Embeddings("mean", 0),
            "max": lambda: Embeddings("max"),
        },
        ("order 1",),
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
    "scripted": Family({"layers": scripted}, ("scripted",)),
    "complex": Family({"product": Complex}, ("float64",)),
    "autograd function": Family({"three": Functions}),
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
    "operations": Family(_of(Operations, "attention", "einsum", "sort", "normalize")),
    "random": Family(
        {
            "dropout": lambda: DrawsNothing(nn.Dropout(0.3)),
            "alpha dropout": lambda: DrawsNothing(nn.AlphaDropout(0.2)),
            "feature alpha dropout": lambda: DrawsNothing(nn.FeatureAlphaDropout(0.2)),
            "dropout of channels": lambda: DrawsNothing(Layer(nn.Dropout1d(0.3), 3, 4)),
            "rrelu": lambda: DrawsNothing(nn.RReLU()),
            "bernoulli": lambda: DrawsNothing(Draws("bernoulli")),
            "randn_like": lambda: DrawsNothing(Draws("randn_like")),
            "rand": lambda: DrawsNothing(Draws("rand")),
        }
    ),
    "compiled": Family(_of(Compiled, "eager", "aot_eager"), ("compiled",)),
    "by row": Family({"layers": ByRow}),
    "pairs": Family({"bilinear": Pairs}),
    "attributes": Family({"assigned": Remembers}),
}


def make_block(name: str) -> nn.Module:
    """Return a new block. Its values follow from torch's random state."""
    family, _, variant = name.partition("/")
    return FAMILIES[family].variants[variant]()


def traits_of(name: str) -> tuple[str, ...]:
    """Return the traits of a block, by its name."""
    return FAMILIES[name.partition("/")[0]].traits
