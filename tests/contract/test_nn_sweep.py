"""Every module class of torch.nn, wrapped, against the plain one: outputs and gradients in float64, training and eval.

The classes are not listed here but found in torch.nn, so that one that a later torch adds fails until it has a recipe
(how to make it, and on what to run it) or is in `EXCLUDED` with its reason. The oracle is the plain module on the
whole batch, also for batch normalisation, by `sync_batch_norm=True`. There is one exception: running statistics of
instance normalisation are means over the batch, so there it is `data_parallel`, the plain composition. Modules that
draw random numbers have settings that leave nothing to chance; with other settings, where they do draw, draws are
switched off, as by `verify`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrizations

from helpers.losses import loss_of, tensors_in
from helpers.modules import Calls
from unisono import DataParallel, data_parallel
from unisono.runtime.draws_off import DrawsOff

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(nn.Container|NLLLoss2d|weight_norm).* deprecated:FutureWarning"),
]
SYNC = {"sync_batch_norm": True}

Batch = Callable[[int], torch.Tensor]  # makes an input of so many rows
How = Callable[..., Any] | None
Options = Mapping[str, Any]
NONE: Options = {}


def real(*shape: int, rows_at: int = 0) -> Batch:
    """Normally distributed, with a gradient; the axis of the rows is put in at `rows_at`."""
    return lambda rows: torch.randn(*shape[:rows_at], rows, *shape[rows_at:]).requires_grad_()


def whole(*shape: int) -> Batch:
    """Without rows, with a gradient: every replica gets all of it."""
    return lambda rows: torch.randn(shape).requires_grad_()


def between_0_and_1(*shape: int) -> Batch:
    return lambda rows: torch.empty(rows, *shape).uniform_(0.1, 0.9).requires_grad_()


def signs(*shape: int) -> Batch:
    return lambda rows: torch.randint(0, 2, (rows, *shape)) * 2.0 - 1


def integers(low: int, high: int, *shape: int) -> Batch:
    return lambda rows: torch.randint(low, high, (rows, *shape))


@dataclass(frozen=True)
class Recipe:
    """How to make and run one module of class `kind`.

    `how` calls it in another way than `module(*inputs)`; `options` are those of DataParallel.
    """

    kind: type[nn.Module]
    make: Callable[[], nn.Module]
    inputs: Sequence[Batch]
    how: How = None
    options: Options = field(default_factory=dict)

    def __str__(self) -> str:
        return self.kind.__name__

    def module(self) -> nn.Module:
        module = self.make()
        if isinstance(module, LazyModuleMixin):
            module(*self.batch(4))  # a dry run gives it its parameters, and the class that it will be
        for buffer in module.buffers():
            if buffer.is_floating_point():  # running statistics and class weights, other than 0 and 1
                buffer.uniform_(0.5, 1.5)
        if self.how is None:
            return module
        return Calls(lambda calls, *inputs: calls.how(calls.layer, *inputs), layer=module, how=self.how)

    def batch(self, rows: int) -> list[torch.Tensor]:
        return [make(rows) for make in self.inputs]


def recipe(
    kind: type[nn.Module], *args: Any, on: Sequence[Batch], how: How = None, options: Options = NONE, **kwargs: Any
) -> Recipe:
    """The recipe for `kind(*args, **kwargs)`, run on the inputs `on`."""
    return Recipe(kind, partial(kind, *args, **kwargs), on, how, options)


def same(kinds: Sequence[type[nn.Module]], *args: Any, **kwargs: Any) -> list[Recipe]:
    """The same recipe for several classes."""
    return [recipe(kind, *args, **kwargs) for kind in kinds]


def line(channels: int, size: int = 6) -> list[Batch]:
    return [real(channels, size)]


def plane(channels: int, size: int = 6) -> list[Batch]:
    return [real(channels, size, size)]


def space(channels: int, size: int = 6) -> list[Batch]:
    return [real(channels, size, size, size)]


OF_RANKS = [line(4), plane(4), space(4, size=4)]


def of_ranks(names: Sequence[str], *args: Any, **kwargs: Any) -> list[Recipe]:
    """The same recipe for classes of a line, a plane and a space, whose names end in 1d, 2d and 3d; 4 channels."""
    ranks = [*enumerate(OF_RANKS, 1)]
    return [recipe(getattr(nn, f"{name}{rank}d"), *args, on=on, **kwargs) for name in names for rank, on in ranks]


def losses(
    kinds: Sequence[type[nn.Module]], *args: Any, mean: str | None = "mean", options: Options = NONE, **kwargs: Any
) -> list[Recipe]:
    """A loss a row, their sum, and their mean, if it is one over rows, by the name that the class has for it."""
    reductions = {"none": "stack", "sum": "sum", **({mean: "mean"} if mean else {})}
    return [
        recipe(kind, *args, reduction=reduction, options={"scalars": scalars, **options}, **kwargs)
        for kind in kinds
        for reduction, scalars in reductions.items()
    ]


def recurrent(kind: type[nn.Module], **kwargs: Any) -> list[Recipe]:
    """With hidden states in and out; batch first, and batch second, where all have their rows on axis 1."""
    state = [real(4, kwargs.get("proj_size", 4), rows_at=1)]
    axes: Any = (0, 1)
    if kind is nn.LSTM:
        state.append(real(4, 4, rows_at=1))
        axes = (0, (1, 1))
    make = partial(recipe, kind, 3, 4, 2, bidirectional=True, **kwargs)
    in_dims = (0, *[1] * len(state))
    return [
        make(batch_first=True, on=[real(2, 3)], options={"out_dims": axes}),
        make(batch_first=True, on=[real(2, 3), *state], how=with_state, options={"in_dims": in_dims, "out_dims": axes}),
        make(on=[real(2, 3, rows_at=1)], options={"dim": 1}),
        make(on=[real(2, 3, rows_at=1), *state], how=with_state, options={"dim": 1}),
    ]


def with_state(layer: nn.Module, x: torch.Tensor, *state: torch.Tensor) -> Any:
    return layer(x, state if len(state) > 1 else state[0])


def with_count(layer: nn.CrossEntropyLoss, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": layer(x, target), "counted": (target != layer.ignore_index).sum()}


def pool_and_unpool(pool: Callable[..., Any]) -> Callable[..., Any]:
    return lambda layer, x: layer(*pool(x, 2, return_indices=True))


def each_layer(layers: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: layer(x) for name, layer in layers.named_children()}


def all_three(parameters: nn.ParameterList | nn.ParameterDict, x: torch.Tensor) -> list[torch.Tensor]:
    assert len(parameters) == 3
    values = parameters.values() if isinstance(parameters, nn.ParameterDict) else parameters
    return [x * parameter for parameter in values]


def with_padding_mask(layer: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> Any:
    mask = torch.arange(x.size(1), device=x.device) >= lengths[:, None]
    if isinstance(layer, nn.MultiheadAttention):
        return layer(x, x, x, key_padding_mask=mask)
    return layer(x, src_key_padding_mask=mask)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


ELEMENT_BY_ELEMENT = [
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink,
    nn.Softsign, nn.Tanh, nn.Tanhshrink,
]  # fmt: skip
DROPOUTS = [
    (nn.Dropout, [real(20)]),
    (nn.Dropout1d, line(20, 3)),
    (nn.Dropout2d, plane(20, 2)),
    (nn.Dropout3d, space(20, 2)),
    (nn.AlphaDropout, [real(20)]),
    (nn.FeatureAlphaDropout, plane(20, 2)),
]

RECIPES = [
    # activations
    *same(ELEMENT_BY_ELEMENT, on=[real(3, 4)]),
    recipe(nn.GELU, "tanh", on=[real(3, 4)]),
    recipe(nn.GLU, on=[real(3, 4)]),
    recipe(nn.PReLU, 3, on=[real(3, 4)]),
    recipe(nn.RReLU, 0.2, 0.2, on=[real(3, 4)]),  # in training too it multiplies by 0.2, without chance
    recipe(nn.Threshold, 0.1, 20, on=[real(3, 4)]),
    *same([nn.Softmax, nn.LogSoftmax, nn.Softmin], dim=1, on=[real(3, 4)]),
    recipe(nn.Softmax2d, on=plane(3)),
    # linear layers
    *same([nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear], 5, 3, on=[real(4, 5)]),
    recipe(nn.LazyLinear, 3, on=[real(5)]),
    recipe(nn.Bilinear, 5, 4, 3, on=[real(5), real(4)]),
    recipe(nn.AdaptiveLogSoftmaxWithLoss, 16, 12, [3, 7], on=[real(16), integers(0, 12)], options={"scalars": "mean"}),
    recipe(nn.AdaptiveLogSoftmaxWithLoss, 16, 12, [3, 7], on=[real(16)], how=lambda layer, x: layer.log_prob(x)),
    # convolutions
    *of_ranks(["Conv"], 4, 6, 3, stride=2, padding=1, groups=2),
    *of_ranks(["Conv"], 4, 3, 3, padding="same", padding_mode="circular", bias=False),
    *of_ranks(["ConvTranspose"], 4, 6, 3, stride=2, output_padding=1),
    *of_ranks(["LazyConv", "LazyConvTranspose"], 6, 3),
    recipe(nn.Fold, (4, 5), 2, on=[real(3 * 4, 3 * 4)]),
    recipe(nn.Unfold, 2, padding=1, on=plane(3)),
    # normalisation
    *of_ranks(["BatchNorm"], 4, options=SYNC),
    *of_ranks(["BatchNorm"], 4, options=SYNC, momentum=None, affine=False),
    *of_ranks(["BatchNorm"], 4, options=SYNC, track_running_stats=False),
    *of_ranks(["LazyBatchNorm"], options=SYNC),
    recipe(nn.BatchNorm1d, 4, on=[real(4)], options=SYNC),
    recipe(nn.SyncBatchNorm, 4, on=plane(4), options=SYNC),
    *of_ranks(["InstanceNorm"], 4, affine=True),
    *of_ranks(["InstanceNorm"], 4, track_running_stats=True),
    *of_ranks(["LazyInstanceNorm"]),
    recipe(nn.GroupNorm, 2, 4, on=plane(4)),
    *same([nn.LayerNorm, nn.RMSNorm], (3, 4), on=[real(3, 4)]),
    *same([nn.LocalResponseNorm, nn.CrossMapLRN2d], 2, on=plane(4)),
    # random layers where nothing is left to chance
    *(recipe(kind, p, on=on) for kind, on in DROPOUTS for p in (0.0, 1.0)),
    recipe(nn.FractionalMaxPool2d, 2, output_size=3, on=plane(2, 6)),  # (6 - 2) / (3 - 1) is a whole number, so the
    recipe(nn.FractionalMaxPool3d, 2, output_size=3, on=space(2, 6)),  # regions are the same for every draw
    # pooling
    *of_ranks(["AdaptiveAvgPool", "AdaptiveMaxPool"], 3),
    *of_ranks(["AdaptiveMaxPool"], 3, return_indices=True),
    *of_ranks(["AvgPool", "MaxPool"], 3, stride=2, padding=1),
    *of_ranks(["LPPool"], 2, 2),
    *of_ranks(["MaxPool"], 2, return_indices=True),
    recipe(nn.MaxUnpool1d, 2, on=line(3), how=pool_and_unpool(F.max_pool1d)),
    recipe(nn.MaxUnpool2d, 2, on=plane(3), how=pool_and_unpool(F.max_pool2d)),
    recipe(nn.MaxUnpool3d, 2, on=space(3, 4), how=pool_and_unpool(F.max_pool3d)),
    # padding and shapes
    *of_ranks(["CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"], 2),
    *of_ranks(["ConstantPad"], 2, 0.5),
    recipe(nn.ChannelShuffle, 2, on=plane(4)),
    recipe(nn.Flatten, on=plane(3)),
    recipe(nn.Unflatten, 1, (2, 3), on=[real(6)]),
    recipe(nn.PixelShuffle, 2, on=plane(8)),
    recipe(nn.PixelUnshuffle, 2, on=plane(3)),
    *(recipe(nn.Upsample, scale_factor=2, on=on) for on in OF_RANKS),
    recipe(nn.Upsample, size=(4, 9), mode="bicubic", on=plane(3)),
    *same([nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d], scale_factor=2, on=plane(3)),
    # distances
    *same([nn.CosineSimilarity, nn.PairwiseDistance], on=[real(5), real(5)]),
    # embeddings
    recipe(nn.Embedding, 11, 4, on=[integers(0, 11, 5)], padding_idx=2),
    recipe(nn.Embedding, 11, 4, on=[integers(0, 11, 5)], sparse=True),
    recipe(nn.EmbeddingBag, 11, 4, on=[integers(0, 11, 5)]),
    recipe(nn.EmbeddingBag, 11, 4, on=[integers(0, 11, 5)], mode="max"),
    recipe(nn.EmbeddingBag, 11, 4, on=[integers(0, 11, 5)], mode="sum", sparse=True),
    recipe(
        nn.EmbeddingBag, 11, 4, on=[integers(0, 11, 5), real(5)], mode="sum",
        how=lambda layer, x, weights: layer(x, per_sample_weights=weights),
    ),
    # recurrent layers
    *(each for kind in (nn.RNN, nn.GRU, nn.LSTM) for each in recurrent(kind)),
    *recurrent(nn.LSTM, proj_size=2),
    *same([nn.RNNCell, nn.GRUCell], 3, 4, on=[real(3), real(4)]),
    recipe(nn.LSTMCell, 3, 4, on=[real(3)]),
    recipe(nn.LSTMCell, 3, 4, on=[real(3), real(4), real(4)], how=with_state),
    # attention
    recipe(nn.MultiheadAttention, 8, 2, batch_first=True, on=[real(4, 8), real(5, 8), real(5, 8)]),
    recipe(nn.MultiheadAttention, 8, 2, batch_first=True, on=[real(4, 8), integers(1, 5)], how=with_padding_mask),
    recipe(
        nn.MultiheadAttention, 8, 2, kdim=3, vdim=5, add_bias_kv=True, options={"dim": 1, "out_dims": (1, 0)},
        on=[real(4, 8, rows_at=1), real(6, 3, rows_at=1), real(6, 5, rows_at=1)],
    ),
    Recipe(nn.TransformerEncoderLayer, encoder_layer, [real(4, 8)]),
    Recipe(nn.TransformerEncoderLayer, encoder_layer, [real(4, 8), integers(1, 5)], with_padding_mask),
    Recipe(nn.TransformerDecoderLayer, decoder_layer, [real(4, 8), real(3, 8)]),
    Recipe(nn.TransformerEncoder, lambda: nn.TransformerEncoder(encoder_layer(), 2), [real(4, 8)]),
    Recipe(
        nn.TransformerEncoder, lambda: nn.TransformerEncoder(encoder_layer(), 2), [real(4, 8), integers(1, 5)],
        with_padding_mask,
    ),
    Recipe(nn.TransformerDecoder, lambda: nn.TransformerDecoder(decoder_layer(), 2), [real(4, 8), real(3, 8)]),
    recipe(nn.Transformer, 8, 2, 1, 1, 16, dropout=0.0, batch_first=True, on=[real(4, 8), real(3, 8)]),
    recipe(
        nn.Transformer, 8, 2, 1, 1, 16, dropout=0.0, batch_first=True, on=[real(4, 8), real(3, 8), whole(3, 3)],
        how=lambda layer, source, target, mask: layer(source, target, tgt_mask=mask), options={"in_dims": (0, 0, None)},
    ),
    # losses
    *losses([nn.BCELoss], on=[between_0_and_1(3), between_0_and_1(3)]),
    *losses([nn.BCEWithLogitsLoss], on=[real(3), between_0_and_1(3)]),
    *losses(
        [nn.CTCLoss], options={"in_dims": (1, 0, 0, 0)},
        how=lambda layer, scores, *more: layer(scores.log_softmax(-1), *more),
        on=[real(9, 5, rows_at=1), integers(1, 5, 3), integers(7, 10), integers(1, 4)],
    ),
    *losses([nn.CosineEmbeddingLoss], 0.1, on=[real(5), real(5), signs()]),
    *losses([nn.CrossEntropyLoss], mean=None, on=[real(4), integers(0, 4)], ignore_index=2, label_smoothing=0.1),
    recipe(
        nn.CrossEntropyLoss, ignore_index=2, label_smoothing=0.1, on=[real(4), integers(0, 4)], how=with_count,
        options={"scalars": {"loss": "mean:counted", "counted": "sum"}},
    ),
    *losses([nn.CrossEntropyLoss], on=[real(4, 3), between_0_and_1(4, 3)]),
    Recipe(
        nn.CrossEntropyLoss, lambda: nn.CrossEntropyLoss(torch.ones(4), reduction="sum"), [real(4), integers(0, 4)],
        options={"scalars": "sum"},
    ),
    *losses([nn.GaussianNLLLoss], on=[real(3), real(3), between_0_and_1(3)]),
    *losses([nn.HingeEmbeddingLoss, nn.SoftMarginLoss], on=[real(3), signs(3)]),
    *losses([nn.HuberLoss, nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss], on=[real(3), real(3)]),
    *losses([nn.KLDivLoss], mean="batchmean", on=[real(5), between_0_and_1(5)],
            how=lambda layer, x, target: layer(x.log_softmax(-1), target)),
    *(  # older releases of torch have no such class
        losses([nn.LinearCrossEntropyLoss], 5, 4, on=[real(5), integers(0, 4)], bias=True)
        if hasattr(nn, "LinearCrossEntropyLoss")
        else []
    ),
    *losses([nn.MarginRankingLoss], 0.1, on=[real(), real(), signs()]),
    *losses([nn.MultiLabelMarginLoss], on=[real(4), integers(-1, 4, 4)]),
    *losses([nn.MultiLabelSoftMarginLoss], on=[real(4), integers(0, 2, 4)]),
    *losses([nn.MultiMarginLoss, nn.NLLLoss], on=[real(4), integers(0, 4)]),
    *losses([nn.NLLLoss2d], on=[real(4, 3, 3), integers(0, 4, 3, 3)]),
    *losses([nn.PoissonNLLLoss], on=[real(3), between_0_and_1(3)], full=True),
    *losses([nn.TripletMarginLoss], on=[real(5), real(5), real(5)], swap=True),
    *losses([nn.TripletMarginWithDistanceLoss], on=[real(5)] * 3),
    # containers
    Recipe(nn.Sequential, lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), [real(5)]),
    Recipe(nn.ModuleList, lambda: nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 3)]), [real(5)], each_layer),
    Recipe(nn.ModuleDict, lambda: nn.ModuleDict({"a": nn.Linear(5, 4), "b": nn.Tanh()}), [real(5)], each_layer),
    Recipe(nn.Container, lambda: nn.Container(a=nn.Linear(5, 4), b=nn.Tanh()), [real(5)], each_layer),
    Recipe(nn.ParameterList, lambda: nn.ParameterList(list(torch.randn(3, 5))), [real(5)], all_three),
    Recipe(nn.ParameterDict, lambda: nn.ParameterDict({name: torch.randn(5) for name in "abc"}), [real(5)], all_three),
    # reparametrised ones, in the old way and in the new
    Recipe(nn.Linear, lambda: nn.utils.weight_norm(nn.Linear(5, 3)), [real(5)]),
    Recipe(nn.Conv2d, lambda: nn.utils.spectral_norm(nn.Conv2d(4, 3, 2)), plane(4)),
    Recipe(nn.Linear, lambda: parametrizations.weight_norm(nn.Linear(5, 3)), [real(5)]),
    Recipe(nn.Conv2d, lambda: parametrizations.spectral_norm(nn.Conv2d(4, 3, 2)), plane(4)),
    Recipe(nn.Linear, lambda: parametrizations.orthogonal(nn.Linear(5, 3)), [real(5)]),
]  # fmt: skip

EXCLUDED: dict[type[nn.Module], str] = {
    nn.Module: "has no forward: it is the base of all others",
    nn.RNNBase: "has no forward: it is the base of RNN, LSTM and GRU",
    nn.RNNCellBase: "has no forward: it is the base of RNNCell, LSTMCell and GRUCell",
    nn.DataParallel: "takes the machine's GPUs for itself, whatever it is in; this package replaces it",
}


def module_classes() -> set[type[nn.Module]]:
    """Return every public module class in torch.nn, in torch.nn.modules, and in the files of torch.nn.modules."""
    files = [
        importlib.import_module(f"torch.nn.modules.{info.name}") for info in pkgutil.iter_modules(nn.modules.__path__)
    ]
    return {
        value
        for place in (nn, nn.modules, *files)
        for name, value in vars(place).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and not name.startswith("_")
    }


def test_every_class_has_a_recipe_or_a_reason() -> None:
    """Also that no class has both, and that no reason is for a class that has gone."""
    classes, tested = module_classes(), {recipe.kind for recipe in RECIPES}
    assert len(classes) > 150
    missing = sorted(kind.__name__ for kind in classes - tested - EXCLUDED.keys())
    assert not missing, f"torch.nn has classes with neither a recipe nor a reason why not: {missing}"
    assert classes >= EXCLUDED.keys()
    assert not tested & EXCLUDED.keys()
    for kind, reason in EXCLUDED.items():
        assert not reason.startswith("has no forward") or kind.forward is nn.Module.forward


def assert_same(actual: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    assert (actual is None) == (expected is None), f"{what}: got {actual}, expected {expected}"
    if actual is None or expected is None:
        return
    for name in ("device", "is_sparse"):
        assert getattr(actual, name) == getattr(expected, name), f"{name} of {what}"
    actual, expected = (tensor.detach().cpu().to_dense() for tensor in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda message: f"{what}: {message}")


def step(
    run: Callable[..., Any], module: nn.Module, batch: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Call `run`, which is `module` or stands for it, on copies of the batch, and run backward; yield what it gave."""
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in batch]
    outputs = tensors_in(run(*inputs))
    module.zero_grad()
    if any(output.requires_grad for output in outputs):
        loss_of(outputs).backward()
    yield from ((f"output {number}", output) for number, output in enumerate(outputs))
    yield from ((f"the gradient of input {number}", tensor.grad) for number, tensor in enumerate(inputs))
    yield from ((f"the gradient of {name}", parameter.grad) for name, parameter in module.named_parameters())
    yield from module.state_dict().items()


def batch_on(device: str | torch.device, recipe: Recipe, rows: int) -> list[torch.Tensor]:
    return [tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in recipe.batch(rows)]


def compare(
    recipe: Recipe, devices: Sequence[str | torch.device], rows: int, modes: Sequence[bool] = (True, False)
) -> None:
    """Compare a step in training, and then, from the state that it has left, one in eval mode."""
    plain, twin = recipe.module(), recipe.module()
    twin.load_state_dict(plain.state_dict())  # rather than a deep copy, which the old weight_norm refuses
    plain, twin = plain.to(devices[0]), twin.to(devices[0])
    model = DataParallel(twin, devices, **recipe.options)
    averages_statistics = isinstance(plain, _InstanceNorm) and plain.track_running_stats
    for training in modes:
        batch = batch_on(devices[0], recipe, rows)
        plain.train(training)
        twin.train(training)

        def oracle(*inputs: torch.Tensor, training: bool = training) -> Any:
            return data_parallel(plain, inputs, devices) if averages_statistics and training else plain(*inputs)

        try:
            with DrawsOff():
                expected = dict(step(oracle, plain, batch))
                actual = dict(step(model, twin, batch))
            assert actual.keys() == expected.keys()
            for name, theirs in expected.items():
                assert_same(actual[name], theirs, name)
                assert theirs is None or theirs.requires_grad == actual[name].requires_grad, name
            with torch.no_grad():  # some layers have a shorter way then
                outputs = [] if training else [tensors_in(module(*batch)) for module in (model, plain)]
            for number, (mine, theirs) in enumerate(zip(*outputs, strict=True)):
                assert_same(mine, theirs, f"output {number}, without gradients")
        except Exception as error:
            error.add_note(f"in {'training' if training else 'eval mode'}, with {rows} rows on {len(devices)} replicas")
            raise


DRAWING = [
    *(recipe(kind, 0.4, on=on) for kind, on in DROPOUTS),
    recipe(nn.RReLU, on=[real(3, 4)]),
    *(drawing for kind in (nn.RNN, nn.LSTM, nn.GRU) for drawing in recurrent(kind, dropout=0.4)),
    recipe(
        nn.MultiheadAttention, 8, 2, dropout=0.3, batch_first=True, on=[real(4, 8), integers(1, 5)],
        how=with_padding_mask,
    ),
    recipe(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.3, on=[real(4, 8, rows_at=1)], options={"dim": 1}),
    recipe(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.3, batch_first=True, on=[real(4, 8)]),
    recipe(nn.TransformerDecoderLayer, 8, 2, 16, dropout=0.3, batch_first=True, on=[real(4, 8), real(3, 8)]),
    recipe(nn.Transformer, 8, 2, 1, 1, 16, dropout=0.3, batch_first=True, on=[real(4, 8), real(3, 8)]),
    recipe(nn.FractionalMaxPool2d, 2, output_ratio=0.6, on=plane(2)),
    recipe(nn.FractionalMaxPool3d, 2, output_ratio=0.6, on=space(2)),
]  # fmt: skip


SLOW = pytest.mark.slow
# Recipes, how many replicas and rows, and marks.
RUNS: list[tuple[str, list[Recipe], list[tuple[int, int]], Any]] = [
    ("few", RECIPES, [(3, 7)], ()),  # one row is left for the last
    ("many", RECIPES, [(4, 2), (8, 17)], SLOW),  # replicas without rows: too few, or the others round up
    ("drawing", DRAWING, [(3, 7), (4, 8)], ()),
]


@pytest.mark.parametrize(
    ("splits", "recipe"),
    [
        pytest.param(splits, recipe, marks=marks, id=f"{recipe}-{name}")
        for name, recipes, splits, marks in RUNS
        for recipe in recipes
    ],
)
def test_a_wrapped_module_is_the_plain_one(recipe: Recipe, splits: list[tuple[int, int]]) -> None:
    """R10, R2, S10, G6, N1, N2, N5, N12: outputs, all gradients, and the state afterwards, in training and eval."""
    for num_replicas, rows in splits:
        devices = ["cpu"] * num_replicas
        compare(recipe, devices, rows)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_also_where_each_replica_has_a_device_of_its_own(sim: list[torch.device], recipe: Recipe) -> None:
    """R10, N1: on simulated accelerators, where a tensor that is left behind on another device is an error."""
    refused, modes = [], []
    for training in (True, False):
        try:
            module, batch = recipe.module().to(sim[0]).train(training), batch_on(sim[0], recipe, 7)
            dict(step(module, module, batch))
            with torch.no_grad():
                module(*batch)
            modes.append(training)
        except (NotImplementedError, RuntimeError) as error:
            refused.append(str(error))
    if modes:
        compare(recipe, sim[:3], 7, modes)
    if refused:
        pytest.skip(f"simulated devices cannot run the plain module either: {'; '.join(refused)}")
