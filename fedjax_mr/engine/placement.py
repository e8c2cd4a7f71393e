"""Placement of data: on the devices, or in host memory if it does not fit.

From host memory, only the rows of the current cohort are transferred.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class CohortSamples(NamedTuple):
    """The samples of the clients of a round, in the order of the layout.

    Each client is padded to the size of the largest client. The padding is never used for training.
    """

    x: Any  # [K', largest client, ...]
    y: Any  # [K', largest client]


class HostSamples:
    """All samples in host memory or in memory-mapped files. Those of a cohort are sent to the devices."""

    def __init__(self, x: Any, y: Any, index: Any, offsets: Any, *, sharding: jax.sharding.Sharding) -> None:
        """Keep the samples in host memory.

        Args:
          x: samples [M, ...].
          y: labels [M].
          index: row numbers of ``x``, client after client.
          offsets: client i has the entries ``offsets[i]`` to ``offsets[i + 1] - 1`` of ``index`` [N + 1].
          sharding: placement of the clients of a round on the devices.
        """
        self._x, self._y = np.asarray(x), np.asarray(y)
        self._index, self._offsets = np.asarray(index), np.asarray(offsets)
        self._width = max(1, int(np.diff(self._offsets).max()))
        self._sharding = sharding
        self._ahead: dict[int, CohortSamples] = {}  # by round, at most one entry

    def send(self, ids: np.ndarray) -> CohortSamples:
        """Start the transfer of the samples of clients ``ids`` [K']. Each process gathers only those of its devices."""
        positions = self._offsets[ids][:, None] + np.arange(self._width)
        rows = self._index[np.minimum(positions, len(self._index) - 1)]

        def put(array: np.ndarray) -> jax.Array:
            shape = (*rows.shape, *array.shape[1:])
            return jax.make_array_from_callback(shape, self._sharding, lambda part: array[rows[(part or ())[:2]]])

        return CohortSamples(put(self._x), put(self._y))

    def send_ahead(self, round: int, ids: np.ndarray) -> None:
        """Start the transfer of the samples of a later round."""
        self._ahead = {round: self.send(ids)}

    def sent_ahead(self, round: int) -> CohortSamples | None:
        """The samples of a round if they were sent ahead, else None. The store is empty afterwards."""
        ahead, self._ahead = self._ahead, {}
        return ahead.get(round)


def rows_of(memory: Any, ids: np.ndarray) -> Any:
    """Read the rows [R, ...] of clients ``ids`` [R] from a memory [N, ...] on the host."""
    return jax.tree.map(lambda leaf: leaf[ids], memory)


def write_rows(memory: Any, ids: np.ndarray, rows: Any) -> None:
    """Write the rows [R, ...] of clients ``ids`` [R] into a memory [N, ...] on the host."""
    for leaf, new in zip(jax.tree.leaves(memory), jax.tree.leaves(rows), strict=True):
        leaf[ids] = np.asarray(new)


def shapes_at(tree: Any, shardings: Any) -> Any:
    """The shapes and dtypes of a tree at one sharding or at a tree of shardings. Nothing is placed."""

    def each(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: each(leaf, shardings), tree)
    return jax.tree.map(each, tree, shardings)


def place(tree: Any, shardings: Any) -> Any:
    """Place a tree on the devices of one sharding, or of a tree of shardings.

    With several processes, each must hold the complete host arrays. It places only its own part, and nothing is sent
    between processes.
    """
    if all(each.is_fully_addressable for each in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)

    def put(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: put(leaf, shardings), tree)
    return jax.tree.map(put, tree, shardings)
