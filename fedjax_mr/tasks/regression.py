"""Real numbers: the squared error of standardised targets."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.tasks.base import Task

STRATA = 10  # groups of targets for partitions by label: tenths of the training samples; our choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """Targets y [C] float32 in their own unit; the outputs [C] are standardised: a prediction is output * std + mean.

    The loss is the mean squared error of the standardised numbers, so its size does not depend on the unit.

    Attributes:
      mean, std: of the training targets [C], or 0 and 1.
      unit: unit of the targets, for tables and figures.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    unit: str = ""
    name: ClassVar[str] = "regression"
    dtype: ClassVar[type] = np.float32
    provides: ClassVar[frozenset[str]] = frozenset({"numbers"})
    default_metrics: ClassVar[tuple[str, ...]] = ("rmse", "mae", "r2")
    group: ClassVar[str] = "tenth of the target"
    predicted: ClassVar[str] = "numbers in the unit of the targets"
    formula: ClassVar[str] = 'outputs * np.array(task["std"]) + np.array(task["mean"])'

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = np.asarray(getattr(self, name))
            fits = values.shape in ((1,), (self.width,)) and values.dtype.kind in "iuf" and np.isfinite(values).all()
            if not fits or (name == "std" and (values <= 0).any()):
                kind = "a positive number" if name == "std" else "a number"
                raise UserError(
                    f"{name} of the targets must be {kind}, or one for each of {self.width}, not {getattr(self, name)}"
                )

    def standardised(self, targets: jax.Array) -> jax.Array:
        """Targets [B, C] as the network is to return them."""
        return (targets - _row(self.mean)) / _row(self.std)

    def loss(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """The mean squared error of the standardised numbers of each sample [B]."""
        del mask
        return jnp.mean(jnp.square(outputs - self.standardised(targets)), axis=-1)

    def predict(self, outputs: jax.Array) -> jax.Array:
        """The numbers [B, C] in the unit of the targets."""
        return outputs * _row(self.std) + _row(self.mean)

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """C numbers: [C]."""
        del shape
        return (self.width,)

    @classmethod
    def convert(cls, y: np.ndarray) -> np.ndarray:
        """Numbers [M] or [M, C] as float32 [M, C]."""
        y = super().convert(y)
        return y[:, None] if y.ndim == 1 else y

    def fitted(self, y: np.ndarray) -> Task:
        """The task with the mean and standard deviation of the training targets, unless it has some."""
        if self.mean != (0.0,) or self.std != (1.0,):
            return self
        spread = y.std(axis=0, dtype=np.float64)
        mean, std = y.mean(axis=0, dtype=np.float64), np.where(spread > 0, spread, 1.0)
        return dataclasses.replace(self, mean=tuple(map(float, mean)), std=tuple(map(float, std)))

    def strata(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Tenths of the samples by the first number."""
        edges = np.quantile(y[:, 0], np.arange(1, STRATA) / STRATA)
        return np.searchsorted(edges, y[:, 0], side="right").astype(np.int32), STRATA


def _row(values: tuple[float, ...]) -> jax.Array:
    return jnp.asarray(values, jnp.float32)[None]
