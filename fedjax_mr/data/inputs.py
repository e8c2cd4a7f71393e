"""Checks of what a network receives: samples after their normalisation, for training, test and public samples together.

Wrong units ruin a run without an error: the loss stays at chance or diverges. All statistics are those of a fixed part
of the samples (`_some`), so that large datasets cost milliseconds.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedjax_mr.errors import UserError

MOST_VALUES = 2**19  # of the samples that are looked at: every one of a small dataset, each n-th one of a large one
FEWEST_VALUES = 100  # fewer values say nothing about a unit

# Bytes instead of 0..1, percents, cents and millimetres differ by 100 and more. Samples of one kind from two places,
# such as photos by day and by night, differ by less than 20.
OTHER_UNIT = 20.0
# Standardised samples beside raw ones in 0..1 differ by 3 to 4 (MNIST, CIFAR); parts of one dataset by less than 2.
OTHER_SPREAD = 3.0
# The standard deviation is 1 if standardised and 0.3 for pixels in 0..1, but 0.005 if pixels in 0..1 are divided by the
# statistics of bytes, and 74 if pixels in 0..255 are not divided.
LOW_SPREAD, HIGH_SPREAD = 0.02, 20.0
# The mean is at most 3 standard deviations from 0 in the datasets of the papers. Digits as bytes in 0..16, which become
# -0.96 +- 0.05, train to chance.
HIGH_MEAN = 10.0  # standard deviations
OTHER_COLUMN = 100.0  # as metres and centimetres; the network hardly notices the smaller column
FEWEST_DEVIATING = 0.01  # share of the rows; a column with fewer other values is almost constant and has no unit


class Normalised(Protocol):
    """The part of a `Dataset` that decides what a network receives."""

    @property
    def name(self) -> str: ...
    @property
    def x(self) -> np.ndarray: ...
    @property
    def test_x(self) -> np.ndarray: ...
    @property
    def mean(self) -> tuple[float, ...]: ...
    @property
    def std(self) -> tuple[float, ...]: ...
    @property
    def categories(self) -> tuple[int, ...]: ...


def scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The normalisation (pixel - mean) / std as a factor and a summand, each [channels] or [1]."""
    unit = 255.0 if np.dtype(dtype) == np.uint8 else 1.0
    return (1 / (unit * np.array(std))).astype(np.float32), (-np.array(mean) / np.array(std)).astype(np.float32)


def _some(x: np.ndarray) -> np.ndarray:
    """Each n-th sample, so that there are about `MOST_VALUES` values."""
    return x[:: max(1, math.ceil(x.size / MOST_VALUES))]


def refuse_not_finite(where: str, x: np.ndarray) -> None:
    """Check that all values are finite.

    Args:
      where: name of the samples in errors.
      x: samples in the order of the user.

    Raises:
      UserError: names the first column with such values, their number and a remedy.
    """
    if not np.issubdtype(x.dtype, np.floating):
        return
    with np.errstate(all="ignore"):
        if np.isfinite(x.sum(dtype=np.float64)) or np.isfinite(x).all():  # the sum takes no memory
            return
    bad = ~np.isfinite(x)
    first = tuple(int(axis[0]) for axis in np.nonzero(bad))
    value = f"has a value that is not finite ({x[first]}) in row {first[0]}"
    rows = np.count_nonzero(bad.reshape(len(x), -1).any(1))
    if x.ndim == 2:
        columns = np.flatnonzero(bad.any(0))
        more = f" and {len(columns) - 1} more columns" if len(columns) > 1 else ""
        value += f", column {first[1]} ({np.count_nonzero(bad[:, first[1]])} of {len(x)} values there{more})"
    raise UserError(
        f"{where} {value}: replace such values, for example by the median of the training samples in their column, or "
        f"drop their rows ({rows})"
    )


def refuse_normalisation(dataset: Normalised) -> None:
    """Check that mean and standard deviation fit the samples.

    Raises:
      UserError: there are too many or too few numbers, they are not finite, or they have the unit of bytes.
    """
    channels = dataset.x.shape[-1] if dataset.x.ndim > 1 else 1
    for which, values in (("mean", dataset.mean), ("std", dataset.std)):
        if len(values) not in (1, channels) or not np.isfinite(values).all():
            raise UserError(f"{dataset.name}: {which} is {values}; it must be one finite number, or one per channel")
    if not all(dataset.std):
        raise UserError(f"{dataset.name}: std is {dataset.std}; it must not be 0")
    if dataset.x.dtype == np.uint8 and max(dataset.mean) > 1:
        raise UserError(
            f"{dataset.name}: mean is {max(dataset.mean):.4g}, but mean and std of bytes are those of pixels in 0..1: "
            "divide both by 255"
        )


def _kind(x: np.ndarray) -> str:
    if x.dtype == np.uint8:
        return "bytes"
    return "floating-point numbers" if x.dtype.kind == "f" else "tokens" if x.dtype.kind in "iu" else "no numbers"


def measured(x: np.ndarray, categories: tuple[int, ...]) -> np.ndarray:
    """The columns of samples that are measurements, and not numbers of categories, which have no unit."""
    return x[..., [not count for count in categories]] if any(categories) else x


def refuse_other_units(name: str, x: np.ndarray, other: np.ndarray, part: str) -> None:
    """Check that other samples have the kind and the unit of the training samples.

    Args:
      name: name of the dataset.
      x: training samples, before normalisation.
      other: the others.
      part: their name, such as "test".

    Raises:
      UserError: they differ.
    """
    ours, theirs = _kind(x), _kind(other)
    if ours != theirs:
        raise UserError(
            f"{name}: the {part} samples are {theirs} ({other.dtype}), but the training samples {ours} ({x.dtype}): "
            "convert both in the same way"
        )
    one, two = (None if ours == "tokens" else _typical(each) for each in (x, other))
    if one and two and max(one / two, two / one) > OTHER_UNIT:
        raise UserError(
            f"{name}: typical values are {two:.3g} in the {part} samples, but {one:.3g} in the training samples: bring "
            "both to the same unit"
        )


def _typical(x: np.ndarray) -> float | None:
    """The median of the absolute values except 0, which is common in images and sparse tables; None for few values."""
    values = _some(x).ravel()
    values = np.abs(values[values != 0])
    return float(np.median(values)) if len(values) >= FEWEST_VALUES else None


class _Columns(NamedTuple):
    """Statistics of the inputs of a network for each column of a table, or channel of images: [columns]."""

    mean: np.ndarray
    spread: np.ndarray  # standard deviation
    unit: np.ndarray  # root mean square distance from the median, of the values that differ from it
    varies: np.ndarray  # bool, whether at least `FEWEST_DEVIATING` of the values differ from the median

    @classmethod
    def of(cls, dataset: Normalised, x: np.ndarray) -> "_Columns":
        with np.errstate(all="ignore"):  # a tiny std gives infinite inputs, which are noted
            scale, shift = scale_and_shift(dataset.mean, dataset.std, x.dtype)
            inputs = (_some(x).astype(np.float32) * scale + shift).reshape(-1, x.shape[-1]).astype(np.float64)
            if dataset.categories:
                inputs[:, np.array(dataset.categories) > 0] = 0  # the number of a category has no unit
            distance = inputs - np.median(inputs, axis=0)
            number = np.count_nonzero(distance, axis=0)
            unit = np.sqrt((distance**2).sum(0) / np.maximum(number, 1))
            return cls(inputs.mean(0), inputs.std(0), unit, number > FEWEST_DEVIATING * len(inputs))

    def about(self, number: int) -> str:
        """The values of a column in words."""
        values = f"{self.mean[number]:.3g} +- {self.spread[number]:.2g}"
        return values if len(self.mean) == 1 else f"{values} (column {number})"


def notes(dataset: Normalised) -> Iterator[str]:
    """Yield a line for each sign that the training or test samples have an unsuitable scale."""
    if _has_unit(dataset.x) and not (dataset.categories and all(dataset.categories)):
        train = _Columns.of(dataset, dataset.x)
        yield from _absurd(dataset, train)
        yield from other_spread(dataset, dataset.test_x, "test", train)


def _has_unit(x: np.ndarray) -> bool:
    return x.ndim > 1 and _kind(x) in ("bytes", "floating-point numbers")


def _absurd(dataset: Normalised, columns: _Columns) -> Iterator[str]:
    """Yield a line if the inputs of the network are huge, hardly vary, or have columns of very different units."""
    size, units = np.maximum(columns.spread, np.abs(columns.mean)), np.where(columns.varies, columns.unit, np.inf)
    large, small = int(np.argmax(columns.spread)), int(np.argmin(units))
    with np.errstate(all="ignore"):
        far = np.abs(columns.mean) / np.maximum(units, 1e-30)  # 0 for a column that does not vary
    if not size.max() <= HIGH_SPREAD:  # or not a number
        what = f"{columns.about(int(np.argmax(size)))}, and it learns little from values far above 1"
    elif columns.unit.max() < LOW_SPREAD:
        what = f"{columns.about(large)}, which hardly differ"
    elif far.max() > HIGH_MEAN:
        what = f"{columns.about(int(np.argmax(far)))}, which hardly differ"
    elif columns.spread[large] > OTHER_COLUMN * units[small]:
        what = f"{columns.about(large)} and {columns.about(small)}, and it hardly notices the smaller ones"
    else:
        return
    if dataset.x.dtype == np.uint8:
        largest = dataset.x.max()
        remedy = f"bytes (here up to {largest}) are divided by 255, and mean= and std= are those of the result"
    else:
        several = ", one for each column" if len(columns.mean) > 1 else ""
        remedy = f"pass mean= and std= of the training samples{several}"
    yield f"{dataset.name}: the network receives values of {what}; if that is not intended: {remedy}"


def other_spread(dataset: Normalised, other: np.ndarray, part: str, train: _Columns | None = None) -> Iterator[str]:
    """Yield a line if other samples vary far more or less than the training samples."""
    if min(other.size, dataset.x.size) < FEWEST_VALUES or not _has_unit(other):
        return
    train = train or _Columns.of(dataset, dataset.x)
    ours, theirs = (float(np.sqrt(np.mean(each.spread**2))) for each in (train, _Columns.of(dataset, other)))
    if max(ours, theirs) > OTHER_SPREAD * min(ours, theirs):
        yield (
            f"{dataset.name}: the inputs of the network have a standard deviation of {theirs:.2g} in the {part} "
            f"samples, but {ours:.2g} in the training samples; if that is not intended, scale both in the same way"
        )
