"""Build the network and the simulator of a configuration."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_mr import registry
from fedjax_mr.clock import Events
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.data import Dataset, FederatedData
from fedjax_mr.engine.layout import Layout
from fedjax_mr.engine.round import INIT
from fedjax_mr.engine.simulator import Simulator, network_of, require_task, task_of
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.architectures import architectures, best_networks
from fedjax_mr.experiment.method import build_chosen, chosen, local_setting
from fedjax_mr.experiment.pretrained import start_from
from fedjax_mr.experiment.simulated_time import clients_may_be_late, clock_of
from fedjax_mr.keys import random_key
from fedjax_mr.models import Model, adapters, parts
from fedjax_mr.models.base import with_fields
from fedjax_mr.models.precision import stored, with_precision
from fedjax_mr.tasks import Task, with_metrics


def task(config: Config, federated: FederatedData) -> Task:
    """The task of a configuration with its loss and its metrics.

    Raises:
      UserError: as `simulator.task_of`, or a share above 1 shall be reached.
    """
    settings = configuration.loss_settings(config)
    found = task_of(federated, loss=config.loss, metrics=config.metric_names, settings=settings)
    found = found or federated.dataset.task
    for name in ("target_accuracy", "stop_at_accuracy"):
        value = getattr(config, name)
        if value is not None and found.primary.unit == "fraction" and not 0 <= value <= 1:
            raise UserError(f"{name}={value} is out of range (allowed: >= 0 and <= 1)")
    return found


def build_model(
    config: Config,
    dataset: Dataset,
    *,
    task: Task | None = None,
    modules: Sequence[Any] = (),
    variables: Any = None,
) -> Model:
    """The network of a configuration for the samples of a dataset; a `Zoo` if there are several.

    Args:
      config: the configuration, which names the networks.
      dataset: the samples.
      task: the task with the loss, see `task`. Default: that of the dataset with the metrics of the configuration.
      modules: user-supplied Flax modules or `Model`s. Default: the networks that the configuration names.
      variables: user-supplied variables of the network. Default: it is initialised from the seed.

    Raises:
      UserError: a network does not fit the samples, or the precision has no effect on it. Raised before compilation.
    """
    options: dict[str, Any] = {"norm": config.norm, "authors_state": config.authors_state}
    options |= {"projection": config.projection, "remat": config.remat}
    task = task or with_metrics(dataset.task, config.metric_names)
    model = network_of(list(modules) or config.networks, dataset, task=task, init=config.init, **options)
    if model.precision not in ("float32", config.precision):
        raise UserError(f"{model.name} trains in {model.precision}: add precision={model.precision}, for the record")
    for network in model.networks:
        if (kind := network.convolution) not in ("auto", config.convolution):
            raise UserError(f"{network.name} has convolution={kind}: add convolution={kind}, for the record")
    model = stored(fine_tuned(config, model, variables=variables), config.frozen_dtype)
    model = with_precision(model, config.precision)
    return with_fields(model, convolution=config.convolution)


def fine_tuned(config: Config, model: Model, *, variables: Any = None) -> Model:
    """The network with the adapters and the frozen part that the configuration asks for.

    Raises:
      UserError: nothing would train, or there are several networks.
    """
    key = jax.random.fold_in(random_key(config.seed), INIT)
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
            dropout=config.lora_dropout,
            stabilized=config.lora_rslora,
        )
    if config.trainable is None and variables is None:
        return model
    if len(model.networks) > 1:
        raise UserError(f"trainable= and variables= need a single network, not {model.name}")
    return parts.partly(model, config.trainable or "*", key=key, variables=variables)


def simulator_of(
    config: Config,
    federated: FederatedData,
    model: Model,
    *,
    events: Events | None = None,
    secret: np.ndarray | None = None,
    **changes: Any,
) -> Simulator:
    """The simulator of a configuration.

    Args:
      config: the configuration.
      federated: the clients' data.
      model: the network.
      events: the result of `events_of`. Default: it is computed if it is needed.
      secret: see `chosen`. A simulator that trains needs it.
      changes: arguments of `Simulator` that replace those of the configuration.
    """
    require_task(config.strategy, model.task)
    arguments: dict[str, Any] = {
        "strategy": build_chosen,
        "hyper": chosen(config, secret=secret),
        "cohort": config.cohort,
        "local": local_setting(config, federated.dataset),
        "seed": config.seed,
        "architectures": _architectures(config, federated),
        "layout": configuration.part(config, Layout),
        "stop_at_divergence": not config.allow_nonfinite,
    } | changes
    if (config.mode == "async" or clients_may_be_late(config)) and "cohort" not in changes:
        clock, width = clock_of(config, federated, model, events)
        arguments |= {"hyper": dataclasses.replace(arguments["hyper"], clock=clock), "cohort": width}
    return Simulator(model=model, federated=federated, name=config.strategy, **arguments)


def _architectures(config: Config, federated: FederatedData) -> np.ndarray:
    if not config.architectures_from:
        return architectures(config.architectures, len(config.networks), federated.num_clients, seed=config.seed)
    division = federated.hash()
    return best_networks(config.architectures_from, config.networks, federated.num_clients, division=division)
