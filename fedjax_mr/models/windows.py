"""Convolution and pooling of images that stay fast inside compiled loops.

XLA:CPU has a fast convolution only for images NHWC, kernels HWIO and outputs NHWC. It rewrites other orders to this one
only outside loops (openxla/xla, ``conv_canonicalization.cc``; jax-ml/jax#12868). Local training is a loop, so the
gradients here are written in the fast order. That order is still slow for the few channels of small networks. On CPU,
therefore, blocks of neighbouring pixels of the image are folded into the channels. Many channels with small windows
take fewer multiplications by `minimal_filtering`, and images that are smaller than the kernel are not multiplied with
their padding, unless a run chooses the direct form (`convolutions`).

On GPU, a convolution with a kernel per client is a grouped one, and cuDNN computes its groups one after the other.
Small convolutions are therefore batched products there: rows of pixels times a banded matrix of the kernel.

Pooling avoids ``reduce_window``, whose gradient (``select_and_scatter``) is serial on CPU and not deterministic on GPU.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.models import minimal_filtering, platforms
from fedjax_mr.models.minimal_filtering import Pair

Padding = str | int | Sequence[Pair]
"""``"SAME"``, ``"VALID"``, one number for all four sides (as in PyTorch), or ((top, bottom), (left, right))."""


# ---- Convolution

CONVOLUTIONS = ("auto", "minimal", "direct")
_chosen: contextvars.ContextVar[str] = contextvars.ContextVar("convolution", default="auto")


@contextlib.contextmanager
def convolutions(kind: str) -> Iterator[None]:
    """Compute convolutions in one way inside the ``with`` block.

    Args:
      kind: ``minimal``: by `minimal_filtering` where it is estimated to be faster, and without multiplications by the
        padding of images that are smaller than the kernel. ``auto``: so on CPU only, where this was measured.
        ``direct``: never; the numbers are those of version 0.3.0.

    Raises:
      UserError: the kind is unknown.
    """
    if kind not in CONVOLUTIONS:
        raise unknown_name("convolution", kind, CONVOLUTIONS)
    token = _chosen.set(kind)
    try:
        yield
    finally:
        _chosen.reset(token)


def _fewer() -> bool:
    return _chosen.get() == "minimal" or (_chosen.get() == "auto" and platforms.current() == "cpu")


def conv(x: jax.Array, kernel: jax.Array, *, strides: int | Pair = 1, padding: Padding = "SAME") -> jax.Array:
    """Convolution [B, H', W', O] of images [B, H, W, I] with a kernel [h, w, I, O].

    The value is that of ``lax.conv_general_dilated``. The gradients (of any order, in reverse mode) are ordinary
    convolutions in the order NHWC, HWIO, NHWC, on CPU with blocks folded into the channels, or products. Small
    convolutions on GPU are products, too. `convolutions` says when there are fewer multiplications. Inside
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
    if _fewer() and math.prod(kernel.shape[:2]) > math.prod(x.shape[1:3]):
        return _without_padding(x, kernel, strides, pads)
    if strides == (1, 1) and _fewer() and (tile := minimal_filtering.tile(x, kernel, pads)):
        return minimal_filtering.convolve(x, kernel, pads, tile)
    if platforms.current() == "gpu" and _multiply_adds(x, kernel, strides, pads) <= BANDED_WORK:
        return _banded(_pad(x, pads), kernel, strides)
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
    block = _forward_block(*kernel.shape[2:])
    if block != (1, 1) and kernel.shape[1] > 1 and _folds(strides, x_dilation, kernel_dilation):
        return _folded(_pad(x, pads), kernel, block)
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


def _without_padding(x: jax.Array, kernel: jax.Array, strides: Pair, pads: Sequence[Pair]) -> jax.Array:
    """Compute the convolution of images that are smaller than the kernel, without multiplications by padding.

    Each output depends on nearly all pixels, so this is a product with a matrix of parts of the kernel. With 3x3
    windows it takes 16 of 36 multiplications if the images have 2x2 pixels, and 1 of 9 if they have one.
    """
    extent, window = x.shape[1:3], kernel.shape[:2]
    outputs = pair(
        [
            (size + sum(pad) - wide) // step + 1
            for size, wide, step, pad in zip(extent, window, strides, pads, strict=True)
        ]
    )
    matrix = _band(kernel, outputs, extent, strides=strides, pads=pads)
    y = x.reshape(len(x), -1) @ matrix.reshape(-1, math.prod(outputs) * kernel.shape[3])
    return y.reshape(len(x), *outputs, -1)


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
        return x_gradient, _kernel_gradient(x, pads, gradient, kernel)
    # The batch replaces the input channels: images [I, H, W, B], kernel [H', W', B, O].
    kernel_pads = tuple((p, o + w - 1 - i - p) for i, w, o, p in zip(image, window, output, low, strict=True))
    x_turned, gradient_turned = jnp.transpose(x, (3, 1, 2, 0)), jnp.transpose(gradient, (1, 2, 0, 3))
    kernel_gradient = _conv(x_turned, gradient_turned, kernel_dilation, kernel_pads, x_dilation, strides)
    return x_gradient, jnp.transpose(jnp.asarray(kernel_gradient), (1, 2, 0, 3))


_conv.defvjp(_conv_forward, _conv_backward)


# A block of neighbouring outputs depends on a block of inputs through a banded matrix. This makes many channels of few,
# enough for vector units and caches, at the cost of the zeros in the band. It is faster on CPU only; other devices use
# the convolutions of their libraries.


def _folds(*steps: Pair) -> bool:
    """Whether blocks may be folded: on CPU, without strides and dilation."""
    return platforms.current() == "cpu" and all(step == (1, 1) for step in steps)


def _forward_block(channels: int, features: int) -> Pair:
    """Rows and columns to fold (measured for 1 to 64 channels with 5x5 and 3x3 kernels)."""
    if channels >= 16:
        return 1, 1
    return (2, 2) if 4 * channels >= 8 and 4 * features >= 48 else (4, 2)


def _gradient_block(features: int) -> Pair:
    """Rows and columns to fold for the gradient of the kernel (measured as those of the convolution)."""
    return (2, 2) if features < 16 else (1, 2) if features < 32 else (1, 1)


def _pad(x: jax.Array, pads: Sequence[Pair]) -> jax.Array:
    """Pad images with zeros; a negative padding crops."""
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)))


def _blocks(x: jax.Array, block: Pair, count: Sequence[int]) -> jax.Array:
    """The first H' x W' blocks of images, with zeros beyond the edge: [B, H', W', rows x columns x I]."""
    batch, *extent, channels = x.shape
    (rows, columns), (height, width) = block, count
    missing = (number * wide - size for number, wide, size in zip(count, block, extent, strict=True))
    x = _pad(x, tuple((0, spare) for spare in missing))
    x = jnp.swapaxes(x.reshape(batch, height, rows, width, columns * channels), 2, 3)
    return x.reshape(batch, height, width, rows * columns * channels)


def _counts(extent: Sequence[int], window: Sequence[int], block: Pair) -> tuple[Pair, Pair]:
    """The number of blocks of ``extent`` outputs, and the number of blocks of inputs that one of them depends on."""
    outputs = tuple(-(-size // wide) for size, wide in zip(extent, block, strict=True))
    reach = tuple(-(-(wide + size - 1) // wide) for size, wide in zip(window, block, strict=True))
    return pair(outputs), pair(reach)


def _band(
    kernel: jax.Array,
    block: Pair,
    extent: Sequence[int],
    *,
    strides: Pair = (1, 1),
    pads: Sequence[Pair] = ((0, 0), (0, 0)),
) -> jax.Array:
    """The banded matrix [H, W, I, rows, columns, O] that maps an ``extent`` of H x W inputs to a block of outputs."""
    shifted = []
    for place in np.ndindex(*block):
        first = [at * step - pad[0] for at, step, pad in zip(place, strides, pads, strict=True)]
        last = [size - wide - at for size, wide, at in zip(extent, kernel.shape[:2], first, strict=True)]
        edges = [(*each, 0) for each in zip(first, last, strict=True)]  # negative ones crop the kernel
        shifted.append(lax.pad(kernel, jnp.zeros((), kernel.dtype), (*edges, (0, 0, 0), (0, 0, 0))))
    return jnp.stack(shifted, axis=3).reshape(*extent, kernel.shape[2], *block, kernel.shape[3])


def _block_kernel(kernel: jax.Array, block: Pair, reach: Pair) -> jax.Array:
    """The kernel [h', w', rows x columns x I, rows x columns x O] of a convolution of blocks; ``reach`` is h', w'."""
    (rows, columns), (height, width), (channels, features) = block, reach, kernel.shape[2:]
    band = _band(kernel, block, (height * rows, width * columns))
    band = band.reshape(height, rows, width, columns * channels, rows * columns * features)
    return jnp.swapaxes(band, 1, 2).reshape(height, width, rows * columns * channels, rows * columns * features)


def _folded(x: jax.Array, kernel: jax.Array, block: Pair) -> jax.Array:
    """Compute the unpadded convolution with blocks folded into the channels."""
    batch, features = x.shape[0], kernel.shape[3]
    height, width = (size - wide + 1 for size, wide in zip(x.shape[1:3], kernel.shape[:2], strict=True))
    outputs, reach = _counts((height, width), kernel.shape[:2], block)
    x = _blocks(x, block, [own + more - 1 for own, more in zip(outputs, reach, strict=True)])
    kernel = _block_kernel(kernel, block, reach)
    y = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = jnp.swapaxes(y.reshape(batch, *outputs, block[0], block[1] * features), 2, 3)
    return y.reshape(batch, outputs[0] * block[0], outputs[1] * block[1], features)[:, :height, :width]


def _kernel_gradient(x: jax.Array, pads: tuple[Pair, Pair], gradient: jax.Array, kernel: jax.Array) -> jax.Array:
    """Gradient of the kernel [h, w, I, O]: the batch replaces the input channels, blocks are folded into the others."""
    block = _gradient_block(gradient.shape[3])
    outputs, reach = _counts(gradient.shape[1:3], kernel.shape[:2], block)
    x = _blocks(_pad(x, pads), block, [own + more - 1 for own, more in zip(outputs, reach, strict=True)])
    turned = jnp.transpose(x, (3, 1, 2, 0)), jnp.transpose(_blocks(gradient, block, outputs), (1, 2, 0, 3))
    band = lax.conv_general_dilated(*turned, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    _, sum_over_band = jax.vjp(lambda kernel: _block_kernel(kernel, block, reach), kernel)
    return sum_over_band(jnp.transpose(band, (1, 2, 0, 3)))[0]


def _scattered(gradient: jax.Array, kernel: jax.Array) -> jax.Array:
    """Gradient of the images [B, H, W, I] for an unpadded convolution: products, summed where they overlap."""
    batch, rows, width, features = gradient.shape
    h, w, channels, _ = kernel.shape
    runs = -(-width // 5)  # runs of at most five columns
    columns = -(-width // runs)
    gradient = _pad(gradient, ((0, 0), (0, runs * columns - width)))
    reach = columns + w - 1
    band = _band(kernel, (1, columns), (h, reach)).reshape(-1, columns * features)
    parts = (gradient.reshape(-1, columns * features) @ band.T).reshape(batch, rows, runs, h, reach * channels)
    total = jnp.zeros((batch, rows + h - 1, (runs * columns + w - 1) * channels), gradient.dtype)
    for run, row in np.ndindex(runs, h):
        # Slice, add and update in place: a sum of padded parts is three times slower.
        corner = (0, row, run * columns * channels)
        current = lax.dynamic_slice(total, corner, (batch, rows, reach * channels))
        total = lax.dynamic_update_slice(total, current + parts[:, :, run, row], corner)
    return total.reshape(batch, rows + h - 1, -1, channels)[:, :, : width + w - 1]


# ---- Convolution on GPUs

BANDED_WORK = 800_000_000
"""Multiply-adds of one client up to which its convolution is a product with a banded matrix, on GPU. A larger one fills
the device alone."""
BANDED_FEATURES = 52
"""Columns of the banded matrix per column of the kernel: enough for tiles of a matrix unit, but not too many zeros
(measured on an H100, with LeNet-5, McMahan's CNN and ResNet-20)."""


def _multiply_adds(x: jax.Array, kernel: jax.Array, strides: Pair, pads: Sequence[Pair]) -> int:
    """Number of multiply-adds of a convolution of the images of one client."""
    sizes = zip(x.shape[1:3], kernel.shape[:2], strides, pads, strict=True)
    outputs = math.prod((size + sum(pad) - wide) // step + 1 for size, wide, step, pad in sizes)
    return x.shape[0] * outputs * math.prod(kernel.shape)


def _banded(x: jax.Array, kernel: jax.Array, strides: Pair) -> jax.Array:
    """Compute the unpadded convolution as one product, batched over the clients if ``vmap`` adds them.

    A run of neighbouring outputs of a row depends on h rows of pixels, which are contiguous in memory. Patches of
    single outputs would be larger and slow to copy, pixel by pixel. The zeros of the band cost less than both.
    """
    (h, w, channels, features), (down, right) = kernel.shape, strides
    height, width = ((size - wide) // step + 1 for size, wide, step in zip(x.shape[1:3], (h, w), strides, strict=True))
    runs = -(-width // max(1, BANDED_FEATURES * w // features)) if w > 1 else width
    columns = -(-width // runs)
    step, reach = columns * right, (columns - 1) * right + w  # of the inputs of a run
    pieces = -(-reach // step)
    x = _pad(x, ((0, 0), (0, (runs + pieces - 1) * step - x.shape[2])))
    x = x.reshape(*x.shape[:2], runs + pieces - 1, step * channels)
    bottom = (height - 1) * down + 1
    rows = jnp.concatenate(
        [
            x[:, row : row + bottom : down, piece : piece + runs, : (reach - piece * step) * channels]
            for row, piece in np.ndindex(h, pieces)
        ],
        axis=-1,
    )
    band = _band(kernel, (1, columns), (h, reach), strides=strides)
    y = rows @ band.reshape(-1, columns * features)
    return y.reshape(*y.shape[:2], runs * columns, features)[:, :, :width]


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
    return functools.reduce(_first_maximum, _window_elements(x, window, strides, padding))


# XLA recomputes operations that it considers cheap, such as these maxima, at each use, but it stores the results of a
# loop. Hence the loops over samples on CPU: the maxima and their positions are computed once.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _tiled_max(x: jax.Array, window: Pair) -> jax.Array:
    """Maxima [B, H', W', I] over windows that cover [B, H, W, I] without overlap."""
    return _tiled_max_forward(x, window)[0]


def _tiled_max_forward(x: jax.Array, window: Pair) -> tuple[jax.Array, jax.Array]:
    def first_maxima(sample: jax.Array) -> tuple[jax.Array, jax.Array]:
        best, *others = _window_elements(sample[None], window, None, 0)
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


def _window_elements(x: jax.Array, window: int | Pair, strides: int | Pair | None, padding: int) -> list[jax.Array]:
    """The first elements of all windows, then the second elements, and so on: slices [B, H', W', I]."""
    window = pair(window)
    strides = window if strides is None else pair(strides)
    pads = ((padding, padding), (padding, padding))
    _require_room("pooling window", x.shape[1:3], window, pads)
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)), constant_values=-np.inf)
    # Distance from an element of the first window to the same element of the last window, plus one.
    height, width = (
        (size - wide) // step * step + 1 for size, wide, step in zip(x.shape[1:3], window, strides, strict=True)
    )
    return [
        x[:, row : row + height : strides[0], column : column + width : strides[1]]
        for row, column in np.ndindex(*window)
    ]
