"""Placement: on the devices, or on the host for what is larger than they are; then only a cohort's rows travel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class CohortSamples(NamedTuple):
    """The samples of the clients of a round in the order of the layout, each filled up to the largest client's number.

    The filling is never trained on.
    """

    x: Any  # [K', largest client, ...]
    y: Any  # [K', largest client]


class HostSamples:
    """The federation's samples in the host's memory, or in files mapped into it; a cohort's are sent to the devices."""

    def __init__(self, x: Any, y: Any, index: Any, offsets: Any, *, sharding: jax.sharding.Sharding) -> None:
        """Keep the samples [M, ...], the clients' rows in a flat index array and their offsets [N + 1].

        Args:
          x: samples [M, ...].
          y: labels [M].
          index: all clients' rows of x, client after client.
          offsets: where each client's run begins in ``index`` [N + 1].
          sharding: how the clients of a round are laid out over the devices.
        """
        self._x, self._y = np.asarray(x), np.asarray(y)
        self._index, self._offsets = np.asarray(index), np.asarray(offsets)
        self._width = max(1, int(np.diff(self._offsets).max()))
        self._sharding = sharding
        self._ahead: dict[int, CohortSamples] = {}  # by round; at most one

    def send(self, ids: np.ndarray) -> CohortSamples:
        """Begin to send the samples of clients ``ids`` [K']; each process gathers those of its own devices alone."""
        positions = self._offsets[ids][:, None] + np.arange(self._width)
        rows = self._index[np.minimum(positions, len(self._index) - 1)]

        def put(array: np.ndarray) -> jax.Array:
            shape = (*rows.shape, *array.shape[1:])
            return jax.make_array_from_callback(shape, self._sharding, lambda part: array[rows[(part or ())[:2]]])

        return CohortSamples(put(self._x), put(self._y))

    def send_ahead(self, round: int, ids: np.ndarray) -> None:
        """Begin to send the samples of a later round."""
        self._ahead = {round: self.send(ids)}

    def sent_ahead(self, round: int) -> CohortSamples | None:
        """Return a round's samples if they were sent ahead; forget all that were."""
        ahead, self._ahead = self._ahead, {}
        return ahead.get(round)


def rows_of(memory: Any, ids: np.ndarray) -> Any:
    """Return the rows [R, ...] of some clients from a memory [N, ...] that the host keeps."""
    return jax.tree.map(lambda leaf: leaf[ids], memory)


def write_rows(memory: Any, ids: np.ndarray, rows: Any) -> None:
    """Write the rows [R, ...] of some clients into a memory [N, ...] that the host keeps."""
    for leaf, new in zip(jax.tree.leaves(memory), jax.tree.leaves(rows), strict=True):
        leaf[ids] = np.asarray(new)


def shapes_at(tree: Any, shardings: Any) -> Any:
    """Return shapes and dtypes in place of a tree's arrays, at one sharding or a tree of them; nothing is placed."""

    def each(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: each(leaf, shardings), tree)
    return jax.tree.map(each, tree, shardings)


def place(tree: Any, shardings: Any) -> Any:
    """Return a tree on the devices of one sharding, or of a tree of them.

    Over several processes each holds all of what is not yet on devices, and places its own part: nothing is sent.
    """
    if all(each.is_fully_addressable for each in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)

    def put(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: put(leaf, shardings), tree)
    return jax.tree.map(put, tree, shardings)
