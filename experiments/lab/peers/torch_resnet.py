"""ResNet-18 in PyTorch, without torchvision, which not every environment has.

The network, the names of its tensors and its initialisation are those of torchvision's ``resnet18``.
"""

import torch
from torch import nn

WIDTHS = (64, 128, 256, 512)  # of the four stages


def convolution(inputs: int, width: int, kernel: int, stride: int) -> nn.Conv2d:
    """A convolution without bias, with He's initialisation by the outputs."""
    layer = nn.Conv2d(inputs, width, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class Block(nn.Module):
    """Two 3x3 convolutions, each normalised, plus the shortcut, then ReLU."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Make the layers. If the maps change their shape, the shortcut is a 1x1 convolution."""
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, 1), nn.BatchNorm2d(width)
        self.downsample = nn.Sequential()
        if inputs != width:
            self.downsample = nn.Sequential(convolution(inputs, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the block."""
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + self.downsample(x)).relu()


class ResNet18(nn.Module):
    """The network."""

    def __init__(self, classes: int = 10) -> None:
        """Make the layers."""
        super().__init__()
        inputs = WIDTHS[0]
        self.conv1, self.bn1, self.pool = convolution(3, inputs, 7, 2), nn.BatchNorm2d(inputs), nn.MaxPool2d(3, 2, 1)
        for stage, width in enumerate(WIDTHS):
            blocks = Block(inputs, width, 2 if stage else 1), Block(width, width, 1)
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
            inputs = width
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of images [B, 3, H, W]."""
        y = self.pool(self.bn1(self.conv1(x)).relu())
        for stage in range(len(WIDTHS)):
            y = self.get_submodule(f"layer{stage + 1}")(y)
        return self.fc(y.mean((2, 3)))
