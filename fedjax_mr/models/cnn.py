"""Small convolutional networks and two dense networks.

Sources: McMahan et al., "Communication-efficient learning of deep networks from decentralized data" (AISTATS 2017) for
`CNNMcMahan` and `MLP`; LeCun et al. (1998) for the structure of `LeNet5`. The widths of `LeNet5` and `CNNFEMNIST` are
those of the networks called CNN in the released code of FedMR (KDD 2024).
"""

import functools
from typing import ClassVar

import flax.linen as nn

from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.blocks import ConvBlock, DenseBlock, Flatten, head


class CNNDigits(BlockNet):
    """The network of the quickstart, for 8x8 digits: two 3x3 convolutions, two dense layers, 13,706 parameters.

    Attributes:
      scale: factor for all widths.
      deep: whether to add a third convolution.
    """

    scale: float = 1.0
    deep: bool = False

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        third = (("conv3", ConvBlock(int(64 * self.scale), initialisation=self.initialisation)),) if self.deep else ()
        return (
            ("conv1", ConvBlock(int(16 * self.scale), pool=2, initialisation=self.initialisation)),
            ("conv2", ConvBlock(int(32 * self.scale), pool=2, initialisation=self.initialisation)),
            *third,
            ("hidden", DenseBlock(int(64 * self.scale), initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


class LeNet5(BlockNet):
    """The CNN for CIFAR in the released code of FedMR and FedCross: 62,006 parameters at 10 classes.

    Attributes:
      scale: factor for all widths.
      deep: whether to add a third convolution (3x3, 32 channels).
    """

    scale: float = 1.0
    deep: bool = False

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(ConvBlock, kernel_size=5, padding="VALID", pool=2, initialisation=self.initialisation)
        third = (("conv3", ConvBlock(int(32 * self.scale), initialisation=self.initialisation)),) if self.deep else ()
        return (
            ("conv1", conv(int(6 * self.scale))),
            ("conv2", conv(int(16 * self.scale))),
            *third,
            ("hidden1", DenseBlock(int(120 * self.scale), initialisation=self.initialisation)),
            ("hidden2", DenseBlock(int(84 * self.scale), initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


class CNNMcMahan(BlockNet):
    """The CNN of McMahan et al.: two 5x5 convolutions of 32 and 64 channels, 512 hidden units.

    Attributes:
      padding: ``SAME``, as in the TensorFlow tutorial that the paper followed, or ``VALID``.
    """

    padding: str = "SAME"

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(
            ConvBlock, kernel_size=5, padding=self.padding, pool=2, initialisation=self.initialisation
        )
        return (
            ("conv1", conv(32)),
            ("conv2", conv(64)),
            ("hidden", DenseBlock(512, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


class CNNFEMNIST(BlockNet):
    """The CNN for FEMNIST in the released code of FedMR: 160,510 parameters at 62 classes."""

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(ConvBlock, kernel_size=5, padding="VALID", pool=2, initialisation=self.initialisation)
        return (
            ("conv1", conv(16)),
            ("conv2", conv(32)),
            ("hidden", DenseBlock(256, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


class MLP(BlockNet):
    """McMahan's 2NN: two hidden layers of 200 units, 199,210 parameters on 28x28 images and 10 classes."""

    takes: ClassVar[str] = "numbers"

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        return (
            ("hidden1", DenseBlock(200, initialisation=self.initialisation)),
            ("hidden2", DenseBlock(200, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


class Logistic(BlockNet):
    """Multinomial logistic regression, for convex experiments."""

    takes: ClassVar[str] = "numbers"
    has_representation: ClassVar[bool] = False

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        return (("flatten", Flatten()), ("classifier", head(self.num_classes, initialisation=self.initialisation)))


class CNNFedMe(BlockNet):
    """FedMe's networks for FEMNIST: one to four unpadded 3x3 convolutions, one pooling layer, 128 hidden units.

    Attributes:
      depth: number of convolutions, of 32, 64, 128 and 256 channels.
      conv_relu: whether ReLU follows each convolution. The released code has none.
    """

    depth: int = 2
    conv_relu: bool = False

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(ConvBlock, padding="VALID", relu=self.conv_relu, initialisation=self.initialisation)
        last = self.depth - 1
        return (
            *((f"conv{i + 1}", conv(32 * 2**i, pool=2 if i == last else 0)) for i in range(self.depth)),
            ("hidden", DenseBlock(128, dropout=0.25, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, dropout=0.5, initialisation=self.initialisation)),
        )


class CNNPfl(BlockNet):
    """The CIFAR-10 network of pfl-research's benchmarks (TensorFlow's tutorial network with two dropouts)."""

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(ConvBlock, padding="VALID", initialisation=self.initialisation)
        return (
            ("conv1", conv(32)),
            ("conv2", conv(64, pool=2)),
            ("hidden", DenseBlock(128, dropout=0.25, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, dropout=0.5, initialisation=self.initialisation)),
        )
