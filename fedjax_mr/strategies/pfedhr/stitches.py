"""Stitches between blocks that never met: new layers that bring the output of one to the shape that the next one takes.

pFedHR, section 3.2.3: ReLU(W x + b). The paper does not say what W is between feature maps; the authors' code flattens
everything (``flat``, without ReLU), which takes 183 million numbers in the median of random candidates from M1 to M4.
``channel`` instead mixes channels and averages or repeats places.
"""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.models import layers
from fedjax_mr.models.blocks import head
from fedjax_mr.strategies.pfedhr.chains import Block, Chain, Programs, output_shape


class ChannelStitch(nn.Module):
    """Maps to maps: a 1x1 convolution and adaptive averaging; to a vector: of 1x1 maps; from a vector: a dense layer.

    Averaging and the convolution commute, so the one that leaves less to compute comes first.

    Attributes:
      returns: the shape of one sample that leaves it.
      relu: whether ReLU follows.
    """

    returns: tuple[int, ...]
    relu: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """[B, *returns] of [B, ...]."""
        if x.ndim == 2:
            x = layers.Dense(math.prod(self.returns), name="dense")(x)
        else:
            *places, features = self.returns if len(self.returns) == 3 else (1, 1, *self.returns)
            mix = layers.Dense(features, name="dense")
            grows = math.prod(places) > math.prod(x.shape[1:3])
            x = adaptive_average(mix(x), places) if grows else mix(adaptive_average(x, places))
        x = nn.relu(x) if self.relu else x
        return x.reshape(x.shape[0], *self.returns)


class FlatStitch(nn.Module):
    """One dense layer between everything and everything, as in the authors' code.

    Attributes:
      returns: the shape of one sample that leaves it.
    """

    returns: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """[B, *returns] of [B, ...]."""
        x = layers.Dense(math.prod(self.returns), name="dense")(x.reshape(x.shape[0], -1))
        return x.reshape(x.shape[0], *self.returns)


def adaptive_average(x: jax.Array, places: Sequence[int]) -> jax.Array:
    """Maps [B, h, w, I] of [B, H, W, I]: means over windows of nearly equal size, as PyTorch's adaptive pooling.

    Where there are more places than before, windows overlap and values repeat.
    """
    for axis, new in enumerate(places, start=1):
        if x.shape[axis] != new:
            weights = jnp.asarray(_windows(x.shape[axis], new))
            x = jnp.moveaxis(jnp.tensordot(weights, x, axes=(1, axis)), 0, axis)
    return x


def _windows(size: int, new: int) -> np.ndarray:
    places = np.arange(size)
    starts, ends = np.arange(new) * size // new, -(-np.arange(1, new + 1) * size // new)
    inside = (places >= starts[:, None]) & (places < ends[:, None])
    return (inside / inside.sum(axis=1, keepdims=True)).astype(np.float32)


def stitch(
    blocks: Sequence[Block],
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    kind: str,
    limit: int,
    programs: Programs,
    key: jax.Array,
) -> Chain:
    """The chain of blocks with a stitch in front of each and a new classifier behind; consumes ``key``.

    Args:
      blocks: what is joined, in order.
      input_shape: the shape of one sample.
      num_classes: C.
      kind: ``channel`` or ``flat``.
      limit: the largest number of parameters that all new layers together may have.
      programs: where the new layers' initialisation is compiled.
      key: of the initialisation.

    Raises:
      UserError: the stitches would be larger than the limit.
    """
    flat = kind == "flat"
    chain, shape, size = [], input_shape, 0
    for place, block in enumerate(blocks):
        module = FlatStitch(block.takes) if flat else ChannelStitch(block.takes, relu=place > 0)
        size += _size(module, shape, limit, size)
        chain += [programs.init(module, shape, jax.random.fold_in(key, place)), block.piece]
        shape = output_shape(block.piece, block.takes)
    classifier = head(num_classes, initialisation="torch")
    _size(classifier, shape, limit, size)
    return (*chain, programs.init(classifier, shape, jax.random.fold_in(key, len(blocks))))


def _size(module: nn.Module, shape: tuple[int, ...], limit: int, so_far: int) -> int:
    start = lambda: module.init(jax.random.key(0), jnp.zeros((1, *shape)), train=False, mask=None)
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(start)))
    if so_far + size > limit:
        raise UserError(
            f"the stitches of a candidate would have {so_far + size:,} parameters, more than the limit of {limit:,}; "
            "stitch by channels, or raise the limit"
        )
    return size
