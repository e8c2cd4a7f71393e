"""The values published in the papers, and those that belong to a configuration."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config

TABLES = Path(__file__).parents[1] / "exp" / "paper_tables.csv"

# The papers' names. A "CNN" is LeNet-5 in the FedMR authors' code and McMahan's network in the papers' text.
MODELS = {
    "lenet5": "CNN", "cnn_mcmahan": "CNN", "cnn_femnist": "CNN", "resnet20": "ResNet-20", "vgg16": "VGG-16",
    "vgg_femnist": "VGG-16", "pfedhr_m1,pfedhr_m2,pfedhr_m3,pfedhr_m4": "M1 to M4", "cnn1,cnn2,cnn3,cnn4": "1 to 4",
    "vgg11_fedma,vgg13_fedma,vgg16_fedma,vgg19_fedma": "1 to 4", "lstm1,lstm2,lstm3,lstm4": "1 to 4",
}  # fmt: skip
DATASETS = {
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "femnist": "FEMNIST", "mnist": "MNIST", "svhn_cropped": "SVHN",
    "shakespeare": "Shakespeare",
}  # fmt: skip
LABEL_MODES = {"cifar100": "coarse"}  # the papers do not say; their code trains on these, and their accuracies fit them
# Number of clients and cohort size of each paper, except for natural clients. Tables with a single value show that of
# the first paper that has one.
PAPERS = {
    "fedmr_kdd": (100, 10), "fedmr_v1": (100, 10), "fedcross": (100, 10), "pfedhr": (12, 4), "fedme": (20, 20),
}  # fmt: skip


class Published(NamedTuple):
    """A value of a paper, in percent as printed."""

    paper: str
    mean: float
    deviation: float | None
    source: str

    @property
    def short_source(self) -> str:
        """Short name of the paper, without the table: ``KDD'24`` and ``v1`` (both of FedMR), ``FedCross``."""
        return self.source.partition(",")[0].removeprefix("FedMR ")


def rows() -> list[dict[str, str]]:
    """The rows of the papers' tables."""
    with TABLES.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def lookup(config: Config, published: Iterable[Mapping[str, str]]) -> Published | None:
    """The value of the first paper that has one for a configuration, or None. See `lookup_all`."""
    return next(iter(lookup_all(config, published)), None)


def lookup_all(config: Config, published: Iterable[Mapping[str, str]]) -> list[Published]:
    """The papers' values for a configuration, in the order of `PAPERS`.

    These must match: dataset, labels, model, partition, strategy, its settings in the table and, without natural
    clients, the numbers of clients. Rounds and momentum need not match: the papers do not state them, or contradict
    their code. A value that a paper copied from an earlier one is listed once.

    Args:
      config: configuration of a run.
      published: rows of the papers' tables, as `rows` returns them.
    """
    if config.server_optimizer != "none" or config.uses_channel:  # no method of these tables has one
        return []
    if config.partition_file or config.label_mode != LABEL_MODES.get(config.dataset, "fine"):
        return []  # the flags of a partition say nothing of a file's
    own = configuration.decisive(config)
    wanted = (DATASETS.get(config.dataset), MODELS.get(config.model), division(config), config.strategy)
    sizes = (config.clients, config.cohort)

    def fits(row: Mapping[str, str]) -> bool:
        if (row["dataset"], row["model"], row["heterogeneity"], row["method"].lower()) != wanted:
            return False
        if config.partition != "natural" and PAPERS.get(row["paper"]) != sizes:
            return False
        pairs = (pair.split("=") for pair in row["setting"].split())
        return all(str(own.get(f"{config.strategy}_{name}")) == value for name, value in pairs)

    row_of: dict[str, Mapping[str, str]] = {}
    for row in published:  # the main tables come first; an ablation of the same paper may repeat their values
        if row["paper"] not in row_of and fits(row):
            row_of[row["paper"]] = row
    numbers: dict[tuple[float, float | None], Published] = {}
    for paper, row in ((paper, row_of[paper]) for paper in PAPERS if paper in row_of):
        mean, deviation = float(row["mean"]), float(row["std"]) if row["std"] else None
        numbers.setdefault((mean, deviation), Published(paper, mean, deviation, row["source"]))
    return list(numbers.values())


def division(config: Config) -> str:
    """The name of a partition in the papers' tables."""
    parts = {
        "dirichlet": f"dir_{float(config.alpha)}",
        "dirichlet_size": f"dir_{float(config.alpha)}_size_{float(config.alpha_size)}",
        "classes": f"classes_{config.classes_per_client}",
    }
    return parts.get(config.partition, config.partition)
