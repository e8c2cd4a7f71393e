"""The client axis: K clients over D devices (``shard_map``) and ``lanes`` clients at once on each device.

Why not ``vmap`` alone: a convolution whose kernels differ per client is one grouped convolution, slow on CPUs and on
many GPUs, so how many clients run side by side is a dial. Why not sharding annotations: XLA's partitioner gathers the
operands of grouped convolutions, and every device would train every client.
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
    """How the clients of a round are laid out.

    Attributes:
      mesh: one axis, ``clients``, over D devices.
      lanes: clients trained side by side on one device.
      fused: whether whole rounds run in one compiled program. On several CPU devices of one process they do not:
        moving K models between the clients' devices and the server would be a collective, and collectives between
        CPU devices of one process can deadlock. There the server step runs on the first device and the rows are copied.
      described: whether the devices are only described (``jax.experimental.topologies``): programs are compiled for
        them, shapes stand for arrays, and nothing runs.
    """

    mesh: Mesh
    lanes: int
    fused: bool
    described: bool = False

    @property
    def platform(self) -> str:
        """The platform of the devices: ``cpu``, ``gpu`` or ``tpu``."""
        return self.mesh.devices.flat[0].platform

    @property
    def num_devices(self) -> int:
        """D."""
        return self.mesh.devices.size

    @property
    def home(self) -> jax.sharding.Sharding:
        """Where the server state lives."""
        return self.replicated if self.fused else SingleDeviceSharding(self.mesh.devices.flat[0])

    @property
    def replicated(self) -> NamedSharding:
        """One copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def sharded(self) -> NamedSharding:
        """The leading axis cut into D runs."""
        return NamedSharding(self.mesh, PartitionSpec(CLIENTS))

    def cut(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Return how stacked models [K, ...] are divided over their parameters: along the axis with least padding.

        A leaf that is too small is not divided: where padding would make moving it dearer than a copy everywhere.
        """
        devices = self.num_devices
        sizes = {axis: self._filled(size) / size for axis, size in enumerate(shape) if axis and size}
        best = min(sizes, key=lambda axis: (sizes[axis], -shape[axis]), default=0)
        if not best or sizes[best] > devices / 2 or devices == 1:
            return PartitionSpec()
        return PartitionSpec(*(None,) * best, CLIENTS)

    def _filled(self, size: int) -> int:
        return -(-size // self.num_devices) * self.num_devices

    def at_rest(self, tree: Any, *, rows: Collection[int]) -> Any:
        """Return where a tree of server state or clients' memory is kept between two calls, leaf by leaf.

        Stacked leaves, whose leading axis is one of ``rows`` (K, N), are divided: over their parameters, as in
        `by_parameters`, if these divide evenly; else by rows, if D divides their number. Everything else has a copy on
        every device of a program.
        """
        if not (self.fused and self.num_devices > 1):
            return jax.tree.map(lambda leaf: self.home, tree)

        def each(leaf: Any) -> NamedSharding:
            if not leaf.shape[:1] or leaf.shape[0] not in rows:
                return self.replicated
            spec = self.cut(leaf.shape)
            if spec and leaf.shape[len(spec) - 1] % self.num_devices == 0:
                return NamedSharding(self.mesh, spec)
            return self.sharded if leaf.shape[0] % self.num_devices == 0 else self.replicated

        return jax.tree.map(each, tree)

    def by_parameters(self, tree: Any, *, rows: Collection[int]) -> Any:
        """Divide stacked leaves over their parameters, in a compiled program: what mixes whole models is then local.

        From clients' rows this is one all-to-all per leaf, which moves (D-1)/D of the leaf, and so is the way back.
        Axes that D does not divide are padded.
        """
        if not (self.fused and self.num_devices > 1):
            return tree

        def each(leaf: jax.Array) -> jax.Array:
            if not leaf.shape[:1] or leaf.shape[0] not in rows:
                return leaf  # the compiler chooses: a copy on each device after each round may not be needed
            spec = self.cut(leaf.shape)
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))

        return jax.tree.map(each, tree)

    def padded(self, count: int) -> int:
        """Return ``count`` rounded up to a multiple of D x lanes."""
        block = self.num_devices * self.lanes
        return -(-count // block) * block


def client_axis(*, devices: int | None, lanes: int | None, cohort_size: int) -> ClientAxis:
    """Return the layout asked for; None chooses: all devices (not more than K), 1 lane on CPU, all lanes elsewhere.

    Raises:
      UserError: fewer devices exist than asked for.
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
    """The layout of a server whose clients train elsewhere: its own work is done on the first device."""
    return ClientAxis(Mesh(np.array(jax.devices()[:1]), (CLIENTS,)), lanes=1, fused=False)


def assign(axis: ClientAxis, work: jax.Array) -> jax.Array:
    """Return which row each slot trains [K'], K' = K padded: longest first, balanced over the devices.

    Rows of similar work share the lanes of one step; the groups go, longest first, to the device with the least work
    so far (Graham's longest-processing-time rule). Slots without a row hold K.

    Args:
      axis: D devices x lanes.
      work: the clients' numbers of samples [K].
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
    """Return the slot of each row [K], the inverse of `assign`."""
    return jnp.zeros(count, jnp.int32).at[slots].set(jnp.arange(slots.shape[0], dtype=jnp.int32), mode="drop")


def map_clients(axis: ClientAxis, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return ``function(shared, row)`` over rows [K', ...].

    Devices share the rows by ``shard_map``, lanes by ``vmap``, and the rest is done in turn. ``shared`` is the same for
    all. The result has no collective: each device trains its own rows. With one lane the
    rows run one after the other as they are (a ``vmap`` over one would turn every loop of dynamic length into a masked
    one).
    """
    function = jax.named_scope("clients_part")(function)  # the server may train, too

    def on_device(shared: Any, rows: Any) -> Any:
        if axis.lanes == 1:
            return jax.lax.map(lambda row: function(shared, row), rows)
        split = jax.tree.map(lambda leaf: leaf.reshape(-1, axis.lanes, *leaf.shape[1:]), rows)
        done = jax.lax.map(lambda group: jax.vmap(function, in_axes=(None, 0))(shared, group), split)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), done)

    specs = (PartitionSpec(), PartitionSpec(CLIENTS))
    return jax.shard_map(on_device, mesh=axis.mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
