"""What a run keeps of its samples beside the partition: enough to use its models where the samples are not."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.data import files
from fedjax_mr.data.federated import Dataset
from fedjax_mr.errors import UserError

FILE = "samples.json"
DTYPES = ("uint8", "float32", "int32")
BEYOND = 1.0  # how far float samples may lie outside the training samples' range, in widths of it


@dataclasses.dataclass(frozen=True)
class Facts:
    """The kind of the samples and their normalisation.

    Attributes:
      name: the data set's.
      shape: of one sample.
      dtype: uint8, float32 or int32 (tokens), as the source gives them.
      num_classes: C.
      mean, std: those of the `Dataset`.
      low, high: the smallest and the largest value in the training samples.
      vocabulary: how many different tokens there are; 0 for samples that are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: float
    high: float
    vocabulary: int = 0

    @classmethod
    def of(cls, dataset: Dataset) -> "Facts":
        """Return the facts of a data set."""
        x = dataset.x
        return cls(
            dataset.name, tuple(x.shape[1:]), x.dtype.name, dataset.num_classes, tuple(map(float, dataset.mean)),
            tuple(map(float, dataset.std)), float(x.min()), float(x.max()), dataset.vocabulary,
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write ``samples.json`` into a run folder."""
        with files.atomic_write(folder / FILE) as path:
            path.write_text(self.text() + "\n", encoding="utf-8")

    def text(self) -> str:
        """Return the facts as JSON; `parse` reads it."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def parse(cls, text: str) -> "Facts":
        """Return the facts that a JSON text holds.

        Raises:
          ValueError, TypeError, KeyError: it holds something else.
        """
        values = files.parse_json(text)
        for name in ("shape", "mean", "std"):
            values[name] = tuple(values[name])
        found = cls(**values)
        if found.dtype not in DTYPES or not all(type(each) is int for each in (*found.shape, found.num_classes)):
            raise ValueError(f"no samples are {found.dtype} of shape {found.shape}")
        if type(found.name) is not str or type(found.vocabulary) is not int or found.num_classes < 1:
            raise ValueError("name, vocabulary or num_classes")
        numbers = (*found.mean, *found.std, found.low, found.high)
        if not all(type(each) in (int, float) and math.isfinite(each) for each in numbers):
            raise ValueError("mean, std, low and high are finite numbers")
        if not all(each > 0 for each in found.std) or found.low > found.high or min((*found.shape, 1)) < 1:
            raise ValueError("std is above 0, low is not above high, and shapes are positive")
        return found

    @classmethod
    def read(cls, folder: Path) -> "Facts | None":
        """Return the facts that a run folder holds; None if it is older than they are.

        Raises:
          UserError: the file is damaged.
        """
        path = folder / FILE
        try:
            return cls.parse(files.read_text(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} is damaged ({error})") from None

    def dataset(self, count: int) -> Dataset:
        """Return a data set of this kind with ``count`` labels and one sample, all zeros: a template, not to train on.

        It stands for the true one where only shapes are asked for.
        """
        x, y = np.zeros((1, *self.shape), self.dtype), np.zeros(count, np.int32)
        return Dataset(
            self.name, x, y, x, y[:1], self.num_classes, mean=self.mean, std=self.std, vocabulary=self.vocabulary
        )

    def samples(self, x: Any) -> np.ndarray:
        """Return samples as the source would give them, [n, ...], after checking that they are of this kind.

        Raises:
          UserError: another shape, another type of numbers, or values that no sample of the source has.
        """
        x = np.asarray(x)
        if x.ndim == len(self.shape) and self.shape[-1:] == (1,) and x.shape[1:] == self.shape[:-1]:
            x = x[..., None]  # images without a channel axis, as `from_arrays` takes them
        if x.shape[1:] != self.shape:
            one = "; a single sample x is x[None]" if x.shape == self.shape else ""
            raise UserError(f"samples of {self.name} are [n, {_numbers(self.shape)}], not [{_numbers(x.shape)}]{one}")
        tokens, floats = self.vocabulary > 0, np.issubdtype(self.dtype, np.floating)
        if not np.issubdtype(x.dtype, np.floating if floats else np.integer):
            kind = f"floats from {self.low:g} to {self.high:g}" if floats else "token numbers" if tokens else "bytes"
            raise UserError(f"samples of {self.name} are {kind}, and these are {x.dtype}: give them as the source does")
        if not x.size:
            return x.astype(self.dtype)
        if floats and not np.isfinite(x).all():
            raise UserError(f"these samples of {self.name} hold values that are not finite")
        low, high = (0.0, 255.0) if not floats else (self.low, self.high)
        high = self.vocabulary - 1 if tokens else high
        room = BEYOND * (high - low) if floats else 0.0
        if x.min() < low - room or x.max() > high + room:
            raise UserError(
                f"samples of {self.name} go from {low:g} to {high:g}, and these from {x.min():g} to {x.max():g}: give "
                "them as the source does, not normalised or scaled in another way"
            )
        return x.astype(self.dtype)


def _numbers(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the normalisation of samples, (pixel - mean) / std, as one factor and one summand [channels] or [1]."""
    unit = 255.0 if np.dtype(dtype) == np.uint8 else 1.0
    return (1 / (unit * np.array(std))).astype(np.float32), (-np.array(mean) / np.array(std)).astype(np.float32)
