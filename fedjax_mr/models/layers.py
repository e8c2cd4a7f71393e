"""Layers that stay fast inside compiled loops, with PyTorch's conventions where they differ from Flax's.

XLA:CPU has a fast convolution only for images NHWC, kernels HWIO and outputs NHWC, and rewrites other orders into that
one only outside of loops (openxla/xla, ``conv_canonicalization.cc``; jax-ml/jax#12868). Local training is a loop, so
the gradients here are written in the fast order. Even that order is slow with few channels, which small networks have:
on CPU neighbouring columns of the image are folded into the channels, and gradients become matrix products. Pooling
avoids ``reduce_window``, whose gradient (``select_and_scatter``) is serial on CPU and not deterministic on GPU.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_mr.errors import UserError, unknown_name

Pair = tuple[int, int]
Padding = str | int | Sequence[Pair]
"""``"SAME"``, ``"VALID"``, one number for all four sides (as in PyTorch), or ((top, bottom), (left, right))."""

Initializer = Callable[..., jax.Array]


# ---- Convolution


def conv(x: jax.Array, kernel: jax.Array, *, strides: int | Pair = 1, padding: Padding = "SAME") -> jax.Array:
    """Return the convolution [B, H', W', O] of images [B, H, W, I] with a kernel [h, w, I, O].

    The value is that of ``lax.conv_general_dilated``; the gradients (of any order, in reverse mode) are ordinary
    convolutions in the order NHWC, HWIO, NHWC, on CPU with columns folded into the channels, or products. Inside
    ``shard_map`` a gradient asks for images and kernel that vary over the same mesh axes, which JAX checks. Second
    derivatives through ``lax.scan`` fail in jax 0.10, which hands the backward pass the wrong arrays there.

    Raises:
      UserError: the images are smaller than the kernel.
    """
    strides = _pair(strides)
    pads = _explicit_padding(x.shape[1:3], kernel.shape[:2], strides, padding)
    _require_room("convolution", x.shape[1:3], kernel.shape[:2], pads)
    return _conv(x, kernel, strides, pads, (1, 1), (1, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _conv(
    x: jax.Array, kernel: jax.Array, strides: Pair, pads: tuple[Pair, Pair], x_dilation: Pair, kernel_dilation: Pair
) -> jax.Array:
    if kernel.shape[:2] == x.shape[1:3] and not any(map(any, pads)) and x_dilation == kernel_dilation == (1, 1):
        # The weight gradient of a 1x1 convolution: one position, so one product, which saves ResNet-20 a sixth.
        return jnp.einsum("bhwi,hwio->bo", x, kernel)[:, None, None]
    if math.prod(kernel.shape[:2]) > math.prod(x.shape[1:3]):
        return _product(x, kernel, strides, pads, x_dilation, kernel_dilation)
    columns = _columns(*kernel.shape[2:])
    if columns > 1 and kernel.shape[1] > 1 and _folds(strides, x_dilation, kernel_dilation):
        return _folded(_pad(x, pads), kernel, columns)
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        pads,
        lhs_dilation=x_dilation,
        rhs_dilation=kernel_dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _product(
    x: jax.Array, kernel: jax.Array, strides: Pair, pads: tuple[Pair, Pair], x_dilation: Pair, kernel_dilation: Pair
) -> jax.Array:
    """Return the convolution as one product of patches and kernel.

    XLA exchanges images and kernel of a convolution whose kernel is the larger one, into an order that is slow again
    (``SwapConvOperands`` in its algebraic simplifier). Images as small as that have few patches.
    """
    edges = tuple((*pad, dilation - 1) for pad, dilation in zip(pads, x_dilation, strict=True))
    x = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *edges, (0, 0, 0)))
    window = _dilated(kernel.shape[:2], kernel_dilation)
    height, width = (
        (size - wide) // step * step + 1 for size, wide, step in zip(x.shape[1:3], window, strides, strict=True)
    )
    tops, lefts = (range(0, wide, step) for wide, step in zip(window, kernel_dilation, strict=True))
    x = jnp.stack([x[:, top : top + height : strides[0]] for top in tops])
    x = jnp.stack([x[:, :, :, left : left + width : strides[1]] for left in lefts])
    return jnp.einsum("whbyxi,hwio->byxo", x, kernel)


def _conv_forward(x, kernel, strides, pads, x_dilation, kernel_dilation):
    return _conv(x, kernel, strides, pads, x_dilation, kernel_dilation), (x, kernel)


def _conv_backward(strides, pads, x_dilation, kernel_dilation, residuals, gradient):
    x, kernel = residuals
    # Extents once dilated: a gradient value meets the input at multiples of the stride, so strides become dilations.
    image = _dilated(x.shape[1:3], x_dilation)
    window = _dilated(kernel.shape[:2], kernel_dilation)
    output = _dilated(gradient.shape[1:3], strides)
    low = [pad[0] for pad in pads]

    folds = _folds(strides, x_dilation, kernel_dilation) and window[1] > 1
    if folds and image[0] * image[1] >= 1.5 * output[0] * output[1] and not any(map(any, pads)):
        # A convolution over the padded gradient would do that much more work.
        x_gradient = _scattered(gradient, kernel)
    else:
        x_pads = tuple((w - 1 - p, i + p - o) for i, w, o, p in zip(image, window, output, low, strict=True))
        flipped = jnp.swapaxes(kernel[::-1, ::-1], 2, 3)
        x_gradient = _conv(gradient, flipped, x_dilation, x_pads, strides, kernel_dilation)

    columns = max(2, _columns(*kernel.shape[2:]))
    patches = math.prod(gradient.shape[:3]) * window[0] * (window[1] + columns - 1) * x.shape[3] // columns
    if folds and patches <= MAX_PATCHES:
        return x_gradient, _kernel_gradient(x, pads, gradient, window, columns)
    # The batch takes the place of the input channels: images [I, H, W, B], kernel [H', W', B, O].
    kernel_pads = tuple((p, o + w - 1 - i - p) for i, w, o, p in zip(image, window, output, low, strict=True))
    x_turned, gradient_turned = jnp.transpose(x, (3, 1, 2, 0)), jnp.transpose(gradient, (1, 2, 0, 3))
    kernel_gradient = _conv(x_turned, gradient_turned, kernel_dilation, kernel_pads, x_dilation, strides)
    return x_gradient, jnp.transpose(jnp.asarray(kernel_gradient), (1, 2, 0, 3))


_conv.defvjp(_conv_forward, _conv_backward)


# A run of n neighbouring output columns depends on n + w - 1 input columns through a banded (Toeplitz) matrix. Seen
# that way, n x O channels come out of n x I, which is enough for vectors and caches, at the price of the zeros in the
# band. It wins on CPU only; other devices keep their libraries' convolutions.

MAX_PATCHES = 2**25
"""Numbers that a matrix of patches may hold: 128 MiB."""


def _folds(*steps: Pair) -> bool:
    """Return whether columns may be folded: on CPU, neither strides nor dilation."""
    return jax.default_backend() == "cpu" and all(step == (1, 1) for step in steps)


def _columns(channels: int, features: int) -> int:
    """Return how many columns to fold (measured for 1 to 64 channels of 5x5 and 3x3 kernels): 1, 2 or 4."""
    return next(
        columns for columns in (1, 2, 4) if columns == 4 or (columns * features >= 24 and columns * channels > 3)
    )


def _pad(x: jax.Array, pads: tuple[Pair, Pair]) -> jax.Array:
    """Return images with zeros around, or cropped where a padding is negative."""
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)))


def _band(kernel: jax.Array, columns: int, width: int) -> jax.Array:
    """Return the banded matrix [h, width, I, columns, O] that maps ``width`` input columns to ``columns`` outputs."""
    spare = width - kernel.shape[1]
    shifted = [jnp.pad(kernel, ((0, 0), (column, spare - column), (0, 0), (0, 0))) for column in range(columns)]
    return jnp.stack(shifted, axis=3)


def _folded(x: jax.Array, kernel: jax.Array, columns: int) -> jax.Array:
    """Return the unpadded convolution with ``columns`` columns folded into the channels."""
    batch, height, width, channels = x.shape
    h, w, _, features = kernel.shape
    runs = -(-(width - w + 1) // columns)
    reach = -(-(columns + w - 1) // columns)  # runs of input columns that a run of outputs depends on
    x = _pad(x, ((0, 0), (0, (runs + reach - 1) * columns - width)))
    y = lax.conv_general_dilated(
        x.reshape(batch, height, runs + reach - 1, columns * channels),
        _band(kernel, columns, reach * columns).reshape(h, reach, columns * channels, columns * features),
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y.reshape(batch, height - h + 1, runs * columns, features)[:, :, : width - w + 1]


def _kernel_gradient(
    x: jax.Array, pads: tuple[Pair, Pair], gradient: jax.Array, window: Sequence[int], columns: int
) -> jax.Array:
    """Return the kernel's gradient [h, w, I, O]: patches times gradient, the band summed."""
    h, w = window
    batch, rows, width, features = gradient.shape
    channels = x.shape[3]
    runs = -(-width // columns)
    spare = runs * columns - width
    reach = columns + w - 1
    top_bottom, (left, right) = pads
    x, gradient = _pad(x, (top_bottom, (left, right + spare))), _pad(gradient, ((0, 0), (0, spare)))
    # With the batch innermost, patches are long runs of memory. Without the barrier x is computed anew for each patch.
    lines = lax.optimization_barrier(jnp.transpose(x.reshape(batch, x.shape[1], -1), (2, 1, 0)))
    starts = range(0, runs * columns * channels, columns * channels)
    patches = [
        jnp.stack([lines[start : start + reach * channels, row : row + rows] for start in starts], axis=1)
        for row in range(h)
    ]
    turned = jnp.transpose(gradient.reshape(batch, rows, runs, columns * features), (2, 1, 0, 3))
    product = jnp.stack(patches).reshape(h * reach * channels, -1) @ turned.reshape(-1, columns * features)
    band = product.reshape(h, reach, channels, columns, features)
    return functools.reduce(jnp.add, [band[:, column : column + w, :, column] for column in range(columns)])


def _scattered(gradient: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return the images' gradient [B, H, W, I] of an unpadded convolution: products, added up where they overlap."""
    batch, rows, width, features = gradient.shape
    h, w, channels, _ = kernel.shape
    runs = -(-width // 5)  # runs of at most five columns
    columns = -(-width // runs)
    gradient = _pad(gradient, ((0, 0), (0, runs * columns - width)))
    reach = columns + w - 1
    band = _band(kernel, columns, reach).reshape(-1, columns * features)
    parts = (gradient.reshape(-1, columns * features) @ band.T).reshape(batch, rows, runs, h, reach * channels)
    total = jnp.zeros((batch, rows + h - 1, (runs * columns + w - 1) * channels), gradient.dtype)
    for run, row in np.ndindex(runs, h):
        # Slice, add and update in place: padding the parts and adding those would be three times slower.
        corner = (0, row, run * columns * channels)
        before = lax.dynamic_slice(total, corner, (batch, rows, reach * channels))
        total = lax.dynamic_update_slice(total, before + parts[:, :, run, row], corner)
    return total.reshape(batch, rows + h - 1, -1, channels)[:, :, : width + w - 1]


def _dilated(extent: Sequence[int], dilation: Pair) -> tuple[int, ...]:
    return tuple((size - 1) * step + 1 for size, step in zip(extent, dilation, strict=True))


def _pair(value: int | Sequence[int]) -> Pair:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second


def _explicit_padding(
    extent: Sequence[int], window: Sequence[int], strides: Pair, padding: Padding
) -> tuple[Pair, Pair]:
    if isinstance(padding, int):
        padding = ((padding, padding), (padding, padding))
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(extent, window, strides, padding)
    rows, columns = padding
    return _pair(rows), _pair(columns)


def _require_room(what: str, extent: Sequence[int], window: Sequence[int], pads: tuple[Pair, Pair]) -> None:
    if any(size + sum(pad) < wide for size, wide, pad in zip(extent, window, pads, strict=True)):
        height, width = extent
        raise UserError(f"a {window[0]}x{window[1]} {what} does not fit into feature maps of {height}x{width}")


# ---- Pooling


def max_pool(x: jax.Array, window: int | Pair, *, strides: int | Pair | None = None, padding: int = 0) -> jax.Array:
    """Return the maxima [B, H', W', I] over windows of [B, H, W, I]; rows that fill no window are dropped.

    Of equal maxima the first one, row by row, takes the gradient, as in PyTorch.

    Args:
      x: feature maps.
      window: the window's extent.
      strides: the step between windows; the window by default.
      padding: rows and columns added on each side that never win.

    Raises:
      UserError: the maps are smaller than the window.
    """
    return functools.reduce(_first_maximum, _window_elements(x, window, strides, padding, -np.inf))


def avg_pool(x: jax.Array, window: int | Pair, *, strides: int | Pair | None = None, padding: int = 0) -> jax.Array:
    """Return the means [B, H', W', I] over windows of [B, H, W, I]; padding counts as zeros.

    Arguments and errors are those of `max_pool`.
    """
    return functools.reduce(jnp.add, _window_elements(x, window, strides, padding, 0.0)) / math.prod(_pair(window))


def _first_maximum(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the greater array elementwise, ``a`` where equal, NaN where either is.

    The gradients of ``jnp.max`` and ``jnp.maximum`` search for the elements equal to the maximum. XLA may compute the
    elements a second time with another rounding and find none: NaN or nothing. A selection finds exactly one.
    """
    return jnp.where((b > a) | jnp.isnan(b), b, a)


def _window_elements(
    x: jax.Array, window: int | Pair, strides: int | Pair | None, padding: int, fill: float
) -> list[jax.Array]:
    """Return the first elements of all windows, the second ones, and so on: slices of [B, H', W', I] each."""
    window = _pair(window)
    strides = window if strides is None else _pair(strides)
    pads = ((padding, padding), (padding, padding))
    _require_room("pooling window", x.shape[1:3], window, pads)
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)), constant_values=fill)
    # From the first window's element to the last window's, exclusive.
    height, width = (
        (size - wide) // step * step + 1 for size, wide, step in zip(x.shape[1:3], window, strides, strict=True)
    )
    return [
        x[:, row : row + height : strides[0], column : column + width : strides[1]]
        for row, column in np.ndindex(*window)
    ]


# ---- Layers with parameters


def uniform_fan_in(fan_in: int) -> Initializer:
    """Return the initializer U(-1/sqrt(fan_in), 1/sqrt(fan_in)): PyTorch's default for weights and biases alike."""
    bound = 1.0 / math.sqrt(fan_in)

    def initialize(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return initialize


def initializers(init: str, fan_in: int) -> tuple[Initializer, Initializer]:
    """Return the initializers of kernel and bias.

    Args:
      init: ``torch`` (uniform by fan-in, bias too), ``flax`` (LeCun normal, zero bias) or
        ``he`` (normal with variance 2 / (h w O), zero bias: He et al., ICCV 2015, in its fan-out form).
      fan_in: inputs per output.

    Raises:
      UserError: no such initialisation.
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
      features: O, the channels of the output.
      kernel_size: h and w.
      strides: the step in both directions.
      padding: see `Padding`. PyTorch pads both sides alike, which with strides differs from ``"SAME"``.
      use_bias: whether there is a bias.
      initialisation: see `initializers`.
    """

    features: int
    kernel_size: int | Pair = 3
    strides: int | Pair = 1
    padding: Padding = "SAME"
    use_bias: bool = True
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output [B, H', W', O] of images [B, H, W, I]."""
        window = _pair(self.kernel_size)
        channels = x.shape[-1]
        kernel_init, bias_init = initializers(self.initialisation, math.prod(window) * channels)
        kernel = self.param("kernel", kernel_init, (*window, channels, self.features), jnp.float32)
        x = conv(x, kernel, strides=self.strides, padding=self.padding)
        if not self.use_bias:
            return x
        return x + self.param("bias", bias_init, (self.features,), jnp.float32).reshape(1, 1, 1, -1)


class Dense(nn.Module):
    """A dense layer with parameters ``kernel`` [I, O] and ``bias`` [O].

    Attributes:
      features: O.
      initialisation: see `initializers`.
    """

    features: int
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output [..., O] of vectors [..., I]."""
        kernel_init, bias_init = initializers(self.initialisation, x.shape[-1])
        kernel = self.param("kernel", kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", bias_init, (self.features,), jnp.float32)
        return x @ kernel + bias.reshape(*(1 for _ in x.shape[:-1]), -1)


class BatchNorm(nn.Module):
    """Batch normalisation over all axes but the last, with PyTorch's running statistics (its defaults).

    Batch statistics normalise with the biased variance while the running variance takes the unbiased one (Flax keeps
    the biased one). Parameters ``scale`` and ``bias`` [C], statistics ``mean`` and ``var`` [C] in ``batch_stats``.

    Attributes:
      scale_init: the first value of ``scale``.
      rate: the share of a new batch in the running statistics (Flax's momentum is 1 - rate).
      epsilon: added to the variance.
      counted: whether the statistics hold the number of batches seen, as PyTorch's do, without effect on the outputs: a
        float32 ``count`` (PyTorch's is an integer of 8 bytes, whose mean over clients would not be one).
    """

    scale_init: float = 1.0
    rate: float = 0.1
    epsilon: float = 1e-5
    counted: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Return the normalised maps [B, ..., C]; only samples whose ``mask`` [B] is 1 enter the statistics."""
        channels = x.shape[-1]
        scale = self.param("scale", nn.initializers.constant(self.scale_init), (channels,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (channels,), jnp.float32)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (channels,), jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, (channels,), jnp.float32)

        seen = self.variable("batch_stats", "count", jnp.zeros, (), jnp.float32) if self.counted else None

        mean, var = running_mean.value, running_var.value
        if train:
            mean, var, count = masked_moments(x, mask)
            if not self.is_initializing():
                # A batch without any true sample leaves the statistics alone.
                rate = jnp.where(count > 0, self.rate, 0.0)
                unbiased = var * (count / jnp.maximum(count - 1, 1))
                running_mean.value += rate * (mean - running_mean.value)
                running_var.value += rate * (unbiased - running_var.value)
                if seen is not None:
                    seen.value += jnp.where(count > 0, 1.0, 0.0)

        multiplier = scale * lax.rsqrt(var + self.epsilon)
        ones = (1,) * (x.ndim - 1)
        return x * multiplier.reshape(*ones, -1) + (bias - mean * multiplier).reshape(*ones, -1)


def masked_moments(x: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return mean [C], biased variance [C] and the number of values per channel of the true samples of [B, ..., C].

    Args:
      x: maps or vectors.
      mask: [B], 1 for true samples; None: all are true.
    """
    axes = tuple(range(x.ndim - 1))
    per_sample = math.prod(x.shape[1:-1])
    weight = jnp.ones(x.shape[:1], x.dtype) if mask is None else mask.astype(x.dtype)
    count = weight.sum() * per_sample
    weight = weight.reshape(-1, *(1 for _ in x.shape[1:]))
    total = jnp.maximum(count, 1)
    mean = (x * weight).sum(axes, keepdims=True) / total
    var = (lax.square(x - mean) * weight).sum(axes) / total
    return mean.reshape(-1), var, count


class GroupNorm(nn.GroupNorm):
    """Group normalisation (Wu and He, ECCV 2018): statistics per sample, so nothing to average and nothing to mask.

    Two groups, as in TensorFlow Federated's ResNets (Reddi et al., "Adaptive Federated Optimization", ICLR 2021).
    """

    num_groups: int | None = 2
    epsilon: float = 1e-5

    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Return the normalised maps [B, ..., C]; ``train`` and ``mask`` change nothing."""
        return super().__call__(x)


def norm_layer(
    kind: str, *, scale_init: float = 1.0, counted: bool = False, name: str | None = None
) -> BatchNorm | GroupNorm:
    """Return a normalisation layer by name: ``batch`` or ``group``; ``counted`` concerns the former only.

    Raises:
      UserError: no such normalisation.
    """
    if kind == "batch":
        return BatchNorm(scale_init=scale_init, counted=counted, name=name)
    if kind == "group":
        return GroupNorm(scale_init=nn.initializers.constant(scale_init), name=name)
    raise unknown_name("norm", kind, ("batch", "group"))
