"""ResNet-18 as a Flax module, such as a user writes it and passes to ``fmr.run(model=...)``.

The network, its paddings and its initialisation are those of torchvision (He et al., CVPR 2016, with a first
convolution for large images). `torch_resnet.py` is the same network in PyTorch. The layers are this project's: their
gradients are fast on CPUs, and their BatchNorm has PyTorch's running statistics.
"""

import functools
import itertools

import flax.linen as nn
import jax

from fedjax_mr.models import layers, windows

WIDTHS = (64, 128, 256, 512)  # of the four stages
convolution = functools.partial(layers.Conv, use_bias=False, initialisation="he")


class Block(nn.Module):
    """Two 3x3 convolutions, each normalised, plus the shortcut, then ReLU.

    Attributes:
      width: features.
      strides: step of the first convolution. If the maps change their shape, the shortcut is a 1x1 convolution.
    """

    width: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the feature maps [B, H', W', width] of [B, H, W, I]."""
        normalised = lambda maps: layers.BatchNorm()(maps, train=train, mask=mask)
        y = nn.relu(normalised(convolution(self.width, 3, self.strides, 1)(x)))
        y = normalised(convolution(self.width, 3, 1, 1)(y))
        if x.shape != y.shape:
            x = normalised(convolution(self.width, 1, self.strides, 0)(x))
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """The network: 11,181,642 parameters with ten classes."""

    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the logits [B, classes] of images [B, H, W, 3]; ``mask`` [B] is 0 for padding."""
        y = layers.BatchNorm()(convolution(WIDTHS[0], 7, 2, 3)(x), train=train, mask=mask)
        y = windows.max_pool(nn.relu(y), 3, strides=2, padding=1)
        for (stage, width), index in itertools.product(enumerate(WIDTHS), range(2)):
            y = Block(width, 2 if stage and not index else 1)(y, train=train, mask=mask)
        return layers.Dense(self.classes)(y.mean((1, 2)))
