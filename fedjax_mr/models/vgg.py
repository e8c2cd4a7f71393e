"""VGG networks: stacks of 3x3 convolutions with pooling in between, in the variants of federated papers.

Sources: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition" (ICLR 2015) for
the stacks; the released code of FedMR (KDD 2024) for `VGG16` and `VGGFEMNIST`; the code of FedMe (Matsuda et al., 2022)
for `VGGFedMA`, whose small head comes from FedMA (Wang et al., ICLR 2020).
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.blocks import ConvBlock, DenseBlock, head

# Convolutions in each of the five stages, by depth.
STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def stack(depth: int, width: int, conv: Callable[..., ConvBlock]) -> list[tuple[str, nn.Module]]:
    """The convolutions of VGG by ``depth``. Widths double up to eight times ``width``; each stage ends with pooling."""
    blocks = []
    for stage, count in enumerate(STAGES[depth]):
        for index in range(count):
            features = width * min(2**stage, 8)
            blocks.append((f"conv{len(blocks) + 1}", conv(features, pool=2 if index == count - 1 else 0)))
    return blocks


class VGG16(BlockNet):
    """The VGG-16 for CIFAR in the released code of FedMR, with normalisation: 33,646,666 parameters at 10 classes.

    Attributes:
      norm: ``batch`` or ``group``.
      authors_state: whether BatchNorm counts its batches, as in the released state.
      width: features of the first stage.
      hidden: width of the two dense layers.
    """

    norm: str = "batch"
    authors_state: bool = False
    width: int = 64
    hidden: int = 4096

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(
            ConvBlock, norm=self.norm, counted=self.authors_state, initialisation=self.initialisation
        )
        return (
            *stack(16, self.width, conv),
            ("hidden1", DenseBlock(self.hidden, initialisation=self.initialisation)),
            ("hidden2", DenseBlock(self.hidden, dropout=0.5, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, dropout=0.5, initialisation=self.initialisation)),
        )


class VGGFedMA(BlockNet):
    """FedMe's VGG-11/13/16/19 for CIFAR, without normalisation, with a head of 512 units.

    Attributes:
      depth: 11, 13, 16 or 19.
      width: features of the first stage.
      hidden: width of the two dense layers.
    """

    depth: int = 16
    width: int = 64
    hidden: int = 512

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        he = "he" if self.initialisation == "torch" else self.initialisation
        dense = functools.partial(DenseBlock, self.hidden, dropout=0.5, initialisation=self.initialisation)
        return (
            *stack(self.depth, self.width, functools.partial(ConvBlock, initialisation=he)),
            ("hidden1", dense()),
            ("hidden2", dense()),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


class VGGFEMNIST(BlockNet):
    """The network called VGG-16 for FEMNIST in the released code of FedMR: seven layers, 8,024,958 parameters.

    Attributes:
      width: features of the first convolution.
    """

    width: int = 64

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        conv = functools.partial(ConvBlock, initialisation=self.initialisation)
        return (
            ("conv1", conv(self.width, 1, padding=1)),
            ("conv2", conv(self.width, pool=2, pool_strides=1)),
            ("conv3", conv(2 * self.width, pool=2, pool_strides=1)),
            ("conv4", conv(4 * self.width)),
            ("conv5", conv(8 * self.width, pool=2)),
            ("grid", MeanGrid(7)),
            ("hidden", DenseBlock(4 * self.width, relu=False, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


class MeanGrid(nn.Module):
    """Means over a grid of fixed size, for images of any size (PyTorch's adaptive average pooling).

    Attributes:
      size: rows and columns of the grid.
    """

    size: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the means [B, size, size, I] of feature maps [B, H, W, I]."""
        rows, columns = (jnp.asarray(_shares(extent, self.size), x.dtype) for extent in x.shape[1:3])
        return jnp.einsum("rh,bhwi,cw->brci", rows, x, columns)


def _shares(extent: int, size: int) -> np.ndarray:
    """The matrix [size, extent] whose row r averages the pixels of cell r; cells may overlap."""
    shares = np.zeros((size, extent))
    for cell in range(size):
        first, last = cell * extent // size, -(-(cell + 1) * extent // size)
        shares[cell, first:last] = 1 / (last - first)
    return shares
