"""Client data larger than a device: they stay on the host, and a cohort's samples are sent ahead of its round."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Sent(NamedTuple):
    """The samples of the clients of a round in the order of the layout, each filled up to the largest client's number.

    What fills up is never trained on.
    """

    x: Any  # [K', largest client, ...]
    y: Any  # [K', largest client]


class HostData:
    """The federation's samples in the host's memory, or in files mapped into it."""

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

    def shapes(self, count: int) -> Sent:
        """Return the shapes of what is sent for ``count`` = K' clients."""
        shape = (count, self._width)
        return Sent(
            jax.ShapeDtypeStruct((*shape, *self._x.shape[1:]), self._x.dtype),
            jax.ShapeDtypeStruct(shape, self._y.dtype),
        )

    def send(self, ids: np.ndarray) -> Sent:
        """Begin to send the samples of clients ``ids`` [K']; each process gathers those of its own devices alone."""
        positions = self._offsets[ids][:, None] + np.arange(self._width)
        rows = self._index[np.minimum(positions, len(self._index) - 1)]

        def put(array: np.ndarray) -> jax.Array:
            shape = (*rows.shape, *array.shape[1:])
            return jax.make_array_from_callback(shape, self._sharding, lambda part: array[rows[(part or ())[:2]]])

        return Sent(put(self._x), put(self._y))


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
