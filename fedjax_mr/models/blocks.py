"""The blocks of most networks: a convolution or a dense layer, with normalisation, pooling, activation and dropout."""

import flax.linen as nn
import jax

from fedjax_mr.models import layers, windows


class ConvBlock(nn.Module):
    """Convolution, then optionally normalisation, max-pooling, ReLU and dropout of channels.

    Pooling always precedes ReLU, also where a paper has the reverse order: the two commute, and ReLU is cheaper here.

    Attributes:
      features, kernel_size, strides, padding, initialisation: see `layers.Conv`.
      norm: ``batch``, ``group`` or "" (no normalisation).
      counted: see `layers.BatchNorm`.
      pool: window of max-pooling. 0 disables it.
      pool_strides: step of max-pooling. Default: the window.
      relu: whether ReLU follows.
      channel_dropout: probability of dropping an output channel.
    """

    features: int
    kernel_size: int = 3
    strides: int = 1
    padding: windows.Padding = "SAME"
    initialisation: str = "torch"
    norm: str = ""
    counted: bool = False
    pool: int = 0
    pool_strides: int | None = None
    relu: bool = True
    channel_dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the feature maps [B, H', W', features] of [B, H, W, I]."""
        x = layers.Conv(
            self.features,
            self.kernel_size,
            self.strides,
            self.padding,
            initialisation=self.initialisation,
            pool=0 if self.norm else self.pool,
            pool_strides=self.pool_strides,
            name="conv",
        )(x)
        if self.norm:
            x = layers.norm_layer(self.norm, counted=self.counted, name="norm")(x, train=train, mask=mask)
            if self.pool:
                x = windows.max_pool(x, self.pool, strides=self.pool_strides)
        if self.relu:
            x = nn.relu(x)
        if self.channel_dropout:
            x = nn.Dropout(self.channel_dropout, broadcast_dims=(1, 2))(x, deterministic=not train)
        return x


class DenseBlock(nn.Module):
    """Flattening, dropout, dense layer, ReLU.

    Attributes:
      features: width of the output.
      initialisation: see `layers.Dense`.
      dropout: probability of dropping an input.
      relu: whether ReLU follows.
      flatten: whether a sample becomes one vector. Otherwise the layer is applied to its last axis, at each position.
    """

    features: int
    initialisation: str = "torch"
    dropout: float = 0.0
    relu: bool = True
    flatten: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the vectors [B, features] of [B, ...], or [B, ..., features] of [B, ..., I] without flattening."""
        x = x.reshape(x.shape[0], -1) if self.flatten else x
        if self.dropout:
            x = nn.Dropout(self.dropout)(x, deterministic=not train)
        x = layers.Dense(self.features, initialisation=self.initialisation, name="dense")(x)
        return nn.relu(x) if self.relu else x


def head(num_classes: int, *, initialisation: str, dropout: float = 0.0, flatten: bool = True) -> DenseBlock:
    """The classifier: a dense block [B, F] -> [B, C] without ReLU, or [B, ..., F] -> [B, ..., C] at each position."""
    return DenseBlock(num_classes, initialisation=initialisation, dropout=dropout, relu=False, flatten=flatten)


class Flatten(nn.Module):
    """Flatten each sample to a vector."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Reshape [B, ...] to [B, F]."""
        return x.reshape(x.shape[0], -1)


class Projection(nn.Module):
    """MOON's projection head (Li et al., CVPR 2021, section 3.2): dense layer of the same width, ReLU, dense layer."""

    features: int
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, z: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the projection [B, features] of a representation [B, ...]."""
        z = z.reshape(z.shape[0], -1)
        z = nn.relu(layers.Dense(z.shape[-1], self.initialisation, name="hidden")(z))
        return layers.Dense(self.features, self.initialisation, name="dense")(z)
