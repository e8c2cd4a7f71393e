"""Minimal filtering: convolutions without strides in fewer multiplications (Winograd, Toom and Cook).

m neighbouring outputs of a filter with r taps take m r multiplications, or n = m + r - 1: the filter and the inputs are
polynomials, which are evaluated at n points, multiplied there, and interpolated.

    y = A^T [(G g) * (B d)]      y [m] outputs, g [r] taps, d [n] inputs, A [n, m], G [n, r], B [n, n]

Images do so along rows and columns. A tile of m x m outputs depends on n x n inputs, and at each of the n x n points
the sum over the channels is a matrix product [tiles, I] x [I, O]. Tiles of 4 x 4 outputs take a sixth (5x5 windows) or
a quarter (3x3) of the multiplications. The price is rounding. Relative to float64, errors are 1e-6 (3x3) and 3e-6
(5x5), root mean square: 2 to 8 times those of the direct form, and 12 times in sums as short as those of the input
gradient of FEMNIST's CNN. Where products are in TF32, as by default on NVIDIA GPUs, its errors grow alike.

On CPU, the transforms would be limited by memory, so they are computed for a few images at a time, which stay in the
cache. On other devices there are no loops, and kernels of clients (``vmap``) are one batched product over clients and
points, where a direct convolution would have groups.

Sources: Winograd, "Arithmetic complexity of computations" (SIAM 1980); Lavin and Gray, "Fast algorithms for
convolutional neural networks" (CVPR 2016), who also take the gradients. How they are computed here is our choice.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_mr.models import platforms

Pair = tuple[int, int]

POINTS = {4: (0, 1, -1), 6: (0, -1, 1 / 2, -2, 3 / 2), 8: (0, 1, -1, 1 / 2, -1 / 2, 2, -2)}
"""The points by n. Infinity, which stands for the coefficient of the highest power, is the last one in addition. Of all
sets of simple fractions, these have the smallest errors."""
TAPS, OUTPUTS = (3, 5), (2, 4)  # r and m, per direction

# Measured on one core of a CPU with AVX2, in multiply-adds of a product that take as long:
TRANSFORMED = 18  # for one number of a transformed image
OF_KERNEL = 90  # for one number of a transformed kernel, which is large and used once per step
WORTHWHILE = 1.6  # direct cost over ours: less is lost again in compilation, which takes a second longer per layer

BLOCK = 100  # tiles of a block of images, on CPU: few enough for the cache, and enough rows for products


class Matrices(NamedTuple):
    """The three matrices of one direction."""

    outputs: np.ndarray  # A
    kernel: np.ndarray  # G
    inputs: np.ndarray  # B


@functools.cache
def matrices(outputs: int, taps: int) -> Matrices:
    """The matrices for m outputs of a filter with r taps.

    G and A are powers of the points. Row j of B has the coefficients of the polynomial that is zero at all other
    points, and G is divided by its value at point j (Lagrange). The row of infinity picks the highest power.
    """
    points = np.array(POINTS[outputs + taps - 1], np.float64)
    others = [np.delete(points, number) for number in range(len(points))]
    scale = np.array([np.prod(point - rest) for point, rest in zip(points, others, strict=True)])
    powers = lambda count: np.vstack([np.vander(points, count, increasing=True), np.eye(count)[-1]])
    inputs = np.vstack([*(np.append(np.poly(rest)[::-1], 0) for rest in others), np.poly(points)[::-1]])
    return Matrices(powers(outputs), powers(taps) / np.append(scale, 1)[:, None], inputs)


def tile(x: jax.Array, kernel: jax.Array, pads: Sequence[Pair]) -> Pair | None:
    """Rows and columns m of the tiles with the lowest cost, or None if the direct convolution costs less.

    The costs are estimates. Few channels lose: their transforms cost more than the products save. So do small images
    with many channels, whose kernels are transformed for few tiles. Numbers other than float32 are left to the direct
    form: bfloat16 would lose too many digits.
    """
    *window, channels, features = kernel.shape
    if not (x.dtype == kernel.dtype == jnp.float32 and set(window) <= set(TAPS)):
        return None
    extent = _extent(x, window, pads)
    both, product = channels + features, channels * features

    def cost(tile: Pair) -> int:
        points = math.prod(m + r - 1 for m, r in zip(tile, window, strict=True))
        tiles = x.shape[0] * math.prod(_count(extent, tile))
        return points * (tiles * (product + TRANSFORMED * both) + OF_KERNEL * product)

    best = min(itertools.product(OUTPUTS, OUTPUTS), key=cost)
    direct = x.shape[0] * math.prod(extent) * math.prod(window) * product
    return best if WORTHWHILE * cost(best) <= direct else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve(x: jax.Array, kernel: jax.Array, pads: tuple[Pair, Pair], tile: Pair) -> jax.Array:
    """Convolution [B, H', W', O] of images [B, H, W, I] with a kernel [h, w, I, O].

    Differentiable in reverse mode, any number of times.

    Args:
      x: the images.
      kernel: the kernel; h and w are in `TAPS`.
      pads: ((top, bottom), (left, right)) rows and columns of zeros; negative numbers crop.
      tile: rows and columns of the tiles, in `OUTPUTS`.
    """
    window, extent = kernel.shape[:2], _extent(x, kernel.shape[:2], pads)
    rows, columns = _both(tile, window)
    transformed = _transformed(kernel, rows, columns)

    def block(x: jax.Array) -> tuple[jax.Array, tuple]:
        lines = _rows(_covered(x, window, pads, tile), rows.inputs, tile[0])
        size = (len(x), *_count(extent, tile))

        def at_point(each: tuple[jax.Array, jax.Array]) -> jax.Array:
            lines, kernel = each
            products = _columns(lines, columns.inputs, tile[1]) @ kernel
            return _join_columns(products.reshape(-1, *size, products.shape[-1]), columns.outputs)

        return _join_rows(_map(at_point, (lines, transformed)), rows.outputs, extent), ()

    return _in_blocks(block, (), math.prod(_count(extent, tile)), kernel, x)[0]


def _forward(x, kernel, pads, tile):
    return convolve(x, kernel, pads, tile), (x, kernel)


def _backward(pads, tile, residuals, gradient) -> Any:
    return gradients(*residuals, gradient, pads, tile)


convolve.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def gradients(
    x: jax.Array, kernel: jax.Array, gradient: jax.Array, pads: tuple[Pair, Pair], tile: Pair
) -> tuple[jax.Array, jax.Array]:
    """The gradients of images [B, H, W, I] and kernel [h, w, I, O] from that of the outputs [B, H', W', O].

    That of the images is a convolution with the kernel turned around. That of the kernel is a sum over the tiles of
    products at the points: G^T [(B d) * (A y)]. Nothing transformed is kept from the forward pass.
    """
    window, extent, images = kernel.shape[:2], gradient.shape[1:3], x.shape[1:3]
    rows, columns = _both(tile, window)
    turned = _transformed(jnp.swapaxes(kernel[::-1, ::-1], 2, 3), rows, columns)
    around = tuple(
        (r - 1 - low, size + low - outputs)
        for r, (low, _), size, outputs in zip(window, pads, images, extent, strict=True)
    )

    def block(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = (len(x), *_count(images, tile))
        of_inputs = _rows(_covered(x, window, pads, tile), rows.inputs, tile[0])
        of_outputs = _rows(_covered(gradient, (1, 1), ((0, 0), (0, 0)), tile), rows.outputs, tile[0])
        of_gradient = _rows(_covered(gradient, window, around, tile), rows.inputs, tile[0])

        def at_point(each: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            inputs, outputs, lines, kernel = each
            inputs, outputs = (
                _columns(part, matrix, tile[1])
                for part, matrix in ((inputs, columns.inputs), (outputs, columns.outputs))
            )
            products = _columns(lines, columns.inputs, tile[1]) @ kernel
            of_kernel = jnp.einsum("qti,qto->qio", inputs, outputs)
            return _join_columns(products.reshape(-1, *size, products.shape[-1]), columns.outputs), of_kernel

        joined, of_kernel = _map(at_point, (of_inputs, of_outputs, of_gradient, turned))
        return _join_rows(joined, rows.outputs, images), of_kernel

    zeros = jnp.zeros_like(jnp.swapaxes(turned, 2, 3))
    of_images, of_kernel = _in_blocks(block, zeros, math.prod(_count(extent, tile)), kernel, x, gradient)
    # The transposed map of `_transformed`.
    of_kernel = jnp.matmul(
        _kron(rows, columns).T, of_kernel.reshape(-1, math.prod(kernel.shape[2:])), precision=lax.Precision.HIGHEST
    )
    return of_images, of_kernel.reshape(kernel.shape)


def _gradients_forward(x, kernel, gradient, pads, tile):
    return gradients(x, kernel, gradient, pads, tile), (x, kernel, gradient)


def _gradients_backward(pads, tile, residuals, weights):
    # Like both gradients, these are derivatives of the sum of y * (x convolved with k), linear in x, in k and in y.
    x, kernel, gradient = residuals
    of_x, of_kernel = cast(Any, gradients(*weights, gradient, pads, tile))
    both = convolve(weights[0], kernel, pads, tile), convolve(x, weights[1], pads, tile)
    return of_x, of_kernel, jnp.add(*cast(Any, both))


gradients.defvjp(_gradients_forward, _gradients_backward)


# ---- Transforms


def _combined(matrix: np.ndarray, parts: Sequence[jax.Array], axis: int) -> jax.Array:
    """The combinations of arrays with the coefficients in the rows of a matrix, along a new axis."""
    shape = [1] * (parts[0].ndim + 1)
    shape[axis] = len(matrix)
    columns = matrix.T.astype(np.float32).reshape(-1, *shape)
    terms = (column * jnp.expand_dims(part, axis) for column, part in zip(columns, parts, strict=True))
    return functools.reduce(jnp.add, terms)


def _windows(x: jax.Array, axis: int, width: int, step: int) -> list[jax.Array]:
    """The first elements of all windows along an axis, then the second ones, and so on."""
    last = x.shape[axis] - width
    return [lax.slice_in_dim(x, start, start + last + 1, step, axis) for start in range(width)]


def _rows(x: jax.Array, matrix: np.ndarray, step: int) -> jax.Array:
    """Transform along the rows: [n, B, T, W, I] of images [B, H, W, I] with T tiles."""
    return _combined(matrix, _windows(x, 1, matrix.shape[1], step), 0)


def _columns(x: jax.Array, matrix: np.ndarray, step: int) -> jax.Array:
    """Transform along the columns, and flatten all tiles: [n, B T S, I] of [B, T, W, I] with S tiles."""
    return _combined(matrix, _windows(x, 2, matrix.shape[1], step), 0).reshape(len(matrix), -1, x.shape[-1])


def _join_columns(x: jax.Array, matrix: np.ndarray) -> jax.Array:
    """Transform back along the columns: [B, T, S m, O] of [n, B, T, S, O]."""
    y = _combined(matrix.T, list(x), 3)
    return y.reshape(*y.shape[:2], -1, y.shape[-1])


def _join_rows(x: jax.Array, matrix: np.ndarray, extent: Sequence[int]) -> jax.Array:
    """Transform back along the rows, and cut what tiles have beyond the extent: [B, H', W', O] of [n, B, T, W, O]."""
    y = _combined(matrix.T, list(x), 2)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, : extent[0], : extent[1]]


def _transformed(kernel: jax.Array, rows: Matrices, columns: Matrices) -> jax.Array:
    """The kernel [h, w, I, O] at all points: [n, n, I, O]."""
    flat = kernel.reshape(-1, math.prod(kernel.shape[2:]))
    at_points = jnp.matmul(_kron(rows, columns), flat, precision=lax.Precision.HIGHEST)
    return at_points.reshape(len(rows.kernel), len(columns.kernel), *kernel.shape[2:])


def _kron(rows: Matrices, columns: Matrices) -> np.ndarray:
    return np.kron(rows.kernel, columns.kernel).astype(np.float32)


# ---- Tiles and blocks


def _both(tile: Pair, window: Sequence[int]) -> tuple[Matrices, Matrices]:
    rows, columns = map(matrices, tile, window)
    return rows, columns


def _extent(x: jax.Array, window: Sequence[int], pads: Sequence[Pair]) -> Pair:
    """H' and W' of the outputs."""
    height, width = (size + sum(pad) - r + 1 for size, pad, r in zip(x.shape[1:3], pads, window, strict=True))
    return height, width


def _count(extent: Sequence[int], tile: Pair) -> Pair:
    """The number of tiles T and S that cover the outputs."""
    down, right = (-(-size // m) for size, m in zip(extent, tile, strict=True))
    return down, right


def _covered(x: jax.Array, window: Sequence[int], pads: Sequence[Pair], tile: Pair) -> jax.Array:
    """Pad images as for a convolution, and with as many zeros more as whole tiles need."""
    count = _count(_extent(x, window, pads), tile)
    sizes = (number * m + r - 1 for number, m, r in zip(count, tile, window, strict=True))
    edges = [(low, size - own - low, 0) for size, own, (low, _) in zip(sizes, x.shape[1:3], pads, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *edges, (0, 0, 0)))


def _map(function: Callable, arrays: Any) -> Any:
    """Map over the points of the rows. A loop makes XLA store its arguments instead of computing them n times."""
    return lax.map(function, arrays) if platforms.current() == "cpu" else jax.vmap(function)(arrays)


def _in_blocks(function: Callable, start: Any, tiles: int, kernel: jax.Array, *images: jax.Array) -> tuple[Any, Any]:
    """Call a function for blocks of images on CPU, elsewhere once for all.

    Args:
      function: called with a block of each array of images. Its first result belongs to the images, its second one is
        added to ``start``.
      start: zeros, or ().
      tiles: number of tiles of an image.
      kernel: the kernel, which is read for each block: with more channels, a block has more tiles.
      images: arrays [B, ...].
    """
    batch = len(images[0])
    wanted = max(BLOCK, *kernel.shape[2:]) / tiles
    divisors = (size for size in range(1, batch + 1) if batch % size == 0)
    size = min(divisors, key=lambda size: abs(math.log(size / wanted))) if platforms.current() == "cpu" else batch
    if size == batch:
        return function(*images)

    def step(total: Any, block: Any) -> tuple[Any, Any]:
        own, part = function(*block)
        return jax.tree.map(jnp.add, total, part), own

    total, own = lax.scan(step, start, tuple(each.reshape(-1, size, *each.shape[1:]) for each in images))
    return own.reshape(batch, *own.shape[2:]), total
