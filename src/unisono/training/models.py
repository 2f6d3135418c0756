"""The models of `unisono train`: a ResNet-18 for small pictures, and a perceptron."""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

MODELS = ("resnet18", "mlp")

_MLP_WIDTH = 256


def build(name: str, *, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    """Build an image classifier, which maps pictures (rows, *image_shape) to logits (rows, num_classes).

    Example:
        >>> import torch
        >>> model = build("resnet18", num_classes=10, image_shape=(1, 28, 28))
        >>> model(torch.rand(4, 1, 28, 28)).shape
        torch.Size([4, 10])

    Args:
        name: one of MODELS: "resnet18", see `resnet18`, for pictures of any size; or "mlp", see `mlp`, for one size.
        num_classes: of the logits of each picture.
        image_shape: (channels, height, width) of one picture.
    """
    return resnet18(num_classes, image_shape[0]) if name == "resnet18" else mlp(num_classes, image_shape)


def resnet18(num_classes: int, in_channels: int = 1) -> nn.Sequential:
    """Build ResNet-18 for small pictures: a 3x3 stem without stride, and no max-pooling.

    Sizes for one picture of 28 x 28 (any other size works too; 8 x 8 ends at 1 x 1):

        stem         64 x 28 x 28
        stage1       64 x 28 x 28    two residual blocks
        stage2      128 x 14 x 14    two, the first with stride 2
        stage3      256 x  7 x  7    two, the first with stride 2
        stage4      512 x  4 x  4    two, the first with stride 2
        head        512 -> num_classes, after the mean over the picture

    Source: K. He et al., "Deep residual learning for image recognition", 2015, in the variant of "Dive into
    Deep Learning", chapter "Concise Implementation for Multiple GPUs".
    """
    stem = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(*stem),
            stage1=nn.Sequential(Residual(64, 64), Residual(64, 64)),
            stage2=nn.Sequential(Residual(64, 128, stride=2), Residual(128, 128)),
            stage3=nn.Sequential(Residual(128, 256, stride=2), Residual(256, 256)),
            stage4=nn.Sequential(Residual(256, 512, stride=2), Residual(512, 512)),
            head=nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(512, num_classes)),
        )
    )


class Residual(nn.Module):
    """Add two 3x3 convolutions, with batch norm, to their own input.

    If the block changes the size or the number of channels, the input passes a 1x1 convolution first. A convolution
    before a batch norm has no bias (those of the tutorials have one): batch norm subtracts it again with the mean.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, stride=stride, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels or stride != 1:
            self.shortcut = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, in_channels, H, W) to (rows, out_channels, H / stride, W / stride), rounded up."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


def mlp(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Sequential:
    """Build a perceptron with two hidden layers of 256.

    It has no batch norm, so rows do not interact, and any number of replicas gives the losses of one.
    """
    channels, height, width = image_shape
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden1=nn.Linear(channels * height * width, _MLP_WIDTH),
            relu1=nn.ReLU(),
            hidden2=nn.Linear(_MLP_WIDTH, _MLP_WIDTH),
            relu2=nn.ReLU(),
            out=nn.Linear(_MLP_WIDTH, num_classes),
        )
    )
