"""Columns of a table by name, from a pandas frame, a dictionary or a CSV file: their numbers, categories and faults.

A text column holds numbers if all of its values are numbers, or ``true`` and ``false`` (1 and 0).
Columns that only look like numbers or dates are refused with a remedy, because a guess would have to be repeated by
everybody who uses the model.
"""

import csv
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from absl import logging

from fedjax_mr import files
from fedjax_mr.data.values import as_array, is_missing
from fedjax_mr.errors import UserError

Columns = dict[str, np.ndarray]
"""The values [M] of each column: numbers, truth values, or texts and other objects. None and NaN are missing."""

SUFFIXES = (".csv", ".tsv")
# As pandas reads them, so "none" is a category.
MISSING = frozenset({"", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "None", "<NA>", "NaT"})
MOST_CATEGORIES = 100  # of a text column that is not listed as categorical; more are names, notes or identifiers
FEWEST_ROWS = 20  # in fewer rows, texts that are all different may still be categories
FEWEST_NUMBERED_ROWS = 100  # in fewer rows, whole numbers that are all different may still be measured
_TRUTH = {"true": True, "false": False}
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([ T].*)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}([ T].*)?")
_ALMOST_NUMBER = re.compile(r"[<>~≈±]?\s*[-+]?[$€£]?\s*\d[\d.,' ]*\s*(%|‰|[$€£]|\s[a-zA-Zµ/]+)?")
_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0+")  # as pandas writes whole numbers of a column with missing values


def read(table: Any, where: str) -> Columns:
    """The columns of a table.

    Args:
      table: the path of a file of comma-separated values (also semicolons or tabs), a pandas frame, a dictionary of
        columns, or anything else that has ``columns`` and returns a column for ``table[name]``.
      where: name of the table in errors.

    Raises:
      UserError: the file is missing or damaged, there are no rows, or columns have no name or the same one.
    """
    if isinstance(table, str | os.PathLike):
        columns = _of_file(files.expand_home(os.fspath(table)))
    elif isinstance(table, Mapping):
        columns = _of_pairs(((name, table[name]) for name in table), where)
    elif hasattr(table, "columns") and hasattr(table, "__getitem__"):
        columns = _of_pairs(((name, table[name]) for name in _unique(table.columns, where)), where)
    else:
        raise UserError(
            f"{where} is a {type(table).__name__}: pass a pandas frame, a dictionary of columns or a CSV file"
        )
    if len(lengths := {len(values) for values in columns.values()}) > 1:
        raise UserError(f"{where} has columns of different lengths, {min(lengths)} and {max(lengths)}")
    if not lengths or lengths == {0}:
        raise UserError(f"{where} has no {'rows' if lengths else 'columns'}")
    return columns


def select(columns: Columns, names: Iterable[str], where: str, what: str) -> None:
    """Check that columns exist. Raises a UserError that lists those there are; ``what`` says who names them."""
    for name in names:
        if name not in columns:
            shown = ", ".join(list(columns)[:20]) + (", ..." if len(columns) > 20 else "")
            raise UserError(f"{where} has no column {name!r} for {what}: it has {shown}")


def missing(values: np.ndarray) -> np.ndarray:
    """Which values are missing [M]: None, NaN, and texts such as "" and "NA" (`MISSING`)."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind != "O":
        return np.zeros(len(values), bool)
    return np.array([_is_missing(value) for value in values.tolist()], bool)


def numbers(values: np.ndarray, where: str) -> np.ndarray | None:
    """The values as float64 [M], NaN where they are missing; None if most of them are no numbers.

    Raises:
      UserError: some values are no numbers although most are, a number is infinite, or the values are dates or almost
        numbers, such as ``12 %``.
    """
    try:
        found = values.astype(np.float64)  # None is NaN; fast, and enough for most columns
    except (ValueError, TypeError):
        absent = missing(values)
        parsed = [None if gone else _number(value) for value, gone in zip(values.tolist(), absent, strict=True)]
        found = np.array([np.nan if number is None else number for number in parsed], np.float64)
        wrong = np.array([number is None for number in parsed], bool) & ~absent
        if wrong.any():
            _refuse_almost_numbers(values, wrong, where)
            if 2 * wrong.sum() > (~absent).sum():  # codes such as "1A", "2" are categories
                return None
            row = int(np.argmax(wrong))
            raise UserError(
                f"{where} has numbers, but {wrong.sum()} of {len(values)} values are texts (the first is "
                f"{_shown(values[row])} in row {row}): leave missing values empty, or list it in categorical="
            ) from None
    if np.isinf(found).any():
        raise UserError(f"{where} has an infinite value in row {int(np.argmax(np.isinf(found)))}: leave it empty")
    return found


def texts(values: np.ndarray) -> np.ndarray:
    """The values as categories [M], objects: texts, None where they are missing. Whole numbers have no decimals."""
    absent = missing(values).tolist()
    named = [None if gone else _text(value) for value, gone in zip(values.tolist(), absent, strict=True)]
    return np.array(named, dtype=object)


def names(values: np.ndarray) -> tuple[str, ...]:
    """The different categories of `texts`, sorted: as numbers if all are whole numbers, else as texts."""
    found = {value for value in values.tolist() if value is not None}
    whole = all(re.fullmatch(r"-?(0|[1-9]\d{0,15})", name, re.ASCII) for name in found)
    return tuple(sorted(found, key=int if whole else str))


def codes(values: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """The number of each category of `texts` in ``names`` [M] float32. -1: missing, or not among them."""
    number = {name: code for code, name in enumerate(names)}
    return np.array([number.get(value, -1) for value in values.tolist()], np.float32)


def refuse_free_text(categories: np.ndarray, where: str) -> None:
    """Refuse a column of texts [M] that are rather names, notes or identifiers than categories."""
    known = [value for value in categories.tolist() if value is not None]
    different = len(set(known))
    if different > MOST_CATEGORIES or (len(known) >= FEWEST_ROWS and different > len(known) / 2):
        raise UserError(
            f"{where} has {different:,} different texts in {len(known):,} rows (such as {_shown(known[0])}): drop it "
            "(drop=), or list it in categorical= if these are categories"
        )


def warn_of_identifiers(numbers: np.ndarray, where: str) -> None:
    """Warn of a column of numbers [M] that has another whole number in each row, as numbers of patients are."""
    different = np.unique(numbers)
    if len(numbers) >= FEWEST_NUMBERED_ROWS and len(different) == len(numbers) and not np.any(different % 1):
        logging.warning(
            "%s has another whole number in each of %d rows: if it numbers rows or persons, drop it (--drop_columns)",
            where, len(numbers),
        )  # fmt: skip


# ---- Sources of columns


def _unique(labels: Iterable[Any], where: str) -> list[Any]:
    """The labels of the columns, which differ."""
    labels = list(labels)
    seen: set[str] = set()
    for label in labels:
        if str(label).strip() in seen:
            raise UserError(f"{where} has two columns {str(label).strip()!r}: rename one")
        seen.add(str(label).strip())
    return labels


def _of_pairs(pairs: Iterable[tuple[Any, Any]], where: str) -> Columns:
    return {str(name).strip(): _values(values, f"{where}: column {name!r}") for name, values in pairs}


def _values(values: Any, where: str) -> np.ndarray:
    """A column [M] of numbers, truth values or objects."""
    dtype = getattr(values, "dtype", None)
    if not isinstance(dtype, np.dtype):  # a list, or a column of pandas or polars that may hold NA
        values = np.array(values.to_list() if hasattr(values, "to_list") else list(values), dtype=object)
    array = as_array(values, where)
    if array.ndim != 1:
        raise UserError(f"{where} is {array.dtype} of shape {array.shape}, but a column has one value per row")
    if array.dtype.kind in "mM":
        array = array.astype(str)
    return array if array.dtype.kind in "biuf" else array.astype(object)


def _of_file(path: Path) -> Columns:
    """The columns of a CSV file: objects, texts as they are written.

    Raises:
      UserError: the file is missing, is not UTF-8, or its rows do not fit its first line.
    """
    if not path.is_file():
        raise UserError(f"data file {path} does not exist (names of datasets have no '/' and no suffix)")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # a file of Excel begins with a byte order mark
            first = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=_delimiter(first), strict=True, skipinitialspace=True)
            rows = []
            for row in reader:
                if rows and row and len(row) != len(rows[0]):
                    raise UserError(
                        f"{path}, line {reader.line_num}: {len(row)} values, but the first line names {len(rows[0])} "
                        "columns: put values with commas into quotation marks"
                    )
                rows += [row] if row else []  # an empty line is no row
    except UnicodeDecodeError:
        raise UserError(f"{path} is not in UTF-8: save it as 'CSV UTF-8', or convert it with iconv") from None
    except (OSError, csv.Error) as error:
        raise UserError(f"{path} is no table of comma-separated values ({error})") from None
    if not rows:
        raise UserError(f"{path} is empty")
    header = [name.strip() for name in rows[0]]
    if len(rows) == 1:
        raise UserError(f"{path} has no rows below its first line, which names the columns")
    columns = [np.array(column, dtype=object) for column in zip(*rows[1:], strict=True)]
    if header[0] == "" and _counts(columns[0]):  # row numbers, which pandas and R write without a name
        header, columns = header[1:], columns[1:]
    if "" in header:
        raise UserError(f"{path}: column {header.index('') + 1} has no name in the first line: name it, or remove it")
    return dict(zip(_unique(header, str(path)), columns, strict=True))


def _delimiter(line: str) -> str:
    """The separator that the first line has most often: a comma, a semicolon or a tab."""
    return max(",;\t", key=line.count)


def _counts(values: np.ndarray) -> bool:
    """Whether texts count from 0 or 1."""
    return any(all(text == str(number) for number, text in enumerate(values.tolist(), start)) for start in (0, 1))


# ---- Values


def _is_missing(value: Any) -> bool:
    return value.strip() in MISSING if isinstance(value, str) else is_missing(value)


def _number(value: Any) -> float | None:
    """A value as a number, or None."""
    if isinstance(value, str) and (word := value.strip().lower()) in _TRUTH:
        return float(_TRUTH[word])
    try:
        return float(value)
    except (ValueError, TypeError):
        return None


def _text(value: Any) -> str:
    """A value as the name of a category: ``3``, ``3.0`` and ``"3.0"`` are the same one."""
    if isinstance(value, str):
        text = value.strip()
        whole = _WHOLE.fullmatch(text)
        return whole[1] if whole else text
    value = value.item() if isinstance(value, np.generic) else value
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _refuse_almost_numbers(values: np.ndarray, wrong: np.ndarray, where: str) -> None:
    """Refuse dates, and numbers with a unit, a percent sign or a decimal comma."""
    others = [value for value in values[wrong].tolist() if not isinstance(value, str) or not _is_missing(value)]
    kinds = [value.strip() for value in others if isinstance(value, str)]
    if len(kinds) < len(others):
        _refuse_dates(np.array([each for each in others if not isinstance(each, str)]).astype(str), where)
    if all(_DATE.fullmatch(text) for text in kinds):
        _refuse_dates(np.array(kinds), where)
    if all(_ALMOST_NUMBER.fullmatch(text) for text in kinds):
        row = int(np.argmax(wrong))
        raise UserError(
            f"{where} has {_shown(values[row])} in row {row}: write plain numbers such as 12.5, without signs, units "
            "and thousands separators, or list it in categorical="
        )


def _refuse_dates(values: np.ndarray, where: str) -> NoReturn:
    raise UserError(
        f"{where} has dates or other objects (such as {_shown(values[0])}): replace them by numbers, such as the days "
        "since the first one, or drop the column (drop=)"
    )


def _shown(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    return repr(value if len(str(value)) <= 40 else f"{str(value)[:40]}...")
