"""Build the simulator of a configuration."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_mr.data import Dataset, FederatedData
from fedjax_mr.data.augment import crop_flip
from fedjax_mr.engine import local
from fedjax_mr.engine.simulator import Simulator, network_of
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.architectures import architectures, best_networks
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.settings import settings_of
from fedjax_mr.models import MODELS, Model
from fedjax_mr.strategies import STRATEGIES, Problem, Strategy
from fedjax_mr.strategies.transforms import make_server_optimizer, server_optimizer


def build_model(config: Config, dataset: Dataset, *, modules: Sequence[Any] = ()) -> Model:
    """The network of a configuration for the samples of a dataset; a `Zoo` if there are several.

    Args:
      config: the configuration, which names the networks.
      dataset: the samples.
      modules: user-supplied Flax modules or `Model`s. Default: the networks that the configuration names.

    Raises:
      UserError: a network does not fit the samples. Raised before any compilation.
    """
    options = {"norm": config.norm, "authors_state": config.authors_state, "projection": config.projection}
    return network_of(list(modules) or config.networks, dataset, init=config.init, **options)


def simulator_of(config: Config, federated: FederatedData, model: Model, **changes: Any) -> Simulator:
    """The simulator of a configuration.

    Args:
      config: the configuration.
      federated: the clients' data.
      model: the network.
      changes: arguments of `Simulator` that replace those of the configuration.
    """
    chosen: dict[str, Any] = {
        "strategy": build_strategy,
        "hyper": config,
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
    return Simulator(model=model, federated=federated, name=config.strategy, **chosen)


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


def build_strategy(config: Config, problem: Problem) -> Strategy:
    """The strategy of a configuration, with its server optimizer if there is one."""
    strategy = STRATEGIES[config.strategy].build(configuration.hyper(config), problem)
    if config.server_optimizer == "none":
        return strategy
    optimizer = make_server_optimizer(
        config.server_optimizer,
        lr=config.server_lr,
        momentum=config.server_momentum,
        beta2=config.server_beta2,
        tau=config.server_tau,
        several=strategy.models is not None and strategy.models.stacked,
    )
    return server_optimizer(strategy, optimizer)


# Settings that compiled programs do not depend on, or receive as an argument.
_NOT_COMPILED = {"seed", "rounds", "eval_every", "eval_clients", "finetune_epochs", "stop_at_accuracy", "patience"}


def program_key(config: Config) -> str | None:
    """All settings that the compiled programs of a run depend on, except the shapes of their arguments.

    None if a strategy or network is user-supplied. Such code may depend on other values, such as a variable of a
    notebook, so it is traced again in every run.
    """
    if not (STRATEGIES.is_ours(config.strategy) and all(map(MODELS.is_ours, config.networks))):
        return None
    data = {each.flag for each in settings_of(Config) if each.info.group in ("Data", "Partition")}
    settings = configuration.decisive(config)
    return json.dumps({flag: value for flag, value in settings.items() if flag not in data | _NOT_COMPILED})


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
