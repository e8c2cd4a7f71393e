"""The strategy of a configuration with its channel and its clock, and the local training of its clients."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_mr.channel import channel, privacy
from fedjax_mr.channel.links import LINKS
from fedjax_mr.client import local
from fedjax_mr.client.schedules import schedule
from fedjax_mr.client.training import Training
from fedjax_mr.clock import Cohorts, Schedule, asynchronous, online, with_late_clients
from fedjax_mr.clock.asynchronous import STALENESS, Keys
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.data import Dataset
from fedjax_mr.data.augment import AUGMENTATIONS
from fedjax_mr.engine.round import Build
from fedjax_mr.errors import UserError
from fedjax_mr.registry import names_only_ours
from fedjax_mr.settings import as_arguments, bind, for_programs
from fedjax_mr.strategies import STRATEGIES, Problem, Strategy
from fedjax_mr.strategies.transforms import (
    SERVER_OPTIMIZERS,
    ServerOptimizer,
    by_settings,
    keep_optimizer,
    server_optimizer,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Asynchrony:
    """The asynchronous clients of a run. A pytree."""

    schedule: Schedule
    keys: Keys
    settings: Any  # of the weight
    staleness: str = dataclasses.field(metadata=local.STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Online:
    """The asynchronous clients of a run whose method selects them itself. A pytree."""

    seconds: Any  # [J, N] float32, of each job with each client
    keys: Keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """The strategy of a configuration. A pytree: the leaves are the numbers."""

    strategy: str = dataclasses.field(metadata=local.STATIC)
    hyper: Any
    server: Any  # ServerOptimizer or None
    links: dict[str, Any]  # the settings of each link of the channel, by name
    seed: Any  # of the partition
    poisson: Any = None  # the probability of Poisson sampling
    secret: Any = None  # two words [2] uint32, from which the noise follows, see `channel.privacy`
    secret_cohorts: bool = dataclasses.field(default=False, metadata=local.STATIC)  # they follow from it as well
    clock: Asynchrony | Online | Cohorts | None = None
    users_code: bool = dataclasses.field(default=False, metadata=local.STATIC)  # in a row, see `Simulator.code`
    keep_optimizer: bool = dataclasses.field(default=False, metadata=local.STATIC)


def chosen(config: Config, *, secret: np.ndarray | None = None) -> Chosen:
    """The strategy of a configuration, with its numbers as arrays.

    Args:
      config: the configuration.
      secret: two words [2] uint32, from which the noise and the cohorts follow (`guarantee.secret_of`). Default: the
        noise follows from the keys of the clients, which real clients draw from a secret of their own.
    """
    server = None
    if config.server_optimizer != "none":
        server = for_programs(configuration.settings_of_row(config, config.server_optimizer, ServerOptimizer))
    poisson = None if config.dp_poisson is None else np.float32(config.dp_poisson)
    hyper = as_arguments(configuration.hyper(config))
    hidden = secret is not None and config.fleet is None  # simulated time shows who was selected
    links = {name: for_programs(settings) for name, _, settings in configuration.links(config)}
    seed = np.int32(config.seed if config.partition_seed is None else config.partition_seed)
    ours = all(map(LINKS.is_ours, links)) and (server is None or SERVER_OPTIMIZERS.is_ours(config.server_optimizer))
    ours &= config.mode == "sync" or STALENESS.is_ours(config.staleness)
    ours &= names_only_ours(hyper)
    return Chosen(
        config.strategy,
        hyper,
        server,
        links,
        seed,
        poisson,
        secret,
        hidden,
        users_code=not ours,
        keep_optimizer=config.keep_optimizer,
    )


def build_chosen(chosen: Chosen, problem: Problem) -> Strategy:
    """The strategy with its server optimizer, its channel, and its late or asynchronous clients, if it has them."""
    inner = functools.partial(build_chosen, dataclasses.replace(chosen, clock=None))
    match chosen.clock:
        case Cohorts() as cohorts:
            return with_late_clients(inner(problem), problem, cohorts)
        case Online(seconds, keys):
            return online(inner, problem, seconds, keys)
        case Asynchrony(schedule, keys, settings, staleness):
            return asynchronous(inner, problem, schedule, keys, weight=STALENESS[staleness].build(settings))
    strategy, server = STRATEGIES[chosen.strategy].build(chosen.hyper, problem), chosen.server
    if chosen.keep_optimizer:
        strategy = keep_optimizer(strategy, problem)
    several = strategy.models is None or strategy.models.stacked
    if server is not None:
        if strategy.stale == "branches" and problem.num_branches > problem.cohort_size:
            raise UserError(
                "a server optimizer would change models that clients are training: use server_optimizer=none, or "
                "in_flight= equal to cohort="
            )
        strategy = server_optimizer(strategy, by_settings(server, several=several))
    if chosen.poisson is not None:
        strategy = privacy.poisson(strategy, problem, chosen.poisson)
    if chosen.secret_cohorts:
        strategy = privacy.secretly_selected(strategy, problem, chosen.secret)
    facts = {"stacked": several, "secret": chosen.secret, "seed": chosen.seed}
    made = []
    for name, settings in chosen.links.items():
        row = LINKS[name]
        made.append(row.build(settings, problem, **{fact: facts[fact] for fact in row.gets}))
    return channel(strategy, problem, made)


def strategy_of(config: Config) -> Build:
    """The function problem -> strategy of a configuration."""
    return bind(build_chosen, chosen(config))


def local_setting(config: Config, dataset: Dataset) -> local.LocalSetting:
    """The settings of the clients' training."""
    over = config.lr_over or config.rounds
    factor = schedule(
        config.lr_schedule, decay=config.lr_decay, every=config.lr_every, over=over, warmup=config.lr_warmup
    )
    training = configuration.part(config, Training)
    return local.of_training(training, **augmentations(config, dataset), schedule=factor)


def augmentations(config: Config, dataset: Dataset) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """The arguments ``augment`` and ``mix`` of `local.setting`. Without augmentation: none.

    Raises:
      UserError: the samples are not images, two augmentations are of the same kind, or one does not suit the task.
    """
    found: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {}
    for name in config.augmentations:
        row, task = AUGMENTATIONS[name], dataset.task
        if dataset.x.ndim != 4:
            raise UserError(f"augment={name} requires images, but {dataset.name} has none: leave it out")
        if "pixels" in task.provides and not row.mixes:
            raise UserError(f"augment={name} would move the images but not their masks: leave it out")
        if "risk" in task.provides and row.mixes:
            raise UserError(f"augment={name} mixes two samples, but {task.name} compares their times: leave it out")
        kind = "mix" if row.mixes else "augment"
        if kind in found:
            raise UserError(
                f"augment={config.augment} has two that {'mix' if row.mixes else 'change'} images: name one"
            )
        found[kind] = row.build(configuration.settings_of_row(config, name, row.settings))
    return found
