"""Values of users as arrays: samples, labels and ids. Missing values are refused, because NumPy would replace them."""

import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from fedjax_mr.errors import UserError

# The texts that Python and pandas make of a missing value. An array of texts has no other sign of it.
_TEXTS_OF_MISSING = ("nan", "None", "NaT", "<NA>")
_LARGEST_NUMBER = 2**63  # of int64


def as_array(values: object, name: str) -> np.ndarray:
    """Convert values to an array.

    Raises:
      UserError: the values are nested lists, or a list of arrays, with entries of different shapes; or an array with a
        mask hides some.
    """
    if isinstance(values, np.ma.MaskedArray) and (count := np.ma.count_masked(values)):
        rows = np.flatnonzero(np.ma.getmaskarray(values).reshape(len(values), -1).any(1)) if values.ndim else [0]
        raise UserError(
            f"{name} is a masked array that hides {count} values, the first in row {rows[0]}: fill them with numbers "
            "(array.filled(...)), or drop their rows"
        )
    try:
        return np.asarray(values)
    except ValueError:
        raise UserError(
            f"{name} has entries of different shapes, but an array needs one shape: crop, pad or resize them"
        ) from None


def ids(values: object, name: str, *, nobody: bool = False) -> np.ndarray:
    """Convert ids of clients or domains to an array of integers, or of texts if one of them is a text.

    Equal ids have one form: 1, 1.0 and "1" beside texts are "1", and bytes are decoded.

    Args:
      values: the ids.
      name: their name in errors.
      nobody: whether "" is the id of samples without an owner.

    Raises:
      UserError: an id is missing, or is neither a whole number nor a text.
    """
    if isinstance(values, np.ma.MaskedArray):
        mask, values = np.ma.getmaskarray(values), values.data.astype(object)
        values[mask] = None
    array = as_array(values, name)
    if array.dtype.kind in "USfO" and not hasattr(values, "dtype"):  # a list: NumPy would write 1.0 and None as texts
        array = np.asarray(values, dtype=object)
    flat = array.ravel()
    if array.dtype.kind in "bi":
        return array
    if array.dtype.kind == "u":  # uint64 beside int64 would become float64
        return array.astype(np.int64 if array.max(initial=0) < _LARGEST_NUMBER else str)
    if array.dtype.kind == "f":
        missing, wrong = np.isnan(flat), (flat != np.round(flat)) | (np.abs(flat) >= _LARGEST_NUMBER)
        wrong &= ~missing
        convert: Callable[[], np.ndarray] = lambda: array.astype(np.int64)
    elif array.dtype.kind == "U":
        missing, wrong, convert = np.isin(flat, _TEXTS_OF_MISSING), np.zeros(len(flat), bool), lambda: array
    else:
        simple = [_simple(value) for value in flat.tolist()]
        missing = np.array([value is None for value in simple], bool)
        wrong = np.array([isinstance(value, _Wrong) for value in simple], bool)
        texts = any(isinstance(value, str) for value in simple)
        texts = texts or any(type(value) is int and abs(value) >= _LARGEST_NUMBER for value in simple)
        convert = lambda: np.array(list(map(str, simple)) if texts else simple).reshape(array.shape)
    if missing.any():
        row = int(np.argmax(missing))
        remedy = ', or use "" for samples without a client' if nobody else ""
        raise UserError(
            f"{name}: {missing.sum()} of {len(flat)} are missing (the first is {_shown(flat[row])} in row {row}): name "
            f"them or drop their samples{remedy}"
        )
    if wrong.any():
        row = int(np.argmax(wrong))
        raise UserError(f"{name} must be whole numbers or texts, but row {row} has {_shown(flat[row])}")
    return convert()


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, NaT or pandas' NA."""
    return not isinstance(value, str) and str(value) in _TEXTS_OF_MISSING


class _Wrong:
    """Stands for a value that is no id."""


def _simple(value: Any) -> Any:
    """An id as a Python integer, truth value or text; None if it is missing."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            return _Wrong()
    if isinstance(value, str):
        return None if value in _TEXTS_OF_MISSING else value
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if is_missing(value):
        return None
    if isinstance(value, numbers.Real):
        number: Any = value
        return int(number) if number % 1 == 0 else _Wrong()  # also wrong: infinite, whose remainder is no number
    return _Wrong()


def _shown(value: Any) -> str:
    return repr(value.item() if isinstance(value, np.generic) else value)[:60]
