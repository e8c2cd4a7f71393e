"""The files with the samples of real clients and of their server.

A client's file is an .npz file with arrays ``x`` and ``y``, and optionally ``validation_x``, ``validation_y``,
``test_x``, ``test_y``. The server's file has ``test_x`` and ``test_y``, on which the deployed model is tested, and
``public_x`` (and ``public_y``) if the strategy needs public data. It also defines the kind of all samples, their
normalisation and the task: either by ``facts``, which `divide` writes from a dataset for a trial, or by arrays with the
names and the defaults of `from_arrays`, see `KIND`. ``num_classes`` is the width of the task, and ``target_mean``,
``target_std`` and so on are its other facts. Without them, numbers are standardised by the server's own targets.

Both may be CSV files instead. The rows of the server's table define categories, medians, means and scales, which are
sent to all clients, and the deployed model is tested on them. A client prepares its own rows with them; a column
``split`` says which rows are for ``validation`` and ``test``.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from fedjax_mr import files
from fedjax_mr.config.config import Config, settings_of_row
from fedjax_mr.data import FederatedData, columns, from_arrays, from_table, npz
from fedjax_mr.data.columns import Columns
from fedjax_mr.data.facts import Facts
from fedjax_mr.data.federated import Public
from fedjax_mr.data.preparation import Preparation
from fedjax_mr.data.sources.table import ColumnNames, targets_of
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.tasks import TASKS, Classification, Task, of_facts

KIND = ("task", "num_classes", "mean", "std", "categories")
_FACT = "target_"  # begins the names of arrays with facts of the task
SPLIT, PARTS = "split", ("train", "validation", "test")  # a column of a client's table, and its values
OTHER_UNIT = 20.0  # standard deviations between the means of two places, which more likely have other units


class ClientSamples(NamedTuple):
    """A client's samples, in their order for training."""

    x: np.ndarray  # [n, ...] training samples
    y: np.ndarray  # [n, ...] targets in the form of the task
    validation_x: np.ndarray
    validation_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @classmethod
    def read(cls, path: Path | str, facts: Facts | None) -> "ClientSamples":
        """Read a client's file.

        Args:
          path: the file.
          facts: shape, type and task that all samples of the federation have. None: the file is only checked by
            itself.

        Raises:
          UserError: the file is missing or damaged, or its samples are not of the federation's kind.
        """
        if is_table(path):
            return cls._of_table(path, facts)
        arrays = _read(path)
        parts: list[np.ndarray] = []
        for before in ("", "validation_", "test_"):
            x, y = (arrays.get(before + name) for name in ("x", "y"))
            if (x is None) != (y is None) or (x is None and not before):
                raise UserError(f"{path} needs arrays {before}x and {before}y, of samples and labels")
            facts = facts or _kind(path, x, y, {"task": np.array(_likely_task(np.asarray(y)))})
            if x is None or y is None:
                x, y = np.zeros((0, *facts.shape), facts.dtype), facts.dataset(0).y
            parts += checked_samples(path, before, x, y, facts)
        if not len(parts[1]):
            raise UserError(f"{path} holds no training samples")
        return cls(*parts)

    @classmethod
    def _of_table(cls, path: Path | str, facts: Facts | None) -> "ClientSamples":
        """Read a client's CSV file and prepare its rows as those of the server's."""
        if facts is None or facts.preparation is None:
            raise UserError(f"{path} is a table, so the server's file must be one, too: it says how to prepare columns")
        rows, preparation = columns.read(str(path), str(path)), facts.preparation
        x, y = preparation.apply(rows, str(path)), targets_of(rows, preparation, facts.learned, str(path))
        _tell_of_other_units(path, x, facts)
        part = _parts_of(path, rows, preparation)
        if not (part == PARTS[0]).any():
            raise UserError(f"{path} holds no training samples")
        return cls(*(each[part == name] for name in PARTS for each in (x, y)))

    def fingerprint(self) -> str:
        """A digest of all samples and labels; it is never sent."""
        digest = hashlib.sha256()
        for part in self:
            digest.update(f"{part.shape}{part.dtype}".encode())
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


class ServerSamples(NamedTuple):
    """The server's samples, and the kind of all samples in the federation."""

    facts: Facts
    test_x: np.ndarray
    test_y: np.ndarray
    public: Public | None
    divided: bool  # whether `divide` wrote the file, from the dataset and the partition of the flags

    @classmethod
    def read(cls, path: Path | str, config: Config | None = None) -> "ServerSamples":
        """Read the server's file.

        Args:
          path: the file.
          config: the configuration, which names the target and the categories of a CSV file.

        Raises:
          UserError: the file is missing or damaged, or its samples are not of the kind that it declares.
        """
        if is_table(path):
            config = config or Config()
            names = settings_of_row(config, str(path), ColumnNames).arguments
            if not names["target"]:
                raise UserError(f"{path} is a table: name the column to predict, --target=COLUMN")
            dataset = from_table(str(path), **names, task=config.task, test=str(path))
            return cls(Facts.of(dataset), dataset.test_x, dataset.test_y, None, divided=False)
        arrays = _read(path)
        try:
            x, y = arrays["test_x"], arrays["test_y"]
            facts = Facts.parse(str(arrays["facts"].item())) if "facts" in arrays else _kind(path, x, y, arrays)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a file of a server: it needs test_x and test_y ({error})") from None
        public = None
        if "public_x" in arrays:
            if "public_y" in arrays:
                public = Public(*checked_samples(path, "public_", arrays["public_x"], arrays["public_y"], facts))
            else:
                public = Public(facts.samples(arrays["public_x"]), None)
        x, y = checked_samples(path, "test_", x, y, facts)
        return cls(facts, x, y, public, divided="facts" in arrays)


def is_table(path: Path | str) -> bool:
    """Whether a file of samples is one of comma-separated values, by its suffix."""
    return str(path).endswith(columns.SUFFIXES)


def _parts_of(path: Path | str, rows: Columns, preparation: Preparation) -> np.ndarray:
    """The part of each row of a client's table [n]: train, validation or test. Default: train.

    Raises:
      UserError: a row has another part.
    """
    count = len(next(iter(rows.values())))
    if SPLIT not in rows or SPLIT in (*preparation.columns, *preparation.target):
        return np.full(count, PARTS[0])
    part = columns.texts(rows[SPLIT])
    wrong = ~np.isin(part.astype(str), PARTS)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise UserError(f"{path}: column {SPLIT!r} has {part[row]!r} in row {row}, but it is one of {', '.join(PARTS)}")
    return part.astype(str)


def _tell_of_other_units(path: Path | str, x: np.ndarray, facts: Facts) -> None:
    """Warn of columns of numbers of a client's table [n, F] that may have another unit than the server's."""
    assert facts.preparation is not None
    usual = (np.broadcast_to(each, x.shape[1:]) for each in (facts.mean, facts.std))
    columns = zip(facts.preparation.columns, facts.preparation.categories, x.T, *usual, strict=True)
    for name, categories, values, mean, std in columns:
        if not categories and abs(values.mean(dtype=np.float64) - mean) > OTHER_UNIT * std:
            logging.warning(
                "%s: column %r has a mean of %.4g, but the server's rows have %.4g +- %.2g: is the unit the same?",
                path, name, values.mean(), mean, std,
            )  # fmt: skip


def _kind(path: Path | str, x: Any, y: Any, arrays: Mapping[str, np.ndarray]) -> Facts:
    """The kind of the samples of a file, as `from_arrays` takes them.

    Args:
      path: the file.
      x: samples.
      y: targets.
      arrays: the arrays of the file, of which those in `KIND` and the facts of the task count.

    Raises:
      UserError: they are no samples and targets, or not of the task.
    """
    kind = {name: arrays[name].tolist() for name in KIND if name in arrays}
    about = {name.removeprefix(_FACT): arrays[name].tolist() for name in arrays if name.startswith(_FACT)}
    task = str(kind.pop("task", Classification.name))
    if task != Classification.name and "num_classes" in kind:
        about["width"] = kind.pop("num_classes")
    try:
        kind["task"] = _task(task, y, about) if about else task
        facts = Facts.of(from_arrays(x, y, x_test=x, y_test=y, name=Path(path).stem, **kind))
    except (UserError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if "tokens" in facts.learned.provides:  # the largest token may be missing among the server's samples
        facts = dataclasses.replace(facts, vocabulary=max(facts.vocabulary, facts.num_classes))
    return facts


def _task(name: str, y: Any, facts: Mapping[str, Any]) -> Task:
    """The task of targets y with some facts in place of those that y has.

    Raises:
      UserError: the task is unknown.
      ValueError: as `of_facts`.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    known = TASKS[name].of(TASKS[name].convert(np.asarray(y))).facts()
    several = {each for each, value in known.items() if isinstance(value, tuple)}
    values = {each: np.atleast_1d(value).tolist() if each in several else value for each, value in facts.items()}
    return of_facts(known | values)


def _likely_task(y: np.ndarray) -> str:
    """A task that may have the targets y [n, ...] of a file without the server's."""
    if y.dtype.kind == "f" and y.ndim:
        return "regression"
    if y.dtype.kind not in "biu" or y.ndim not in (2, 3):
        return "classification"
    return "segmentation" if y.ndim == 3 else "multilabel" if y.max(initial=0) <= 1 else "language"


def _read(path: Path | str) -> dict[str, np.ndarray]:
    try:
        return npz.read(Path(path))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def checked_samples(path: Path | str, before: str, x: np.ndarray, y: np.ndarray, facts: Facts) -> list[np.ndarray]:
    """Check the samples and labels of a part of a file, and return them with the dtypes of the federation.

    Args:
      path: where they come from, for errors.
      before: prefix of the arrays' names, such as "test_".
      x: samples.
      y: labels, or targets of the task.
      facts: the kind of the federation's samples.

    Raises:
      UserError: they are not of the kind.
    """
    try:
        x = facts.samples(x)
    except UserError as error:
        raise UserError(f"{before}x in {path}: {error}") from None
    task = facts.learned
    if "classes" not in task.provides:
        if y.shape[:1] != (len(x),):
            raise UserError(f"{before}y in {path} must be {len(x)} targets, one per sample, not {list(y.shape)}")
        y = task.convert(y)
        task.check(x, y, f"{before}y in {path}")
        return [x, y.astype(task.dtype)]
    if y.shape != (len(x),) or y.dtype.kind not in "iu" or (len(y) and (y.min() < 0 or y.max() >= facts.num_classes)):
        raise UserError(
            f"{before}y in {path} must be {len(x)} labels from 0 to {facts.num_classes - 1}, one per sample"
        )
    return [x, y.astype(np.int32)]


def divide(federated: FederatedData, folder: Path) -> list[Path]:
    """Write the files of the server and of all clients; return their paths, the server's first.

    Raises:
      UserError: a file exists, which may hold somebody's own samples; or the folder cannot be written.
    """
    names = ["server.npz", *(f"client-{client}.npz" for client in range(federated.num_clients))]
    if existing := [name for name in names if (folder / name).exists()]:
        raise UserError(f"{folder / existing[0]} exists: choose another folder, or remove the files of a trial")
    dataset, owned = federated.dataset, federated.client_test if federated.test is not None else None
    written = []

    def write(name: str, **arrays: Any) -> None:
        with files.atomic_write(folder / name) as path:
            np.savez_compressed(path, **{key: value for key, value in arrays.items() if value is not None})
        written.append(folder / name)

    try:
        files.make_folder(folder)
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror}): choose another folder") from None
    public = federated.public
    write(
        "server.npz",
        facts=np.array(Facts.of(dataset).text()),
        test_x=dataset.test_x,
        test_y=dataset.test_y,
        public_x=public and public.x,
        public_y=public and public.y,
    )
    for client in range(federated.num_clients):
        rows = {"": (dataset.x, dataset.y, federated.train.rows(client))}
        if federated.validation is not None:
            rows["validation_"] = (dataset.x, dataset.y, federated.validation.rows(client))
        if owned is not None:
            rows["test_"] = (owned.x, owned.y, owned.split.rows(client))
        parts = {f"{name}x": x[own] for name, (x, _, own) in rows.items()}
        write(f"client-{client}.npz", **parts, **{f"{name}y": y[own] for name, (_, y, own) in rows.items()})
    return written
