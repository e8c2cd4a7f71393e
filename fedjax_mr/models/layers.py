"""Layers with parameters. Where PyTorch and Flax differ, the conventions are PyTorch's."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_mr.errors import unknown_name
from fedjax_mr.keys import threefry
from fedjax_mr.models import platforms, windows

Initializer = Callable[..., jax.Array]


def uniform_fan_in(fan_in: int) -> Initializer:
    """The initializer U(-1/sqrt(fan_in), 1/sqrt(fan_in)): PyTorch's default for weights and biases."""
    bound = 1.0 / math.sqrt(fan_in)

    def initialize(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return initialize


def initializers(init: str, fan_in: int) -> tuple[Initializer, Initializer]:
    """The initializers of kernel and bias.

    Args:
      init: ``torch`` (uniform by fan-in, bias too), ``flax`` (LeCun normal, zero bias) or
        ``he`` (normal with variance 2 / (h w O), zero bias: He et al., ICCV 2015, in its fan-out form).
      fan_in: inputs per output.

    Raises:
      UserError: the initialisation is unknown.
    """
    if init == "torch":
        return uniform_fan_in(fan_in), uniform_fan_in(fan_in)
    if init == "flax":
        return nn.initializers.lecun_normal(), nn.initializers.zeros
    if init == "he":
        return nn.initializers.variance_scaling(2.0, "fan_out", "normal"), nn.initializers.zeros
    raise unknown_name("init", init, ("torch", "flax", "he"))


class Conv(nn.Module):
    """A 2-D convolution with parameters ``kernel`` [h, w, I, O] and ``bias`` [O].

    Attributes:
      features: O, the output channels.
      kernel_size: h and w.
      strides: step in both directions.
      padding: see `windows.Padding`. PyTorch pads both sides by the same amount, which differs from ``"SAME"`` if there
        are strides.
      use_bias: whether there is a bias.
      initialisation: see `initializers`.
      pool: window of max-pooling. 0 disables it. Pooling precedes the bias: the two commute, also in floating point,
        and this order needs fewer additions.
      pool_strides: step of max-pooling. Default: the window.
    """

    features: int
    kernel_size: int | windows.Pair = 3
    strides: int | windows.Pair = 1
    padding: windows.Padding = "SAME"
    use_bias: bool = True
    initialisation: str = "torch"
    pool: int = 0
    pool_strides: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute the output [B, H', W', O] for images [B, H, W, I]."""
        window = windows.pair(self.kernel_size)
        channels = x.shape[-1]
        kernel_init, bias_init = initializers(self.initialisation, math.prod(window) * channels)
        kernel = self.param("kernel", kernel_init, (*window, channels, self.features), jnp.float32)
        x = windows.conv(x, kernel, strides=self.strides, padding=self.padding)
        if self.pool:
            x = windows.max_pool(x, self.pool, strides=self.pool_strides)
        if not self.use_bias:
            return x
        return x + self.param("bias", bias_init, (self.features,), jnp.float32).reshape(1, 1, 1, -1)


class Dense(nn.Module):
    """A dense layer with parameters ``kernel`` [I, O] and ``bias`` [O].

    Attributes:
      features: O.
      initialisation: see `initializers`.
      use_bias: whether there is a bias.
    """

    features: int
    initialisation: str = "torch"
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute the output [..., O] for vectors [..., I]."""
        kernel_init, bias_init = initializers(self.initialisation, x.shape[-1])
        kernel = self.param("kernel", kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", bias_init, (self.features,), jnp.float32) if self.use_bias else None
        if x.ndim > 2 and platforms.current() == "cpu":  # sequences, with many rows: `product` is faster
            rows = product(x.reshape(-1, x.shape[-1]), kernel)
            return (rows if bias is None else shifted(rows, bias)).reshape(*x.shape[:-1], -1)
        y = x @ kernel
        return y if bias is None else y + bias.reshape(*(1 for _ in x.shape[:-1]), -1)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The products [..., R, O] of matrices [..., R, I] and [..., I, O] with equal leading axes, as ``a @ b``.

    The gradient to ``b`` is written so that XLA for CPUs transposes no operand in memory. With JAX's own form, it
    computes a transposed gradient anew from those of all later layers, one number at a time: a step of
    `vit_tiny_patch8` then takes 1.5 times as long.
    """
    return _product(a, b) if platforms.current() == "cpu" else a @ b


@jax.custom_vjp
def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def _product_backward(matrices: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = matrices
    leading = tuple(range(a.ndim - 2))
    along = lambda axis: (((axis,), (axis,)), (leading, leading))
    of_a = lax.dot_general(gradient, b, along(a.ndim - 1))
    if a.shape[-1] > b.shape[-1]:  # Eigen is faster with few rows and many columns
        of_b = lax.dot_general(gradient, a, along(a.ndim - 2))
        return of_a, lax.optimization_barrier(of_b).swapaxes(-1, -2)  # without it, XLA computes the other form
    return of_a, lax.dot_general(a, gradient, along(a.ndim - 2))


_product.defvjp(lambda a, b: (a @ b, (a, b)), _product_backward)


@jax.custom_vjp
def shifted(rows: jax.Array, shift: jax.Array) -> jax.Array:
    """The sums [R, O] of rows [R, O] and a shift [O].

    The gradient to the shift is a product with ones, which on CPUs takes less than a tenth of the time of XLA's sum.
    """
    return rows + shift[None]


def _shifted_backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, (jnp.ones_like(gradient[:, :1]).T @ gradient)[0]


shifted.defvjp(lambda rows, shift: (rows + shift[None], None), _shifted_backward)


class Dropout(nn.Module):
    """Sets each number to zero with the probability ``rate`` in training, and divides the others by 1 - rate."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Compute an array of the same shape."""
        return dropped(x, self.rate, self.make_rng("dropout")) if train and self.rate else x


def dropped(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Set each number to zero with the probability ``rate``, and divide the others by 1 - rate; consumes ``key``."""
    return jnp.where(are_kept(1 - rate, key, x.shape), x / (1 - rate), jnp.zeros_like(x))


def are_kept(probability: float, key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Independent draws, each True with a probability (to within 2^-32); consumes ``key``.

    The draws are the first words of the blocks 0, 1, ... of Threefry, as elementwise operations that XLA fuses into one
    loop with what follows. On a CPU, a mask of a million takes an eighth of the time of `jax.random.bernoulli`, whose
    rounds pass through memory one after another.
    """
    number = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    draws, _ = threefry(jax.random.key_data(key)[:2], (number, jnp.zeros_like(number)))
    return draws < jnp.uint32(min(round(probability * 2**32), 2**32 - 1))


class BatchNorm(nn.Module):
    """Batch normalisation over all axes but the last, with the running statistics and defaults of PyTorch.

    Batches are normalised with the biased variance, and the running variance is updated with the unbiased one (Flax
    uses the biased one for both). Parameters: ``scale`` and ``bias`` [channels]. Statistics in ``batch_stats``:
    ``mean`` and ``var`` [channels].

    Attributes:
      scale_init: initial value of ``scale``.
      rate: weight of a new batch in the running statistics (1 - momentum in Flax).
      epsilon: added to the variance.
      counted: whether the statistics include the number of batches, as in PyTorch. It does not affect the outputs. Here
        it is a float32 ``count``; PyTorch's is an 8-byte integer, and a mean over clients is not an integer.
    """

    scale_init: float = 1.0
    rate: float = 0.1
    epsilon: float = 1e-5
    counted: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Normalise maps [B, ..., channels]; only samples whose ``mask`` [B] is 1 enter the statistics.

        Maps of a shorter number type are normalised in float32.
        """
        channels, dtype = x.shape[-1], x.dtype
        wide = dtype if dtype == jnp.float64 else jnp.float32
        x = x.astype(wide)
        scale = self.param("scale", nn.initializers.constant(self.scale_init), (channels,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (channels,), jnp.float32)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (channels,), jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, (channels,), jnp.float32)

        scale, bias = scale.astype(wide), bias.astype(wide)
        seen = self.variable("batch_stats", "count", jnp.zeros, (), jnp.float32) if self.counted else None

        weight = jnp.ones(x.shape[:1], x.dtype) if mask is None else mask.astype(x.dtype)
        if not train:
            mean, var = running_mean.value, running_var.value
            out = _normalise(x, scale, bias, mean, var, self.epsilon)
        elif platforms.current() == "cpu":
            mean, var = masked_moments(x, weight)
            out = _normalise(x, scale, bias, mean, var, self.epsilon)
        else:
            moments: Any = normalise_batch(x, weight, scale, bias, running_mean.value, self.epsilon)
            out, mean, var = moments
        if train:
            count = weight.sum() * math.prod(x.shape[1:-1])
            if not self.is_initializing():
                # A batch of padding alone leaves the statistics unchanged.
                rate = jnp.where(count > 0, self.rate, 0.0)
                unbiased = var * (count / jnp.maximum(count - 1, 1))
                running_mean.value += rate * (mean - running_mean.value)
                running_var.value += rate * (unbiased - running_var.value)
                if seen is not None:
                    seen.value += jnp.where(count > 0, 1.0, 0.0)

        return out.astype(dtype)


def masked_moments(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance [channels] over the samples of [B, ..., channels] whose ``weight`` [B] is 1, not 0."""
    axes = tuple(range(x.ndim - 1))
    total, weight = _total(x, weight), _broadcast(weight, x)
    mean = (x * weight).sum(axes, keepdims=True) / total
    var = (lax.square(x - mean) * weight).sum(axes) / total
    return mean.reshape(-1), var


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def normalise_batch(
    x: jax.Array, weight: jax.Array, scale: jax.Array, bias: jax.Array, near: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise maps [B, ..., channels] with the moments of `masked_moments`, in few passes over memory.

    For accelerators, where small networks are limited by kernel launches and memory. One pass computes mean and
    variance, relative to ``near`` [channels] (the running mean) so that squares lose few digits. Another computes both
    sums of the gradient. Of the forward pass only x is stored. Compiled for an H200, the local step of ResNet-20 has
    330 kernels instead of 407.

    Returns:
      The normalised maps, the mean and the biased variance.
    """
    return _normalise_batch_forward(x, weight, scale, bias, near, epsilon)[0]


def _normalise_batch_forward(x, weight, scale, bias, near, epsilon):
    axes = tuple(range(x.ndim - 1))
    total, weights = _total(x, weight), _broadcast(weight, x)
    offset = x - _per_channel(near, x)
    first, second = (offset * weights).sum(axes) / total, (lax.square(offset) * weights).sum(axes) / total
    mean, var = near + first, jnp.maximum(second - lax.square(first), 0.0)
    return (_normalise(x, scale, bias, mean, var, epsilon), mean, var), (x, weight, scale, mean, var, near)


def _normalise_batch_backward(epsilon, residuals, gradients):
    x, weight, scale, mean, var, near = residuals
    gradient, of_mean, of_var = gradients
    axes = tuple(range(x.ndim - 1))
    total, weights = _total(x, weight), _broadcast(weight, x)
    inverse = lax.rsqrt(var + epsilon)
    centred = x - _per_channel(mean, x)
    of_bias, of_scale = gradient.sum(axes), (gradient * centred).sum(axes) * inverse
    multiplier = scale * inverse
    through_mean = (of_mean - multiplier * of_bias) / total
    through_var = (2 * of_var - multiplier * inverse * of_scale) / total
    moments = _per_channel(through_mean, x) + centred * _per_channel(through_var, x)
    of_x = gradient * _per_channel(multiplier, x) + weights * moments
    return of_x, jnp.zeros_like(weight), of_scale, of_bias, jnp.zeros_like(near)


normalise_batch.defvjp(_normalise_batch_forward, _normalise_batch_backward)


def _normalise(
    x: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, var: jax.Array, epsilon: float
) -> jax.Array:
    multiplier = scale * lax.rsqrt(var + epsilon)
    return x * _per_channel(multiplier, x) + _per_channel(bias - mean * multiplier, x)


def _total(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Number of values per channel in samples that are not padding, at least 1."""
    return jnp.maximum(weight.sum() * math.prod(x.shape[1:-1]), 1)


def _broadcast(weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight.reshape(-1, *(1 for _ in x.shape[1:]))


def _per_channel(values: jax.Array, x: jax.Array) -> jax.Array:
    return values.reshape(*(1 for _ in x.shape[1:]), -1)


class GroupNorm(nn.GroupNorm):
    """Group normalisation (Wu and He, ECCV 2018). Statistics are per sample, so there are none to average or to mask.

    Two groups, as in TensorFlow Federated's ResNets (Reddi et al., "Adaptive Federated Optimization", ICLR 2021).
    """

    num_groups: int | None = 2
    epsilon: float = 1e-5

    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Normalise maps [B, ..., channels]; ``train`` and ``mask`` have no effect."""
        return super().__call__(x)


def norm_layer(
    kind: str, *, scale_init: float = 1.0, counted: bool = False, name: str | None = None
) -> BatchNorm | GroupNorm:
    """A normalisation layer by name: ``batch`` or ``group``. ``counted`` only applies to ``batch``.

    Raises:
      UserError: the normalisation is unknown.
    """
    if kind == "batch":
        return BatchNorm(scale_init=scale_init, counted=counted, name=name)
    if kind == "group":
        return GroupNorm(scale_init=nn.initializers.constant(scale_init), name=name)
    raise unknown_name("norm", kind, ("batch", "group"))
