"""The time until an event that some samples have not met yet: Cox's partial likelihood."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.tasks.base import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survival(Task):
    """Targets y [2] float32: the time, and 1 if the event happened then or 0 if observation ended (censored).

    The output [1] is the logarithm of the relative risk. The loss is the negative logarithm of Cox's partial likelihood
    with Breslow's treatment of ties (Cox 1972, Breslow 1974). The samples at risk are those *of the batch*: a large
    ``batch_size`` is closer to the likelihood of all samples. Samples without an event have the loss 0.

    Attributes:
      times: increasing times that bound the intervals of the concordance, from the training samples (`times_of`).
    """

    width: int = 1
    times: tuple[float, ...] = ()
    name: ClassVar[str] = "survival"
    dtype: ClassVar[type] = np.float32
    provides: ClassVar[frozenset[str]] = frozenset({"risk"})
    default_metrics: ClassVar[tuple[str, ...]] = ("concordance",)
    group: ClassVar[str] = "event"
    predicted: ClassVar[str] = "risks relative to that of an output of 0"
    formula: ClassVar[str] = "np.exp(outputs)"

    def loss(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """-log of the partial likelihood of each event among the samples of the batch [B]; 0 if censored."""
        risk, (time, event) = outputs[:, 0], (targets[:, 0], targets[:, 1])
        at_risk = (time[None, :] >= time[:, None]) & (mask[None, :] > 0)  # [B, B]: who was still observed at time i
        at_risk = at_risk | jnp.eye(len(risk), dtype=bool)  # padding, too, has a finite loss
        total = jax.nn.logsumexp(jnp.where(at_risk, risk[None, :], -jnp.inf), axis=1)
        return jnp.where((event > 0) & (mask > 0), total - risk, 0.0)

    def predict(self, outputs: jax.Array) -> jax.Array:
        """The risk relative to that of an output of 0 [B, 1]."""
        return jnp.exp(outputs)

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Time and event: [2]."""
        del shape
        return (2,)

    def check(self, x: np.ndarray, y: np.ndarray, where: str) -> None:
        """Check times and events [M, 2]. Raises a UserError: another shape, negative times, events other than 0, 1."""
        super().check(x, y, where)
        if (y[:, 0] < 0).any():
            raise UserError(f"{where} has a negative time in row {int(np.argmax(y[:, 0] < 0))}")
        other = ~np.isin(y[:, 1], (0, 1))
        if other.any():
            row = int(np.argmax(other))
            raise UserError(f"{where} has event {y[row, 1]:g} in row {row}: 1 is an event, 0 the end of observation")

    @classmethod
    def of(cls, y: np.ndarray) -> Task:
        """The targets are time and event, the output is one risk."""
        del y
        return cls()

    def fitted(self, y: np.ndarray) -> Task:
        """The task with the times of the training samples' events, unless it has some."""
        return self if self.times else dataclasses.replace(self, times=times_of(y))

    def strata(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """Censored samples and events."""
        return y[:, 1].astype(np.int32), 2


def times_of(y: np.ndarray, most: int = 256) -> tuple[float, ...]:
    """The distinct times of events of targets [M, 2], or as many quantiles of them as intervals are allowed."""
    times = np.unique(y[y[:, 1] > 0, 0])
    if len(times) > most:
        times = np.unique(np.quantile(times, np.linspace(0, 1, most), method="nearest"))
    return tuple(map(float, times))
