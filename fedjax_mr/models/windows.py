"""Convolution and pooling of images that stay fast inside compiled loops.

XLA:CPU has a fast convolution only for images NHWC, kernels HWIO and outputs NHWC. It rewrites other orders to this one
only outside loops (openxla/xla, ``conv_canonicalization.cc``; jax-ml/jax#12868). Local training is a loop, so the
gradients here are written in the fast order. That order is still slow for the few channels of small networks. On CPU,
therefore, neighbouring columns of the image are folded into the channels, and the batch is the innermost axis of the
weight gradient. Pooling avoids ``reduce_window``, whose gradient (``select_and_scatter``) is serial on CPU and not
deterministic on GPU.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_mr.errors import UserError
from fedjax_mr.models import platforms

Pair = tuple[int, int]
Padding = str | int | Sequence[Pair]
"""``"SAME"``, ``"VALID"``, one number for all four sides (as in PyTorch), or ((top, bottom), (left, right))."""


# ---- Convolution


def conv(x: jax.Array, kernel: jax.Array, *, strides: int | Pair = 1, padding: Padding = "SAME") -> jax.Array:
    """Convolution [B, H', W', O] of images [B, H, W, I] with a kernel [h, w, I, O].

    The value is that of ``lax.conv_general_dilated``. The gradients (of any order, in reverse mode) are ordinary
    convolutions in the order NHWC, HWIO, NHWC, on CPU with columns folded into the channels, or products. Inside
    ``shard_map``, gradients require that images and kernel vary over the same mesh axes; JAX checks it. Second
    derivatives through ``lax.scan`` fail in jax 0.10, which passes wrong arrays to the backward pass.

    Raises:
      UserError: the images are smaller than the kernel.
    """
    strides = pair(strides)
    pads = _explicit_padding(x.shape[1:3], kernel.shape[:2], strides, padding)
    _require_room("convolution", x.shape[1:3], kernel.shape[:2], pads)
    if kernel.shape[:2] == (1, 1) and not any(map(any, pads)):
        # Strides only skip pixels here; without them the weight gradient is one product.
        x, strides = x[:, :: strides[0], :: strides[1]], (1, 1)
    return _conv(x, kernel, strides, pads, (1, 1), (1, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _conv(
    x: jax.Array, kernel: jax.Array, strides: Pair, pads: tuple[Pair, Pair], x_dilation: Pair, kernel_dilation: Pair
) -> jax.Array:
    if kernel.shape[:2] == x.shape[1:3] and not any(map(any, pads)) and x_dilation == kernel_dilation == (1, 1):
        # The weight gradient of a 1x1 convolution has one position, so it is one product: ResNet-20 is a sixth faster.
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
    """Compute the convolution as one product of patches and kernel.

    If the kernel is larger than the images, XLA swaps the two, which gives a slow order (``SwapConvOperands`` in its
    algebraic simplifier). Such small images have few patches.
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
    # Dilated extents: gradient values align with the input at multiples of the stride, so strides become dilations.
    image = _dilated(x.shape[1:3], x_dilation)
    window = _dilated(kernel.shape[:2], kernel_dilation)
    output = _dilated(gradient.shape[1:3], strides)
    low = [pad[0] for pad in pads]

    folds = _folds(strides, x_dilation, kernel_dilation) and window[1] > 1
    if folds and image[0] * image[1] >= 1.5 * output[0] * output[1] and not any(map(any, pads)):
        # A convolution over the padded gradient would do 1.5 times the work or more.
        x_gradient = _scattered(gradient, kernel)
    else:
        x_pads = tuple((w - 1 - p, i + p - o) for i, w, o, p in zip(image, window, output, low, strict=True))
        flipped = jnp.swapaxes(kernel[::-1, ::-1], 2, 3)
        x_gradient = _conv(gradient, flipped, x_dilation, x_pads, strides, kernel_dilation)

    if folds:
        return x_gradient, _kernel_gradient(x, pads, gradient, window)
    # The batch replaces the input channels: images [I, H, W, B], kernel [H', W', B, O].
    kernel_pads = tuple((p, o + w - 1 - i - p) for i, w, o, p in zip(image, window, output, low, strict=True))
    x_turned, gradient_turned = jnp.transpose(x, (3, 1, 2, 0)), jnp.transpose(gradient, (1, 2, 0, 3))
    kernel_gradient = _conv(x_turned, gradient_turned, kernel_dilation, kernel_pads, x_dilation, strides)
    return x_gradient, jnp.transpose(jnp.asarray(kernel_gradient), (1, 2, 0, 3))


_conv.defvjp(_conv_forward, _conv_backward)


# A run of n neighbouring output columns depends on n + w - 1 input columns through a banded (Toeplitz) matrix. This
# makes n x O channels from n x I channels, enough for vector units and caches, at the cost of the zeros in the band. It
# is faster on CPU only; other devices use the convolutions of their libraries.


def _folds(*steps: Pair) -> bool:
    """Whether columns may be folded: on CPU, without strides and dilation."""
    return platforms.current() == "cpu" and all(step == (1, 1) for step in steps)


def _columns(channels: int, features: int) -> int:
    """Number of columns to fold: 1, 2 or 4 (measured for 1 to 64 channels with 5x5 and 3x3 kernels)."""
    if channels >= 16:
        return 1
    return next(
        columns for columns in (1, 2, 4) if columns == 4 or (columns * features >= 24 and columns * channels > 3)
    )


def _pad(x: jax.Array, pads: tuple[Pair, Pair]) -> jax.Array:
    """Pad images with zeros; a negative padding crops."""
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)))


def _band(kernel: jax.Array, columns: int, width: int) -> jax.Array:
    """The banded matrix [h, width, I, columns, O] that maps ``width`` input columns to ``columns`` output columns."""
    spare = width - kernel.shape[1]
    shifted = [jnp.pad(kernel, ((0, 0), (column, spare - column), (0, 0), (0, 0))) for column in range(columns)]
    return jnp.stack(shifted, axis=3)


def _folded(x: jax.Array, kernel: jax.Array, columns: int) -> jax.Array:
    """Compute the unpadded convolution with ``columns`` columns folded into the channels."""
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


def _kernel_gradient(x: jax.Array, pads: tuple[Pair, Pair], gradient: jax.Array, window: Sequence[int]) -> jax.Array:
    """Gradient of the kernel [h, w, I, O]: one convolution per run of output columns, then a sum over the band.

    With the batch as innermost axis, the pixels of one image column are contiguous in memory, and each row starts one
    batch after the previous one. So this is a 1-D convolution whose stride is the batch, and XLA stores no patches.
    """
    h, w = window
    batch, rows, width, features = gradient.shape
    channels = x.shape[3]
    enough = 48 if channels <= 3 else 32  # features of a run; measured for 1 to 64 channels of 5x5 and 3x3 kernels
    columns = next(columns for columns in (1, 2, 4, 8) if columns == 8 or columns * features >= enough)
    runs = -(-width // columns)
    spare = runs * columns - width
    reach = columns + w - 1
    top_bottom, (left, right) = pads
    x, gradient = _pad(x, (top_bottom, (left, right + spare))), _pad(gradient, ((0, 0), (0, spare)))
    lines = jnp.transpose(x.reshape(batch, x.shape[1], -1), (2, 1, 0)).reshape(-1, 1, x.shape[1] * batch, 1)
    turned = jnp.transpose(gradient.reshape(batch, rows, runs, columns * features), (2, 1, 0, 3))
    turned = turned.reshape(runs, 1, rows * batch, 1, columns * features)

    def product(run: jax.Array | int) -> jax.Array:
        part = lax.dynamic_slice_in_dim(lines, run * (columns * channels), reach * channels)
        return lax.conv_general_dilated(
            part, turned[run], (1, batch), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    # In a loop the operands are computed once; in an unrolled sum, XLA computes x again for each term.
    band = lax.fori_loop(1, runs, lambda run, total: total + product(run), product(0))
    band = band.reshape(reach, channels, h, columns, features)
    kernel = functools.reduce(jnp.add, [band[column : column + w, :, :, column] for column in range(columns)])
    return jnp.transpose(kernel, (2, 0, 1, 3))


def _scattered(gradient: jax.Array, kernel: jax.Array) -> jax.Array:
    """Gradient of the images [B, H, W, I] for an unpadded convolution: products, summed where they overlap."""
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
        # Slice, add and update in place: a sum of padded parts is three times slower.
        corner = (0, row, run * columns * channels)
        current = lax.dynamic_slice(total, corner, (batch, rows, reach * channels))
        total = lax.dynamic_update_slice(total, current + parts[:, :, run, row], corner)
    return total.reshape(batch, rows + h - 1, -1, channels)[:, :, : width + w - 1]


def _dilated(extent: Sequence[int], dilation: Pair) -> tuple[int, ...]:
    return tuple((size - 1) * step + 1 for size, step in zip(extent, dilation, strict=True))


def pair(value: int | Sequence[int]) -> Pair:
    """One number for rows and one for columns."""
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
    return pair(rows), pair(columns)


def _require_room(what: str, extent: Sequence[int], window: Sequence[int], pads: tuple[Pair, Pair]) -> None:
    if any(size + sum(pad) < wide for size, wide, pad in zip(extent, window, pads, strict=True)):
        height, width = extent
        raise UserError(f"a {window[0]}x{window[1]} {what} does not fit into feature maps of {height}x{width}")


# ---- Pooling


def max_pool(x: jax.Array, window: int | Pair, *, strides: int | Pair | None = None, padding: int = 0) -> jax.Array:
    """Maxima [B, H', W', I] over windows of [B, H, W, I]. Rows and columns that fill no window are ignored.

    Among equal maxima the first one in row-major order receives the gradient, as in PyTorch.

    Args:
      x: feature maps.
      window: size of the window.
      strides: step between windows. Default: the window.
      padding: rows and columns of minus infinity on each side.

    Raises:
      UserError: the maps are smaller than the window.
    """
    window = pair(window)
    _require_room("pooling window", x.shape[1:3], window, ((padding, padding), (padding, padding)))
    if platforms.current() == "cpu" and not padding and (strides is None or pair(strides) == window):
        rows, columns = (size // wide * wide for size, wide in zip(x.shape[1:3], window, strict=True))
        return _tiled_max(x[:, :rows, :columns], window)
    return functools.reduce(_first_maximum, _window_elements(x, window, strides, padding, -np.inf))


def avg_pool(x: jax.Array, window: int | Pair, *, strides: int | Pair | None = None, padding: int = 0) -> jax.Array:
    """Means [B, H', W', I] over windows of [B, H, W, I]. Padding counts as zeros.

    Arguments and errors are those of `max_pool`.
    """
    return functools.reduce(jnp.add, _window_elements(x, window, strides, padding, 0.0)) / math.prod(pair(window))


# XLA recomputes operations that it considers cheap, such as these maxima, at each use, but it stores the results of a
# loop. Hence the loops over samples on CPU: the maxima and their positions are computed once.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _tiled_max(x: jax.Array, window: Pair) -> jax.Array:
    """Maxima [B, H', W', I] over windows that cover [B, H, W, I] without overlap."""
    return _tiled_max_forward(x, window)[0]


def _tiled_max_forward(x: jax.Array, window: Pair) -> tuple[jax.Array, jax.Array]:
    def first_maxima(sample: jax.Array) -> tuple[jax.Array, jax.Array]:
        best, *others = _window_elements(sample[None], window, None, 0, -np.inf)
        winner = jnp.zeros_like(best)  # in the type of the images, which is faster than a small integer
        for number, other in enumerate(others, start=1):
            better = (other > best) | jnp.isnan(other)
            best, winner = jnp.where(better, other, best), jnp.where(better, number, winner)
        return best[0], winner[0]

    return lax.map(first_maxima, x)


def _tiled_max_backward(window: Pair, winner: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    order = jnp.arange(math.prod(window), dtype=winner.dtype).reshape(1, window[0], 1, window[1], 1)

    def tiles(sample: tuple[jax.Array, jax.Array]) -> jax.Array:
        winner, gradient = (jnp.expand_dims(each, (1, 3)) for each in sample)
        return jnp.where(winner == order, gradient, 0.0)

    batch, height, width, channels = gradient.shape
    x = lax.map(tiles, (winner, gradient))  # [B, H', h, W', w, I]
    return (x.reshape(batch, height * window[0], width * window[1], channels),)


_tiled_max.defvjp(_tiled_max_forward, _tiled_max_backward)


def _first_maximum(a: jax.Array, b: jax.Array) -> jax.Array:
    """Elementwise maximum: ``a`` where both are equal, NaN where one is NaN.

    The gradients of ``jnp.max`` and ``jnp.maximum`` search for the elements that equal the maximum. XLA may recompute
    the elements with another rounding, so that none is equal and the gradient is NaN or zero. A selection has exactly
    one element.
    """
    return jnp.where((b > a) | jnp.isnan(b), b, a)


def _window_elements(
    x: jax.Array, window: int | Pair, strides: int | Pair | None, padding: int, fill: float
) -> list[jax.Array]:
    """The first elements of all windows, then the second elements, and so on: slices [B, H', W', I]."""
    window = pair(window)
    strides = window if strides is None else pair(strides)
    pads = ((padding, padding), (padding, padding))
    _require_room("pooling window", x.shape[1:3], window, pads)
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)), constant_values=fill)
    # Distance from an element of the first window to the same element of the last window, plus one.
    height, width = (
        (size - wide) // step * step + 1 for size, wide, step in zip(x.shape[1:3], window, strides, strict=True)
    )
    return [
        x[:, row : row + height : strides[0], column : column + width : strides[1]]
        for row, column in np.ndindex(*window)
    ]
