"""From a configuration to its network and its compiled rounds."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import models, trees
from fedjax_mr.data import Dataset, FederatedData
from fedjax_mr.data.augment import crop_flip
from fedjax_mr.data.facts import scale_and_shift
from fedjax_mr.data.federated import Public
from fedjax_mr.engine import local
from fedjax_mr.engine.clients import ClientAxis, client_axis
from fedjax_mr.engine.program import memory_needed
from fedjax_mr.engine.round import Build, Federation, RunConstants, begin, finish, start, train_client
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.architectures import architectures
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.settings import settings_of
from fedjax_mr.models import MODELS, BlockNet, Model, Zoo
from fedjax_mr.strategies import STRATEGIES, Problem, Strategy
from fedjax_mr.strategies.transforms import make_server_optimizer, server_optimizer


def build_model(config: Config, federated: FederatedData, *, modules: Sequence[Any] = ()) -> Model:
    """Return the network for the samples of a federation; a `Zoo` if there are several.

    Args:
      config: names the networks.
      federated: the data.
      modules: Flax modules, or `Model`s of them, in place of the networks that the configuration names.

    Raises:
      UserError: a network does not fit the samples; this before anything is compiled.
    """
    x = federated.dataset.x
    tokens = np.issubdtype(x.dtype, np.signedinteger)
    facts: dict[str, Any] = {
        "input_shape": x.shape[1:],
        "num_classes": federated.dataset.num_classes,
        "input_dtype": np.int32 if tokens else np.float32,
        "norm": config.norm,
        "authors_state": config.authors_state,
        "projection": config.projection,
    }
    if modules:
        networks = [models.of_module(module, **facts) for module in modules]
    else:
        networks = [models.build(name, **facts, init=config.init) for name in config.model.split(",")]
    return networks[0] if len(networks) == 1 else Zoo.of(networks)


@dataclasses.dataclass(frozen=True)
class FederationFacts:
    """The facts of a federation from which its problem follows; no client's samples are among them.

    Attributes:
      dataset: whose kind of samples and normalisation count; its samples do not.
      sizes: training samples per client [N].
      label_counts: the same per client and class [N, C].
      validation_sizes: samples that each client keeps for validation [N]; None: no client keeps any.
      public: the server's public set, or None.
      division: a name of this division of the data, by which runs of the same one find each other.
    """

    dataset: Dataset
    sizes: np.ndarray
    label_counts: np.ndarray
    validation_sizes: np.ndarray | None = None
    public: Public | None = None
    division: str = ""

    @classmethod
    def of(cls, federated: FederatedData) -> "FederationFacts":
        """Return the facts of a federation whose samples are all here."""
        validation = None if federated.validation is None else federated.validation.sizes
        counts, division = federated.label_counts(), federated.hash()
        return cls(federated.dataset, federated.sizes, counts, validation, federated.public, division)


def problem_of(config: Config, facts: FederationFacts, model: Model) -> Problem:
    """Return the problem of a configuration's clients."""
    count = len(facts.sizes)
    setting = local.LocalSetting(
        optimizer=local.make_optimizer(
            config.optimizer,
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
        ),
        epochs=config.local_epochs,
        batch_size=config.batch_size,
        max_size=int(facts.sizes.max()),
        augment=augmentation(config, facts.dataset),
        lr=config.lr if config.optimizer == "sgd" else None,
        momentum=config.momentum,
    )
    kept = facts.validation_sizes
    return Problem(
        model=model,
        local=setting,
        num_clients=count,
        cohort_size=config.cohort,
        num_classes=facts.dataset.num_classes,
        layers=model.layers(),
        sizes=jnp.asarray(facts.sizes, jnp.int32),
        label_counts=jnp.asarray(facts.label_counts, jnp.int32),
        architectures=jnp.asarray(architectures(config, count, division=facts.division), jnp.int32),
        public=public_samples(facts),
        validation_sizes=None if kept is None else jnp.asarray(kept, jnp.int32),
    )


def build_rounds(config: Config, federated: FederatedData, model: Model, axis: ClientAxis) -> Rounds:
    """Return the compiled programs of a configuration's strategy on a layout."""
    problem = problem_of(config, FederationFacts.of(federated), model)
    dataset, split = federated.dataset, federated.train_and_validation()
    federation = Federation(samples(federated, dataset.x, dataset.y), split.index, split.offsets)
    build = functools.partial(build_strategy, config)
    constants = RunConstants(problem, federation, jax.random.key(config.seed))
    if not all(isinstance(network.module, BlockNet) for network in model.networks):
        _rehearse(config, build, constants, axis)
    return Rounds(
        build,
        constants,
        axis,
        stop_at_divergence=not config.allow_nonfinite,
        memory_on_host=memory_on_host(config, build(problem), axis),
        data_on_host=data_on_host(config, federated, axis),
        key=program_key(config),
    )


# What the programs of a run never see, or see as an argument.
_NOT_COMPILED = {"seed", "rounds", "eval_every", "eval_clients", "finetune_epochs", "stop_at_accuracy", "patience"}


def program_key(config: Config) -> str | None:
    """Return all settings that decide about the programs of a run, beside what they see of their arguments.

    None if some of the code is not this package's: a notebook's functions may read what no key can name, such as a
    number in another cell, and are traced anew in every run.
    """
    names = config.model.split(",")
    if not (STRATEGIES.is_ours(config.strategy) and all(map(MODELS.is_ours, names))):
        return None
    data = {each.flag for each in settings_of(Config) if each.info.group in ("Data", "Partition")}
    settings = configuration.decisive(config)
    return json.dumps({flag: value for flag, value in settings.items() if flag not in data | _NOT_COMPILED})


def layout(config: Config, federated: FederatedData, model: Model) -> ClientAxis:
    """Return the devices and lanes of a run: those asked for, else the most lanes that a device's memory holds.

    The compiler says what a round takes before anything runs. The round is compiled once more for the run itself, from
    the compilation cache. Several processes, whose devices might know different limits, take all lanes.
    """
    axis = client_axis(devices=config.devices, lanes=config.lanes, cohort_size=config.cohort)
    limit = memory_limit(axis)
    if config.lanes is not None or axis.lanes == 1 or math.isinf(limit) or jax.process_count() > 1:
        return axis
    if data_on_host(config, federated, axis):
        return axis  # such rounds take one client's samples after the other from the host: nothing to compile ahead

    def needed(axis: ClientAxis) -> int:
        described = dataclasses.replace(axis, described=True)
        return max(map(memory_needed, build_rounds(config, federated, model, described).compile().values()))

    return lanes_that_fit(axis, limit, needed)


def lanes_that_fit(axis: ClientAxis, limit: float, needed: Callable[[ClientAxis], int]) -> ClientAxis:
    """Return the layout with its lanes halved until ``needed`` bytes are within ``limit``, or one is left."""
    while axis.lanes > 1 and needed(axis) > limit:
        axis = dataclasses.replace(axis, lanes=-(-axis.lanes // 2))
    return axis


def _rehearse(config: Config, build: Build, constants: RunConstants, axis: ClientAxis) -> None:
    """Trace a round with a network that is not ours; nothing is computed.

    Raises:
      UserError: the strategy needs more of the network than it has.
    """

    def one_round(constants: RunConstants) -> Any:
        progress = start(build, constants)
        plan, rows = begin(build, axis, constants, progress)
        trained = jax.lax.map(lambda row: train_client(build, constants, progress.round, row), rows)
        return finish(build, constants, progress, plan, trained)

    try:
        jax.eval_shape(one_round, constants)
    except UserError as error:
        raise UserError(f"{config.strategy}: {error}") from None


def build_strategy(config: Config, problem: Problem) -> Strategy:
    """Return a configuration's strategy, with the server's optimizer if there is one."""
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


def public_samples(facts: FederationFacts) -> local.Samples | None:
    """Return the server's public set, y None where it has no labels; None if there is none."""
    public = facts.public
    if public is None:
        return None
    labels = np.zeros(len(public.x), np.int32) if public.y is None else public.y
    known = normalised(facts.dataset, public.x, labels)
    return known._replace(y=None) if public.y is None else known


def data_on_host(config: Config, federated: FederatedData, axis: ClientAxis) -> bool:
    """Return whether the clients' samples are kept on the host: asked for, or more than a third of a device."""
    if config.data_placement != "auto":
        return config.data_placement == "host"
    return too_large(federated.dataset.x.nbytes, axis)


def too_large(needed: int, axis: ClientAxis) -> bool:
    """Return whether so many bytes are over a third of a device's memory; the processor's own has no limit here."""
    return 3 * needed > memory_limit(axis)


def memory_limit(axis: ClientAxis) -> float:
    """Return the bytes of a device; infinity where it does not tell, as the processor, or is not here to be asked."""
    if axis.described:
        return math.inf
    statistics = axis.mesh.local_mesh.devices.flat[0].memory_stats() or {}
    return statistics.get("bytes_limit", math.inf)


def memory_on_host(config: Config, strategy: Strategy, axis: ClientAxis) -> bool:
    """Return whether what the clients remember is kept on the host: asked for, or more than a third of a device."""
    if strategy.init_memory is None or config.memory == "device":
        return False
    if jax.process_count() > 1:  # there the devices share it, parameter by parameter
        if config.memory == "host":
            raise UserError("--memory=host is for one process; several divide the clients' memory among their devices")
        return False
    needed = trees.num_bytes(jax.eval_shape(strategy.init_memory, jax.random.key(0)))
    return config.memory == "host" or too_large(needed, axis)


def augmentation(config: Config, dataset: Dataset) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """Return the change of the training images that a configuration asks for, or None.

    Raises:
      UserError: the samples are no images.
    """
    if config.augment == "none":
        return None
    if dataset.x.ndim != 4:
        raise UserError(f"--augment={config.augment} is for images, and {dataset.name} has none; leave it out")
    return _crop_flip(config.augment_pad)


@functools.cache  # the same function in every run, as `local.make_optimizer`
def _crop_flip(pad: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return functools.partial(crop_flip, pad=pad)


def samples(federated: FederatedData, x: np.ndarray, y: np.ndarray) -> local.Samples:
    """Return samples with the normalisation of a federation's data set."""
    return normalised(federated.dataset, x, y)


def normalised(dataset: Dataset, x: np.ndarray, y: np.ndarray) -> local.Samples:
    """Return samples with the data set's normalisation, (pixel - mean) / std, as one factor and one summand."""
    scale, shift = scale_and_shift(dataset.mean, dataset.std, x.dtype)
    return local.Samples(x, np.asarray(y, np.int32), scale, shift).in_rows()
