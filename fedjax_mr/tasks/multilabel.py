"""Several labels per sample, each of them yes or no."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_mr.tasks.base import Task, check_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multilabel(Task):
    """Targets y [C] of 0 and 1, of which several may be 1; the outputs [C] are logits of yes.

    The loss is the mean of the labels' cross-entropies in nats. A target of -1 is unknown and does not count.
    """

    name: ClassVar[str] = "multilabel"
    provides: ClassVar[frozenset[str]] = frozenset({"labels"})
    default_metrics: ClassVar[tuple[str, ...]] = ("macro_f1", "micro_f1", "exact_match")
    predicted: ClassVar[str] = "probabilities of the labels"
    formula: ClassVar[str] = "jax.nn.sigmoid(outputs)"

    def loss(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """The mean cross-entropy of the known labels of each sample [B] in nats."""
        del mask
        known = (targets >= 0).astype(outputs.dtype)
        losses = optax.sigmoid_binary_cross_entropy(outputs, targets.astype(outputs.dtype))
        return jnp.sum(losses * known, axis=-1) / jnp.maximum(jnp.sum(known, axis=-1), 1.0)

    def predict(self, outputs: jax.Array) -> jax.Array:
        """The probability of each label [B, C]."""
        return jax.nn.sigmoid(outputs)

    def divergence(self, outputs: jax.Array, teacher: jax.Array) -> jax.Array:
        """The mean Kullback-Leibler divergence of the labels' probabilities from the teacher's [B]; ours."""
        share = jax.nn.sigmoid(teacher)
        yes = jax.nn.log_sigmoid(teacher) - jax.nn.log_sigmoid(outputs)
        no = jax.nn.log_sigmoid(-teacher) - jax.nn.log_sigmoid(-outputs)
        return jnp.mean(share * yes + (1 - share) * no, axis=-1)

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One target per label: [C]."""
        del shape
        return (self.width,)

    def check(self, x: np.ndarray, y: np.ndarray, where: str) -> None:
        """Check labels [M, C]. Raises a UserError: another shape, or values other than 0, 1 and -1 (unknown)."""
        super().check(x, y, where)
        check_range(y, 2, where, unknown=True)
