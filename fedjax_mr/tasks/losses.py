"""Losses that replace a task's own in training, by name: a function of the task and a dataclass of its settings.

Every method adds its own terms to this loss. Tests use the task's own loss, so that columns stay comparable.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.registry import Registry
from fedjax_mr.settings import field
from fedjax_mr.tasks.base import Criterion, Task


@dataclasses.dataclass(frozen=True)
class Weighted:
    """Settings of class weights."""

    loss_weights: str = field(
        "balanced", "weighted: weights of the classes, separated by commas, or balanced: M / (C M_c) with the M_c "
        "training samples of class c over all clients", needs=("loss", "weighted"), group="Local training")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Focal:
    """Settings of the focal loss."""

    focal_gamma: float = field(
        2.0, "focal: gamma, exponent of (1 - p). 0 is the cross-entropy", low=0, high=100,
        needs=("loss", "focal"), group="Local training", source="Lin et al., ICCV 2017", static=True)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Smoothed:
    """Settings of label smoothing."""

    label_smoothing: float = field(
        0.1, "smoothed: share of a target that is spread evenly over all classes", low=0, high=1, open_high=True,
        needs=("loss", "smoothed"), group="Local training", source="Szegedy et al., CVPR 2016", static=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Huber:
    """Settings of Huber's loss."""

    huber_delta: float = field(
        1.0, "huber: error, in standard deviations of the target, above which the loss is linear", low=0,
        open_low=True, needs=("loss", "huber"), group="Local training", source="Huber 1964", static=True)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Quantile:
    """Settings of the quantile loss."""

    quantile: float = field(
        0.5, "quantile: the quantile of the target that is predicted", low=0, high=1, open_low=True, open_high=True,
        needs=("loss", "quantile"), group="Local training", source="Koenker and Bassett 1978", static=True)  # fmt: skip


class LossRow(NamedTuple):
    """A loss by name.

    Attributes:
      build: (settings, task, counts) -> criterion. ``counts`` [C] are the training samples per class over all clients,
        or None for tasks without classes and for real clients, who do not tell theirs. Equal arguments must give equal
        criteria, so that runs share programs: return a frozen dataclass with ``__call__``, or a function of a module.
      settings: the dataclass of its settings, or None.
      needs: what it requires of a task, see `Task.provides`.
    """

    build: Callable[[Any, Task, np.ndarray | None], Criterion]
    settings: type | None = None
    needs: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class _WeightedCrossEntropy:
    weights: tuple[float, ...]

    def __call__(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """The cross-entropy of each sample [B] times the weight of its class.

        The mean of a batch divides by its samples, not by the sum of their weights as PyTorch does.
        """
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, targets)
        return losses * jnp.asarray(self.weights, losses.dtype)[targets]


@dataclasses.dataclass(frozen=True)
class _FocalCrossEntropy:
    gamma: float

    def __call__(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """(1 - p)^gamma times the cross-entropy of each sample [B], where p is the probability of its class."""
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, targets)
        other = jnp.maximum(-jnp.expm1(-losses), 1e-12)  # 1 - p; at 0 the gradient of its power may be infinite
        return jnp.power(other, self.gamma) * losses


@dataclasses.dataclass(frozen=True)
class _SmoothedCrossEntropy:
    share: float

    def __call__(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """The cross-entropy of each sample [B] with smoothed targets."""
        uniform = -jnp.mean(jax.nn.log_softmax(outputs), axis=-1)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, targets)
        return (1 - self.share) * losses + self.share * uniform


@dataclasses.dataclass(frozen=True)
class _OfErrors:
    """A loss of standardised errors (target - output), mean over the numbers of a sample."""

    task: Any
    of: Callable[[Any, jax.Array], jax.Array]
    number: float = 0.0

    def __call__(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """The mean loss of the numbers of each sample [B]."""
        return jnp.mean(self.of(self.number, self.task.standardised(targets) - outputs), axis=-1)


def _huber(delta: float, errors: jax.Array) -> jax.Array:
    return optax.losses.huber_loss(errors, delta=delta)


def _absolute(_: float, errors: jax.Array) -> jax.Array:
    return jnp.abs(errors)


def _pinball(quantile: float, errors: jax.Array) -> jax.Array:
    return jnp.maximum(quantile * errors, (quantile - 1) * errors)


def class_weights(weights: str, classes: int, counts: np.ndarray | None) -> tuple[float, ...]:
    """The weights of C classes from a setting and the samples per class [C], None if they are unknown.

    Raises:
      UserError: another number of weights, or one that is not a positive number, or balanced weights without counts.
    """
    if weights == "balanced":  # a class without samples has no loss, whatever its weight is
        if counts is None:
            raise UserError(
                "loss_weights=balanced needs the number of samples of each class, which real clients do not tell: set "
                "loss_weights= to one weight per class"
            )
        return tuple(float(each) for each in counts.sum() / (len(counts) * np.maximum(counts, 1)))
    try:
        values = tuple(float(each) for each in weights.split(","))
    except ValueError:
        values = ()
    if len(values) != classes or not all(0 < each < np.inf for each in values):
        raise UserError(
            f"loss_weights={weights} must be {classes} positive numbers, one per class, separated by commas, or "
            "balanced"
        )
    return values


def _weighted(settings: Weighted, task: Task, counts: np.ndarray | None) -> Criterion:
    return _WeightedCrossEntropy(class_weights(settings.loss_weights, task.width, counts))


_CLASSES, _NUMBERS = frozenset({"classes"}), frozenset({"numbers"})
_OURS: dict[str, LossRow] = {
    "weighted": LossRow(_weighted, Weighted, _CLASSES),
    "focal": LossRow(lambda settings, task, counts: _FocalCrossEntropy(settings.focal_gamma), Focal, _CLASSES),
    "smoothed": LossRow(
        lambda settings, task, counts: _SmoothedCrossEntropy(settings.label_smoothing), Smoothed, _CLASSES
    ),
    "mae": LossRow(lambda settings, task, counts: _OfErrors(task, _absolute), None, _NUMBERS),
    "huber": LossRow(lambda settings, task, counts: _OfErrors(task, _huber, settings.huber_delta), Huber, _NUMBERS),
    "quantile": LossRow(
        lambda settings, task, counts: _OfErrors(task, _pinball, settings.quantile), Quantile, _NUMBERS
    ),
}


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `LOSSES`. Raises a UserError: it is not a `LossRow`."""
    if not isinstance(row, LossRow) or not callable(row.build):
        raise UserError(f"fmr.LOSSES[{name!r}] takes fmr.LossRow(build, Settings or None)")


LOSSES = Registry("loss", "fmr.LOSSES", check_row, _OURS)
"""Every loss by its name."""


def with_loss(task: Task, name: str, settings: Any = None, counts: np.ndarray | None = None) -> Task:
    """The task with a loss of `LOSSES` in training.

    Args:
      task: the task.
      name: name of the loss.
      settings: its settings. Default: their defaults.
      counts: training samples per class [C], for tasks with classes.

    Raises:
      UserError: the loss is unknown or does not suit the task, or a setting is wrong.
    """
    if name not in LOSSES:
        raise unknown_name("loss", name, LOSSES)
    row = LOSSES[name]
    if missing := [need for need in row.needs if need not in task.provides]:
        raise UserError(f"loss={name} needs {missing[0]}, which the task {task.name} has not")
    settings = settings if settings is not None or row.settings is None else row.settings()
    bare = dataclasses.replace(task, criterion=None, metrics=())  # the loss is the same, whatever the metrics are
    return dataclasses.replace(task, criterion=row.build(settings, bare, counts))
