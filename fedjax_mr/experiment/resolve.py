"""From the configuration that a user writes to a complete and checked one, once, before anything else is done.

What a user leaves open is filled in here: the hyper-parameters of the method, a public set for a method that cannot do
without one, the content hashes of imported files, and the name of user-supplied samples. The name of a user-supplied
network has a hash of its shapes, which depend on the samples, so `UserObjects.build` adds it once they are loaded.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fedjax_mr import registry
from fedjax_mr.channel import LINKS
from fedjax_mr.client import optimizers
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports, settings
from fedjax_mr.config.config import Config
from fedjax_mr.config.loggers import LOGGERS
from fedjax_mr.config.settings import Setting
from fedjax_mr.data import SOURCES, Dataset, is_file
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment.user_objects import UserObjects
from fedjax_mr.models import MODELS, Model
from fedjax_mr.registry import Registry
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.strategies.transforms import SERVER_OPTIMIZERS

PUBLIC_SHARE = 0.1  # of methods that cannot do without public data, as in FedMe's and pFedHR's papers


class Resolved(NamedTuple):
    """A configuration that is complete and checked, and the user-supplied objects beside it.

    Attributes:
      config: all settings of the run.
      user_objects: the samples and networks that replace those that ``config`` names.
      notes: one line for each setting that was filled in, and for settings that have no effect.
    """

    config: Config
    user_objects: UserObjects
    notes: tuple[str, ...]


def resolve(config: Config, *, dataset: Dataset | None = None, model: Any = None, variables: Any = None) -> Resolved:
    """Complete and check a configuration, before any data are read.

    Args:
      config: as the user wrote it, by flags or in Python.
      dataset: samples to use in place of the dataset that ``config`` names.
      model: a network, or a list of several, to use in place of those that ``config`` names.
      variables: values of the network's variables, to use in place of initial ones.

    Raises:
      UserError: a name is unknown, a value has the wrong type or is out of range, two settings contradict each other,
        or as `imports.load`.
    """
    if not isinstance(config, Config):
        raise UserError(f"a run takes an fmr.Config(...), not a {type(config).__name__}")
    user_objects = UserObjects.of(dataset, model, variables)
    for name in registry.USER_OBJECTS:
        if isinstance(value := getattr(config, name), os.PathLike):
            raise UserError(f"{name}= of a Config is a text, not a path object: use {name}={os.fspath(value)!r}")
        if not isinstance(value, str | None):
            raise UserError(
                f"{name}= of a Config is a name, not a {type(value).__name__}: pass the object as "
                f"fmr.run(config, {name}=...)"
            )
    imports.load(config.imports)
    config = dataclasses.replace(config, hyper=_hyper(config))
    for setting, value in settings.values_of(config):
        setting.check(value, setting.name)
    for owner in (config.hyper, *config.rows):
        for setting, value in settings.values_of(owner):
            place = "hyper" if owner is config.hyper else type(owner).__name__
            setting.check(value, f"{place}.{setting.name}")
    completed = dataclasses.replace(
        config,
        dataset=user_objects.dataset_name(config.dataset),
        public_share=public_share(config),
        lr_over=config.lr_over or (float(config.rounds) if config.lr_schedule == "cosine" else None),
        imports=imports.recorded(config.imports, _rows_used(config)),
    )
    _check_together(completed, user_objects)
    return Resolved(completed, user_objects, tuple(_notes(config, completed)))


def _hyper(config: Config) -> Any:
    """The hyper-parameters of the method, which are its defaults if the configuration has none."""
    if config.strategy not in STRATEGIES:
        raise unknown_name("strategy", config.strategy, STRATEGIES)
    owner = STRATEGIES[config.strategy].hyper
    if config.hyper is not None and type(config.hyper) is not owner:
        wanted = "has no hyper-parameters" if owner is None else f"takes {_full_name(owner)}"
        raise UserError(f"strategy {config.strategy!r} {wanted}, but hyper is a {_full_name(type(config.hyper))}")
    return configuration.hyper(config)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _rows_used(config: Config) -> imports.Names:
    """The rows of the registries that a run uses."""
    used = {(rows.kind, name.partition("/")[0]) for _, rows, name in _named(config)}
    used |= {(SERVER_OPTIMIZERS.kind, config.server_optimizer), (SOURCES.kind, config.public_from or "")}
    return used | {(LINKS.kind, name) for name, _, _ in configuration.links(config)}


def _named(config: Config) -> Iterator[tuple[Setting, Registry, str]]:
    """Yield each setting whose values are names of rows, the registry and a name."""
    for setting, value in settings.values_of(config):
        if isinstance(setting.info.names, Registry) and value is not None:
            for name in value.split(","):
                yield setting, setting.info.names, name


# --- Public data -----------------------------------------------------------------------------------------------------


def public_share(config: Config) -> float:
    """The share of public samples: the default of a method that needs some, if the configuration has none."""
    return config.public_share or (PUBLIC_SHARE if _needs_public(config) else 0.0)


def _needs_public(config: Config) -> bool:
    """Whether the method needs public data and no partition file may hold some."""
    row = STRATEGIES.get(config.strategy)
    if row is None or config.partition_file:
        return False
    return row.needs_public(configuration.hyper(config)) if callable(row.needs_public) else row.needs_public


def unequal_shares(configs: Sequence[Config]) -> Iterator[str]:
    """Yield a line if methods are compared of which only some give up training samples for a public set."""
    needing = dict.fromkeys(config.strategy for config in configs if _needs_public(config))
    others = [config.public_share for config in configs if config.strategy not in needing]
    if needing and others and not any(others):
        share = f"--public_share={max(config.public_share for config in configs):g}"
        yield f"{share} for {', '.join(needing)} and none for the others: use it for all to train on the same data"


# --- Checks across settings ------------------------------------------------------------------------------------------


def _check_together(config: Config, user_objects: UserObjects) -> None:
    """Check the names in a configuration, and settings that depend on each other.

    Raises:
      UserError: the message names the setting, its value and the values allowed.
    """
    supplied = user_objects.dataset, user_objects.modules or None, user_objects.variables
    for name, each in zip(registry.USER_OBJECTS, supplied, strict=True):
        if registry.is_supplied(recorded := getattr(config, name) or "") and each is None:
            raise registry.not_passed(name, recorded)
    if config.variables is not None and user_objects.variables is None:
        raise UserError(f"variables={config.variables} cannot be set: pass them as fmr.run(config, variables=...)")
    if config.dataset not in SOURCES and not registry.is_supplied(config.dataset) and not _is_path(config.dataset):
        raise unknown_name(SOURCES.kind, config.dataset, SOURCES)
    for setting, rows, name in _named(config):
        if name not in rows and name != setting.default and not setting.info.path and rows is not MODELS:
            raise unknown_name(rows.kind, name, {*rows, *([] if setting.default is None else [setting.default])})
    if config.server_optimizer not in ("none", *SERVER_OPTIMIZERS):
        raise unknown_name("server_optimizer", config.server_optimizer, ["none", *SERVER_OPTIMIZERS])
    for name in config.links.split(",") if config.links else ():
        if name not in LINKS or LINKS[name].is_on is not None:
            own = [link for link, row in LINKS.items() if row.is_on is None]
            raise UserError(
                f"links={name!r} is not one of your links ({', '.join(own) or 'there are none'}): import the file that "
                "registers it with --import; links of this package have flags of their own, such as --compress"
            )
    optimizers.check(config.optimizer, momentum=config.momentum, weight_decay=config.weight_decay)
    _check_networks(config, user_objects)
    _check_adapters(config, user_objects)
    _check_logs(config)
    if 0 < config.clients < config.cohort:  # 0 clients: all of the dataset, which is not loaded yet
        raise UserError(
            f"cohort={config.cohort} is more than clients={config.clients}: at most all clients train in a round"
        )
    if config.resume and config.overwrite:
        raise UserError("resume=True continues a run and overwrite=True replaces it: use only one of them")
    _check_channel(config)
    _check_clock(config)
    number, count = config.process_id, config.num_processes
    if number is not None and count is not None and number >= count:
        raise UserError(f"process_id={number} is not below num_processes={count}: processes count from 0")


def _check_networks(config: Config, user_objects: UserObjects) -> None:
    for name in () if user_objects.modules else config.networks:
        if name not in MODELS and not registry.is_supplied(name):
            raise unknown_name("model", name, MODELS)
    given = [len(each.networks) if isinstance(each, Model) else 1 for each in user_objects.modules]
    count = sum(given) or len(config.networks)
    if count > 1 and not STRATEGIES[config.strategy].several:
        able = ", ".join(name for name, row in STRATEGIES.items() if row.several)
        raise UserError(
            f"strategy {config.strategy} needs the same network for all clients, but model= names {count}; for "
            f"clients of different networks there are {able}"
        )
    if len(config.architectures_from) not in (0, 1, count):
        raise UserError(
            f"architectures_from= names {len(config.architectures_from)} runs, but model= {count} networks: one run "
            "for each network, in the same order, or one folder that holds them"
        )


def _check_adapters(config: Config, user_objects: UserObjects) -> None:
    given = any(isinstance(each, Model) and each.adapter is not None for each in user_objects.modules)
    if STRATEGIES[config.strategy].adapters and config.adapter == "none" and not given:
        raise UserError(f"strategy {config.strategy} trains adapters: set adapter=lora")
    for setting, value in settings.values_of(config):
        if setting.info.needs == ("adapter",) and config.adapter == "none" and value != setting.default:
            raise UserError(f"{setting.name}={value} needs adapter=lora")


def _check_channel(config: Config) -> None:
    clipped = config.dp_clip is not None
    for flag in ("dp_noise", "dp_target_epsilon", "dp_quantile"):
        if getattr(config, flag) and not clipped:
            raise UserError(f"{flag}={getattr(config, flag):g} needs dp_clip=, the largest norm of a client's upload")
    if config.dp_seed is not None and not config.dp_noise and config.dp_target_epsilon is None:
        raise UserError("dp_seed= decides the noise, and this run adds none: add dp_noise= or leave it out")
    if config.attack != "none" and config.dp_noise_on == "mean" and clipped:
        raise UserError(
            "attackers add no noise, so with dp_noise_on=mean the mean has too little: use dp_noise_on=upload"
        )
    if config.dp_poisson is not None:
        if config.dp_noise_on != "mean" or not clipped:
            raise UserError(
                "dp_poisson= protects a mean only, because the number of uploads shows who takes part: add "
                "dp_noise_on=mean and dp_clip="
            )
        if config.dp_quantile is not None:
            raise UserError("dp_poisson= needs a constant norm: leave dp_quantile= out")
    if config.dp_target_epsilon is not None and config.dp_noise:
        raise UserError("dp_target_epsilon= chooses the noise: leave dp_noise= out")
    if config.mode == "async" and (config.dp_noise or config.dp_target_epsilon is not None):
        raise UserError("epsilon of asynchronous clients is not known: they are not drawn independently; use mode=sync")
    if config.mode == "async" and config.compress_download != "none":
        raise UserError(
            "asynchronous clients receive models uncompressed, because their changes are added to a later model: use "
            "compress_download=none"
        )
    if config.error_feedback != "none" and config.compress == "none":
        raise UserError(f"error_feedback={config.error_feedback} needs compress=: without it there is no error")


def _check_clock(config: Config) -> None:
    if config.mode == "async" and (config.lr_schedule != "constant" or config.lr_warmup):
        raise UserError(
            "a client in asynchronous rounds may train in a later round than it started, so the learning rate must be "
            "constant: use lr_schedule=constant and lr_warmup=0, or mode=sync"
        )
    if config.late != "drop" and config.deadline is None:
        raise UserError(f"late={config.late} needs deadline=, the seconds after which a round ends")
    for flag in ("deadline", "over_select"):
        if getattr(config, flag) in (None, 1):
            continue
        if config.mode == "async":
            raise UserError(f"{flag}= is for synchronous rounds, where the server waits: leave it out or use mode=sync")
        counting = {"dp_noise": 0, "dp_target_epsilon": None, "dp_quantile": None, "robust": "none", "attack": "none"}
        for other, neutral in counting.items():
            if getattr(config, other) != neutral:
                raise UserError(f"{flag}= drops uploads, which {other}= would count: use only one of them")
        if config.error_feedback == "ef21":
            raise UserError(f"{flag}= drops uploads, and error_feedback=ef21 needs all: use error_feedback=ef")


def _check_logs(config: Config) -> None:
    for name in config.logs:
        needed = getattr(LOGGERS[name], "needs", None)
        if needed is not None and importlib.util.find_spec(needed) is None:
            raise UserError(f"log={name!r} needs {needed}: pip install 'fedjax-mr[{name}]'")


def _is_path(name: str) -> bool:
    return "/" in name or "\\" in name or is_file(name)


# --- Notes -----------------------------------------------------------------------------------------------------------


def _notes(written: Config, config: Config) -> Iterator[str]:
    """Yield one line for a share of samples that was filled in, and for each group of settings without effect.

    Such settings are allowed: methods that are compared share their data, including the settings of the public set.

    Args:
      written: the configuration as the user wrote it.
      config: the complete one.
    """
    if written.public_share != config.public_share:
        share = f"{config.public_share:g} of the training samples (--public_share={config.public_share:g})"
        yield f"{config.strategy} needs public data: {share}, which no client has"
    public = "--public_share, --public_max, --public_labels and --public_from"
    if STRATEGIES[config.strategy].group == "asynchronous" and config.mode == "sync":
        yield f"{config.strategy} is for asynchronous clients (--mode=async): in synchronous rounds no upload is stale"
    for setting, value in configuration.setting_values(config):
        group, needs, changed = setting.info.group, setting.info.needs, value != setting.default
        conditional = group in ("Channel", "Clock", "Local training") and not setting.info.has_effect(vars(config))
        if conditional and changed:
            wanted = f"={' or '.join(needs[1:])}" if needs[1:] else ""
            yield f"--{setting.flag} has no effect without --{needs[0]}{wanted}"
    has_settings = config.public_max is not None or config.public_from or not config.public_labels
    if config.public_share and not STRATEGIES[config.strategy].public:
        share = f"--public_share={config.public_share:g}"
        yield f"{config.strategy} takes no public data: the samples of {share} stay unused"
    elif has_settings and not config.public_share and not config.partition_file:
        yield f"without --public_share there is no public set: {public} have no effect"
