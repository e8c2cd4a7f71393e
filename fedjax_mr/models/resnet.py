"""Residual networks of 20 layers: the one that the authors of FedMR ran, and He's.

Sources: He et al., "Deep residual learning for image recognition" (CVPR 2016) for `ResNet20He` and "Identity mappings
in deep residual networks" (ECCV 2016) for the order of operations in `Bottleneck`. `ResNet20` follows the code that
the authors of FedMR (KDD 2024) released, which is not the network of either paper.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_mr.models import layers, windows
from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.blocks import head


class Bottleneck(nn.Module):
    """Norm, ReLU and convolution three times (1x1, 3x3, 1x1 to four times the width), plus the input.

    Attributes:
      features: the width of the inner convolutions.
      strides: the step of the 3x3 convolution and of the shortcut.
      project: whether a 1x1 convolution of the raw input is the shortcut; else it is the input itself.
      norm, counted, initialisation: those of `ResNet20`.
    """

    features: int
    strides: int
    project: bool
    norm: str
    counted: bool
    initialisation: str

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Return the feature maps [B, H', W', 4 features] of [B, H, W, I]."""
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
    """The first convolution, for grey images followed by 3x3 max-pooling of step 1 (the authors' FEMNIST variant)."""

    features: int
    initialisation: str

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Return the feature maps [B, H, W, features] of [B, H, W, I]."""
        y = _conv(self.features, 3, initialisation=self.initialisation, name="conv")(x)
        return windows.max_pool(y, 3, strides=1, padding=1) if x.shape[-1] == 1 else y


class Mean(nn.Module):
    """The mean over the image, after which the authors' state has a BatchNorm that their forward pass never uses.

    Attributes:
      unused_norm: whether that BatchNorm is there: it travels with the rest of the state, and its outputs are dropped.
    """

    unused_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Return the representation [B, F] of feature maps [B, H, W, F]."""
        if self.unused_norm:
            layers.BatchNorm(scale_init=0.5, counted=True, name="unused")(x, train=False)
        return x.mean((1, 2))


class ResNet20(BlockNet):
    """The authors' pre-activation bottleneck network: three stages of two blocks, 219,482 parameters at 10 classes.

    That count includes the final BatchNorm that they create and never use (512 parameters), here only with
    ``authors_state``; without normalisation after the last sum, the head sees the mean of the raw maps.

    Attributes:
      norm: ``batch`` or ``group``.
      authors_state: whether the state is the released one, tensor by tensor: the unused BatchNorm and batch counters.
      width: the features of the first stage.
    """

    norm: str = "batch"
    authors_state: bool = False
    width: int = 16

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """Return the named blocks in forward order."""
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
    """Two 3x3 convolutions, each normalised, plus the input, then ReLU.

    Where the extent halves the shortcut takes every second pixel and appends channels of zeros (He's option A).

    Attributes:
      features: the width.
      strides: the step of the first convolution and of the shortcut.
      norm, initialisation: those of `ResNet20He`.
    """

    features: int
    strides: int
    norm: str
    initialisation: str

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Return the feature maps [B, H', W', features] of [B, H, W, I]."""
        conv = functools.partial(_conv, self.features, 3, initialisation=self.initialisation)
        y = conv(strides=self.strides, name="conv1")(x)
        y = nn.relu(layers.norm_layer(self.norm, name="norm1")(y, train=train, mask=mask))
        y = conv(name="conv2")(y)
        y = layers.norm_layer(self.norm, name="norm2")(y, train=train, mask=mask)
        shortcut = x[:, :: self.strides, :: self.strides]
        missing = self.features - x.shape[-1]
        return nn.relu(y + jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, missing))))


class StemHe(nn.Module):
    """The first convolution, normalised and rectified."""

    features: int
    norm: str
    initialisation: str

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Return the feature maps [B, H, W, features] of [B, H, W, I]."""
        y = _conv(self.features, 3, initialisation=self.initialisation, name="conv")(x)
        return nn.relu(layers.norm_layer(self.norm, name="norm")(y, train=train, mask=mask))


class ResNet20He(BlockNet):
    """He's network for CIFAR with 6n + 2 layers, n = 3: 269,722 parameters at 10 classes.

    Attributes:
      norm: ``batch`` or ``group``.
      width: the features of the first stage.
      blocks_per_stage: He's n.
    """

    norm: str = "batch"
    width: int = 16
    blocks_per_stage: int = 3

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """Return the named blocks in forward order."""
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
    """Return a convolution without bias, padded by half its kernel on every side, He-normal as both sources set it."""
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
    """Return a normalisation whose scale starts at 0.5, as the authors set it."""
    scale = 0.5 if initialisation == "torch" else 1.0
    return layers.norm_layer(kind, scale_init=scale, counted=counted, name=name)
