"""Tables of users, from pandas or a CSV file: numbers and categories in, any task out.

The rows are divided into training and test rows first. Medians of missing values, categories, means and standard
deviations are learned from the training rows alone, and kept as a `Preparation`, which prepares new rows.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.data import columns as table_columns
from fedjax_mr.data.columns import Columns
from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.preparation import Preparation
from fedjax_mr.data.sources import arrays
from fedjax_mr.data.values import ids
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.settings import field
from fedjax_mr.tasks import TASKS, Classification, Multilabel, Regression, Survival, Task

MOST_NUMBERED_CLASSES = 30  # a target with more different numbers may be meant for a regression
SUPPORTED = (Classification, Multilabel, Regression, Survival)


@dataclasses.dataclass(frozen=True)
class ColumnNames:
    """The settings of a CSV file: names of columns, separated by commas. In Python also a sequence of names."""

    # fmt: off
    target: str | None = field(
        None, "Column of a CSV file to predict, or several separated by commas (survival: time,event). Required with a "
        "CSV file", group="Data", compiled="no")
    client_column: str | None = field(
        None, "Column of a CSV file with the natural client of each row, such as a hospital. Default: there are none",
        group="Data", compiled="no")
    categorical: str | None = field(
        None, "Columns of a CSV file whose numbers are categories, separated by commas. Columns of texts always are",
        group="Data", compiled="no")
    drop_columns: str | None = field(
        None, "Columns of a CSV file that are not used, separated by commas", argument="drop", group="Data",
        compiled="no")
    # fmt: on

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `from_table` that name columns."""
        return {
            "target": _names(self.target),
            "client": self.client_column,
            "categorical": _names(self.categorical),
            "drop": _names(self.drop_columns),
        }


def _names(columns: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names in a setting."""
    return tuple(each.strip() for each in columns.split(",")) if isinstance(columns, str) else tuple(columns or ())


def load(request: DataRequest) -> Dataset:
    """Read a CSV file of a user, see `from_table`.

    Raises:
      UserError: no target is named, or as in `from_table`.
    """
    columns = request.settings.arguments
    if not columns["target"]:
        names = ", ".join(list(table_columns.read(request.name, request.name))[:20])
        raise UserError(
            f"{request.name} is a table: name the column to predict, --target=COLUMN or from_table(file, COLUMN); it "
            f"has {names}"
        )
    return from_table(request.name, task=request.task, **columns)


def from_table(
    table: Any,
    target: str | Sequence[str],
    *,
    task: str | Task | None = None,
    client: str | Sequence[Any] | np.ndarray | None = None,
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    test: Any = None,
    client_test: Sequence[Any] | np.ndarray | None = None,
    name: str | None = None,
) -> Dataset:
    """Make a dataset of the rows of a table.

    All columns but the target, the client and ``drop`` become x [M, F] float32. Columns of numbers (truth values are 0
    and 1) are standardised in the network; their missing values become the median of the training rows. Text columns
    and ``categorical`` ones become numbers of categories, -1 for missing ones and for those that no training row has;
    `Dataset.categories` says which columns these are. Dates, numbers with units and columns of free text are refused.
    Without ``test``, 20 % of the rows of each client (or of each class, without clients) become the test set, with a
    constant seed. `Dataset.preparation` has all that was learned from the training rows.

    Args:
      table: a pandas frame, a dictionary of columns [M], or the path of a file of comma-separated values (UTF-8, names
        in the first line; semicolons and tabs are recognised).
      target: the column to predict. Several for regression and multilabel (0, 1, or missing if unknown); for survival
        the time and the event (1, or 0 if observation ended).
      task: a name of `tasks.TASKS`, or a task. Default: classification. Its classes are the different values of the
        target in all rows, sorted; `Dataset.class_names` has their names.
      client: the column with the natural client, such as a hospital; or the client of each row [M], "" for rows without
        one. The column does not become part of x.
      categorical: columns of numbers that are categories, and text columns with very many categories.
      drop: columns that are not used.
      test: another table with the test rows.
      client_test: the client of each test row, if ``client`` is not a column.
      name: name of the dataset. Default: that of the file, or ``table``.

    Raises:
      UserError: a column does not exist, the target or the client has missing values, the target has one value only,
        there is no column for the samples, or a column is refused.
    """
    path = Path(table) if isinstance(table, str | os.PathLike) else None
    name = name or (path.stem if path else "table")
    targets = (target,) if isinstance(target, str) else tuple(target)
    column_of_client = client if isinstance(client, str) else None
    kind = _kind(task, targets, name)
    where = str(path or name)
    rows = table_columns.read(table, where)
    table_columns.select(rows, targets, where, "the target")
    table_columns.select(rows, [column_of_client] if column_of_client else [], where, "the client")
    table_columns.select(rows, drop, where, "drop=")
    names = [each for each in rows if each not in {*targets, column_of_client, *drop}]
    table_columns.select({each: rows[each] for each in names}, categorical, where, "the samples (categorical=)")
    if not names:
        raise UserError(f"{where} has no column for the samples beside target, client and drop")
    every = frozenset(categorical) | {each for each in names if _is_pandas_category(table, each)}

    count = len(rows[names[0]])
    owners = _owners(rows, client, where)
    if test is not None:
        where_test = f"{where} (test)"
        others = table_columns.read(test, where_test)
        used = [*names, *targets, *([column_of_client] if column_of_client else [])]
        table_columns.select(others, used, where_test, "what the training rows have")
        rows = {each: np.concatenate([rows[each].astype(object), others[each].astype(object)]) for each in used}
        owners_test = _owners(others, column_of_client or client_test, where_test)
    y, class_names = _targets(rows, targets, kind, where, chosen=task is not None)
    if test is not None:
        is_test = np.arange(len(y)) >= count
    else:
        number = None if owners is None else np.unique(owners, return_inverse=True)[1]
        is_test = arrays.held_out(y, number, task if isinstance(task, Task) else kind.of(y), name)
        owners_test = None if owners is None else owners[is_test]
        owners = None if owners is None else owners[~is_test]
    preparation = Preparation.learn(rows, names, ~is_test, categorical=every, where=where)
    preparation = dataclasses.replace(preparation, target=targets, class_names=class_names)
    x = preparation.encode(rows, where)
    mean, std = _statistics(x[~is_test], preparation)
    dataset = arrays.from_arrays(
        x[~is_test], y[~is_test], task=task, client=owners, x_test=x[is_test], y_test=y[is_test],
        client_test=owners_test, name=name, num_classes=len(class_names) or None, mean=mean, std=std,
        categories=preparation.counts,
    )  # fmt: skip
    return dataclasses.replace(dataset, class_names=class_names, preparation=preparation)


def _kind(task: str | Task | None, targets: tuple[str, ...], name: str) -> type[Task]:
    """The class of the task. Raises a UserError: it is unknown, or does not suit a table or so many targets."""
    if isinstance(task, str) and task not in TASKS:
        raise unknown_name("task", task, TASKS)
    kind = Classification if task is None else TASKS[task] if isinstance(task, str) else type(task)
    if not issubclass(kind, SUPPORTED):
        raise UserError(
            f"{name}: a table has targets for {', '.join(each.name for each in SUPPORTED)}, not {kind.name}"
        )
    if not targets or (len(targets) > 1 and issubclass(kind, Classification)):
        raise UserError(
            f"{name}: {kind.name} needs one target column, not {len(targets)}; for several use task='multilabel' (yes "
            "or no), 'regression' (numbers) or 'survival' (time and event)"
        )
    if len(targets) != 2 and issubclass(kind, Survival):
        raise UserError(f"{name}: survival needs two target columns, time and event, not {', '.join(targets)}")
    if len(set(targets)) < len(targets):
        raise UserError(f"{name}: a target column is named twice: {', '.join(targets)}")
    return kind


def _is_pandas_category(table: Any, name: str) -> bool:
    frame = hasattr(table, "columns") and name in list(table.columns)
    return frame and str(getattr(table[name], "dtype", "")) == "category"


def _owners(rows: Columns, client: Any, where: str) -> np.ndarray | None:
    """The client of each row [M], or None. Raises a UserError: the client of a row is missing."""
    if client is None or not isinstance(client, str):
        return None if client is None else ids(client, f"{where}: client", nobody=True)
    values = rows[client]
    absent = table_columns.missing(values)
    if absent.any():
        raise UserError(
            f"{where}: the client is missing in {absent.sum()} of {len(values)} rows (the first is row "
            f"{int(np.argmax(absent))} of column {client!r}): write a name there, or remove these rows"
        )
    texts = table_columns.texts(values)
    whole = all(text == "0" or (text.isascii() and text.isdigit() and text[0] != "0") for text in texts.tolist())
    return ids(texts.astype(np.int64) if whole else texts.astype(str), f"{where}: client")


def _targets(
    rows: Columns, targets: tuple[str, ...], kind: type[Task], where: str, *, chosen: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The targets [M, ...] of a task, and the names of the classes. ``chosen``: whether the user named the task.

    Raises:
      UserError: a target is missing, is no number although the task needs one, or all targets are the same.
    """
    _refuse_missing(rows, targets, kind, where)
    if issubclass(kind, Classification):
        return _classes(rows[targets[0]], f"{where}: target column {targets[0]!r}", chosen=chosen)
    y = _numbers(rows, targets, kind, where)
    for name, values in zip(targets, y.T, strict=True):
        different = np.unique(values[values >= 0 if issubclass(kind, Multilabel) else np.isfinite(values)])
        all_events = issubclass(kind, Survival) and name == targets[1] and different.tolist() == [1]
        if len(different) < 2 and not all_events:
            value = "no value" if not len(different) else f"the value {different[0]:g}"
            raise UserError(f"{where}: target column {name!r} has {value} in every row: there is nothing to learn")
    return y, ()


def targets_of(rows: Columns, preparation: Preparation, task: Task, where: str) -> np.ndarray:
    """The targets [n, ...] of further rows of a table, such as those of one client, which may have one class only.

    Args:
      rows: the columns, see `columns.read`.
      preparation: names the columns of the target, and the classes.
      task: the task.
      where: name of the rows in errors.

    Raises:
      UserError: a column or a target is missing, a class is not one of the preparation, or the task needs numbers.
    """
    table_columns.select(rows, preparation.target, where, "the target")
    _refuse_missing(rows, preparation.target, type(task), where)
    if isinstance(task, Classification):
        (name,), names = preparation.target, table_columns.texts(rows[preparation.target[0]])
        y = table_columns.codes(names, preparation.class_names).astype(np.int32)
        if (y < 0).any():
            row = int(np.argmax(y < 0))
            raise UserError(
                f"{where}: target column {name!r} has {names[row]!r} in row {row}, but the classes are "
                f"{', '.join(preparation.class_names)}"
            )
    else:
        y = _numbers(rows, preparation.target, type(task), where)
    task.check(np.zeros((len(y), 1)), y, where)
    return y


def _refuse_missing(rows: Columns, targets: tuple[str, ...], kind: type[Task], where: str) -> None:
    """Check that targets are there. Raises a UserError: one is missing, and the task has no unknown targets."""
    for name in targets:
        absent = table_columns.missing(rows[name])
        if absent.any() and not issubclass(kind, Multilabel):
            raise UserError(
                f"{where}: the target is missing in {absent.sum()} of {len(absent)} rows (the first is row "
                f"{int(np.argmax(absent))} of column {name!r}): remove these rows"
            )


def _numbers(rows: Columns, targets: tuple[str, ...], kind: type[Task], where: str) -> np.ndarray:
    """Targets that are numbers [M, C], or labels, -1 where they are unknown.

    Raises:
      UserError: a target is no number, or a label is not 0 or 1.
    """
    found = []
    for name in targets:
        column = f"{where}: target column {name!r}"
        values = table_columns.numbers(rows[name], column)
        if values is None:
            raise UserError(f"{column} has texts, but {kind.name} needs numbers{_remedy(kind)}")
        found.append(values)
    y = np.stack(found, axis=1)
    if issubclass(kind, Multilabel):
        y = np.where(np.isnan(y), -1, y)
        if not np.isin(y, (0, 1, -1)).all():
            row, place = map(int, np.argwhere(~np.isin(y, (0, 1, -1)))[0])
            raise UserError(
                f"{where}: target column {targets[place]!r} has {y[row, place]:g} in row {row}{_remedy(kind)}"
            )
        return y.astype(np.int32)
    return y.astype(np.float32)


def _remedy(kind: type[Task]) -> str:
    remedies = {
        "multilabel": ": write 1 for yes, 0 for no, and nothing if it is unknown",
        "survival": ": write 1 for an event, 0 for the end of observation",
        "regression": "; for classes use task='classification'",
    }
    return remedies.get(kind.name, "")


def _classes(values: np.ndarray, where: str, *, chosen: bool) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class of each row [M] int32, and the names of the classes. ``chosen``: whether the user named the task.

    Raises:
      UserError: there is one class only, or the values are rather numbers to predict or free text.
    """
    texts = table_columns.texts(values)
    names = table_columns.names(texts)
    if len(names) < 2:
        raise UserError(f"{where} has the value {''.join(names)!r} in every row: there is nothing to learn")
    fractions = [_is_fraction(name) for name in names]
    ages = not chosen and len(names) > MOST_NUMBERED_CLASSES and None not in fractions
    if len(names) > table_columns.MOST_CATEGORIES or True in fractions or ages:
        raise UserError(
            f"{where} has {len(names):,} different values (such as {names[0]!r}), too many for classes: predict "
            "numbers with task='regression', or divide them into classes"
            + ("; if these numbers are classes, say task='classification'" if ages and True not in fractions else "")
        )
    return table_columns.codes(texts, names).astype(np.int32), names


def _is_fraction(name: str) -> bool | None:
    """Whether a number is not a whole one; None for a text that is no number."""
    try:
        return not float(name).is_integer()
    except ValueError:
        return None


def _statistics(x: np.ndarray, preparation: Preparation) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each column of training rows [M, F]; 0 and 1 for categories, 1 for constants."""
    numbers = np.array([not each for each in preparation.categories])
    spread = x.std(axis=0, dtype=np.float64)
    mean = np.where(numbers, x.mean(axis=0, dtype=np.float64), 0.0)
    std = np.where(numbers & (spread > 0), spread, 1.0)
    return tuple(map(float, mean)), tuple(map(float, std))
