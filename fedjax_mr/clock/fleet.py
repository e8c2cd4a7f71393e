"""Fleets: how long the devices of the clients take, in simulated seconds.

The job of a client takes as long as its device needs for its local steps, and its network for the model and the upload:

    compute = max(1 ms, Gauss(seconds + seconds_per_step * steps, spread))
    network = max(0, Gauss(latency, latency_spread)) + bytes_down / down_rate + bytes_up / up_rate

The Gaussians are drawn anew for every job. Durations do not depend on weights, so the host computes them ahead.

Kinds. ``uniform``: all devices take one second per local step, and the network takes no time. ``lognormal``: speeds and
rates of the clients are lognormal, with the constants of Papaya's simulations (Huba et al., MLSys 2022, as FedScale has
them) for the speed; rates are our choice. ``classes``: the five classes of devices and of networks of GitFL's released
simulator (Hu et al., RTSS 2023), in equal shares, assigned independently; they do not depend on the number of samples.
A CSV file has a header with some of the names of the fields below and a row for each client.

A user adds a kind as ``fmr.FLEETS["mine"] = fmr.FleetRow(make, Settings)``.
"""

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.registry import Registry

DEVICES = ((100, 5), (150, 10), (200, 20), (300, 30), (500, 50))  # seconds of a job: mean, standard deviation
NETWORKS = ((10, 1), (15, 2), (20, 3), (30, 5), (80, 10))
SECONDS_PER_SAMPLE, SIGMA = 0.005, 0.6  # lognormal: exp(Gauss(1, SIGMA)) * SECONDS_PER_SAMPLE
BYTES_PER_SECOND = 1e6  # lognormal: median rate
SHORTEST = 1e-3  # seconds


class Fleet(NamedTuple):
    """The speeds of N devices."""

    seconds: np.ndarray  # [N] seconds of a job, whatever its number of steps
    seconds_per_step: np.ndarray  # [N]
    spread: np.ndarray  # [N] standard deviation of the computing time, in seconds
    latency: np.ndarray  # [N] seconds
    latency_spread: np.ndarray  # [N]
    down_rate: np.ndarray  # [N] bytes per second
    up_rate: np.ndarray  # [N]

    def durations(
        self, ids: np.ndarray, draws: np.ndarray, *, steps: np.ndarray, bytes_down: float, bytes_up: float
    ) -> "Seconds":
        """The seconds of jobs.

        Args:
          ids: clients [J].
          draws: standard normal numbers [J, 2], from `draw`.
          steps: local steps [J].
          bytes_down: bytes that a client receives.
          bytes_up: bytes that a client sends.
        """
        own = Fleet(*(np.asarray(each, np.float64)[ids] for each in self))
        compute = np.maximum(SHORTEST, own.seconds + own.seconds_per_step * steps + own.spread * draws[:, 0])
        wait = np.maximum(0.0, own.latency + own.latency_spread * draws[:, 1])
        return Seconds(wait / 2 + bytes_down / own.down_rate, compute, wait / 2 + bytes_up / own.up_rate)


class Seconds(NamedTuple):
    """The seconds of jobs, arrays of one shape, float64. Half of the latency counts for each direction."""

    download: np.ndarray
    compute: np.ndarray
    upload: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The seconds from the start of a job to the arrival of its upload."""
        return self.download + self.compute + self.upload


def draw(key: jax.Array, jobs: np.ndarray) -> np.ndarray:
    """Standard normal numbers of jobs, by their numbers [J]: [J, 2]. They do not depend on J."""
    return np.asarray(jax.vmap(lambda job: jax.random.normal(jax.random.fold_in(key, job), (2,)))(jobs), np.float64)


def without_delay(num_clients: int) -> Fleet:
    """A fleet whose jobs take no time, to start from."""
    none = np.zeros(num_clients, np.float32)
    fastest = np.full(num_clients, np.inf, np.float32)
    return Fleet(none, none, none, none, none, fastest, fastest)


def uniform(num_clients: int, *, batch_size: int, rng: np.random.Generator) -> Fleet:
    """One second per local step, and no time for the network."""
    return without_delay(num_clients)._replace(seconds_per_step=np.ones(num_clients, np.float32))


def lognormal(num_clients: int, *, batch_size: int, rng: np.random.Generator) -> Fleet:
    """Lognormal speeds per sample and rates of the network."""
    speed = SECONDS_PER_SAMPLE * rng.lognormal(1, SIGMA, num_clients)
    down, up = BYTES_PER_SECOND * rng.lognormal(0, SIGMA, (2, num_clients))
    as_float = lambda each: each.astype(np.float32)
    return without_delay(num_clients)._replace(
        seconds_per_step=as_float(speed * batch_size), down_rate=as_float(down), up_rate=as_float(up)
    )


def classes(num_clients: int, *, batch_size: int, rng: np.random.Generator) -> Fleet:
    """Five classes of devices and five of networks."""
    device, network = (np.asarray(each, np.float32) for each in (DEVICES, NETWORKS))
    of_device, of_network = (rng.permutation(num_clients) % len(each) for each in (device, network))
    return without_delay(num_clients)._replace(
        seconds=device[of_device, 0],
        spread=device[of_device, 1],
        latency=network[of_network, 0],
        latency_spread=network[of_network, 1],
    )


class FleetRow(NamedTuple):
    """A registered kind of fleet.

    Attributes:
      make: (N, batch_size=, rng=, and the settings by name) -> `Fleet`. ``batch_size`` is that of a local step. Draws
        from ``rng`` decide which client has which device.
      settings: the dataclass of its settings, declared with `field`. Default: there are none.
    """

    make: Callable[..., Fleet]
    settings: type | None = None


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `FLEETS`. Raises a UserError: it is no `FleetRow`, or its settings are no dataclass."""
    declared = isinstance(row, FleetRow) and (row.settings is None or dataclasses.is_dataclass(row.settings))
    if not isinstance(row, FleetRow) or not callable(row.make) or not declared:
        raise UserError(
            f"fmr.FLEETS[{name!r}] takes fmr.FleetRow(make, settings): make(num_clients, *, batch_size, rng, ...) "
            "returns a Fleet, and settings is a dataclass with fmr.field(...), or left out"
        )


FLEETS = Registry(
    "fleet", "fmr.FLEETS", check_row, {each.__name__: FleetRow(each) for each in (uniform, lognormal, classes)}
)
"""All kinds of fleets but files."""


def make(kind: str, num_clients: int, *, batch_size: int, seed: int, settings: Any = None) -> Fleet:
    """Make a fleet.

    Args:
      kind: a name of `FLEETS`, or the path of a CSV file.
      num_clients: N.
      batch_size: samples per local step, for kinds that have a speed per sample.
      seed: decides which client has which device.
      settings: those of the kind, an instance of its dataclass. Default: there are none.

    Raises:
      UserError: an unknown kind, or a file that cannot be read or has another number of clients.
    """
    if kind in FLEETS:
        numbers = {} if settings is None else vars(settings)
        made = FLEETS[kind].make(num_clients, batch_size=batch_size, rng=np.random.default_rng([seed, 48]), **numbers)
        _check(made, num_clients, f"fleet={kind}")
        return made
    if kind.endswith(".csv"):
        return _from_file(Path(kind), num_clients)
    raise unknown_name("fleet", kind, (*FLEETS, "FILE.csv"))


def _from_file(path: Path, count: int) -> Fleet:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        columns = {name: np.array([float(row[name]) for row in rows], np.float32) for name in (rows or [{}])[0]}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read the fleet {path}: {error}") from None
    if unknown := [name for name in columns if name not in Fleet._fields]:
        raise UserError(f"{path} has the unknown column {unknown[0]!r}: it may have {', '.join(Fleet._fields)}")
    if len(rows) != count:
        raise UserError(f"{path} describes {len(rows)} clients, but the federation has {count}")
    made = without_delay(count)._replace(**columns)
    _check(made, count, str(path))
    return made


def _check(made: Fleet, count: int, where: str) -> None:
    """Check the numbers of a fleet of N clients.

    Raises:
      UserError: there are not N, or a client would need for ever.
    """
    for name, values in made._asdict().items():
        if np.shape(values) != (count,):
            raise UserError(f"{where}: {name} has the shape {np.shape(values)}, but the federation has {count} clients")
        if not np.all(values >= 0):
            raise UserError(f"{where} has a number that is negative or missing")
        is_rate = name.endswith("_rate")
        if not np.all(values > 0 if is_rate else np.isfinite(values)):
            raise UserError(f"{where}: {name} must be {'above 0' if is_rate else 'finite'}")
