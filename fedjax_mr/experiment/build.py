"""Build the simulator of a configuration."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import registry, trees
from fedjax_mr.channel import Link, channel, links, privacy
from fedjax_mr.channel.base import upload_shapes
from fedjax_mr.clock import (
    Cohorts,
    Events,
    Schedule,
    asynchronous,
    choice,
    constant,
    fleet,
    hinge,
    online,
    polynomial,
    simulate,
    synchronous,
    with_late_clients,
)
from fedjax_mr.clock.asynchronous import Keys
from fedjax_mr.clock.deadline import asked
from fedjax_mr.clock.fleet import Seconds
from fedjax_mr.clock.schedule import Duration
from fedjax_mr.data import Dataset, FederatedData
from fedjax_mr.data.augment import crop_flip
from fedjax_mr.engine import local
from fedjax_mr.engine.round import CLIENT, CLOCK, DISPATCH, INIT, SELECT, Build, round_key
from fedjax_mr.engine.simulator import Simulator, network_of, problem_of
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.architectures import architectures, best_networks
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.settings import settings_of
from fedjax_mr.models import MODELS, Model, adapters, parts, start_from
from fedjax_mr.models.precision import with_precision
from fedjax_mr.strategies import STRATEGIES, Problem, Strategy
from fedjax_mr.strategies.base import select_uniformly
from fedjax_mr.strategies.hyper import as_arguments, bind, numbers_of
from fedjax_mr.strategies.transforms import make_server_optimizer, server_optimizer


def build_model(config: Config, dataset: Dataset, *, modules: Sequence[Any] = (), variables: Any = None) -> Model:
    """The network of a configuration for the samples of a dataset; a `Zoo` if there are several.

    Args:
      config: the configuration, which names the networks.
      dataset: the samples.
      modules: user-supplied Flax modules or `Model`s. Default: the networks that the configuration names.
      variables: user-supplied variables of the network. Default: it is initialised from the seed.

    Raises:
      UserError: a network does not fit the samples, or the precision has no effect on it. Raised before compilation.
    """
    options = {"norm": config.norm, "authors_state": config.authors_state, "projection": config.projection}
    model = network_of(list(modules) or config.networks, dataset, init=config.init, **options)
    return with_precision(fine_tuned(config, model, variables=variables), config.precision)


def fine_tuned(config: Config, model: Model, *, variables: Any = None) -> Model:
    """The network with the adapters and the frozen part that the configuration asks for.

    Raises:
      UserError: nothing would train, or there are several networks.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), INIT)
    if config.variables is not None and variables is None:
        raise registry.not_passed("variables", config.variables)
    if config.pretrained is not None:
        if variables is not None:
            raise UserError(f"pretrained={config.pretrained} and variables= exclude each other: leave out one of them")
        if len(model.networks) > 1:
            raise UserError(f"pretrained={config.pretrained} needs a single network, not {model.name}: leave it out")
        variables = start_from(model, config.pretrained, key)
    if config.adapter == "lora":
        return adapters.lora(
            model,
            config.lora_rank,
            config.lora_alpha,
            key=key,
            targets=config.lora_targets or "",
            head=config.lora_head,
            trainable=config.trainable or "",
            variables=variables,
        )
    if config.trainable is None and variables is None:
        return model
    if len(model.networks) > 1:
        raise UserError(f"trainable= and variables= need a single network, not {model.name}")
    return parts.partly(model, config.trainable or "*", key=key, variables=variables)


def simulator_of(
    config: Config, federated: FederatedData, model: Model, *, events: Events | None = None, **changes: Any
) -> Simulator:
    """The simulator of a configuration.

    Args:
      config: the configuration.
      federated: the clients' data.
      model: the network.
      events: the result of `events_of`. Default: it is computed if it is needed.
      changes: arguments of `Simulator` that replace those of the configuration.
    """
    arguments: dict[str, Any] = {
        "strategy": build_chosen,
        "hyper": chosen(config),
        "cohort": config.cohort,
        "local": local_setting(config, federated.dataset),
        "seed": config.seed,
        "architectures": _architectures(config, federated),
        "devices": config.devices,
        "lanes": config.lanes,
        "memory": config.memory,
        "data_placement": config.data_placement,
        "stop_at_divergence": not config.allow_nonfinite,
        "key": program_key(config),
    } | changes
    if (config.mode == "async" or clients_may_be_late(config)) and "cohort" not in changes:
        events = events or events_of(config, federated, model)
        if events is None:
            clock, width = _online(config, federated, model), _in_flight(config)
        elif events.schedule is None:
            assert events.cohorts is not None
            clock, width = events.cohorts, events.cohorts.clients.shape[1]
        else:
            clock, width = _asynchrony(config, events.schedule), events.schedule.train_clients.shape[1]
        arguments |= {"hyper": dataclasses.replace(arguments["hyper"], clock=clock), "cohort": width}
    return Simulator(model=model, federated=federated, name=config.strategy, **arguments)


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
    key = jax.random.key(config.seed)
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


def _in_flight(config: Config) -> int:
    """The asynchronous clients M that train at the same time."""
    return config.in_flight or 2 * config.cohort


def simulates_time(config: Config) -> bool:
    """Whether a run has simulated time."""
    return config.fleet is not None or config.mode == "async" or clients_may_be_late(config)


def clients_may_be_late(config: Config) -> bool:
    """Whether uploads of synchronous rounds may be dropped."""
    return config.deadline is not None or config.over_select > 1


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
    made = fleet.make(config.fleet or "uniform", federated.num_clients, batch_size=training.batch_size, seed=seed)
    steps = training.epochs * -(-np.asarray(federated.sizes) // training.batch_size)
    key = jax.random.fold_in(jax.random.key(config.seed), CLOCK)
    sent = trees.num_bytes(model.shapes()), trees.num_bytes(upload_shapes(strategy, problem))
    return Devices(made, key, steps, *sent), problem


def _asynchrony(config: Config, schedule: Schedule) -> "Asynchrony":
    numbers = (np.float32(config.staleness_a), np.float32(config.staleness_b))
    return Asynchrony(schedule, _keys_of_versions(config), numbers, config.staleness)


def _online(config: Config, federated: FederatedData, model: Model) -> "Online":
    if config.cohort != 1:
        raise UserError(f"the method selects asynchronous clients one by one: use cohort=1, not {config.cohort}")
    devices, _ = devices_of(config, federated, model)
    clients, draws = np.arange(federated.num_clients), devices.draws(np.arange(_in_flight(config) + config.rounds))
    of_job = lambda draw: devices.seconds(clients, np.tile(draw, (len(clients), 1))).total.astype(np.float32)
    return Online(np.stack([of_job(draw) for draw in draws]), _keys_of_versions(config))


def _keys_of_versions(config: Config) -> Keys:
    key, versions = jax.random.key(config.seed), jnp.arange(config.rounds + 1)
    return Keys(*(jax.vmap(functools.partial(round_key, key, stream))(versions) for stream in (DISPATCH, CLIENT)))


def _architectures(config: Config, federated: FederatedData) -> np.ndarray:
    if not config.architectures_from:
        return architectures(config.architectures, len(config.networks), federated.num_clients, seed=config.seed)
    division = federated.hash()
    return best_networks(config.architectures_from, config.networks, federated.num_clients, division=division)


def local_setting(config: Config, dataset: Dataset) -> local.LocalSetting:
    """The settings of the clients' training."""
    return local.setting(
        config.optimizer,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        epochs=config.local_epochs,
        batch_size=config.batch_size,
        augment=augmentation(config, dataset),
    )


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
    clock: Asynchrony | Online | Cohorts | None = None


def chosen(config: Config) -> Chosen:
    """The strategy of a configuration, with its numbers as arrays."""
    server = None
    if config.server_optimizer != "none":
        server = ServerOptimizer(
            config.server_optimizer, config.server_lr, config.server_momentum, config.server_beta2, config.server_tau
        )
    poisson = None if config.dp_poisson is None else np.float32(config.dp_poisson)
    hyper = as_arguments(configuration.hyper(config))
    return Chosen(config.strategy, hyper, as_arguments(server), _links(config), poisson)


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
    depends = {"robust": {"stacked": several}}
    made = [arguments(problem, **depends.get(kind, {})) for kind, arguments in chosen.links.items()]
    return channel(strategy, problem, made)


def strategy_of(config: Config) -> Build:
    """The function problem -> strategy of a configuration."""
    return bind(build_chosen, chosen(config))


# Settings that compiled programs do not depend on, or receive as an argument.
_NOT_COMPILED = {
    "seed", "variables", "rounds", "eval_every", "eval_clients", "finetune_epochs", "stop_at_accuracy", "patience",
    "dp_delta", "dp_target_epsilon",
}  # fmt: skip
_NUMBERS = {
    "lr", "momentum", "weight_decay", "clip_norm", "server_lr", "server_momentum", "server_beta2", "server_tau",
    "dp_clip", "dp_noise", "dp_poisson", "dp_quantile", "attackers", "attack_scale", "staleness_a", "staleness_b",
    "deadline",
}  # fmt: skip


def program_key(config: Config) -> str | None:
    """All settings that the compiled programs of a run depend on, except the numbers and shapes of their arguments.

    None if a strategy or network is user-supplied. Such code may depend on other values, such as a variable of a
    notebook, so it is traced again in every run.
    """
    if not (STRATEGIES.is_ours(config.strategy) and all(map(MODELS.is_ours, config.networks))):
        return None
    data = {each.flag for each in settings_of(Config) if each.info.group == "Data"}
    settings = configuration.decisive(config)
    others = data | argument_flags(config) | _NOT_COMPILED
    return json.dumps({flag: value for flag, value in settings.items() if flag not in others})


def argument_flags(config: Config) -> set[str]:
    """The flags whose values are arguments of the compiled programs: seed, partition and numbers.

    With other shapes of the arguments, such as another number of clients, a program is compiled anew.
    """
    partition = {each.flag for each in settings_of(Config) if each.info.group == "Partition"} - {"clients"}
    return {"seed"} | partition | number_flags(config)


def number_flags(config: Config) -> set[str]:
    """The flags of the numbers of the method and of the optimizers."""
    return {f"{config.strategy}_{each.name}" for each in numbers_of(configuration.hyper(config))} | _NUMBERS


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
