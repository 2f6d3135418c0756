"""The programs of verify_rates.py: 60 models whose numbers with replicas are one device's, and 60 with a planted fault.

A program is one entry of `RIGHT` or `FAULTY`. A fault is a function of all rows of a batch, at a place in a model: in
the first layer, in a branch that hardly changes the output, before layers that saturate. Many right models are the same
places with a function of each row, so that a judge that is lenient, or strict, everywhere fails on one side.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from verify_models import (
    BF16,
    FP16,
    FP32,
    FP64,
    Attention,
    Autocast,
    Does,
    Program,
    Reversed,
    Task,
    WideNorm,
    With,
    autoencoder,
    beside,
    cells,
    classes,
    complex_net,
    convnext,
    deep_batch_norm,
    drop,
    experts,
    floats,
    fourier,
    frozen,
    gradient,
    hugging_face,
    language_model,
    last_step,
    mlp,
    named,
    own_derivative,
    padded,
    parameter,
    permutation,
    resnet,
    scaled,
    several,
    stack,
    times,
    tokens,
    unet,
    values,
    vit,
    with_loss,
    zero_adapter,
)

# Inputs and what the loss of them is.
VECTORS = (floats(30, 12), classes(30))
IMAGES = (floats(13, 3, 16, 16), classes(13))
PICTURES = (floats(13, 3, 16, 16), values(13, 3, 16, 16))  # to pictures
SEQUENCES = (floats(13, 17, 8), classes(13))
TOKENS = (tokens(13, 16), classes(13, 16, of=50))  # to tokens
SENTENCES = (tokens(13, 16), classes(13))
LABELS = tokens(30, vocab=4)
SCALED = scaled(1024, classes(30))
SYNC, MEAN = {"sync_batch_norm": True}, {"scalars": "mean"}
Layer = Callable[..., Any]
group_norm = partial(nn.GroupNorm, 4)

# ---- places: a function between layers ---------------------------------------------------------------


def first(between: Layer) -> nn.Module:
    return stack(nn.Linear(12, 16), between, mlp(16, 32, 4))


def branch(between: Layer, scale: float) -> nn.Module:
    """Beside a path that is not changed; the branch's gradients are as small as its scale."""
    return stack(nn.Linear(12, 16), nn.Tanh(), beside(16, between, scale), nn.Linear(16, 4))


def before_sigmoids(between: Layer, layers: int = 10) -> nn.Module:
    """What is before ten sigmoid layers has gradients of some 1e-6 of the last layer's."""
    return stack(
        nn.Linear(12, 16), between, *(mlp(16, 16, 16, act=nn.Sigmoid)[:2] for _ in range(layers)), nn.Linear(16, 4)
    )


def before_saturation(between: Layer) -> nn.Module:
    return stack(
        nn.Linear(12, 16), between, *(mlp(16, 16, 16, act=nn.Tanh, gain=4)[:2] for _ in range(4)), nn.Linear(16, 4)
    )


def in_vit(between: Layer) -> nn.Module:
    return vit(middle=beside(32, between, 1.0))


def in_language_model(between: Layer) -> nn.Module:
    return language_model(WideNorm, beside(32, between, 1e-2))


def adapted_resnet(between: Layer, norm: Callable[[int], nn.Module] = group_norm) -> nn.Module:
    return resnet(norm, blocks=3, adapter=partial(zero_adapter, between))


# ---- programs whose numbers are one device's -------------------------------------------------------


def constants(m: Any, x: Tensor) -> Tensor:
    shift = torch.zeros(16, dtype=torch.float32) + torch.tensor(0.5)
    return m.head(torch.tanh(m.first(x) * torch.tensor(2.0) + shift))


def cancelling(m: Any, x: Tensor) -> Tensor:
    large = 1000 + m.a(x)
    return large - (1000 + m.b(x))


MASKED = (named(input_ids=TOKENS[0], attention_mask=padded(13, 16)), TOKENS[1])
TRANSLATED = (named(input_ids=TOKENS[0], decoder_input_ids=TOKENS[0]), TOKENS[1])


def hf(family: str, head: str, data: Any = MASKED, dtype: torch.dtype = FP32, **rest: Any) -> Program:
    name = f"transformers: {family}" + (" in bfloat16" if dtype == BF16 else "")
    return Program(name, lambda: hugging_face(family, head, **rest), *data, dtype=dtype)


RIGHT = [
    # perceptrons
    Program("60 layers of tanh", lambda: mlp(12, *[24] * 59, 4, act=nn.Tanh), *VECTORS),
    Program(
        "dropout, layer norm, GELU",
        lambda: stack(mlp(12, 48, 48, act=nn.GELU), nn.LayerNorm(48), nn.Dropout(drop(0.5)), nn.Linear(48, 4)),
        *VECTORS,
        replicas=3,
    ),
    Program("ten layers of sigmoid", lambda: before_sigmoids(nn.Identity()), *VECTORS),
    Program("outputs of 1e-6", lambda: stack(mlp(12, 32, 4), lambda y: 1e-6 * y), VECTORS[0]),
    Program("outputs of 1e6", lambda: stack(mlp(12, 32, 4), lambda y: 1e6 * y), VECTORS[0], values(30, 4)),
    Program(
        "sums that cancel", lambda: With(cancelling, a=mlp(12, 32, 4), b=mlp(12, 32, 4)), VECTORS[0], values(30, 4)
    ),
    Program(
        "a gain before layer norm",
        lambda: stack(
            nn.Linear(12, 32), With(lambda m, h: m.gain * h, gain=parameter(1)), nn.LayerNorm(32), nn.Linear(32, 4)
        ),
        *VECTORS,
    ),
    Program(
        "a shift of all logits",
        lambda: With(lambda m, x: m.net(x) + m.shift, net=mlp(12, 32, 4), shift=parameter(1)),
        *VECTORS,
    ),
    Program(
        "a constant feature before batch norm",
        lambda: stack(nn.BatchNorm1d(14), nn.ReLU(), mlp(14, 32, 4)),
        lambda: torch.cat([torch.randn(30, 12), torch.full((30, 2), 0.1)], 1),
        classes(30),
        options=SYNC,
    ),
    Program("20 batch norms, 8 rows", partial(deep_batch_norm, 20), floats(8, 12), classes(8), options=SYNC),
    Program("30 batch norms, 16 rows", partial(deep_batch_norm, 30), floats(16, 12), classes(16), options=SYNC),
    Program(
        "tanh that amplifies rounding", lambda: mlp(12, *[64] * 30, 4, act=nn.Tanh, gain=4), floats(3, 12), classes(3)
    ),
    Program("softmax that saturates", lambda: times(20, mlp(12, 32, 4)), *VECTORS),
    Program("a branch of 1e-6", lambda: branch(torch.sin, 1e-6), *VECTORS),
    Program(
        "weight norm, spectral norm",
        lambda: stack(
            parametrizations.weight_norm(nn.Linear(12, 32)), nn.ELU(), parametrizations.spectral_norm(nn.Linear(32, 4))
        ),
        *VECTORS,
    ),
    Program(
        "frozen and unused parameters",
        lambda: With(
            lambda m, x: m.head(m.body(x)), body=frozen(mlp(12, 32, 32)), head=mlp(32, 16, 4), unused=nn.Linear(4, 4)
        ),
        *VECTORS,
    ),
    Program("autoencoder with tied weights, draws", autoencoder, VECTORS[0], Task(F.mse_loss, VECTORS[0])),
    Program(
        "constants of float32 in float64",
        lambda: With(constants, first=nn.Linear(12, 16), head=nn.Linear(16, 4)),
        *VECTORS,
        FP64,
    ),
    Program(
        "checkpointing",
        lambda: With(
            lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=False)), body=mlp(12, 64, 64), head=nn.Linear(64, 4)
        ),
        *VECTORS,
    ),
    Program("gradient reversal", lambda: stack(mlp(12, 32, 32), Reversed.apply, mlp(32, 16, 4)), *VECTORS),
    Program(
        "a loss in forward",
        lambda: with_loss(mlp(12, 32, 4), F.cross_entropy),
        several(VECTORS[0], LABELS),
        options=MEAN | {"shares": [2, 1]},
    ),
    Program(
        "several inputs, two heads",
        lambda: With(
            lambda m, a, b: {"left": m.left(a * b), "right": [m.right(a + b).sigmoid()]},
            left=mlp(12, 32, 4),
            right=mlp(12, 32, 2),
        ),
        several(VECTORS[0], VECTORS[0]),
    ),
    Program(
        "mixture of experts, routed by row",
        lambda: stack(nn.Linear(12, 16), experts(), experts(), nn.Linear(16, 4)),
        *VECTORS,
    ),
    Program(
        "a derivative in forward",
        own_derivative,
        floats(15, 6),
        values(15, 6, loss=lambda y, t: y["energy"].square().mean() + F.mse_loss(y["forces"], t)),
    ),
    # convolutions
    Program(
        "CNN, group norm, max pooling",
        lambda: stack(
            nn.Conv2d(3, 16, 3),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(400, 4),
        ),
        *IMAGES,
    ),
    Program("ResNet, frozen batch norm", lambda: resnet(lambda width: frozen(nn.BatchNorm2d(width))), *IMAGES),
    Program(
        "ResNet of 12 blocks, batch norm in sync", lambda: resnet(nn.BatchNorm2d, blocks=12), *IMAGES, options=SYNC
    ),
    Program("ResNet, adapters that begin at zero", lambda: adapted_resnet(nn.GELU()), *IMAGES),
    Program("ConvNeXt, layer scale of 1e-6", convnext, *IMAGES),
    Program("U-Net, interpolation", unet, *PICTURES),
    # sequences
    Program(
        "LSTM over 200 steps", lambda: last_step(nn.LSTM(8, 16, batch_first=True), 16), floats(7, 200, 8), classes(7)
    ),
    Program(
        "GRU over 1,000 steps", lambda: last_step(nn.GRU(4, 8, batch_first=True), 8), floats(5, 1000, 4), classes(5)
    ),
    Program(
        "LSTM, two directions, state returned",
        lambda: nn.LSTM(8, 12, 2, batch_first=True, bidirectional=True),
        SEQUENCES[0],
        options={"out_dims": (0, (1, 1))},
    ),
    Program(
        "spectral filter",
        lambda: stack(nn.Linear(8, 16), fourier(), nn.GELU(), lambda x: x[:, :16].mean(1), nn.Linear(16, 4)),
        floats(13, 16, 8),
        classes(13),
    ),
    Program("complex numbers", complex_net, floats(30, 8), classes(30)),
    Program("embedding bag", lambda: stack(nn.EmbeddingBag(50, 16, mode="max"), mlp(16, 32, 4)), *SENTENCES),
    Program(
        "sparse embedding",
        lambda: stack(nn.Embedding(50, 16, sparse=True), lambda x: x.mean(1), mlp(16, 4)),
        *SENTENCES,
    ),
    # attention
    Program(
        "transformer encoder of torch",
        lambda: stack(
            nn.Linear(8, 32),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, drop(), batch_first=True), 2),
            lambda x: x[:, 0],
            nn.Linear(32, 4),
        ),
        *SEQUENCES,
    ),
    Program(
        "attention, a bias on keys",
        lambda: stack(nn.Linear(8, 16), Attention(16), Attention(16), lambda x: x.mean(1), nn.Linear(16, 4)),
        *SEQUENCES,
    ),
    Program("language model, tied weights, padding", language_model, *TOKENS),
    # half precision
    Program("perceptron in bfloat16", lambda: mlp(12, 64, 64, 4), *VECTORS, BF16),
    Program("perceptron in float16", lambda: mlp(12, 64, 64, 4), VECTORS[0], SCALED, FP16),
    Program("ten layers of sigmoid in bfloat16", lambda: before_sigmoids(nn.Identity()), *VECTORS, BF16),
    Program("a branch of 1e-4 in bfloat16", lambda: branch(torch.sin, 1e-4), *VECTORS, BF16),
    Program("language model in bfloat16, norms in float32", lambda: language_model(WideNorm), *TOKENS, BF16),
    Program("LSTM in bfloat16", lambda: last_step(nn.LSTM(8, 16, batch_first=True), 16), *SEQUENCES, BF16),
    Program(
        "ResNet under autocast, batch norm in sync",
        lambda: Autocast(resnet(nn.BatchNorm2d)),
        floats(64, 3, 16, 16),
        classes(64),
        options=SYNC,
    ),
    Program("vision transformer under autocast", lambda: Autocast(vit()), *IMAGES),
    # other people's models
    hf("Bert", "ForMaskedLM"),
    hf("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4),
    hf("Roberta", "ForMaskedLM", pad_token_id=0),
    hf("T5", "ForConditionalGeneration", TRANSLATED, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    hf(
        "Bart",
        "ForConditionalGeneration",
        TRANSLATED,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    ),
    hf("Llama", "ForCausalLM", num_key_value_heads=2),
    hf("Mistral", "ForCausalLM", num_key_value_heads=2),
    hf("Electra", "ForMaskedLM", embedding_size=16),
    hf("Albert", "ForMaskedLM", embedding_size=16),
    hf("DistilBert", "ForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    hf(
        "ViT", "ForImageClassification", (named(pixel_values=IMAGES[0]), classes(13, of=2)), image_size=16, patch_size=4
    ),
    hf("Llama", "ForCausalLM", dtype=BF16, num_key_value_heads=2),
]


# ---- faults: what all rows of a batch go into ------------------------------------------------------


def capacity(h: Tensor) -> Tensor:
    """A quarter of the rows and two are kept, those of the largest scores, as an expert with a capacity keeps them."""
    kept = h.flatten(1).sum(1).topk(len(h) // 4 + 2).indices
    return torch.zeros_like(h).index_copy(0, kept, h[kept])


def column(of_rows: Tensor, like: Tensor) -> Tensor:
    """One value a row, in the shape and type of the rows."""
    return of_rows.to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))


def nearest(h: Tensor) -> Tensor:
    flat = h.detach().flatten(1).float()
    distances = torch.cdist(flat, flat).fill_diagonal_(torch.inf)
    return h + h[distances.argmin(1)]


def whitened(h: Tensor) -> Tensor:
    centred = h - h.mean(0)
    covariance = centred.T @ centred / len(h) + 0.1 * torch.eye(h.shape[1], dtype=h.dtype)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), centred.T, upper=False).T


def quantized(h: Tensor) -> Tensor:
    """Two bits, with the batch's largest value as the scale; a straight-through gradient, as for training."""
    scale = h.detach().abs().amax()
    inside = h.clamp(-scale / 2, scale / 2)
    return inside + (torch.round(inside / scale * 2) * scale / 2 - inside).detach()


def mixed(h: Tensor) -> Tensor:
    return 0.7 * h + 0.3 * h[permutation(len(h))]


class RunningMean(nn.Module):
    """Centres rows by a moving average, which has just moved to the batch's mean."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * h.mean(0)
        return h - self.mean


FAULTS: dict[str, Layer] = {
    "centred": lambda h: h - h.mean(0),
    "scaled by the deviation": lambda h: h / (h.std(0) + 0.01),
    "scaled by the largest": lambda h: h / h.abs().amax(0),
    "softmax over rows": lambda h: h + 20 * h.softmax(0),
    "log-softmax over rows": lambda h: h.log_softmax(0),
    "cumulative sum": lambda h: h.cumsum(0) / 4,
    "sorted rows": lambda h: h.sort(0).values,
    "ranks": lambda h: h * column(h.flatten(1).sum(1).argsort().argsort() / len(h), h),
    "capacity": capacity,
    "divided by the number of rows": lambda h: 10 * h / len(h),
    "nearest neighbour": nearest,
    "rolled": lambda h: h + 2 * h.roll(1, 0),
    "mixed by a permutation": mixed,
    "attention over rows": lambda h: (h @ h.mT).softmax(-1) @ h,
    "with the mean": lambda h: h + 2 * h.mean(0),
    "with the maximum": lambda h: h + h.amax(0),
    "clipped at a quantile": lambda h: h.minimum(h.detach().to(torch.float64).quantile(0.5, 0).to(h.dtype)),
    "row's index as its position": lambda h: h + column(torch.arange(len(h)) / 10, h),
    "the first row as the reference": lambda h: h - h[:1],
    "whitened": whitened,
    "two bits of the batch's range": quantized,
    "gate of the batch's sum": lambda h: h * torch.sigmoid(h.sum(0)),
    "differences of neighbours": lambda h: h.diff(dim=0, prepend=h[:1]),
    "gradient divided by its norm": gradient(lambda g: g / (g.norm() + 1e-12)),
    "gradient divided by the number of rows": gradient(lambda g: g / len(g)),
    "centred gradient": gradient(lambda g: g - g.mean(0)),
}


def fault(
    name: str, place: Layer, where: str, inputs: Any = VECTORS[0], task: Task = VECTORS[1], **rest: Any
) -> Program:
    """Plant a fault of `FAULTS` at a place."""
    return Program(f"{name}, {where}", lambda: place(FAULTS[name]), inputs, task, **rest)


def in_branch(name: str, scale: float, task: Task = VECTORS[1], **rest: Any) -> Program:
    dtype = str(rest.get("dtype", FP32)).removeprefix("torch.")
    return fault(
        name,
        partial(branch, scale=scale),
        f"in a branch of {scale:.0e} in {dtype}".replace("e-0", "e-"),
        task=task,
        **rest,
    )


# ---- losses that rows meet in ------------------------------------------------------------------------


def info_nce(h: Tensor, temperature: float = 0.5) -> Tensor:
    """Two views of each row; all other rows of the batch are negatives."""
    a, b = (F.normalize(part, dim=1) for part in h.chunk(2, 1))
    return F.cross_entropy(a @ b.T / temperature, torch.arange(len(h)))


def barlow_twins(h: Tensor) -> Tensor:
    a, b = ((part - part.mean(0)) / part.std(0) for part in h.chunk(2, 1))
    correlation = a.T @ b / len(h)
    return (correlation - torch.eye(len(correlation))).square().sum()


def hardest_triplet(h: Tensor, label: Tensor) -> Tensor:
    distance = (h[:, None] - h).square().sum(-1)
    same = label[:, None] == label
    farthest = (distance * same).amax(1)
    return (1 + farthest - distance.masked_fill(same, 1e4).amin(1)).relu().mean()


def cox(h: Tensor, time: Tensor) -> Tensor:
    """The partial likelihood of survival analysis: who is still at risk is a matter of the whole batch."""
    risk = h[:, 0][time.argsort(descending=True)]
    return (risk.logcumsumexp(0) - risk).mean()


def dice(h: Tensor, label: Tensor) -> Tensor:
    p = h.softmax(1)[:, 1]
    return 1 - 2 * (p * label).sum() / (p.sum() + label.sum())


def balanced(h: Tensor, label: Tensor) -> Tensor:
    """With an auxiliary loss that is a product of means over the batch, as for experts' load."""
    return F.cross_entropy(h, label) + 20 * (4 * h).softmax(1).mean(0).square().sum()


def correlation(h: Tensor, target: Tensor) -> Tensor:
    a, b = h[:, 0] - h[:, 0].mean(), target - target.mean()
    return -(a * b).sum() / (a.norm() * b.norm())


def without_padding(h: Tensor, label: Tensor) -> Tensor:
    """A mean over the rows whose label is not 0: their number differs from replica to replica."""
    return F.cross_entropy(h, label, ignore_index=0)


def in_loss(name: str, loss: Layer, *more: Any, options: Any = MEAN, **rest: Any) -> Program:
    inputs = several(VECTORS[0], *more)
    return Program(f"loss in forward: {name}", lambda: with_loss(mlp(12, 32, 4), loss), inputs, options=options, **rest)


FAULTY = [
    # in the first layer
    *(
        fault(name, first, "in the first layer", replicas=replicas)
        for name, replicas in {
            "scaled by the deviation": 2,
            "sorted rows": 3,
            "ranks": 2,
            "divided by the number of rows": 3,
            "nearest neighbour": 2,
            "mixed by a permutation": 2,
            "whitened": 2,
            "row's index as its position": 2,
        }.items()
    ),
    fault("rolled", first, "3 replicas of 4 rows", floats(12, 12), classes(12), replicas=3),
    Program("rows as the steps of an LSTM", lambda: last_step(nn.LSTM(8, 16), 16), *SEQUENCES),
    Program(
        "rows as the keys of attention",
        lambda: stack(
            nn.Linear(8, 16),
            With(lambda m, x: m.attend(x, x, x)[0][:, 0], attend=nn.MultiheadAttention(16, 4)),
            nn.Linear(16, 4),
        ),
        *SEQUENCES,
    ),
    Program(
        "batch norm, perceptron",
        lambda: stack(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)),
        *VECTORS,
    ),
    Program("batch norm, ResNet, 3 replicas", lambda: resnet(nn.BatchNorm2d), *IMAGES, replicas=3),
    Program("a moving average, perceptron", lambda: first(RunningMean(16)), *VECTORS),
    fault("capacity", in_vit, "in a vision transformer", *IMAGES),
    fault("centred", partial(cells, 16), "in each step of a recurrent network", *SEQUENCES),
    fault("with the maximum", lambda between: unet(Does(between)), "in a U-Net", *PICTURES),
    # in branches that hardly change the output
    in_branch("centred", 1e-2),
    in_branch("scaled by the largest", 1e-2, replicas=3),
    in_branch("with the mean", 1e-4),
    in_branch("capacity", 1e-4, replicas=3),
    in_branch("attention over rows", 1e-4),
    in_branch("softmax over rows", 1e-6),
    in_branch("clipped at a quantile", 1e-6),
    in_branch("centred", 1e-6),
    in_branch("gate of the batch's sum", 1e-6, replicas=3),
    in_branch("two bits of the batch's range", 1e-4, replicas=3),
    in_branch("the first row as the reference", 1e-6),
    in_branch("gradient divided by its norm", 1e-4),
    in_branch("gradient divided by the number of rows", 1e-6),
    fault("centred gradient", first, "in the first layer"),
    # before what hides them
    fault("centred gradient", partial(deep_batch_norm, 10), "before ten batch norms", options=SYNC),
    *(
        fault(name, before_sigmoids, "before ten sigmoid layers", replicas=3)
        for name in ("centred", "cumulative sum", "with the mean")
    ),
    fault("log-softmax over rows", before_saturation, "before tanh that saturates"),
    *(
        fault(name, adapted_resnet, "in adapters of a ResNet that begin at zero", *IMAGES)
        for name in ("centred", "softmax over rows", "differences of neighbours")
    ),
    # in half precision
    fault("softmax over rows", in_language_model, "in a branch of a language model in bfloat16", *TOKENS, dtype=BF16),
    in_branch("centred", 1e-2, dtype=BF16),
    in_branch("cumulative sum", 1e-4, dtype=BF16),
    in_branch("gradient divided by the number of rows", 1e-4, dtype=BF16),
    fault("with the mean", before_sigmoids, "before ten sigmoid layers in bfloat16", dtype=BF16, replicas=3),
    fault("capacity", first, "in the first layer in float16", task=SCALED, dtype=FP16),
    in_branch("centred", 1e-2, SCALED, dtype=FP16),
    in_branch("softmax over rows", 1e-4, SCALED, dtype=FP16),
    fault("centred", lambda between: Autocast(branch(between, 1e-2)), "in a branch of 1e-2 under autocast"),
    fault(
        "softmax over rows", lambda between: Autocast(adapted_resnet(between)), "in adapters under autocast", *IMAGES
    ),
    Program(
        "batch norm, ResNet under autocast, 64 rows",
        lambda: Autocast(resnet(nn.BatchNorm2d)),
        floats(64, 3, 16, 16),
        classes(64),
    ),
    # in a loss in forward
    in_loss("in-batch negatives", info_nce),
    in_loss("Barlow twins", barlow_twins, replicas=3),
    in_loss("hardest triplets", hardest_triplet, LABELS),
    in_loss("Cox's partial likelihood", cox, floats(30)),
    in_loss("Dice over the batch", dice, tokens(30, vocab=2), replicas=6),
    in_loss("balance of experts", balanced, LABELS, replicas=6),
    in_loss("correlation", correlation, floats(30)),
    in_loss("mean without padding", without_padding, lambda: tokens(30, vocab=4)() * (torch.arange(30) >= 12)),
    in_loss("mean, of which the sum is taken", F.cross_entropy, LABELS, options={"scalars": "sum"}),
    in_loss("mean of shares of 3 to 1", F.cross_entropy, LABELS, options={"shares": [3, 1]}, task=Task(torch.mean)),
]
