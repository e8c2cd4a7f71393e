"""How the columns of a table became samples: learned from the training rows, applied to any other row."""

import dataclasses
import json
from typing import Any

import numpy as np
from absl import logging

from fedjax_mr import untrusted
from fedjax_mr.data import columns as table_columns
from fedjax_mr.data.columns import Columns
from fedjax_mr.errors import UserError

_SCHEMA = {"columns": [str], "categories": [[str]], "fill": [float], "target": [str], "class_names": [str]}


@dataclasses.dataclass(frozen=True)
class Preparation:
    """The columns of samples [M, F], in order, and what replaces missing values.

    A column of numbers stays as it is, and the median of the training rows replaces missing values. It becomes
    (value - mean) / std in the network, by the mean and standard deviation of the dataset. A column of categories
    becomes the number of the category in `categories`, -1 if it is missing or does not occur in the training rows.

    Attributes:
      columns: names of the columns [F].
      categories: the categories of each column [F] by number; () if it holds numbers.
      fill: what replaces a missing value of each column [F]: the median, or -1.
      target: names of the columns of the target.
      class_names: names of the classes by number; () for other tasks.
    """

    columns: tuple[str, ...]
    categories: tuple[tuple[str, ...], ...]
    fill: tuple[float, ...]
    target: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

    @classmethod
    def learn(
        cls, table: Columns, names: list[str], train: np.ndarray, *, categorical: frozenset[str], where: str
    ) -> "Preparation":
        """Learn medians and categories from some rows.

        Args:
          table: the columns, see `columns.read`.
          names: the columns of the samples, in order.
          train: which rows are training rows [M] bool.
          categorical: columns of categories. Text columns are, too.
          where: name of the table in errors.

        Raises:
          UserError: a column has no values in the training rows, or is one of free text, dates or almost numbers.
        """
        categories, fill = [], []
        for name in names:
            column = f"{where}: column {name!r}"
            values = None if name in categorical else table_columns.numbers(table[name], column)
            if values is not None:
                known = values[train & ~np.isnan(values)]
                if not len(known):
                    raise UserError(f"{column} has no values in the training rows: drop it (drop=)")
                table_columns.warn_of_identifiers(values, column)
                categories.append(())
                fill.append(float(np.median(known)))
                continue
            texts = table_columns.texts(table[name])
            if name not in categorical:
                table_columns.refuse_free_text(texts, column)
            found = table_columns.names(texts[train])
            if not found:
                raise UserError(f"{column} has no values in the training rows: drop it (drop=)")
            categories.append(found)
            fill.append(-1.0)
        return cls(tuple(names), tuple(categories), tuple(fill))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of categories of each column [F]; 0 if it holds numbers."""
        return tuple(map(len, self.categories))

    def apply(self, table: Any, where: str = "the table") -> np.ndarray:
        """Prepare the rows of a table as those of the training: samples [n, F] float32. Other columns are ignored.

        Args:
          table: see `columns.read`.
          where: name of the table in errors.

        Raises:
          UserError: a column is missing, or a column of numbers has texts.
        """
        found = table_columns.read(table, where)
        table_columns.select(found, self.columns, where, "the samples")
        x = self.encode(found, where)
        for place, name in enumerate(self.columns):
            unknown = (x[:, place] < 0) & ~table_columns.missing(found[name])
            if self.categories[place] and unknown.any():
                first = found[name][np.argmax(unknown)]
                logging.warning(
                    "%s: column %r has %d values that no training row has (the first is %r): they count as missing",
                    where, name, unknown.sum(), first,
                )  # fmt: skip
        return x

    def encode(self, table: Columns, where: str) -> np.ndarray:
        """As `apply`, for columns that were read and that exist, without a warning of unknown categories."""
        x = np.empty((len(table[self.columns[0]]), len(self.columns)), np.float32)
        for place, (name, categories, fill) in enumerate(zip(self.columns, self.categories, self.fill, strict=True)):
            if categories:
                x[:, place] = table_columns.codes(table_columns.texts(table[name]), categories)
            else:
                x[:, place] = _filled(table[name], fill, f"{where}: column {name!r}")
        return x

    def to_json(self) -> str:
        """The preparation as JSON, which `of_json` reads."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=2)

    @classmethod
    def of_json(cls, text: str) -> "Preparation":
        """Read a preparation from JSON.

        Raises:
          ValueError: the text holds anything else.
        """
        values = untrusted.parse_json(text, _SCHEMA)
        if extra := values.keys() - _SCHEMA.keys():
            raise ValueError(f"a preparation has no {', '.join(sorted(extra))}")
        columns, categories, fill = (values[name] for name in ("columns", "categories", "fill"))
        if not len(columns) == len(categories) == len(fill):
            raise ValueError("columns, categories and fill have different lengths")
        names = {name: tuple(values[name]) for name in ("columns", "target", "class_names")}
        return cls(categories=tuple(map(tuple, categories)), fill=tuple(map(float, fill)), **names)


def _filled(values: np.ndarray, fill: float, where: str) -> np.ndarray:
    found = table_columns.numbers(values, where)
    if found is None:
        raise UserError(f"{where} has texts, but the training rows have numbers")
    return np.where(np.isnan(found), fill, found)
