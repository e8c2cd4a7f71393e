"""Residual networks of 20 layers: the one in the released code of FedMR, and that of He et al.

Sources: He et al., "Deep residual learning for image recognition" (CVPR 2016) for `ResNet20He` and "Identity mappings
in deep residual networks" (ECCV 2016) for the order of operations in `Bottleneck`. `ResNet20` follows the released code
of FedMR (KDD 2024), whose network differs from those of both papers.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_mr.models import layers, windows
from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.blocks import head


class Bottleneck(nn.Module):
    """Normalisation, ReLU and convolution three times (1x1, 3x3, 1x1 to four times the width), plus the shortcut.

    Attributes:
      features: width of the inner convolutions.
      strides: step of the 3x3 convolution and of the shortcut.
      project: whether the shortcut is a 1x1 convolution of the input instead of the input.
      norm, counted, initialisation: see `ResNet20`.
    """

    features: int
    strides: int
    project: bool
    norm: str
    counted: bool
    initialisation: str

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the feature maps [B, H', W', 4 features] of [B, H, W, I]."""
        conv = functools.partial(_conv, initialisation=self.initialisation)

        def rectified(y: jax.Array, name: str) -> jax.Array:
            layer = _halved_norm(self.norm, counted=self.counted, initialisation=self.initialisation, name=name)
            return nn.relu(layer(y, train=train, mask=mask))

        y = conv(self.features, 1, name="conv1")(rectified(x, "norm1"))
        y = conv(self.features, 3, strides=self.strides, name="conv2")(rectified(y, "norm2"))
        y = conv(4 * self.features, 1, name="conv3")(rectified(y, "norm3"))
        shortcut = conv(4 * self.features, 1, strides=self.strides, name="shortcut")(x) if self.project else x
        return y + shortcut


class Stem(nn.Module):
    """The first convolution. For grey images 3x3 max-pooling with step 1 follows (the authors' FEMNIST variant)."""

    features: int
    initialisation: str

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the feature maps [B, H, W, features] of [B, H, W, I]."""
        y = _conv(self.features, 3, initialisation=self.initialisation, name="conv")(x)
        return windows.max_pool(y, 3, strides=1, padding=1) if x.shape[-1] == 1 else y


class Mean(nn.Module):
    """The mean over the image. The released state has a BatchNorm behind it that the forward pass never uses.

    Attributes:
      unused_norm: whether to include that BatchNorm. It is sent with the rest of the state; its outputs are discarded.
    """

    unused_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the representation [B, F] of feature maps [B, H, W, F]."""
        if self.unused_norm:
            layers.BatchNorm(scale_init=0.5, counted=True, name="unused")(x, train=False)
        return x.mean((1, 2))


class ResNet20(BlockNet):
    """The authors' pre-activation bottleneck network: three stages of two blocks, 219,482 parameters at 10 classes.

    This number includes the final BatchNorm (512 parameters), which the released code creates and never uses. Here it
    is present only with ``authors_state``. No normalisation follows the last sum: the head receives its mean.

    Attributes:
      norm: ``batch`` or ``group``.
      authors_state: whether to include all tensors of the released state: the unused BatchNorm and batch counters.
      width: features of the first stage.
    """

    norm: str = "batch"
    authors_state: bool = False
    width: int = 16

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        block = functools.partial(
            Bottleneck, norm=self.norm, counted=self.authors_state, initialisation=self.initialisation
        )
        stages = [
            (
                f"stage{stage + 1}_block{index + 1}",
                block(self.width * 2**stage, 2 if stage and not index else 1, not index),
            )
            for stage in range(3)
            for index in range(2)
        ]
        return (
            ("stem", Stem(self.width, self.initialisation)),
            *stages,
            ("mean", Mean(self.authors_state)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each normalised, plus the shortcut, then ReLU.

    Where the image size halves, the shortcut takes every second pixel and appends channels of zeros (He's option A).

    Attributes:
      features: the width.
      strides: step of the first convolution and of the shortcut.
      norm, initialisation: see `ResNet20He`.
    """

    features: int
    strides: int
    norm: str
    initialisation: str

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the feature maps [B, H', W', features] of [B, H, W, I]."""
        conv = functools.partial(_conv, self.features, 3, initialisation=self.initialisation)
        y = conv(strides=self.strides, name="conv1")(x)
        y = nn.relu(layers.norm_layer(self.norm, name="norm1")(y, train=train, mask=mask))
        y = conv(name="conv2")(y)
        y = layers.norm_layer(self.norm, name="norm2")(y, train=train, mask=mask)
        shortcut = x[:, :: self.strides, :: self.strides]
        missing = self.features - x.shape[-1]
        return nn.relu(y + jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, missing))))


class StemHe(nn.Module):
    """The first convolution, with normalisation and ReLU."""

    features: int
    norm: str
    initialisation: str

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the feature maps [B, H, W, features] of [B, H, W, I]."""
        y = _conv(self.features, 3, initialisation=self.initialisation, name="conv")(x)
        return nn.relu(layers.norm_layer(self.norm, name="norm")(y, train=train, mask=mask))


class ResNet20He(BlockNet):
    """The network of He et al. for CIFAR with 6n + 2 layers, n = 3: 269,722 parameters at 10 classes.

    Attributes:
      norm: ``batch`` or ``group``.
      width: features of the first stage.
      blocks_per_stage: n.
    """

    norm: str = "batch"
    width: int = 16
    blocks_per_stage: int = 3

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        block = functools.partial(BasicBlock, norm=self.norm, initialisation=self.initialisation)
        stages = [
            (f"stage{stage + 1}_block{index + 1}", block(self.width * 2**stage, 2 if stage and not index else 1))
            for stage in range(3)
            for index in range(self.blocks_per_stage)
        ]
        return (
            ("stem", StemHe(self.width, self.norm, self.initialisation)),
            *stages,
            ("mean", Mean()),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


def _conv(features: int, kernel_size: int, *, initialisation: str, strides: int = 1, name: str) -> layers.Conv:
    """A convolution without bias, padded by half its kernel on each side. Both sources use He-normal initialisation."""
    return layers.Conv(
        features,
        kernel_size,
        strides,
        padding=kernel_size // 2,
        use_bias=False,
        initialisation="he" if initialisation == "torch" else initialisation,
        name=name,
    )


def _halved_norm(kind: str, *, counted: bool, initialisation: str, name: str) -> layers.BatchNorm | layers.GroupNorm:
    """A normalisation whose scale starts at 0.5, as in the released code."""
    scale = 0.5 if initialisation == "torch" else 1.0
    return layers.norm_layer(kind, scale_init=scale, counted=counted, name=name)
