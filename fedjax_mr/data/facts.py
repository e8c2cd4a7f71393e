"""Facts about the samples that a run folder keeps, so that its models can be used without the samples."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr import files, untrusted
from fedjax_mr.data.federated import Dataset
from fedjax_mr.data.preparation import Preparation
from fedjax_mr.errors import UserError
from fedjax_mr.tasks import Classification, Task, of_facts, with_metrics

FILE = "samples.json"
DTYPES = ("uint8", "float32", "int32")
_SCHEMA = {
    "name": str, "shape": [int], "dtype": str, "num_classes": int, "mean": [float], "std": [float], "low": float,
    "high": float, "vocabulary?": int, "task?": dict, "categories?": [int],
    "class_names?": [str], "preparation?": dict,
}  # fmt: skip
_TUPLES = ("shape", "mean", "std", "categories", "class_names")
MARGIN = 1.0  # how far float samples may lie outside the range of the training samples, in multiples of the range


@dataclasses.dataclass(frozen=True)
class Facts:
    """The kind of the samples and their normalisation.

    Attributes:
      name: name of the dataset.
      shape: shape of one sample.
      dtype: uint8, float32 or int32 (tokens), as in the source.
      num_classes: C.
      mean, std: see `Dataset`.
      low, high: the smallest and the largest value of the training samples.
      vocabulary: number of different tokens. 0 if the samples are not tokens.
      task: what was learned. None: a class per sample.
      categories, class_names, preparation: see `Dataset`.
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
    task: Task | None = None
    categories: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()
    preparation: Preparation | None = None

    @property
    def learned(self) -> Task:
        """The task, also of a folder that records none."""
        return self.task or with_metrics(Classification(width=self.num_classes))

    @classmethod
    def of(cls, dataset: Dataset) -> "Facts":
        """The facts about a dataset."""
        x = dataset.x
        return cls(
            dataset.name, tuple(x.shape[1:]), x.dtype.name, dataset.num_classes, tuple(map(float, dataset.mean)),
            tuple(map(float, dataset.std)), float(x.min()), float(x.max()), dataset.vocabulary,
            None if type(dataset.task) is Classification else dataset.task, dataset.categories,
            dataset.class_names, dataset.preparation,
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write ``samples.json`` into a run folder."""
        with files.atomic_write(folder / FILE) as path:
            path.write_text(self.text() + "\n", encoding="utf-8")

    def text(self) -> str:
        """The facts as JSON, which `parse` reads."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        later = {name: values.pop(name) for name in ("task", "categories", "class_names", "preparation")}
        later["task"] = later["task"] and later["task"].facts()
        later["preparation"] = later["preparation"] and json.loads(later["preparation"].to_json())
        # Without these facts, files are as version 0.3.0 writes them.
        return json.dumps(values | {name: value for name, value in later.items() if value}, indent=2)

    @classmethod
    def parse(cls, text: str) -> "Facts":
        """Read the facts from a JSON text.

        Raises:
          ValueError, TypeError: the text holds anything else.
        """
        values = untrusted.parse_json(text, _SCHEMA)
        values |= {name: tuple(values[name]) for name in _TUPLES if name in values}
        if "task" in values:
            values["task"] = of_facts(values["task"])
        if "preparation" in values:
            values["preparation"] = Preparation.of_json(json.dumps(values["preparation"]))
        facts = cls(**values)
        if facts.dtype not in DTYPES or facts.num_classes < 1 or facts.num_classes != facts.learned.width:
            raise ValueError(f"samples cannot be {facts.dtype} with {facts.num_classes} classes")
        if not all(facts.std) or facts.low > facts.high or min((*facts.shape, 1)) < 1:  # LEAF's FEMNIST has std < 0
            raise ValueError("std must not be 0, shapes must be positive, and low must not be above high")
        return facts

    @classmethod
    def read(cls, folder: Path) -> "Facts | None":
        """Read the facts of a run folder. None if an older version wrote the folder.

        Raises:
          UserError: the file is damaged.
        """
        path = folder / FILE
        try:
            return cls.parse(untrusted.read_text(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error})") from None

    def dataset(self, count: int) -> Dataset:
        """A placeholder dataset of this kind, with ``count`` targets and one sample, all zeros.

        It replaces the real dataset where only shapes are needed. It cannot be trained on.
        """
        task, x = self.learned, np.zeros((1, *self.shape), self.dtype)
        y = np.zeros((count, *task.target_shape(self.shape)), task.dtype)
        return Dataset(
            self.name, x, y, x, y[:1], mean=self.mean, std=self.std, vocabulary=self.vocabulary, task=task,
            categories=self.categories, class_names=self.class_names, preparation=self.preparation,
        )  # fmt: skip

    def samples(self, x: Any) -> np.ndarray:
        """Check that samples are of this kind, and return them [n, ...] in the source's dtype.

        Of a table that samples were made of (`from_table`), x may also be another table with its columns: a frame, a
        dictionary of columns or the path of a CSV file.

        Raises:
          UserError: the shape, the kind of numbers or the range of values differs from the source.
        """
        if self.preparation is not None and (isinstance(x, str | os.PathLike | dict) or hasattr(x, "columns")):
            return self.preparation.apply(x)
        x = np.asarray(x)
        if x.ndim == len(self.shape) and self.shape[-1:] == (1,) and x.shape[1:] == self.shape[:-1]:
            x = x[..., None]  # images without a channel axis, as `from_arrays` takes them
        if x.shape[1:] != self.shape:
            one = "; a single sample x is x[None]" if x.shape == self.shape else ""
            raise UserError(f"samples of {self.name} are [n, {_numbers(self.shape)}], not [{_numbers(x.shape)}]{one}")
        tokens, floats = self.vocabulary > 0, np.issubdtype(self.dtype, np.floating)
        if not np.issubdtype(x.dtype, np.floating if floats else np.integer):
            kind = f"floats from {self.low:g} to {self.high:g}" if floats else "token numbers" if tokens else "bytes"
            raise UserError(f"samples of {self.name} are {kind}, but these are {x.dtype}: use the source's format")
        if not x.size:
            return x.astype(self.dtype)
        if floats and not np.isfinite(x).all():
            raise UserError(f"these samples of {self.name} hold values that are not finite")
        low, high = (0.0, 255.0) if not floats else (self.low, self.high)
        high = self.vocabulary - 1 if tokens else high
        margin = MARGIN * (high - low) if floats else 0.0
        if x.min() < low - margin or x.max() > high + margin:
            raise UserError(
                f"samples of {self.name} range from {low:g} to {high:g}, but these from {x.min():g} to {x.max():g}: "
                "use the source's format, without other normalisation or scaling"
            )
        return x.astype(self.dtype)


def _numbers(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
