"""The four client networks of pFedHR (Wang et al., NeurIPS 2023), M1 to M4, as in the released code.

M2 is an exception. The released M2 is a copy of M1, and the unused network of that code does not fit the images. Here
M2 is M1 with the third convolution of the unused network, with a 3x3 kernel, which fits.
"""

import functools

import flax.linen as nn

from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.blocks import ConvBlock, DenseBlock, head


class M1(BlockNet):
    """Two 5x5 convolutions and two dense layers: 97,384 parameters on 32x32x3 images and 10 classes."""

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(ConvBlock, kernel_size=5, padding="VALID", initialisation=self.initialisation)
        return (
            ("conv1", conv(10, pool=2)),
            ("conv2", conv(64, pool=2)),
            ("hidden", DenseBlock(50, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, dropout=0.5, initialisation=self.initialisation)),
        )


class M2(BlockNet):
    """M1 with a third convolution: 251,240 parameters."""

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(ConvBlock, kernel_size=5, padding="VALID", initialisation=self.initialisation)
        return (
            ("conv1", conv(10, pool=2)),
            ("conv2", conv(64, pool=2)),
            ("conv3", ConvBlock(128, initialisation=self.initialisation)),
            ("hidden", DenseBlock(50, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, dropout=0.5, initialisation=self.initialisation)),
        )


class M3(BlockNet):
    """Five 5x5 convolutions, the third one without ReLU, and four dense layers: 2,510,178 parameters."""

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(ConvBlock, kernel_size=5, padding="VALID", initialisation=self.initialisation)
        return (
            ("conv1", conv(6)),
            ("conv2", conv(16)),
            ("conv3", conv(32, relu=False)),
            ("conv4", conv(64, pool=2)),
            ("conv5", conv(128)),
            ("hidden1", DenseBlock(1024, initialisation=self.initialisation)),
            ("hidden2", DenseBlock(128, dropout=0.25, initialisation=self.initialisation)),
            ("hidden3", DenseBlock(64, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


class M4(BlockNet):
    """Six 3x3 convolutions, every second one normalised, and three dense layers: 5,852,170 parameters.

    Attributes:
      norm: ``batch`` or ``group``.
      authors_state: whether BatchNorm counts its batches, as in the released state.
    """

    norm: str = "batch"
    authors_state: bool = False

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(ConvBlock, initialisation=self.initialisation)
        normed = functools.partial(conv, norm=self.norm, counted=self.authors_state)
        return (
            ("conv1", normed(32)),
            ("conv2", conv(64, pool=2)),
            ("conv3", normed(128)),
            ("conv4", conv(128, pool=2, channel_dropout=0.05)),
            ("conv5", normed(256)),
            ("conv6", conv(256, pool=2)),
            ("hidden1", DenseBlock(1024, dropout=0.1, initialisation=self.initialisation)),
            ("hidden2", DenseBlock(512, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )
