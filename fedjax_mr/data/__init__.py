"""Datasets by name, and their division among clients.

A new source is one file and one row of `SOURCES`.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import registry
from fedjax_mr.data import columns
from fedjax_mr.data.divide import federate
from fedjax_mr.data.federated import DataRequest, Dataset, FederatedData, Split
from fedjax_mr.data.preparation import Preparation
from fedjax_mr.data.sources import (
    arrays,
    diabetes,
    digits,
    flights,
    hf,
    leaf,
    lung,
    masks,
    movielens,
    table,
    text,
    tfds,
    watch,
)  # fmt: skip
from fedjax_mr.data.sources.arrays import from_arrays
from fedjax_mr.data.sources.images import from_images
from fedjax_mr.data.sources.table import from_table
from fedjax_mr.data.sources.text import from_texts
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.registry import Registry
from fedjax_mr.tasks import TASKS

__all__ = [
    "SOURCES", "Dataset", "FederatedData", "Preparation", "Split", "federate", "from_arrays", "from_images",
    "from_table", "from_texts", "is_file", "load",
]  # fmt: skip


def check_source(name: str, row: Any) -> None:
    """Check a user's row of `SOURCES`.

    Raises:
      UserError: the row is not a function.
    """
    if not callable(row):
        raise UserError(f"fmr.SOURCES[{name!r}] takes a function of a DataRequest that returns a Dataset")


_OURS: dict[str, Callable[[DataRequest], Dataset]] = {
    "digits": digits.load,
    "cifar10": tfds.load,
    "cifar100": tfds.load,
    "mnist": tfds.load,
    "fashion_mnist": tfds.load,
    "svhn_cropped": tfds.load,
    "emnist": tfds.load,
    "femnist": leaf.femnist,
    "shakespeare": leaf.shakespeare,
    "sentiment": text.sentiment,
    "masks": masks.load,
    "diabetes": diabetes.load,
    "lung": lung.load,
    "watch": watch.load,
    "movielens": movielens.load,
    "flights": flights.load,
}
SOURCES = Registry("dataset", "fmr.SOURCES", check_source, _OURS)
"""Every dataset by name."""

LABEL_MODES = {"cifar100": ("fine", "coarse")}
"""Datasets with several kinds of labels. All others have only ``fine`` labels."""


def is_file(name: str) -> bool:
    """Whether a name is that of a file or folder, and not that of a dataset."""
    suffixes = (*columns.SUFFIXES, *text.SUFFIXES)
    return arrays.is_file(name) or name.endswith(suffixes) or name.startswith(hf.PREFIX)


def load(
    name: str | os.PathLike[str],
    *,
    data_dir: str | None = None,
    label_mode: str = "fine",
    offline: bool = False,
    tokenizer: str | None = None,
    text_length: int = 48,
    task: str | None = None,
    target: str | Sequence[str] = (),
    client: str | None = None,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> Dataset:
    """Load the samples of a dataset.

    Args:
      name: a name of `SOURCES`, a configuration such as ``emnist/letters``, the path of an .npz, .csv or .jsonl
        file, or ``hf:`` and the path of a folder of Hugging Face's ``datasets`` with texts or images.
      data_dir: the folder of the source's files. Default: depends on the source.
      label_mode: ``coarse`` for the 20 coarse classes of CIFAR-100.
      offline: whether downloads are forbidden.
      tokenizer: a folder with the tokenizer of texts. Default: hashed words.
      text_length: tokens of a text.
      task: a name of `tasks.TASKS`. Default: that of the source, which is classification for most.
      target: the column to predict of a CSV file, or several, see `from_table`.
      client: the column of a CSV file with the natural client.
      categorical: columns of a CSV file whose numbers are categories.
      drop: columns of a CSV file that are not used.

    Raises:
      UserError: the name or the task is unknown, files are missing or damaged, the samples cannot be trained on, or
        the source has no targets for the task.
    """
    name = os.fspath(name)
    targets = (target,) if isinstance(target, str) else tuple(target)
    if (targets or client or categorical or drop) and not name.endswith(columns.SUFFIXES):
        raise UserError(f"target, client, categorical and drop name columns of a CSV file, which {name} is not")
    if registry.is_supplied(name):
        raise registry.not_passed("dataset", name)
    base = name.partition("/")[0]
    if task is not None and task not in TASKS:
        raise unknown_name("task", task, TASKS)
    if label_mode not in LABEL_MODES.get(base, ("fine",)):
        raise UserError(f"{name} has no {label_mode} labels; only {', '.join(LABEL_MODES)} has label_mode={label_mode}")
    try:
        dataset = _read(
            DataRequest(
                name, data_dir, label_mode, offline, tokenizer, text_length, task, targets, client, tuple(categorical),
                tuple(drop),
            )
        )  # fmt: skip
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read: this user has no permission") from None
    if task is not None and dataset.task.name != task:
        raise UserError(f"{name} has targets for {dataset.task.name}, not for task={task}: leave it out")
    return dataset


def _read(request: DataRequest) -> Dataset:
    """Read the samples from the source that the name means."""
    name, base = request.name, request.name.partition("/")[0]
    if name.startswith(hf.PREFIX):
        return hf.load(request).check()
    if name.endswith(columns.SUFFIXES):
        return table.load(request)
    if name.endswith(text.SUFFIXES):
        return text.load_file(name, request).check()
    if is_file(name):
        return arrays.load(name, task=request.task)
    if name not in SOURCES and Path(name).exists():
        raise UserError(
            f"{name} is not a dataset: convert your data to a CSV file, or to an .npz file with the arrays x and y"
        )
    if (name != base and base != "emnist") or base not in SOURCES:
        raise unknown_name("dataset", name, SOURCES)
    return SOURCES[base](request).check()
