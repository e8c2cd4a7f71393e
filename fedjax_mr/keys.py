"""Random keys of one kind, and its hash. A seed means the same numbers whatever kind JAX makes by default."""

from typing import Any

import jax
import numpy as np

KIND = "threefry2x32"
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
MASK = 0xFFFFFFFF


def random_key(seed: Any) -> jax.Array:
    """The key of a seed."""
    return jax.random.key(seed, impl=KIND)


def key_from_data(data: Any) -> jax.Array:
    """The key with this data [..., 2] uint32, see `jax.random.key_data`."""
    return jax.random.wrap_key_data(data, impl=KIND)


def threefry(key: Any, block: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC 2011): two words for a block of two words, with a key of two.

    Words have 32 bits: integers, or arrays of ``uint32`` of NumPy or JAX. XLA for CPUs computes it in one loop with
    what follows, unlike JAX's own function.
    """
    mask = MASK if isinstance(key[0], int) else np.uint32(MASK)
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    left, right = block[0] + keys[0], block[1] + keys[1] & mask
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            left = left + right  # an integer keeps its carry until the end
            right = (right << bits | right >> 32 - bits) ^ left
            right = right & mask
        left = left + keys[(group + 1) % 3]
        right = right + keys[(group + 2) % 3] + (group + 1) & mask
    return left & mask, right
