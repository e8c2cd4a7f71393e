"""The client axis: K clients over D devices (``shard_map``), with ``lanes`` clients side by side on each device.

``vmap`` alone is not enough. With one kernel per client, a convolution becomes a grouped convolution, which is slow on
CPUs and on many GPUs, so the number of lanes is a setting. Sharding annotations are not enough either: XLA's
partitioner gathers the operands of grouped convolutions, so every device would train every client.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_mr.errors import UserError

CLIENTS = "clients"


@dataclasses.dataclass(frozen=True)
class ClientAxis:
    """The layout of the K clients of a round over the devices.

    Attributes:
      mesh: one axis, ``clients``, over D devices.
      lanes: clients that train side by side on one device.
      fused: whether a whole round runs in one compiled program. It is False on several CPU devices of one process:
        collectives between CPU devices of one process can deadlock. The server step then runs on the first device, and
        the rows are copied between the devices.
      described: whether the machine is not present (``jax.experimental.topologies``). Programs are then compiled, with
        shapes in place of arrays, but not executed.
    """

    mesh: Mesh
    lanes: int
    fused: bool
    described: bool = False

    @property
    def platform(self) -> str:
        """Platform of the devices: ``cpu``, ``gpu`` or ``tpu``."""
        return self.mesh.devices.flat[0].platform

    @property
    def num_devices(self) -> int:
        """Number of devices D."""
        return self.mesh.devices.size

    @property
    def server_device(self) -> jax.sharding.Sharding:
        """Placement of the server state: on all devices if rounds are fused, else on the first device."""
        return self.replicated if self.fused else SingleDeviceSharding(self.mesh.devices.flat[0])

    @property
    def replicated(self) -> NamedSharding:
        """One copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def sharded(self) -> NamedSharding:
        """The leading axis divided into D equal parts, one per device."""
        return NamedSharding(self.mesh, PartitionSpec(CLIENTS))

    def parameter_spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Choose the parameter axis along which a stacked leaf [K, ...] is divided: the one with the least padding.

        A small leaf is replicated if its padding would cost more to transfer than a copy on every device.
        """
        devices = self.num_devices
        sizes = {axis: self._padded_size(size) / size for axis, size in enumerate(shape) if axis and size}
        best = min(sizes, key=lambda axis: (sizes[axis], -shape[axis]), default=0)
        if not best or sizes[best] > devices / 2 or devices == 1:
            return PartitionSpec()
        return PartitionSpec(*(None,) * best, CLIENTS)

    def _padded_size(self, size: int) -> int:
        return -(-size // self.num_devices) * self.num_devices

    def state_placement(self, tree: Any, *, rows: Collection[int]) -> Any:
        """Placement of the server state or of the clients' memory between two calls, per leaf.

        A stacked leaf has a leading axis in ``rows`` (K or N). It is divided over its parameters (see `by_parameters`)
        if D divides them evenly, else over its rows if D divides their number. Other leaves are replicated.
        """
        if not (self.fused and self.num_devices > 1):
            return jax.tree.map(lambda leaf: self.server_device, tree)

        def each(leaf: Any) -> NamedSharding:
            if not leaf.shape[:1] or leaf.shape[0] not in rows:
                return self.replicated
            spec = self.parameter_spec(leaf.shape)
            if spec and leaf.shape[len(spec) - 1] % self.num_devices == 0:
                return NamedSharding(self.mesh, spec)
            return self.sharded if leaf.shape[0] % self.num_devices == 0 else self.replicated

        return jax.tree.map(each, tree)

    def by_parameters(self, tree: Any, *, rows: Collection[int]) -> Any:
        """Divide stacked leaves over their parameters inside a compiled program.

        Operations that mix whole models are then local to a device. The change from rows costs one all-to-all per leaf,
        which moves (D-1)/D of it. The change back costs the same. Axes that D does not divide are padded.
        """
        if not (self.fused and self.num_devices > 1):
            return tree

        def each(leaf: jax.Array) -> jax.Array:
            if not leaf.shape[:1] or leaf.shape[0] not in rows:
                return leaf  # left to the compiler, because a copy on every device may not be needed
            spec = self.parameter_spec(leaf.shape)
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))

        return jax.tree.map(each, tree)

    def padded(self, count: int) -> int:
        """Round ``count`` up to a multiple of D x lanes."""
        block = self.num_devices * self.lanes
        return -(-count // block) * block


def client_axis(*, devices: int | None, lanes: int | None, cohort_size: int) -> ClientAxis:
    """The layout for K clients per round.

    Args:
      devices: number of devices D. Default: all devices, but at most K in a single process.
      lanes: clients side by side on one device. Default: 1 on CPUs, else K / D rounded up.
      cohort_size: K.

    Raises:
      UserError: D is more than the available devices, or less than those of several processes.
    """
    available, several = jax.devices(), jax.process_count() > 1
    count = devices or (len(available) if several else min(len(available), cohort_size))
    if count > len(available):
        raise UserError(
            f"devices={count} is more than the {len(available)} {available[0].platform} device(s) that JAX sees"
        )
    if several and count != len(available):
        raise UserError(f"devices={count} leaves out some of the {len(available)} devices of all processes")
    per_device = -(-cohort_size // count)
    if lanes is None:
        lanes = 1 if available[0].platform == "cpu" else per_device
    fused = count == 1 or several or available[0].platform != "cpu"
    return ClientAxis(Mesh(np.array(available[:count]), (CLIENTS,)), min(lanes, per_device), fused)


def first_device() -> ClientAxis:
    """The layout of a server whose clients train on other machines: the server step runs on the first device."""
    return ClientAxis(Mesh(np.array(jax.devices()[:1]), (CLIENTS,)), lanes=1, fused=False)


def assign(axis: ClientAxis, work: jax.Array) -> jax.Array:
    """Assign the rows of a cohort to slots, balanced over the devices (Graham's longest-processing-time rule).

    Rows with similar work share the lanes of one step. Groups of rows are assigned in order of decreasing work, each to
    the device with the least work so far.

    Args:
      axis: D devices x lanes.
      work: number of samples of each client [K].

    Returns:
      The row of each slot [K'], where K' is K rounded up to a multiple of D x lanes; K for empty slots.
    """
    count = work.shape[0]
    groups = axis.padded(count) // axis.lanes
    groups_per_device = groups // axis.num_devices
    longest_first = jnp.argsort(-work, stable=True).astype(jnp.int32)
    filler = jnp.full((groups * axis.lanes - count,), count, jnp.int32)
    members = jnp.concatenate([longest_first, filler]).reshape(groups, axis.lanes)
    cost = jnp.where(members[:, 0] < count, work[jnp.minimum(members[:, 0], count - 1)], 0).astype(jnp.float32)

    def place(group: jax.Array, carry: tuple) -> tuple:
        load, used, slots = carry
        device = jnp.argmin(jnp.where(used < groups_per_device, load, jnp.inf))
        slots = slots.at[device, used[device]].set(members[group])
        return load.at[device].add(cost[group]), used.at[device].add(1), slots

    start = (
        jnp.zeros(axis.num_devices),
        jnp.zeros(axis.num_devices, jnp.int32),
        jnp.full((axis.num_devices, groups_per_device, axis.lanes), count, jnp.int32),
    )
    return jax.lax.fori_loop(0, groups, place, start)[2].reshape(-1)


def positions(slots: jax.Array, count: int) -> jax.Array:
    """The slot of each row [K]; the inverse of `assign`."""
    return jnp.zeros(count, jnp.int32).at[slots].set(jnp.arange(slots.shape[0], dtype=jnp.int32), mode="drop")


def map_clients(axis: ClientAxis, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Map ``function(shared, row)`` over rows [K', ...], without collectives.

    The rows are divided over the devices by ``shard_map`` and over the lanes by ``vmap``. The groups of a device run
    one after the other. With one lane, ``vmap`` is left out, because it would mask every loop of dynamic length.

    Args:
      axis: the layout.
      function: (shared, row) -> result.

    Returns:
      A function (shared, rows [K', ...]) -> results [K', ...].
    """
    function = jax.named_scope("clients_part")(function)  # separates the clients from a server that trains, too

    def on_device(shared: Any, rows: Any) -> Any:
        if axis.lanes == 1:
            return jax.lax.map(lambda row: function(shared, row), rows)
        split = jax.tree.map(lambda leaf: leaf.reshape(-1, axis.lanes, *leaf.shape[1:]), rows)
        done = jax.lax.map(lambda group: jax.vmap(function, in_axes=(None, 0))(shared, group), split)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), done)

    specs = (PartitionSpec(), PartitionSpec(CLIENTS))
    return jax.shard_map(on_device, mesh=axis.mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
