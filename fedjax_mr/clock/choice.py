"""How asynchronous clients are chosen among those that are idle."""

from collections.abc import Callable

import jax
import numpy as np

from fedjax_mr.clock.schedule import Choose
from fedjax_mr.strategies import interface
from fedjax_mr.strategies.interface import History

_words = jax.jit(lambda key, count: jax.random.bits(key, (count,)), static_argnums=1)  # compiled once for all runs


def uniformly(key_of: Callable[[int], jax.Array]) -> Choose:
    """Choose idle clients uniformly, in random order.

    If no client is busy, these are the clients that `strategies.parts.select_uniformly` selects with the same key.

    Args:
      key_of: the key of each draw, by its number.
    """

    def choose(number: int, busy: np.ndarray, count: int, history: History | None = None) -> np.ndarray:
        drawn = np.asarray(_words(key_of(number), len(busy))).astype(np.int64)
        order = np.argsort(-drawn, kind="stable")
        return order[~busy[order]][:count]

    return choose


def by(strategy_chooses: interface.Choose, key_of: Callable[[int], jax.Array]) -> Choose:
    """Choose clients as a strategy does (`Strategy.choose`).

    Args:
      strategy_chooses: the member of the strategy.
      key_of: the key of each draw, by its number.
    """

    def choose(number: int, busy: np.ndarray, count: int, history: History) -> np.ndarray:
        return strategy_chooses(history, busy, key_of(number))

    return choose
