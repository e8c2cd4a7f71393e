"""The simulated time of a run: the devices of its clients, and the events that follow from them."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.channel.base import payload_shapes, upload_shapes
from fedjax_mr.clock import Cohorts, Events, choice, fleet, simulate, synchronous
from fedjax_mr.clock.asynchronous import STALENESS, Keys
from fedjax_mr.clock.deadline import asked
from fedjax_mr.clock.fleet import Seconds
from fedjax_mr.clock.schedule import Duration
from fedjax_mr.config.config import Config, settings_of_row
from fedjax_mr.data import FederatedData
from fedjax_mr.engine.round import CLIENT, CLOCK, DISPATCH, SELECT, round_key
from fedjax_mr.engine.simulator import problem_of
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.method import Asynchrony, Online, build_chosen, chosen, local_setting
from fedjax_mr.keys import random_key
from fedjax_mr.models import Model
from fedjax_mr.settings import for_programs
from fedjax_mr.strategies import Problem
from fedjax_mr.strategies.parts import select_uniformly


def simulates_time(config: Config) -> bool:
    """Whether a run has simulated time."""
    return config.fleet is not None or config.mode == "async" or clients_may_be_late(config)


def clients_may_be_late(config: Config) -> bool:
    """Whether uploads of synchronous rounds may be dropped."""
    return config.deadline is not None or config.over_select > 1


def _in_flight(config: Config) -> int:
    """The asynchronous clients M that train at the same time."""
    return config.in_flight or 2 * config.cohort


def most_at_once(config: Config) -> int:
    """The largest number of clients that train at the same time: K, or more with late or asynchronous clients."""
    return _in_flight(config) if config.mode == "async" else asked(config.cohort, config.over_select)


class Devices(NamedTuple):
    """The devices of the clients of a run, and their jobs."""

    fleet: fleet.Fleet
    key: jax.Array  # of the random numbers of the jobs
    steps: np.ndarray  # [N] local steps of a job
    bytes_down: int
    bytes_up: int

    def draws(self, jobs: np.ndarray) -> np.ndarray:
        """The random numbers of jobs, by their numbers [J]: [J, 2]."""
        return fleet.draw(self.key, jobs)

    def seconds(self, clients: np.ndarray, draws: np.ndarray) -> Seconds:
        """The seconds of jobs of clients [J] with their random numbers [J, 2]."""
        sent = {"bytes_down": self.bytes_down, "bytes_up": self.bytes_up}
        return self.fleet.durations(clients, draws, steps=self.steps[clients], **sent)


def devices_of(config: Config, federated: FederatedData, model: Model) -> tuple[Devices, Problem]:
    """The devices of a run in simulated time, and the problem of its strategy.

    Raises:
      UserError: the method selects its clients itself, from what the run computes; or as `fleet.make`.
    """
    training, cohort = local_setting(config, federated.dataset), asked(config.cohort, config.over_select)
    if cohort > federated.num_clients:
        raise UserError(f"over_select={config.over_select:g} asks {cohort} of {federated.num_clients} clients")
    problem = problem_of(model, training, federated, cohort=cohort)
    if config.mode == "async":
        problem = dataclasses.replace(problem, in_flight=_in_flight(config))
    strategy = build_chosen(chosen(config), problem)
    if strategy.select is not None and not (config.mode == "async" and strategy.stale == "branches"):
        raise UserError(
            "the method selects its clients itself, so the simulated time is unknown: leave out fleet=, "
            "deadline= and over_select="
        )
    seed = config.seed if config.partition_seed is None else config.partition_seed
    kind = config.fleet or "uniform"
    made = fleet.make(
        kind,
        federated.num_clients,
        batch_size=training.batch_size,
        seed=seed,
        settings=settings_of_row(config, kind, fleet.FLEETS[kind].settings) if kind in fleet.FLEETS else None,
    )
    steps = np.asarray(training.num_steps(np.asarray(federated.sizes)))
    key = jax.random.fold_in(random_key(config.seed), CLOCK)
    down, up = (trees.num_bytes(shapes(strategy, problem)) for shapes in (payload_shapes, upload_shapes))
    return Devices(made, key, steps, down, up), problem


def events_of(
    config: Config,
    federated: FederatedData,
    model: Model,
    *,
    duration: Duration | None = None,
    versions: int | None = None,
) -> Events | None:
    """The events of a run in simulated time, known before it starts.

    None without ``fleet`` and asynchronous clients, and if the method selects asynchronous clients itself.

    Args:
      config: the configuration.
      federated: the clients' data.
      model: the network.
      duration: the seconds of an asynchronous job. Default: those of the fleet.
      versions: number of versions of asynchronous clients. Default: ``rounds``.

    Raises:
      UserError: the method selects its clients itself, from what the run computes; or as `clock.simulate` and
        `clock.synchronous`.
    """
    if not simulates_time(config):
        return None
    devices, problem = devices_of(config, federated, model)
    key = random_key(config.seed)
    if config.mode == "async":
        in_flight = _in_flight(config)
        jobs = np.arange(in_flight + (config.rounds + 2) * config.cohort)
        draws, key_of = devices.draws(jobs), functools.partial(round_key, key, SELECT)
        strategy = build_chosen(chosen(config), problem)
        if strategy.select is not None:
            return None
        choose = strategy.choose

        def of_fleet(job: int, client: int) -> float:
            return float(devices.seconds(np.array([client]), draws[job : job + 1]).total[0])

        return simulate(
            config.rounds if versions is None else versions,
            num_clients=federated.num_clients,
            in_flight=in_flight,
            cohort=config.cohort,
            refill=config.refill,
            choose=choice.uniformly(key_of) if choose is None else choice.by(choose, key_of),
            duration=duration or of_fleet,
        )
    one_round = lambda number: select_uniformly(problem, round_key(key, SELECT, number)).ids
    clients = np.asarray(jax.jit(lambda numbers: jax.lax.map(one_round, numbers))(jnp.arange(config.rounds)))
    jobs = devices.seconds(clients.reshape(-1), devices.draws(np.arange(clients.size)))
    return synchronous(
        clients,
        Seconds(*(each.reshape(clients.shape) for each in jobs)),
        cohort=config.cohort,
        steps=devices.steps[clients] if config.late == "partial" else None,
        deadline=math.inf if config.deadline is None else config.deadline,
    )


def clock_of(
    config: Config, federated: FederatedData, model: Model, events: Events | None = None
) -> tuple[Cohorts | Asynchrony | Online, int]:
    """The late or asynchronous clients of a run, and the number of clients that train together.

    Args:
      config: the configuration, with asynchronous or late clients.
      federated: the clients' data.
      model: the network.
      events: the result of `events_of`. Default: it is computed.
    """
    events = events or events_of(config, federated, model)
    if events is None:
        return _online(config, federated, model), _in_flight(config)
    if events.schedule is None:
        assert events.cohorts is not None
        return events.cohorts, events.cohorts.clients.shape[1]
    settings = for_programs(settings_of_row(config, config.staleness, STALENESS[config.staleness].settings))
    clients = Asynchrony(events.schedule, _keys_of_versions(config), settings, config.staleness)
    return clients, events.schedule.train_clients.shape[1]


def _online(config: Config, federated: FederatedData, model: Model) -> Online:
    if config.cohort != 1:
        raise UserError(f"the method selects asynchronous clients one by one: use cohort=1, not {config.cohort}")
    devices, _ = devices_of(config, federated, model)
    clients, draws = np.arange(federated.num_clients), devices.draws(np.arange(_in_flight(config) + config.rounds))
    of_job = lambda draw: devices.seconds(clients, np.tile(draw, (len(clients), 1))).total.astype(np.float32)
    return Online(np.stack([of_job(draw) for draw in draws]), _keys_of_versions(config))


def _keys_of_versions(config: Config) -> Keys:
    key, versions = random_key(config.seed), jnp.arange(config.rounds + 1)
    return Keys(*(jax.vmap(functools.partial(round_key, key, stream))(versions) for stream in (DISPATCH, CLIENT)))
