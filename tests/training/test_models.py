"""The models have the layers of the tutorials, cope with the pictures of every data set, and can be trained."""

import pytest
import torch
import torch.nn.functional as F

from unisono.training import models


def test_resnet18_has_the_stages_and_the_parameters_of_the_tutorial():
    model = models.build("resnet18", num_classes=10, image_shape=(1, 28, 28)).eval()
    x = torch.rand(2, 1, 28, 28)
    sizes = {}
    for name, layer in model.named_children():
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
    # Counted by hand, without the tutorial's biases before batch norms: the stem, each stage, the head.
    expected = 576 + 128, 147_968, 525_440, 2_099_456, 8_393_216, 5_130
    assert tuple(sum(p.numel() for p in layer.parameters()) for layer in model) == expected


@pytest.mark.parametrize("sizes", [(3, 5, 2), (4, 4, 2), (4, 4, 1)], ids=str)
def test_residual_block_is_the_formula_of_the_paper(sizes):
    block = models.Residual(*sizes).eval()
    x = torch.randn(2, sizes[0], 9, 9)
    inner = F.relu(block.bn1(block.conv1(x)))
    added = x if sizes == (4, 4, 1) else block.shortcut(x)
    expected = F.relu(block.bn2(block.conv2(inner)) + added)
    assert expected.shape == (2, sizes[1], *([9, 9] if sizes[2] == 1 else [5, 5]))
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("image_shape", [(1, 8, 8), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_gives_logits_and_every_parameter_a_gradient(name, image_shape):
    model = models.build(name, num_classes=7, image_shape=image_shape)
    logits = model(torch.rand(3, *image_shape))
    assert logits.shape == (3, 7)
    F.cross_entropy(logits, torch.tensor([0, 3, 6])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
