"""The models have the layers of the tutorials, cope with the pictures of every data set, and can be trained."""

import doctest

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyhands.training import models

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 5, 7)]


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def conv(inputs: int, outputs: int, kernel: int) -> int:
    return inputs * outputs * kernel**2 + outputs


def batch_norm(channels: int) -> int:
    return 2 * channels


def residual(inputs: int, outputs: int) -> int:
    shortcut = conv(inputs, outputs, 1) if inputs != outputs else 0
    return conv(inputs, outputs, 3) + conv(outputs, outputs, 3) + 2 * batch_norm(outputs) + shortcut


def test_examples_in_docstrings():
    failed, attempted = doctest.testmod(models)
    assert (failed, attempted > 0) == (0, True)


def test_resnet18_has_the_parameters_of_its_layers_counted_by_hand():
    stem = conv(1, 64, 3) + batch_norm(64)
    stages = (
        residual(64, 64) + residual(64, 64)
        + residual(64, 128) + residual(128, 128)
        + residual(128, 256) + residual(256, 256)
        + residual(256, 512) + residual(512, 512)
    )  # fmt: skip
    linear = 512 * 10 + 10
    model = models.build("resnet18", num_classes=10, image_shape=(1, 28, 28))
    assert num_parameters(model) == stem + stages + linear == 11_175_818


def test_resnet18_halves_the_picture_in_stages_2_to_4_only():
    x = torch.rand(2, 1, 28, 28)
    sizes = {}
    for name, layer in models.resnet18(10).eval().named_children():
        x = layer(x)
        sizes[name] = tuple(x.shape[1:])
    assert sizes == {
        "stem": (64, 28, 28),
        "stage1": (64, 28, 28),
        "stage2": (128, 14, 14),
        "stage3": (256, 7, 7),
        "stage4": (512, 4, 4),
        "head": (10,),
    }


def test_residual_block_is_the_formula_of_the_paper():
    block = models.Residual(3, 5, stride=2).eval()
    x = torch.randn(2, 3, 9, 9)
    inner = F.relu(block.bn1(block.conv1(x)))
    expected = F.relu(block.bn2(block.conv2(inner)) + block.shortcut(x))
    assert expected.shape == (2, 5, 5, 5)
    torch.testing.assert_close(block(x), expected)


def test_residual_block_of_one_size_adds_the_input_itself():
    block = models.Residual(4, 4).eval()
    nn.init.zeros_(block.bn2.weight)  # silences the convolutions: only the shortcut is left
    x = torch.rand(2, 4, 6, 6)
    torch.testing.assert_close(block(x), x)


def test_mlp_has_two_hidden_layers_and_no_batch_norm():
    model = models.build("mlp", num_classes=10, image_shape=(1, 8, 8))
    widths = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    assert widths == [(64, 256), (256, 256), (256, 10)]
    assert list(model.buffers()) == []


@pytest.mark.parametrize("image_shape", SHAPES, ids=str)
@pytest.mark.parametrize("init", models.INITS)
@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_gives_logits_and_every_parameter_a_gradient(name, init, image_shape):
    torch.manual_seed(0)
    model = models.build(name, num_classes=7, image_shape=image_shape, init=init)
    logits = model(torch.rand(3, *image_shape))
    assert logits.shape == (3, 7)
    F.cross_entropy(logits, torch.tensor([0, 3, 6])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("name", "steps"), [("resnet18", 15), ("mlp", 60)])
def test_every_model_learns_a_batch_by_heart(name, steps):
    torch.manual_seed(0)
    model = models.build(name, num_classes=4, image_shape=(1, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8) % 4
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert model(images).argmax(dim=1).equal(labels)


@pytest.mark.parametrize("name", models.MODELS)
def test_seeds_init_draws_weights_of_linear_and_conv_and_leaves_the_rest(name):
    built = {}
    for init in models.INITS:
        torch.manual_seed(0)
        built[init] = models.build(name, num_classes=10, image_shape=(1, 8, 8), init=init)
    default, seeds = (dict(built[init].named_modules()) for init in models.INITS)
    for path, module in seeds.items():
        drawn = isinstance(module, nn.Linear | nn.Conv2d)
        for key, parameter in module.named_parameters(recurse=False):
            if drawn and key == "weight":
                deviation = 0.01 / parameter.numel() ** 0.5  # of the mean over the weights
                assert parameter.mean().item() == pytest.approx(0, abs=5 * deviation)
                assert parameter.std().item() == pytest.approx(0.01, abs=5 * deviation)
            else:
                assert parameter.equal(default[path].get_parameter(key))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "resnet19"}, r"unknown model 'resnet19'; known are resnet18, mlp"),
        ({"init": "xavier"}, r"unknown init 'xavier'; known are default, seeds"),
        ({"num_classes": 0}, r"got num_classes=0"),
        ({"image_shape": (1, 0, 8)}, r"image_shape=\(1, 0, 8\)"),
        ({"image_shape": (8, 8)}, r"image_shape=\(8, 8\); expected .* channels, height and width"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named_with_what_is_known(wrong, message):
    right = {"name": "mlp", "num_classes": 10, "image_shape": (1, 8, 8)}
    with pytest.raises(ValueError, match=message):
        models.build(**(right | wrong))
