"""The next token at each position of a text: the cross-entropy per token."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_mr.errors import UserError
from fedjax_mr.tasks.base import Task, check_range

IGNORED = -1  # target of a position that does not count, such as the padding of a short text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language(Task):
    """Targets y [T] int32, the token after each position, or -1; the outputs [T, V] are logits. V is ``width``.

    The loss of a sample is the mean cross-entropy of its tokens in nats. The metrics give every token equal weight.
    """

    name: ClassVar[str] = "language"
    provides: ClassVar[frozenset[str]] = frozenset({"logits", "tokens"})
    default_metrics: ClassVar[tuple[str, ...]] = ("perplexity", "token_accuracy", "bits_per_token")
    predicted: ClassVar[str] = "probabilities of the next token at each position"
    formula: ClassVar[str] = "jax.nn.softmax(outputs)"

    def outputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Logits of the next token at each position: [T, V]."""
        return (*shape[:1], self.width)

    def loss(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """The mean cross-entropy of the tokens of each sample [B] in nats; 0 without tokens."""
        del mask
        losses, known = token_losses(outputs, targets)
        return jnp.sum(losses, axis=-1) / jnp.maximum(jnp.sum(known, axis=-1), 1.0)

    def predict(self, outputs: jax.Array) -> jax.Array:
        """The probabilities of the next token at each position [B, T, V]."""
        return jax.nn.softmax(outputs)

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One token per position: [T]."""
        return shape[:1]

    @classmethod
    def of(cls, y: np.ndarray) -> Task:
        """As many tokens as the largest one says."""
        return cls(width=int(y.max(initial=0)) + 1)

    def check(self, x: np.ndarray, y: np.ndarray, where: str) -> None:
        """Check tokens [M, T]. Raises a UserError: the samples are no tokens, or a token is outside 0..V-1."""
        if x.ndim != 2 or not np.issubdtype(x.dtype, np.signedinteger):
            raise UserError(f"{where} needs tokens [T] of integers for language, not {x.dtype} of shape {x.shape[1:]}")
        super().check(x, y, where)
        check_range(y, self.width, where, unknown=True)


def token_losses(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy of each token in nats, 0 where it is ignored, and which tokens count: [B, T] each."""
    known = (targets != IGNORED).astype(outputs.dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.maximum(targets, 0))
    return losses * known, known
