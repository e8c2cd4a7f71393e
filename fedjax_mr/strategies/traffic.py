"""What a round sends: objects of equal size, counted on the devices; bytes are their products on the host."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parcels:
    """A number of sent objects that have the same size.

    Attributes:
      count: number of objects in a round, int32. The engine sums it over rounds.
      size: bytes per object. It is static, so that byte totals cannot overflow an integer type of the device.
    """

    count: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, count: jax.Array | int, size: int) -> "Parcels":
        """Parcels of ``count`` objects of ``size`` bytes each."""
        return cls(jnp.asarray(count, jnp.int32), int(size))


class Traffic(NamedTuple):
    """Objects sent in one or more rounds."""

    down: tuple[Parcels, ...] = ()  # server to clients
    up: tuple[Parcels, ...] = ()  # clients to server
    peer: tuple[Parcels, ...] = ()  # from client to client

    def num_bytes(self) -> tuple[int, int, int]:
        """Bytes (down, up, client to client); host code."""
        down, up, peer = (sum(int(parcels.count) * parcels.size for parcels in each) for each in self)
        return down, up, peer


def usual_traffic(payloads: dict[str, Any], uploads: dict[str, Any]) -> Traffic:
    """Traffic of the payloads and uploads [K, ...] of a round, given as arrays or as shapes."""

    def rows(tree: dict[str, Any]) -> tuple[Parcels, ...]:
        leaves = jax.tree.leaves(tree)
        return (Parcels.of(leaves[0].shape[0], trees.num_bytes(tree) // leaves[0].shape[0]),) if leaves else ()

    return Traffic(rows(payloads), rows(uploads))
