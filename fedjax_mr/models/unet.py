"""A small U-Net, which gives a class to each pixel.

Source: Ronneberger et al., "U-Net: Convolutional networks for biomedical image segmentation" (MICCAI 2015). Four
deviations: it is narrow and has three levels; convolutions are padded, so that the output is as large as the image;
every convolution is normalised; maps are enlarged by repeating pixels, not by a convolution.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.models import layers, windows
from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.blocks import head


class Maps(NamedTuple):
    """Feature maps, which the blocks before the last level hand on.

    Attributes:
      current: [B, h, w, F].
      skipped: the maps of the finer levels, from the finest on, which later blocks append to theirs.
    """

    current: jax.Array
    skipped: tuple[jax.Array, ...]


class Down(nn.Module):
    """One level on the way down: max-pooling, then two 3x3 convolutions, each normalised and followed by ReLU.

    Attributes:
      features: width of the level.
      norm, initialisation: see `UNet`.
    """

    features: int
    norm: str
    initialisation: str

    @nn.compact
    def __call__(self, x: jax.Array | Maps, *, train: bool = False, mask: jax.Array | None = None) -> Maps:
        """Compute the maps of the next level, of half the size (rounded up); those of an image have its size."""
        if isinstance(x, Maps):
            pooled, skipped = halved(x.current), (*x.skipped, x.current)
        else:
            pooled, skipped = x, ()
        return Maps(_convolutions(self, pooled, train=train, mask=mask), skipped)


class Up(nn.Module):
    """One level on the way up: enlarged maps beside those of the same level on the way down, then two convolutions.

    Attributes:
      features: width of the level.
      norm, initialisation: see `UNet`.
    """

    features: int
    norm: str
    initialisation: str

    @nn.compact
    def __call__(self, x: Maps, *, train: bool = False, mask: jax.Array | None = None) -> Maps | jax.Array:
        """Compute the maps of the next finer level. Those of the finest level [B, H, W, F] come without `Maps`."""
        *coarser, beside = x.skipped
        both = jnp.concatenate([beside, doubled(x.current)[:, : beside.shape[1], : beside.shape[2]]], axis=-1)
        current = _convolutions(self, both, train=train, mask=mask)
        return Maps(current, tuple(coarser)) if coarser else current


def halved(x: jax.Array) -> jax.Array:
    """Maxima [B, ceil(H / 2), ceil(W / 2), F] over windows of 2x2 pixels of [B, H, W, F]."""
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), constant_values=-np.inf)
    return windows.max_pool(x, 2)


def doubled(x: jax.Array) -> jax.Array:
    """Maps [B, 2 H, 2 W, F] in which each pixel of [B, H, W, F] is a block of 2x2 pixels."""
    batch, height, width, features = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None], (batch, height, 2, width, 2, features))
    return x.reshape(batch, 2 * height, 2 * width, features)


def _convolutions(level: Down | Up, x: jax.Array, *, train: bool, mask: jax.Array | None) -> jax.Array:
    """Two 3x3 convolutions without bias, each normalised and followed by ReLU."""
    for number in (1, 2):
        conv = layers.Conv(level.features, use_bias=False, initialisation=level.initialisation, name=f"conv{number}")
        norm = layers.norm_layer(level.norm, name=f"norm{number}")
        x = nn.relu(norm(conv(x), train=train, mask=mask))
    return x


class UNet(BlockNet):
    """A U-Net of three levels for images of any size: logits [H, W, C], 118,322 parameters for grey images, 2 classes.

    Attributes:
      norm: ``batch`` or ``group``.
      width: features of the finest level. Each coarser level has twice as many.
      levels: number of levels, at least 2. The coarsest maps have a size of H / 2^(levels - 1), rounded up.
    """

    norm: str = "batch"
    width: int = 16
    levels: int = 3

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        options = {"norm": self.norm, "initialisation": self.initialisation}
        down, up = functools.partial(Down, **options), functools.partial(Up, **options)
        widths = [self.width * 2**level for level in range(self.levels)]
        return (
            *((f"down{level}", down(width)) for level, width in enumerate(widths, 1)),
            *((f"up{level}", up(widths[level - 1])) for level in range(self.levels - 1, 0, -1)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation, flatten=False)),
        )
