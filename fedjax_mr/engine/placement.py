"""Placement of data: on the devices, or in host memory if it does not fit.

From host memory, only the rows of the current cohort are transferred.
"""

from collections.abc import Callable
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

    def shapes(self, count: int) -> CohortSamples:
        """The shapes of the samples of ``count`` clients."""
        shape = lambda array: jax.ShapeDtypeStruct((count, self._width, *array.shape[1:]), array.dtype)
        return CohortSamples(shape(self._x), shape(self._y))

    def send_ahead(self, round: int, ids: np.ndarray) -> None:
        """Start the transfer of the samples of a later round."""
        self._ahead = {round: self.send(ids)}

    def sent_ahead(self, round: int) -> CohortSamples | None:
        """The samples of a round if they were sent ahead, else None. The store is empty afterwards."""
        ahead, self._ahead = self._ahead, {}
        return ahead.get(round)


@jax.tree_util.register_pytree_with_keys_class
class HostMemory:
    """The memories of the clients in host memory: only the rows of clients that have trained exist.

    Its size grows with these clients, not with N. As a pytree it has the leaves ``ids`` [R] and ``rows`` [R, ...], so a
    checkpoint holds no other rows either.
    """

    def __init__(self, first: Callable[[np.ndarray], Any], ids: Any, rows: Any) -> None:
        """Keep the given rows, without a copy.

        Args:
          first: the memory of clients ids [R] before they have trained: leaves [R, ...].
          ids: the clients that have trained [R] int32.
          rows: their memory, leaves [R, ...].
        """
        self._first = first
        self._ids, self._rows = ids, rows  # may have more rows than clients: the room for the next ones
        self._number: dict[int, int] | None = None  # row of each client; made at the first use

    @property
    def ids(self) -> Any:
        """The clients that have trained [R] int32."""
        return self._ids if self._number is None else self._ids[: len(self)]

    @property
    def rows(self) -> Any:
        """The memory of ``ids``, leaves [R, ...]."""
        return self._rows if self._number is None else jax.tree.map(lambda leaf: leaf[: len(self)], self._rows)

    def tree_flatten_with_keys(self) -> tuple[tuple, Callable]:
        """The leaves of the pytree with their names."""
        name = jax.tree_util.GetAttrKey
        return ((name("ids"), self.ids), (name("rows"), self.rows)), self._first

    @classmethod
    def tree_unflatten(cls, first: Callable, leaves: tuple) -> "HostMemory":
        """The memory with these leaves, which may be shapes."""
        return cls(first, *leaves)

    def __len__(self) -> int:
        """Number of clients that have trained."""
        return len(self._numbers())

    def read(self, ids: np.ndarray) -> Any:
        """Copy the rows [R, ...] of clients ``ids`` [R]."""
        rows = np.array([self._numbers().get(client, -1) for client in ids.tolist()], int)
        known = rows >= 0
        if known.all():
            return jax.tree.map(lambda leaf: leaf[rows], self._rows)

        def merged(new: Any, kept: np.ndarray) -> np.ndarray:
            new = np.array(new)
            new[known] = kept[rows[known]]
            return new

        return jax.tree.map(merged, self._first(ids), self._rows)

    def write(self, ids: np.ndarray, rows: Any) -> None:
        """Replace the rows [R, ...] of clients ``ids`` [R]. Rows of the same client must be equal."""
        numbers = self._numbers()
        places = [numbers.setdefault(client, len(numbers)) for client in ids.tolist()]
        self._ids = _with_room(self._ids, len(numbers))
        self._rows = jax.tree.map(lambda leaf: _with_room(leaf, len(numbers)), self._rows)
        self._ids[places] = ids
        for leaf, new in zip(jax.tree.leaves(self._rows), jax.tree.leaves(rows), strict=True):
            leaf[places] = np.asarray(new)

    def _numbers(self) -> dict[int, int]:
        if self._number is None:
            self._number = {client: row for row, client in enumerate(self._ids.tolist())}
        return self._number


def _with_room(array: np.ndarray, count: int) -> np.ndarray:
    """The array if it has ``count`` rows, else a copy with twice as many. Unused rows take no memory."""
    if count <= len(array):
        return array
    larger = np.empty((2 * count, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def rows_of(memory: Any, ids: np.ndarray) -> Any:
    """The rows [R, ...] of clients ``ids`` [R] of a memory on the devices or on the host."""
    return memory.read(ids) if isinstance(memory, HostMemory) else jax.tree.map(lambda leaf: leaf[ids], memory)


def shapes_at(tree: Any, shardings: Any) -> Any:
    """The shapes and dtypes of a tree at one sharding or at a tree of shardings. Nothing is placed."""

    def each(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: each(leaf, shardings), tree)
    return jax.tree.map(each, tree, shardings)


def shared_by_cpus(tree: Any) -> Any:
    """A copy that `place` puts on all CPU devices of this process without further copies. It must never be donated.

    JAX copies an array of NumPy once for every CPU device, unless it begins at a multiple of 64 bytes, as JAX's do.
    """
    device = jax.local_devices(backend="cpu")[0]

    def shared(leaf: Any) -> Any:
        if np.ndim(leaf) == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return np.asarray(jax.device_put(leaf, device))

    return jax.tree.map(shared, tree)


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
