"""How asynchronous clients are chosen among those that are idle."""

from collections.abc import Callable

import jax
import numpy as np

from fedjax_mr.clock.schedule import Choose


def uniformly(key_of: Callable[[int], jax.Array]) -> Choose:
    """Choose idle clients uniformly, in random order.

    If no client is busy, these are the clients that `strategies.base.select_uniformly` selects with the same key.

    Args:
      key_of: the key of each draw, by its number.
    """
    words = jax.jit(lambda key, count: jax.random.bits(key, (count,)), static_argnums=1)

    def choose(number: int, busy: np.ndarray, count: int) -> np.ndarray:
        drawn = np.asarray(words(key_of(number), len(busy))).astype(np.int64)
        order = np.argsort(-drawn, kind="stable")
        return order[~busy[order]][:count]

    return choose
