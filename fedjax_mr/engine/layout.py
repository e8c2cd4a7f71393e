"""The layout of a simulation on its machine: the devices that share the clients, and what stays on the host."""

import dataclasses
import functools
import math
from collections.abc import Callable

from fedjax_mr.engine.clients import ClientAxis
from fedjax_mr.settings import field

MOST_MEMORY_OF_CPU = 1_000_000_000  # bytes of the clients' memories on a CPU device; on the host only used rows exist

_setting = functools.partial(field, group="Engine", affects_results=False)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The settings of the layout. They change no result.

    Attributes:
      devices: number of devices D. Default: see `clients.client_axis`.
      lanes: clients that train side by side on a device. Default: 1 on CPUs, else as many as fit into its memory.
      memory: place of the memories that all N clients keep between rounds: ``device``, ``host`` or ``auto``. ``auto``
        is the host if they need more than a third of a device's memory, or 1 GB on a CPU. On the host, only the
        memories of clients that have trained exist.
      data_placement: place of the clients' samples, with the same values.
    """

    # fmt: off
    devices: int | None = _setting(
        None, "Number of devices that share the clients, over all processes. If omitted, all accelerators; on a CPU "
        "the smaller of its cores and --cohort", unit="devices", low=1, high=65_536, short=True)
    lanes: int | None = _setting(
        None, "Clients that train side by side on a device. If omitted, 1 on a CPU, elsewhere as many as its "
        "memory holds",
        unit="clients", low=1, short=True)
    memory: str = _setting(
        "auto", "Place of the memories that all N clients keep between rounds. On the host, only those of clients that "
        "have trained exist. auto uses the host if all of them need more than a third of a device's memory, or 1 GB on "
        "a CPU", choices=("auto", "device", "host"))
    data_placement: str = _setting(
        "auto", "Place of the clients' samples. With host, the samples of the next cohort are transferred during a "
        "round, each client padded to the largest. auto uses the host if the samples need more than a third of a "
        "device's memory", choices=("auto", "device", "host"))
    # fmt: on


def data_on_host(layout: Layout, needed: int, axis: ClientAxis) -> bool:
    """Whether samples of ``needed`` bytes are kept on the host."""
    return layout.data_placement == "host" or (layout.data_placement == "auto" and too_large(needed, axis))


def memory_on_host(layout: Layout, needed: int, axis: ClientAxis) -> bool:
    """Whether memories of ``needed`` bytes are kept on the host."""
    on_cpu = axis.platform == "cpu" and not axis.described
    much = too_large(needed, axis) or (on_cpu and needed > MOST_MEMORY_OF_CPU)
    return layout.memory == "host" or (layout.memory == "auto" and much)


def too_large(needed: int, axis: ClientAxis) -> bool:
    """Whether ``needed`` bytes are more than a third of the memory of a device. Host memory counts as unlimited."""
    return 3 * needed > memory_limit(axis)


def memory_limit(axis: ClientAxis) -> float:
    """Memory of a device in bytes. Infinity for CPUs, which do not report it, and for devices that are not present."""
    if axis.described:
        return math.inf
    statistics = axis.mesh.local_mesh.devices.flat[0].memory_stats() or {}
    return statistics.get("bytes_limit", math.inf)


def lanes_that_fit(axis: ClientAxis, limit: float, needed: Callable[[ClientAxis], int]) -> ClientAxis:
    """Halve the lanes of a layout until its ``needed`` bytes are within ``limit``, or one lane is left."""
    while axis.lanes > 1 and needed(axis) > limit:
        axis = dataclasses.replace(axis, lanes=-(-axis.lanes // 2))
    return axis
