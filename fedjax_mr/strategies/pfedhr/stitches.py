"""Stitches: new layers that map the output of a block to the input shape of the next block.

pFedHR, section 3.2.3: ReLU(W x + b). The paper does not specify W between feature maps. The authors' code flattens them
(``flat``, without ReLU), which takes 183 million parameters in the median of random candidates from M1 to M4.
``channel`` mixes channels, and averages or repeats positions.
"""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import layers
from fedjax_mr.models.blocks import head
from fedjax_mr.strategies.pfedhr.chains import Block, Chain, PiecePrograms, output_shape


class ChannelStitch(nn.Module):
    """A stitch that mixes channels.

    Between feature maps, it is a 1x1 convolution with adaptive averaging. A vector as output is treated as 1x1 maps. A
    vector as input is mapped by a dense layer. Averaging and convolution commute, so the order with less computation is
    used.

    Attributes:
      returns: shape of one output sample.
      relu: whether ReLU follows.
    """

    returns: tuple[int, ...]
    relu: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Map [B, ...] to [B, *returns]."""
        if x.ndim == 2:
            x = layers.Dense(math.prod(self.returns), name="dense")(x)
        else:
            *size, features = self.returns if len(self.returns) == 3 else (1, 1, *self.returns)
            mix = layers.Dense(features, name="dense")
            grows = math.prod(size) > math.prod(x.shape[1:3])
            x = adaptive_average(mix(x), size) if grows else mix(adaptive_average(x, size))
        x = nn.relu(x) if self.relu else x
        return x.reshape(x.shape[0], *self.returns)


class FlatStitch(nn.Module):
    """A stitch of one dense layer over flattened inputs and outputs, as in the authors' code.

    Attributes:
      returns: shape of one output sample.
    """

    returns: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Map [B, ...] to [B, *returns]."""
        x = layers.Dense(math.prod(self.returns), name="dense")(x.reshape(x.shape[0], -1))
        return x.reshape(x.shape[0], *self.returns)


def adaptive_average(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """Average maps [B, H, W, I] over windows to ``size`` (h, w): [B, h, w, I], like PyTorch's adaptive pooling.

    If the output is larger than the input, windows overlap and values repeat.
    """
    for axis, new in enumerate(size, start=1):
        if x.shape[axis] != new:
            weights = jnp.asarray(_windows(x.shape[axis], new))
            x = jnp.moveaxis(jnp.tensordot(weights, x, axes=(1, axis)), 0, axis)
    return x


def _windows(size: int, new: int) -> np.ndarray:
    positions = np.arange(size)
    starts, ends = np.arange(new) * size // new, -(-np.arange(1, new + 1) * size // new)
    inside = (positions >= starts[:, None]) & (positions < ends[:, None])
    return (inside / inside.sum(axis=1, keepdims=True)).astype(np.float32)


def stitch(
    blocks: Sequence[Block],
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    kind: str,
    limit: int,
    programs: PiecePrograms,
    key: jax.Array,
) -> Chain:
    """Join blocks to a chain, with a stitch before each block and a new classifier at the end; consumes ``key``.

    Args:
      blocks: the blocks in order.
      input_shape: shape of one sample.
      num_classes: C.
      kind: ``channel`` or ``flat``.
      limit: maximum number of parameters of all new layers.
      programs: compiled programs, for the initialisation of the new layers.
      key: randomness of the initialisation.

    Raises:
      UserError: the new layers have more parameters than the limit.
    """
    flat = kind == "flat"
    chain, shape, size = [], input_shape, 0
    for position, block in enumerate(blocks):
        module = FlatStitch(block.takes) if flat else ChannelStitch(block.takes, relu=position > 0)
        size += _size(module, shape, limit, size)
        chain += [programs.init(module, shape, jax.random.fold_in(key, position)), block.piece]
        shape = output_shape(block.piece, block.takes)
    classifier = head(num_classes, initialisation="torch")
    _size(classifier, shape, limit, size)
    return (*chain, programs.init(classifier, shape, jax.random.fold_in(key, len(blocks))))


def _size(module: nn.Module, shape: tuple[int, ...], limit: int, previous: int) -> int:
    start = lambda: module.init(random_key(0), jnp.zeros((1, *shape)), train=False, mask=None)
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(start)))
    if previous + size > limit:
        raise UserError(
            f"the stitches of a candidate would have at least {previous + size:,} parameters, more than {limit:,}: "
            "pass hyper.stitch=channel, or a larger hyper.stitch_limit="
        )
    return size
