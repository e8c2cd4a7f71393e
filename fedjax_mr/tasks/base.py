"""The interface of a task: what a federation learns, from the shape of a target to the numbers of a test.

A task is a value: a frozen dataclass of facts about the targets, with pure functions of outputs and targets. Subclass
`Task` for another one; ``outputs``, ``loss`` and ``predict`` are enough (docs/recipes/own_task.md).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_mr.errors import UserError


class Criterion(Protocol):
    """The loss of each sample: (outputs [B, ...], targets [B, ...], mask [B]) -> [B].

    ``mask`` is 1 for samples and 0 for padding, whose losses do not count.
    """

    def __call__(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array, /) -> jax.Array: ...


class Sums(Protocol):
    """The sums of a metric over a batch: (task, outputs [B, ...], targets [B, ...], mask [B]) -> a tree of arrays.

    Sums of batches, devices, clients and processes are added, so a metric is exact however its samples are divided.
    """

    def __call__(self, task: Any, outputs: jax.Array, targets: jax.Array, mask: jax.Array, /) -> Any: ...


TITLES = {
    "rmse": "RMSE", "mae": "MAE", "r2": "R²", "auroc": "AUROC", "ece": "ECE", "iou": "IoU", "dice": "Dice",
    "macro_f1": "macro F1", "micro_f1": "micro F1", "brier": "Brier score", "top5_accuracy": "top-5 accuracy",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class Metric:
    """A number by which models are judged.

    Attributes:
      name: its name in flags, columns and figures.
      sums: what is added over samples, inside the compiled test.
      value: (sums as NumPy arrays) -> a number, or an array with one number per class. NaN if undefined.
      higher_is_better: whether larger values are better.
      unit: unit in tables and figures: ``fraction``, ``nats``, ``bits``, ``target`` (that of the targets), or "".
      needs: what it requires of a task, see `Task.provides`.
    """

    name: str
    sums: Sums
    value: Callable[[Any], Any]
    higher_is_better: bool = True
    unit: str = ""
    needs: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        """The name in words, for tables and figures."""
        return TITLES.get(self.name, self.name.replace("_", " "))

    def __repr__(self) -> str:
        return f"Metric({self.name})"

    def of(self, sums: Any) -> Any:
        """The value of sums, without warnings where it is undefined."""
        with np.errstate(all="ignore"):
            return self.value(jax.tree.map(np.asarray, sums))

    def each(self, sums: Any) -> np.ndarray:
        """The values of R sums with leaves [R, ...]."""
        count = len(jax.tree.leaves(sums)[0])
        sums = jax.tree.map(np.asarray, sums)
        return np.array([self.of(jax.tree.map(lambda leaf, row=row: leaf[row], sums)) for row in range(count)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What the clients learn.

    Attributes:
      width: C, the size of the last axis of the outputs: classes, labels, numbers or tokens.
      criterion: the loss in training. Default: ``loss``. Tests always use ``loss``, so that methods stay comparable.
      metrics: the numbers of a test. The first one decides which model is best. Default: ``default_metrics``.
      name: name of the task.
      dtype: the type of the targets.
      provides: what methods, metrics and partitions may rely on. ``classes``: each sample has one class, and the
        outputs [B, C] are its logits. ``logits``: the last axis of the outputs holds logits of classes. ``labels``:
        outputs [B, C] are logits of yes or no. ``numbers``: predictions have the unit of the targets, and
        ``standardised`` gives targets the scale of the outputs, as in `Regression`. ``pixels``: the targets are classes
        [B, H, W]. ``tokens``: they are tokens [B, T]. ``risk``: the outputs [B, 1] are logarithms of risks, and
        ``times`` bounds intervals of time, as in `Survival`.
      default_metrics: names of `METRICS`.
      group: what a group of `strata` is, for figures.
      predicted: what ``predict`` returns, in words, and ``formula``: the same as an expression of NumPy or JAX, with
        ``outputs`` and the `facts` of the ``task``. Both are for the examples of exported networks.
    """

    width: int
    criterion: Criterion | None = None
    metrics: tuple[Metric, ...] = ()
    name: ClassVar[str]
    dtype: ClassVar[Any] = np.int32
    provides: ClassVar[frozenset[str]] = frozenset()
    default_metrics: ClassVar[tuple[str, ...]] = ()
    group: ClassVar[str] = "all"
    predicted: ClassVar[str] = "outputs of the network"
    formula: ClassVar[str] = "outputs"

    # --- the network and its loss

    def outputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the network's output for a sample of ``shape``. Default: [C]."""
        del shape
        return (self.width,)

    def loss(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """The loss of each sample [B], see `Criterion`."""
        raise NotImplementedError

    def objective(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """The loss of each sample [B] in training."""
        return (self.criterion or self.loss)(outputs, targets, mask)

    def predict(self, outputs: jax.Array) -> jax.Array:
        """What a person wants from the outputs [B, ...]: probabilities, or numbers in the unit of the targets."""
        raise NotImplementedError

    def divergence(self, outputs: jax.Array, teacher: jax.Array) -> jax.Array:
        """How far outputs are from those of a teacher, of each sample [B], for distillation.

        Kullback-Leibler divergence of the softmaxes for tasks with logits. Otherwise half the squared distance, which
        is our choice: papers distil classes only.
        """
        if "logits" in self.provides:
            shares = jax.nn.log_softmax(outputs), jax.nn.log_softmax(teacher)
            each = optax.losses.kl_divergence_with_log_targets(*shares)
            return each if each.ndim == 1 else jnp.mean(each.reshape(len(each), -1), axis=-1)
        return jnp.mean(jnp.square(outputs - teacher).reshape(len(outputs), -1), axis=-1) / 2

    # --- the targets

    @classmethod
    def convert(cls, y: np.ndarray) -> np.ndarray:
        """Targets of a user [M, ...] in the form of the task. Default: another dtype of the same kind."""
        same_kind = np.issubdtype(y.dtype, np.integer) or np.issubdtype(cls.dtype, np.floating)
        return y.astype(cls.dtype) if y.dtype.kind in "biuf" and same_kind else y

    @classmethod
    def of(cls, y: np.ndarray) -> "Task":
        """The task of targets [M, ...], after `convert`. Default: as wide as the targets of a sample."""
        return cls(width=y.shape[-1] if y.ndim > 1 else 1)

    def fitted(self, y: np.ndarray) -> "Task":
        """The task with what it needs to know about the training targets [M, ...]. Default: nothing."""
        del y
        return self

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the target of a sample of ``shape``. Default: one number."""
        del shape
        return ()

    def check(self, x: np.ndarray, y: np.ndarray, where: str) -> None:
        """Check targets y [M, ...] of samples x [M, ...].

        Raises:
          UserError: names the first fault, with ``where`` in front.
        """
        expected, whole = self.target_shape(x.shape[1:]), np.issubdtype(self.dtype, np.integer)
        kind = "integers" if whole else "floating-point numbers"
        if y.shape[1:] != expected or not np.issubdtype(y.dtype, np.integer if whole else np.floating):
            raise UserError(
                f"{where} needs {kind} of shape {expected} as the target of a sample in {self.name}, not {y.dtype} of "
                f"shape {y.shape[1:]}"
            )
        if not whole and not np.isfinite(y).all():
            row = int(np.nonzero(~np.isfinite(y).reshape(len(y), -1).all(axis=1))[0][0])
            raise UserError(f"{where} has a target that is missing or not finite in row {row}")

    def strata(self, y: np.ndarray) -> tuple[np.ndarray, int] | None:
        """The group of each target [M] int32 and their number, for partitions by label. None: there are none."""
        del y
        return None

    # --- the metrics

    def values(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """The value of each metric, from its sums by name."""
        return {metric.name: metric.of(sums[metric.name]) for metric in self.metrics}

    def values_of_each(self, sums: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The values [R, ...] of each metric, from R sums by name with leaves [R, ...]."""
        return {metric.name: metric.each(sums[metric.name]) for metric in self.metrics}

    @property
    def primary(self) -> Metric:
        """The first metric: it decides which model is best."""
        return self.metrics[0]

    def columns(self, values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
        """Values by metric as columns: a number as it is, ``recall_0``, ``recall_1`` ... for one per class.

        Tables such as the confusion matrix are no columns, see `tables`.
        """
        columns: dict[str, float] = {}
        for name, value in values.items():
            if np.ndim(value) == 0:
                columns[prefix + name] = float(value)
            elif np.ndim(value) == 1:
                columns |= {f"{prefix}{name}_{number}": float(each) for number, each in enumerate(value)}
        return columns

    def tables(self, values: Mapping[str, Any]) -> dict[str, list]:
        """Values by metric with more than one axis, such as the confusion matrix [C, C], as nested lists."""
        return {name: np.asarray(value).tolist() for name, value in values.items() if np.ndim(value) > 1}

    # --- as JSON

    def facts(self) -> dict[str, Any]:
        """The facts about the targets, from which `tasks.of_facts` makes the task again."""
        kept = [each.name for each in dataclasses.fields(self) if each.name not in ("criterion", "metrics")]
        return {"name": self.name} | {name: getattr(self, name) for name in kept}


def check_range(y: np.ndarray, count: int, where: str, *, unknown: bool = False) -> None:
    """Check that classes are in 0..count-1, or -1 if they may be unknown. Raises a UserError that names the row."""
    wrong = (y < (-1 if unknown else 0)) | (y >= count)
    if wrong.any():
        row = tuple(int(axis[0]) for axis in np.nonzero(wrong))
        allowed = f"0..{count - 1}" + (" (-1: unknown)" if unknown else "")
        raise UserError(f"{where} has label {y[row]} in row {row[0]}, outside {allowed}")
