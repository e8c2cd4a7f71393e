"""The checks across the settings of a configuration, before any data are read; `settings` checks each by itself."""

import dataclasses
import importlib.util
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from fedjax_mr import registry
from fedjax_mr.data import SOURCES, is_file
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment import imports
from fedjax_mr.models import MODELS
from fedjax_mr.strategies import STRATEGIES

LOGS = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""The values of ``--log``, each also an extra of this package, and the package that each needs."""
PUBLIC_SHARE = 0.1  # of methods that cannot do without public data, as in FedMe's and pFedHR's papers


def with_imports(config: Any) -> Any:
    """Return a `config.Config` with the content hashes of the imports that it uses.

    Raises:
      UserError: as `imports.load`.
    """
    imports.load(config.imports)
    used = {("strategy", config.strategy), ("partition", config.partition)}
    used |= {("model", name) for name in config.model.split(",")}
    used |= {("data set", name.partition("/")[0]) for name in (config.dataset, config.public_from) if name}
    return dataclasses.replace(config, imports=imports.recorded(config.imports, used))


def complete(config: Any) -> Any:
    """Return a `config.Config` as it is run and kept: `with_imports`, and with public data if its method needs some.

    Raises:
      UserError: as `imports.load`.
    """
    lacks = needs_public(config) and not config.public_share
    return dataclasses.replace(with_imports(config), **({"public_share": PUBLIC_SHARE} if lacks else {}))


def needs_public(config: Any) -> bool:
    """Return whether the method, with its settings, needs public data, and no partition file may hold some."""
    row = STRATEGIES.get(config.strategy)
    if row is None or config.partition_file:
        return False
    if not callable(row.needs_public):
        return row.needs_public
    return row.needs_public(row.hyper() if config.hyper is None and row.hyper is not None else config.hyper)


def added(asked: Any, completed: Any) -> Iterator[str]:
    """Yield one line for each setting that `complete` has added."""
    if asked.public_share != completed.public_share:
        share = f"{completed.public_share:g} of the training samples (--public_share={completed.public_share:g})"
        yield f"{completed.strategy} needs public data: {share}, which no client has"


def unequal_shares(configs: Sequence[Any]) -> Iterator[str]:
    """Yield a line if, of runs that are compared, those that need public data have less to train on than the rest."""
    needing = dict.fromkeys(config.strategy for config in configs if needs_public(config))
    others = [config.public_share for config in configs if config.strategy not in needing]
    if needing and others and not any(others):
        share = f"--public_share={max(config.public_share for config in configs):g}"
        yield f"{share} for {', '.join(needing)} and none for the others: given to all, the data are the same"


def check_together(config: Any, *, in_python: Collection[str] = ()) -> None:
    """Check the names in a `config.Config` and what its settings say together.

    Args:
      config: the configuration.
      in_python: the flags, of ``dataset`` and ``model``, whose object is given in Python this time.

    Raises:
      UserError: something is wrong; the message names the flag, its value and what is allowed.
    """
    for flag in registry.USER_OBJECTS:
        if registry.is_supplied(name := getattr(config, flag)) and flag not in in_python:
            raise UserError(f"--{registry.not_passed(flag, name)}")
    if config.dataset not in SOURCES and not registry.is_supplied(config.dataset) and not _is_path(config.dataset):
        raise unknown_name("data set", config.dataset, SOURCES)
    if config.partition not in PARTITIONS:
        raise unknown_name("partition", config.partition, PARTITIONS)
    _check_models(config)
    _check_logs(config)
    if 0 < config.clients < config.cohort:  # 0 clients: as many as the data has, which only the data can tell
        raise UserError(
            f"--cohort={config.cohort} is more than --clients={config.clients}: at most all clients train in a round"
        )
    if config.resume and config.overwrite:
        raise UserError("--resume goes on with a run and --overwrite replaces it: leave one of them out")
    if None not in (config.process_id, config.num_processes) and config.process_id >= config.num_processes:
        raise UserError(
            f"--process_id={config.process_id} is not below --num_processes={config.num_processes}: processes count "
            "from 0"
        )


def _check_models(config: Any) -> None:
    names = config.model.split(",")
    for name in names:
        if name not in MODELS and not registry.is_supplied(name):
            raise unknown_name("model", name, MODELS)
    if len(names) > 1 and not STRATEGIES[config.strategy].several:
        able = ", ".join(name for name, row in STRATEGIES.items() if row.several)
        raise UserError(
            f"strategy {config.strategy} needs the same network for all clients, but --model names {len(names)}; for "
            f"clients of different networks there are {able}"
        )
    if len(config.architectures_from) not in (0, 1, len(names)):
        raise UserError(
            f"--architectures_from names {len(config.architectures_from)} runs, but --model {len(names)} networks: "
            "one run for each network, in the same order, or one folder that holds them"
        )


def log_names(config: Any) -> list[str]:
    """Return the logs that a configuration wants; ``--tensorboard`` is one of them."""
    names = [] if config.log is None else config.log.split(",")
    return list(dict.fromkeys([*names, *(["tensorboard"] if config.tensorboard else [])]))


def _check_logs(config: Any) -> None:
    for name in log_names(config):
        if name not in LOGS:
            raise unknown_name("value of --log", name, LOGS)
        if importlib.util.find_spec(LOGS[name]) is None:
            raise UserError(f"--log={name} needs {LOGS[name]}: pip install 'fedjax-mr[{name}]'")


def _is_path(name: str) -> bool:
    return "/" in name or "\\" in name or is_file(name)


def without_effect(config: Any) -> Iterator[str]:
    """Yield one line for each group of settings that changes nothing or little in this run.

    These are no mistakes: methods that are compared share the clients' data, and so the settings of the public set.
    """
    public = "--public_share, --public_max, --public_labels and --public_from"
    has_settings = config.public_max is not None or config.public_from or not config.public_labels
    if config.public_share and not STRATEGIES[config.strategy].public:
        share = f"--public_share={config.public_share:g}"
        yield f"{config.strategy} takes no public data: the samples of {share} stay unused"
    elif has_settings and not config.public_share and not config.partition_file:
        yield f"without --public_share there is no public set: {public} have no effect"
