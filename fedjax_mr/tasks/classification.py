"""One class per sample: the cross-entropy of a softmax."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np
import optax

from fedjax_mr.errors import UserError
from fedjax_mr.tasks.base import Task, check_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Targets y [] int32 in 0..C-1; the outputs [C] are logits. The loss is the cross-entropy in nats."""

    name: ClassVar[str] = "classification"
    provides: ClassVar[frozenset[str]] = frozenset({"classes", "logits"})
    default_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    group: ClassVar[str] = "class"
    predicted: ClassVar[str] = "probabilities of the classes"
    formula: ClassVar[str] = "jax.nn.softmax(outputs)"

    def loss(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """The cross-entropy of each sample [B] in nats."""
        del mask
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)

    def predict(self, outputs: jax.Array) -> jax.Array:
        """The probabilities of the classes [B, C]."""
        return jax.nn.softmax(outputs)

    @classmethod
    def of(cls, y: np.ndarray) -> Task:
        """As many classes as the largest one says."""
        return cls(width=int(y.max(initial=0)) + 1)

    def check(self, x: np.ndarray, y: np.ndarray, where: str) -> None:
        """Check labels [M]. Raises a UserError: they are no integers, or outside 0..C-1."""
        del x
        if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
            raise UserError(f"{where} needs one integer label per sample, not {y.dtype} of shape {y.shape}")
        check_range(y, self.width, where)

    def strata(self, y: np.ndarray) -> tuple[np.ndarray, int]:
        """The classes are the groups."""
        return y, self.width
