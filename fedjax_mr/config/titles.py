"""Titles of methods, datasets, networks, partitions and other settings in pictures and LaTeX tables."""

import collections
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import registry
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.config.settings import settings_of
from fedjax_mr.settings import OFF
from fedjax_mr.strategies import STRATEGIES

SEEDS = ("seed", "partition_seed")
DIVISIONS = tuple(
    setting.flag for setting in settings_of(Config) if setting.name in configuration.partition_settings()
)  # the settings that single partitions use

DATASETS = {
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mnist": "MNIST", "fashion_mnist": "Fashion-MNIST",
    "svhn_cropped": "SVHN", "emnist": "EMNIST", "femnist": "FEMNIST", "shakespeare": "Shakespeare",
    "sentiment": "Sentiment",
}  # fmt: skip
SIZES = ("small", "large", "deep")
NETWORKS = {
    "cnn_digits": "CNN", **{f"cnn_digits_{size}": f"{size} CNN" for size in SIZES},
    "lenet5": "LeNet-5", **{f"lenet5_{size}": f"{size} LeNet-5" for size in SIZES},
    "cnn_mcmahan": "McMahan's CNN", "cnn_femnist": "FEMNIST CNN", "cnn_pfl": "pfl CNN", "mlp": "MLP",
    "logistic": "logistic regression", "resnet20": "ResNet-20", "resnet20_he": "He's ResNet-20", "vgg16": "VGG-16",
    "vgg_femnist": "FEMNIST VGG-16", **{f"vgg{depth}_fedma": f"FedMA VGG-{depth}" for depth in (11, 13, 16, 19)},
    **{f"cnn{i}": f"CNN {i}" for i in range(1, 5)}, **{f"lstm{i}": f"LSTM {i}" for i in range(1, 5)},
    **{f"pfedhr_m{i}": f"M{i}" for i in range(1, 5)},
    "vit_tiny": "tiny ViT", "vit_tiny_patch8": "tiny ViT (8x8)", "transformer_tiny": "tiny Transformer",
    "minilm": "MiniLM", "llama_tiny": "tiny Llama", "smollm2_135m": "SmolLM2-135M", "unet": "U-Net", "gru": "GRU",
    "lstm_numbers": "LSTM for numbers",
    "mlp_table": "MLP for tables",
}  # fmt: skip
WITH_AVERAGING = {"momentum": "FedAvgM", "adam": "FedAdam", "yogi": "FedYogi", "adagrad": "FedAdagrad"}
WORDS = {
    "clients": "N = {}", "cohort": "K = {}", "rounds": "{} rounds", "local_epochs": "E = {}", "local_steps": "S = {}",
    "batch_size": "B = {}", "lr": "learning rate {}", "label_mode": "{} labels", "seed": "seed {}",
}  # fmt: skip


def facts(config: Config) -> dict[str, Any]:
    """The settings that can change the results of a run, by flag, without its seeds."""
    return {flag: value for flag, value in configuration.decisive(config).items() if flag not in SEEDS}


def method(settings: Mapping[str, Any]) -> str:
    """The title of a run's method, with the optimizer of the server if it has one.

    Args:
      settings: the settings of the run by flag, from `facts`; the same for the other functions.
    """
    name = settings["strategy"]
    title = (STRATEGIES[name].title if name in STRATEGIES else "") or name
    optimizer = settings.get("server_optimizer", "none")
    if optimizer == "none":
        return title
    return WITH_AVERAGING[optimizer] if name == "fedavg" else f"{title} + server {optimizer}"


def key(settings: Mapping[str, Any]) -> str:
    """The key of the style of a run's curves: the registered name, with the optimizer of the server if it has one."""
    name, optimizer = settings["strategy"], settings.get("server_optimizer", "none")
    return name if optimizer == "none" else f"{name} {optimizer}"


def dataset(name: str) -> str:
    """The title of a dataset, or the name of its file."""
    base, _, part = (name := registry.shown(name)).partition("/")
    return f"{DATASETS[base]} {part}".strip() if base in DATASETS else Path(name).stem


def network(names: str) -> str:
    """The title of a network, or the titles of several."""
    return " + ".join(NETWORKS.get(name, name) for name in registry.shown(names).split(","))


def division(settings: Mapping[str, Any]) -> str:
    """The title of a partition, such as ``Dirichlet(0.5)``."""
    of = lambda flag: _number(settings.get(flag))
    if settings.get("partition_file"):
        return f"divided as in {Path(settings['partition_file']).name}"
    names = {
        "iid": "IID",
        "dirichlet": f"Dirichlet({of('alpha')})",
        "dirichlet_size": f"Dirichlet({of('alpha')}), sizes Dirichlet({of('alpha_size')})",
        "shards": f"{of('shards_per_client')} shards per client"
        + (f" of {of('shard_size')} samples" if settings.get("shard_size") else ""),
        "classes": f"{of('classes_per_client')} classes per client",
        "quantity": f"sizes by rank^-{of('quantity_power')}",
        "bootstrap": f"bootstrap of {of('samples_per_client')}",
        "bootstrap_dirichlet": f"bootstrap of {of('samples_per_client')}, Dirichlet({of('alpha')})",
        "domain": f"one domain per client, labels Dirichlet({of('alpha')})",
        "dirichlet_domain": f"domains Dirichlet({of('alpha')})",
        "natural": "natural clients",
    }
    return names.get(settings["partition"]) or settings["partition"]


def words(flags: Iterable[str], settings: Mapping[str, Any], *, brief: bool = False) -> list[str]:
    """The values of some flags in words, without flags that the run does not have and without its method.

    Args:
      flags: the flags, in order.
      settings: the settings of the run.
      brief: leave out settings that are off in this run and by default, such as ``validation_share`` at 0.
    """
    off = _off(settings["strategy"]) if brief else ()
    parts: dict[str, None] = {}
    for flag in flags:
        if flag not in settings or flag in ("strategy", "server_optimizer"):
            continue
        if not (flag in off and settings[flag] in OFF):
            parts[_words(flag, settings)] = None
    return list(parts)


@functools.cache
def _off(strategy: str) -> frozenset[str]:
    """The flags of a method's runs that are off by default, without the seeds."""
    defaults = configuration.decisive(Config(strategy=strategy))
    return frozenset(flag for flag, value in defaults.items() if value in OFF and flag not in SEEDS)


def _words(flag: str, settings: Mapping[str, Any]) -> str:
    value = settings[flag]
    if flag in ("partition", "partition_file", *DIVISIONS):
        return division(settings)
    if flag == "dataset":
        return dataset(value)
    if flag == "model":
        return network(value)
    if flag in WORDS:
        return WORDS[flag].format(_number(value))
    name = flag.removeprefix(f"{settings['strategy']}_").replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} = {_number(value)}"


def _number(value: Any) -> str:
    """A value in words. Numbers are written as in flags and tables: ``Dirichlet(1.0)`` for ``alpha=1.0``."""
    if isinstance(value, list):
        return ", ".join(map(_number, value)) or "none"
    return "none" if value is None else str(value).replace("_", " ")


def varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The flags whose values differ between the runs that have them."""
    flags = dict.fromkeys(flag for each in settings for flag in each)
    return [flag for flag in flags if len({json.dumps(each[flag]) for each in settings if flag in each}) > 1]


def differences(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells settings of equal names apart, such as ``dataset=b/mine.npz``; "" for a name that is the only one."""
    every = dict.fromkeys(flag for each in settings for flag in each)
    named = [(name, {flag: each.get(flag) for flag in every}) for name, each in zip(names, settings, strict=True)]
    flags = {name: varied([each for other, each in named if other == name]) for name in dict.fromkeys(names)}
    return [", ".join(f"{flag}={each[flag]}" for flag in flags[name]) for name, each in named]


def runs(configs: Sequence[Config]) -> list[str]:
    """A title for each of several runs: its method, and the settings and seeds in which it differs from the others.

    Runs without a difference are numbered.
    """
    known = [facts(config) | {flag: getattr(config, flag) for flag in SEEDS} for config in configs]
    flags = varied(known)
    names = [", ".join([method(each), *words(flags, each, brief=True)]) for each in known]
    count: collections.Counter[str] = collections.Counter()
    for place, name in enumerate(names):
        count[name] += 1
        if count[name] > 1:
            names[place] = f"{name} ({count[name]})"
    return names


def run(config: Config) -> str:
    """The title of a single run: method, dataset, partition, network and seed."""
    known = facts(config)
    parts = dataset(config.dataset), division(known), network(config.model), f"seed {config.seed}"
    return f"{method(known)}: {', '.join(parts)}"
