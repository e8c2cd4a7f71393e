"""The strategy of a configuration with its channel and its clock, and the local training of its clients."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_mr.channel import Link, channel, links, privacy
from fedjax_mr.client import local
from fedjax_mr.client.schedules import schedule
from fedjax_mr.clock import Cohorts, Schedule, asynchronous, constant, hinge, online, polynomial, with_late_clients
from fedjax_mr.clock.asynchronous import Keys
from fedjax_mr.data import Dataset
from fedjax_mr.data.augment import crop_flip
from fedjax_mr.engine.round import Build
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.config import Config
from fedjax_mr.settings import as_arguments, bind
from fedjax_mr.strategies import STRATEGIES, Problem, Strategy
from fedjax_mr.strategies.transforms import make_server_optimizer, server_optimizer


@dataclasses.dataclass(frozen=True)
class ServerOptimizer:
    """The settings of a server optimizer, see `make_server_optimizer`."""

    name: str
    lr: float | None
    momentum: float
    beta2: float
    tau: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Asynchrony:
    """The asynchronous clients of a run. A pytree."""

    schedule: Schedule
    keys: Keys
    numbers: tuple[Any, Any]  # a and b of the weight
    weight: str = dataclasses.field(metadata=local.STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Online:
    """The asynchronous clients of a run whose method selects them itself. A pytree."""

    seconds: Any  # [J, N] float32, of each job with each client
    keys: Keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arguments:
    """A function that makes a link, with its arguments. A pytree: the leaves are the numbers, as arrays."""

    function: Callable = dataclasses.field(metadata=local.STATIC)
    numbers: dict[str, Any]
    others: tuple[tuple[str, Any], ...] = dataclasses.field(metadata=local.STATIC)

    @classmethod
    def of(cls, function: Callable, numbers: dict[str, Any] | None = None, **others: Any) -> "Arguments":
        """Numbers that are None keep the default of the function."""
        kept = {name: value for name, value in (numbers or {}).items() if value is not None}
        arrays = {
            name: np.int32(value) if isinstance(value, int) else np.float32(value) for name, value in kept.items()
        }
        return cls(function, arrays, tuple(others.items()))

    def __call__(self, problem: Problem, **more: Any) -> Link:
        return self.function(problem, **self.numbers, **dict(self.others), **more)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """The strategy of a configuration. A pytree: the leaves are the numbers."""

    strategy: str = dataclasses.field(metadata=local.STATIC)
    hyper: Any
    server: Any  # ServerOptimizer or None
    links: dict[str, Arguments]  # of the channel, by kind
    poisson: Any = None  # the probability of Poisson sampling
    secret: Any = None  # two words [2] uint32, from which the noise follows, see `channel.privacy`
    secret_cohorts: bool = dataclasses.field(default=False, metadata=local.STATIC)  # they follow from it as well
    clock: Asynchrony | Online | Cohorts | None = None


def chosen(config: Config, *, secret: np.ndarray | None = None) -> Chosen:
    """The strategy of a configuration, with its numbers as arrays.

    Args:
      config: the configuration.
      secret: two words [2] uint32, from which the noise and the cohorts follow (`guarantee.secret_of`). Default: the
        noise follows from the keys of the clients, which real clients draw from a secret of their own.
    """
    server = None
    if config.server_optimizer != "none":
        server = ServerOptimizer(
            config.server_optimizer, config.server_lr, config.server_momentum, config.server_beta2, config.server_tau
        )
    poisson = None if config.dp_poisson is None else np.float32(config.dp_poisson)
    hyper = as_arguments(configuration.hyper(config))
    hidden = secret is not None and config.fleet is None  # simulated time shows who was selected
    return Chosen(config.strategy, hyper, as_arguments(server), _links(config), poisson, secret, hidden)


def _links(config: Config) -> dict[str, Arguments]:
    """The links of the channel that the configuration asks for."""
    chosen: dict[str, Arguments] = {}
    if config.compress != "none" or config.compress_download != "none":
        chosen["compression"] = Arguments.of(
            links.compression,
            kind=config.compress,
            ratio=config.compress_ratio,
            levels=config.compress_levels,
            feedback=config.error_feedback,
            download=config.compress_download,
        )
    if config.dp_clip is not None:
        numbers = {"clip": config.dp_clip, "noise": config.dp_noise, "quantile": config.dp_quantile}
        chosen["privacy"] = Arguments.of(links.privacy, numbers, noise_on=config.dp_noise_on)
    if config.attack != "none":
        seed = config.seed if config.partition_seed is None else config.partition_seed
        numbers = {"attackers": config.attackers, "seed": seed, "scale": config.attack_scale}
        chosen["attack"] = Arguments.of(links.attack, numbers, kind=config.attack, target=config.attack_target)
    if config.robust != "none":
        settings = {"outliers": config.robust_outliers, "before": config.robust_before}
        chosen["robust"] = Arguments.of(links.robust, rule=config.robust, **settings)
    if config.exchange != "none":
        settings = {"share": config.exchange_share, "repetitions": config.exchange_repetitions}
        chosen["exchange"] = Arguments.of(links.exchange, when=config.exchange, **settings)
    return chosen


def build_chosen(chosen: Chosen, problem: Problem) -> Strategy:
    """The strategy with its server optimizer, its channel, and its late or asynchronous clients, if it has them."""
    clock = chosen.clock
    if isinstance(clock, Cohorts):
        return with_late_clients(build_chosen(dataclasses.replace(chosen, clock=None), problem), problem, clock)
    if isinstance(clock, Online):
        inner = functools.partial(build_chosen, dataclasses.replace(chosen, clock=None))
        return online(inner, problem, clock.seconds, clock.keys)
    if clock is not None:
        a, b = clock.numbers
        weight = {"constant": constant, "polynomial": polynomial(a), "hinge": hinge(a, b)}[clock.weight]
        inner = functools.partial(build_chosen, dataclasses.replace(chosen, clock=None))
        return asynchronous(inner, problem, clock.schedule, clock.keys, weight=weight)
    strategy, server = STRATEGIES[chosen.strategy].build(chosen.hyper, problem), chosen.server
    several = strategy.models is None or strategy.models.stacked
    if server is not None:
        if strategy.stale == "branches" and problem.num_branches > problem.cohort_size:
            raise UserError(
                "a server optimizer would change models that clients are training: use server_optimizer=none, or "
                "in_flight= equal to cohort="
            )
        optimizer = make_server_optimizer(
            server.name,
            lr=server.lr,
            momentum=server.momentum,
            beta2=server.beta2,
            tau=server.tau,
            several=several,
        )
        strategy = server_optimizer(strategy, optimizer)
    if chosen.poisson is not None:
        strategy = privacy.poisson(strategy, problem, chosen.poisson)
    if chosen.secret_cohorts:
        strategy = privacy.secretly_selected(strategy, problem, chosen.secret)
    depends = {"robust": {"stacked": several}, "privacy": {"secret": chosen.secret}}
    made = [arguments(problem, **depends.get(kind, {})) for kind, arguments in chosen.links.items()]
    return channel(strategy, problem, made)


def strategy_of(config: Config) -> Build:
    """The function problem -> strategy of a configuration."""
    return bind(build_chosen, chosen(config))


def local_setting(config: Config, dataset: Dataset) -> local.LocalSetting:
    """The settings of the clients' training."""
    return local.setting(
        config.optimizer,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        epochs=config.local_epochs,
        steps=config.local_steps,
        batch_size=config.batch_size,
        augment=augmentation(config, dataset),
        schedule=schedule(
            config.lr_schedule,
            decay=config.lr_decay,
            every=config.lr_every,
            over=config.lr_over or config.rounds,
            warmup=config.lr_warmup,
        ),
    )


def augmentation(config: Config, dataset: Dataset) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """The augmentation of the training images: (key, images [B, ...]) -> images. None with ``augment="none"``.

    Raises:
      UserError: the samples are not images.
    """
    if config.augment == "none":
        return None
    if dataset.x.ndim != 4:
        raise UserError(f"augment={config.augment} requires images, but {dataset.name} has none: leave it out")
    return _crop_flip(config.augment_pad)


@functools.cache  # the same function in every run, so compiled programs are reused
def _crop_flip(pad: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return functools.partial(crop_flip, pad=pad)
