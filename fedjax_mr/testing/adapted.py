"""A small attention network with adapters, for tests."""

import functools

import flax.linen as nn
import jax
import numpy as np

from fedjax_mr.keys import random_key
from fedjax_mr.models import Model, adapters
from fedjax_mr.models.base import Variables


class Attention(nn.Module):
    """Attention with two heads over the four rows of a small image, and a classifier."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the logits [B, C] of images [B, 4, 4, 1]."""
        x = x.reshape(x.shape[0], 4, 4)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attend")(x)
        return nn.Dense(self.num_classes, name="last")(x.reshape(x.shape[0], -1))


WHOLE = Model(Attention(3), (4, 4, 1), name="attention")


@functools.cache
def adapted(rank: int = 2, seed: int = 0, *, head: bool = False, **options) -> Model:
    """The network with adapters."""
    return adapters.lora(WHOLE, rank, 4.0, key=random_key(seed), head=head, **options)


def random_models(model: Model, count: int) -> Variables:
    """Stacked models [K, ...] of normal numbers."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: rng.normal(size=(count, *leaf.shape)).astype(leaf.dtype), model.shapes())
