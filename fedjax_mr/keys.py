"""Random keys of one kind. A seed means the same numbers whatever kind JAX makes by default."""

from typing import Any

import jax

KIND = "threefry2x32"


def random_key(seed: Any) -> jax.Array:
    """The key of a seed."""
    return jax.random.key(seed, impl=KIND)


def key_from_data(data: Any) -> jax.Array:
    """The key with this data [..., 2] uint32, see `jax.random.key_data`."""
    return jax.random.wrap_key_data(data, impl=KIND)
