"""The blocks that most networks are made of: a convolution or a dense layer with what belongs to it."""

import flax.linen as nn
import jax

from fedjax_mr.models import layers, windows


class ConvBlock(nn.Module):
    """Convolution, normalisation, max-pooling, ReLU, dropout of whole channels; all but the first optional.

    Pooling comes before ReLU whatever the papers write: the two commute, and this order has fewer values to rectify.

    Attributes:
      features, kernel_size, strides, padding, initialisation: those of `layers.Conv`.
      norm: ``batch``, ``group`` or "" (none).
      counted: that of `layers.BatchNorm`.
      pool: the window of max-pooling; 0 for none.
      pool_strides: the step of max-pooling; the window by default.
      relu: whether ReLU follows.
      channel_dropout: the rate at which output channels are dropped.
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
        """Return the feature maps [B, H', W', features] of [B, H, W, I]."""
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
    """Dropout of the inputs, dense layer, ReLU; flattens what it receives.

    Attributes:
      features: the width of the output.
      initialisation: that of `layers.Dense`.
      dropout: the rate at which inputs are dropped.
      relu: whether ReLU follows.
    """

    features: int
    initialisation: str = "torch"
    dropout: float = 0.0
    relu: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Return the vectors [B, features] of [B, ...]."""
        x = x.reshape(x.shape[0], -1)
        if self.dropout:
            x = nn.Dropout(self.dropout)(x, deterministic=not train)
        x = layers.Dense(self.features, initialisation=self.initialisation, name="dense")(x)
        return nn.relu(x) if self.relu else x


def head(num_classes: int, *, initialisation: str, dropout: float = 0.0) -> DenseBlock:
    """Return the classifier: a dense block [B, F] -> [B, C] without ReLU."""
    return DenseBlock(num_classes, initialisation=initialisation, dropout=dropout, relu=False)


class Flatten(nn.Module):
    """Make one vector of each sample."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Return the vectors [B, F] of [B, ...]."""
        return x.reshape(x.shape[0], -1)


class Projection(nn.Module):
    """MOON's projection head (Li et al., CVPR 2021, section 3.2): dense layer of the same width, ReLU, dense layer."""

    features: int
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, z: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Return the projection [B, features] of a representation [B, ...]."""
        z = z.reshape(z.shape[0], -1)
        z = nn.relu(layers.Dense(z.shape[-1], self.initialisation, name="hidden")(z))
        return layers.Dense(self.features, self.initialisation, name="dense")(z)
