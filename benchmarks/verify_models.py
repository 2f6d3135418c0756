"""What the programs of verify_programs.py are put together from: a program, its inputs and losses, layers, models.

`setting` says how a program is built and run: as a user writes it, or for the truth, in double precision and without
random draws. So blocks take what draws, and what has a precision of its own, from the functions below it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.primitives.pytree import map_tensors, tensors

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# ---- what a program is -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A loss, and how its target is made."""

    criterion: Callable[..., Tensor] | None = None  # None: a projection of all outputs
    target: Callable[[], Any] | None = None  # None: the criterion gets the output only

    def loss(self, output: Any, target: Any) -> Tensor:
        if self.criterion is None:
            return projection(output)
        return self.criterion(output) if self.target is None else self.criterion(output, target)


def projection(output: Any) -> Tensor:
    """Return the sum of all outputs, each value times a weight of its own."""
    leaves = [leaf for _, leaf in tensors(output)]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(leaf.shape, generator=generator).to(leaf.dtype) for leaf in leaves]
    return torch.stack([(leaf * weight).sum() for leaf, weight in zip(leaves, weights, strict=True)]).sum()


@dataclass(frozen=True)
class Program:
    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    task: Task = Task()
    dtype: torch.dtype = FP32  # of the parameters, and of floating inputs
    replicas: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> tuple[nn.Module, Any, Any]:
        """Return the model, its inputs and the target, in the setting that holds."""
        torch.manual_seed(seed)
        model, inputs = self.model(), self.inputs()
        target = None if self.task.target is None else self.task.target()
        dtype = or_wide(self.dtype)
        inputs, target = (
            map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree) for tree in (inputs, target)
        )
        return model.to(dtype), inputs, target


@dataclass
class _Setting:
    wide: bool = False
    draws: bool = True


_setting = _Setting()


@contextmanager
def setting(*, wide: bool, draws: bool) -> Iterator[None]:
    """Build and run programs in double precision if `wide`; without random draws unless `draws`."""
    global _setting  # noqa: PLW0603 - replicas' threads see it too
    before, _setting = _setting, _Setting(wide, draws)
    try:
        yield
    finally:
        _setting = before


def or_wide(dtype: torch.dtype) -> torch.dtype:
    return FP64 if _setting.wide else dtype


def drop(p: float = 0.1) -> float:
    return p if _setting.draws else 0.0


def normal_like(x: Tensor) -> Tensor:
    return torch.randn_like(x) if _setting.draws else torch.ones_like(x)


def permutation(n: int) -> Tensor:
    return torch.randperm(n) if _setting.draws else torch.arange(n - 1, -1, -1)


def autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if _setting.wide else torch.autocast("cpu", dtype)


# ---- inputs and losses -----------------------------------------------------------------------------


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def tokens(*shape: int, vocab: int = 50) -> Callable[[], Tensor]:
    return lambda: torch.randint(vocab, shape)


def several(*makers: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple([make() for make in makers])


def named(**makers: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: make() for name, make in makers.items()}


def padded(rows: int, length: int) -> Callable[[], Tensor]:
    """Return masks of rows of different lengths."""

    def make() -> Tensor:
        return (torch.arange(length) < torch.randint(2, length + 1, (rows, 1))).long()

    return make


def classes(*shape: int, of: int = 4) -> Task:
    """Cross entropy; of sequences, each token's."""

    def criterion(output: Any, target: Tensor) -> Tensor:
        logits = getattr(output, "logits", output)
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())

    return Task(criterion, tokens(*shape, vocab=of))


def scaled(factor: float, task: Task) -> Task:
    """As a gradient scaler does it, so that float16 does not underflow."""
    return Task(lambda output, target: factor * task.criterion(output, target), task.target)


def values(*shape: int, loss: Callable[..., Tensor] = F.mse_loss) -> Task:
    return Task(loss, floats(*shape))


# ---- blocks ----------------------------------------------------------------------------------------


class Does(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Residual(nn.Module):
    def __init__(self, branch: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.branch, self.scale = branch, scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.branch(x)


class With(nn.Module):
    """Layers and a function of their names: `With(lambda m, x: m.a(x) - m.b(x), a=..., b=...)`."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Autocast(nn.Module):
    def __init__(self, net: nn.Module, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, x: Any) -> Any:
        with autocast(self.dtype):
            return self.net(x).to(or_wide(FP32))


class WideNorm(nn.LayerNorm):
    """A layer norm that computes in float32, as language models in half precision have it."""

    def forward(self, x: Tensor) -> Tensor:
        wide = or_wide(FP32)
        return F.layer_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.bias.to(wide)).to(x.dtype)


def parameter(*shape: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(scale * torch.randn(shape))


def stack(*layers: nn.Module | Callable[..., Any]) -> nn.Sequential:
    return nn.Sequential(*(layer if isinstance(layer, nn.Module) else Does(layer) for layer in layers))


def repeat(times: int, make: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(times)))


def beside(width: int, between: nn.Module | Callable[..., Any], scale: float) -> nn.Module:
    """A branch with parameters of its own before and after `between`."""
    return Residual(stack(nn.Linear(width, width), between, nn.Tanh(), nn.Linear(width, width)), scale)


def deep_batch_norm(layers: int, first: Callable[..., Any] | None = None) -> nn.Module:
    """Each batch norm amplifies the rounding of the one before, most with few rows; the layers' biases do nothing."""
    norms = [stack(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(layers)]
    return stack(nn.Linear(12, 32), first or nn.Identity(), *norms, nn.Linear(32, 4))


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU, gain: float = 1.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [times(gain, nn.Linear(n_in, n_out)), act()]
    return nn.Sequential(*layers[:-1])


def times(factor: float, layer: nn.Module) -> nn.Module:
    """Multiply a layer's weights."""
    with torch.no_grad():
        for each in layer.parameters():
            each.mul_(factor)
    return layer


def frozen(layer: nn.Module) -> nn.Module:
    return layer.eval().requires_grad_(False)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


def block(width: int, causal: bool = False, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> nn.Module:
    return stack(
        Residual(stack(norm(width), Attention(width, causal=causal), nn.Dropout(drop()))),
        Residual(stack(norm(width), mlp(width, 4 * width, width, act=nn.GELU))),
    )


def language_model(
    norm: Callable[[int], nn.Module] = nn.LayerNorm, middle: nn.Module | None = None, vocab: int = 50, width: int = 32
) -> nn.Module:
    """A pre-norm transformer whose head has the embedding's weights."""
    embedding = nn.Embedding(vocab, width, padding_idx=0)
    return With(
        lambda m, ids: F.linear(m.blocks(m.embedding(ids) + m.position[: ids.shape[1]]), m.embedding.weight),
        embedding=embedding,
        position=parameter(64, width, scale=0.02),
        blocks=stack(block(width, True, norm), middle or nn.Identity(), block(width, True, norm), norm(width)),
    )


def vit(width: int = 32, middle: nn.Module | None = None) -> nn.Module:
    def forward(m: Any, images: Tensor) -> Tensor:
        patches = m.patches(images).flatten(2).mT
        return m.net(torch.cat([m.first.expand(len(images), 1, -1), patches], 1))[:, 0]

    body = [block(width), middle or nn.Identity(), block(width)]
    net = stack(*body, nn.LayerNorm(width), nn.Linear(width, 4))
    return With(forward, patches=nn.Conv2d(3, width, 4, stride=4), first=parameter(1, 1, width), net=net)


def resnet(
    norm: Callable[[int], nn.Module],
    blocks: int = 4,
    width: int = 16,
    adapter: Callable[[int], nn.Module] | None = None,
) -> nn.Module:
    """A ResNet for images of 3 x 16 x 16; `adapter` makes a layer that follows each block."""

    def one() -> nn.Module:
        conv = partial(nn.Conv2d, width, width, 3, padding=1, bias=False)
        body = stack(Residual(stack(conv(), norm(width), nn.ReLU(), conv(), norm(width))), nn.ReLU())
        return body if adapter is None else stack(body, adapter(width))

    stem = stack(nn.Conv2d(3, width, 3, padding=1), norm(width), nn.ReLU(), nn.MaxPool2d(2))
    return stack(stem, repeat(blocks, one), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


def zero_adapter(between: Callable[..., Any], width: int) -> nn.Module:
    """Down, `between`, up; `up` begins at zero, so the output does not change, and only its gradient is not zero."""
    return Residual(stack(nn.Conv2d(width, 8, 1), between, times(0.0, nn.Conv2d(8, width, 1))))


def unet(middle: nn.Module | None = None) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        fine = m.down(x)
        coarse = F.interpolate(m.middle(F.max_pool2d(fine, 2)), scale_factor=2, mode="bilinear")
        return m.up(torch.cat([fine, coarse], 1))

    conv = partial(nn.Conv2d, kernel_size=3, padding=1)
    return With(
        forward,
        down=stack(conv(3, 8), nn.ReLU()),
        middle=stack(conv(8, 16), nn.SiLU(), middle or nn.Identity(), conv(16, 8)),
        up=stack(nn.InstanceNorm2d(16, affine=True), nn.ConvTranspose2d(16, 3, 3, padding=1)),
    )


def convnext(width: int = 16) -> nn.Module:
    """With a layer scale of 1e-6, as published."""

    def one() -> nn.Module:
        body = stack(
            nn.Conv2d(width, width, 5, padding=2, groups=width),
            lambda x: x.movedim(1, -1),
            nn.LayerNorm(width),
            mlp(width, 4 * width, width, act=nn.GELU),
        )
        scale = nn.Parameter(torch.full((width,), 1e-6))
        return With(lambda m, x: x + (m.scale * m.body(x)).movedim(-1, 1), body=body, scale=scale)

    return stack(nn.Conv2d(3, width, 4, stride=4), repeat(3, one), lambda x: x.mean((2, 3)), nn.Linear(width, 4))


def last_step(rnn: nn.Module, width: int) -> nn.Module:
    return stack(rnn, lambda out: out[0][:, -1], nn.Linear(width, 4))


def cells(width: int, between: Callable[[Tensor], Tensor]) -> nn.Module:
    """A recurrent network, with a function of the state in each step."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), width)
        for step in x.unbind(1):
            h, c = m.cell(step, (between(h), c))
        return m.head(h)

    return With(forward, cell=nn.LSTMCell(8, width), head=nn.Linear(width, 4))


def experts(width: int = 16, number: int = 4) -> nn.Module:
    """A mixture of experts; each row goes to one."""

    def forward(m: Any, x: Tensor) -> Tensor:
        weight, chosen = m.router(x).softmax(-1).max(-1)
        return x + weight[:, None] * torch.stack([e(x) for e in m.experts], 1)[torch.arange(len(x)), chosen]

    return With(
        forward,
        router=nn.Linear(width, number),
        experts=nn.ModuleList(mlp(width, 32, width) for _ in range(number)),
    )


def fourier(width: int = 16) -> nn.Module:
    """Multiplies the spectrum of each row's sequence by complex weights."""

    def forward(m: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        return torch.fft.irfft(spectrum * torch.view_as_complex(m.weight), n=x.shape[1], dim=1)

    return With(forward, weight=parameter(9, width, 2))


def complex_net() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = torch.complex(m.real(x), m.imaginary(x))
        return m.head((z @ torch.view_as_complex(m.weight)).abs())

    return With(
        forward, real=nn.Linear(8, 16), imaginary=nn.Linear(8, 16), weight=parameter(16, 16, 2), head=nn.Linear(16, 4)
    )


class Reversed(torch.autograd.Function):
    """Gradient reversal, as for domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.5 * grads[0]


def gradient(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the identity whose gradient is changed: outputs show nothing."""

    def layer(x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(change)
        return x

    return layer


def autoencoder() -> nn.Module:
    """With tied weights, and a sample in the middle."""

    def forward(m: Any, x: Tensor) -> Tensor:
        mean, spread = m.encoder(x).chunk(2, 1)
        return F.linear(mean + spread.exp() * normal_like(mean), m.encoder.weight[:8].t())

    return With(forward, encoder=nn.Linear(12, 16))


def own_derivative() -> nn.Module:
    """Energy and forces: a derivative inside forward."""

    def forward(m: Any, x: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = m.net(x)
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return {"energy": energy, "forces": forces}

    return With(forward, net=mlp(6, 32, 32, 1, act=nn.Tanh))


def with_loss(net: nn.Module, loss: Callable[..., Tensor]) -> nn.Module:
    """Inputs of the net, then those of the loss."""
    return With(lambda m, x, *rest: loss(m.net(x), *rest), net=net)


def hugging_face(family: str, head: str, **changes: Any) -> nn.Module:
    """Return a tiny model of transformers with random weights; nothing is downloaded."""
    import transformers

    small = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "use_cache": False,
    }
    draws = "hidden_dropout_prob attention_probs_dropout_prob dropout dropout_rate attention_dropout activation_dropout"
    draws += " resid_pdrop embd_pdrop attn_pdrop"
    config = getattr(transformers, f"{family}Config")(**(small | dict.fromkeys(draws.split(), drop()) | changes))
    return getattr(transformers, family + head)(config)
