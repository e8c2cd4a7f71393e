"""Datasets by name, and their division among clients.

A new source is one file and one row of `SOURCES`.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from fedjax_mr import registry
from fedjax_mr.data import columns
from fedjax_mr.data.divide import Splits, federate
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
from fedjax_mr.settings import make
from fedjax_mr.tasks import TASKS

__all__ = [
    "SOURCES", "Dataset", "FederatedData", "Preparation", "Source", "Split", "Splits", "federate", "from_arrays",
    "from_images", "from_table", "from_texts", "is_file", "load", "source_of",
]  # fmt: skip


class Source(NamedTuple):
    """A registered source of a dataset.

    Attributes:
      load: (`DataRequest`) -> dataset. Its ``settings`` are those of the source.
      settings: the dataclass of its settings, declared with `field`. Default: there are none.
    """

    load: Callable[[DataRequest], Dataset]
    settings: type | None = None

    def __call__(self, request: DataRequest) -> Dataset:
        """The dataset of a request."""
        return self.load(request)


def _row_of(row: Any) -> Source:
    """The row of a source that a user wrote as a function alone."""
    return row if isinstance(row, Source) or not callable(row) else Source(cast(Any, row))


def check_source(name: str, row: Any) -> None:
    """Check a user's row of `SOURCES`.

    Raises:
      UserError: the row is neither a function nor a `Source`, or its settings are no dataclass.
    """
    declared = isinstance(row, Source) and (row.settings is None or dataclasses.is_dataclass(row.settings))
    if not isinstance(row, Source) or not callable(row.load) or not declared:
        raise UserError(
            f"fmr.SOURCES[{name!r}] takes a function of a DataRequest that returns a Dataset, or "
            "fmr.Source(function, settings), where settings is a dataclass with fmr.field(...)"
        )


_OURS: dict[str, Source] = {
    "digits": Source(digits.load),
    "cifar10": Source(tfds.load),
    "cifar100": Source(tfds.load, tfds.LabelMode),
    "mnist": Source(tfds.load),
    "fashion_mnist": Source(tfds.load),
    "svhn_cropped": Source(tfds.load),
    "emnist": Source(tfds.load),
    "femnist": Source(leaf.femnist),
    "shakespeare": Source(leaf.shakespeare, text.TextLength),
    "sentiment": Source(text.sentiment, text.TextLength),
    "masks": Source(masks.load),
    "diabetes": Source(diabetes.load),
    "lung": Source(lung.load),
    "watch": Source(watch.load),
    "movielens": Source(movielens.load),
    "flights": Source(flights.load),
}
SOURCES = Registry("dataset", "fmr.SOURCES", check_source, _OURS, row_of=_row_of)
"""Every dataset by name."""


FILES = {
    "folder": Source(hf.load, text.TextLength),
    "table": Source(table.load, table.ColumnNames),
    "texts": Source(text.load_file, text.TextLength),
    "arrays": Source(arrays.load),
}
"""The sources of files and folders of users, by what they hold."""


def is_file(name: str) -> bool:
    """Whether a name is that of a file or folder, and not that of a dataset."""
    return _of_file(name) is not None


def source_of(name: str) -> Source:
    """The source of a dataset, by its name or path.

    Raises:
      UserError: the name is unknown.
    """
    source, base = _of_file(name), name.partition("/")[0]
    if source is not None:
        return source
    if name not in SOURCES and Path(name).exists():
        raise UserError(
            f"{name} is not a dataset: convert your data to a CSV file, or to an .npz file with the arrays x and y"
        )
    if (name != base and base != "emnist") or base not in SOURCES:
        raise unknown_name("dataset", name, SOURCES)
    return SOURCES[base]


def _of_file(name: str) -> Source | None:
    """The source of a file or folder, by the form of its name. None if the name is that of a dataset."""
    if name.startswith(hf.PREFIX):
        return FILES["folder"]
    if name.endswith(columns.SUFFIXES):
        return FILES["table"]
    if name.endswith(text.SUFFIXES):
        return FILES["texts"]
    return FILES["arrays"] if arrays.is_file(name) else None


def load(
    name: str | os.PathLike[str],
    *,
    data_dir: str | None = None,
    offline: bool = False,
    tokenizer: str | None = None,
    task: str | None = None,
    **settings: Any,
) -> Dataset:
    """Load the samples of a dataset.

    Args:
      name: a name of `SOURCES`, a configuration such as ``emnist/letters``, the path of an .npz, .csv or .jsonl
        file, or ``hf:`` and the path of a folder of Hugging Face's ``datasets`` with texts or images.
      data_dir: the folder of the source's files. Default: depends on the source.
      offline: whether downloads are forbidden.
      tokenizer: the tokenizer of texts, see `tokens.encode`. Default: hashed words.
      task: a name of `tasks.TASKS`. Default: that of the source, which is classification for most.
      settings: those of the source, by the names of their flags: ``label_mode`` of CIFAR-100, ``text_length`` of texts,
        and ``target``, ``client_column``, ``categorical`` and ``drop_columns`` of a CSV file (see `from_table`).

    Raises:
      UserError: the name, the task or a setting is unknown, files are missing or damaged, the samples cannot be trained
        on, or the source has no targets for the task.
    """
    name = os.fspath(name)
    if registry.is_supplied(name):
        raise registry.not_passed("dataset", name)
    if task is not None and task not in TASKS:
        raise unknown_name("task", task, TASKS)
    source = source_of(name)
    request = DataRequest(name, data_dir, offline, tokenizer, task, make(source.settings, settings, name))
    try:
        dataset = source.load(request).check()
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read: this user has no permission") from None
    if task is not None and dataset.task.name != task:
        raise UserError(f"{name} has targets for {dataset.task.name}, not for task={task}: leave it out")
    return dataset
