"""FedNTD: clients distil the global model's predictions for the classes other than the label (not-true distillation).

Lee, Jeong, Shin, Bae, Yun: Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS
2022. The logit of the label is omitted from the logits of both the received and the trained network. The loss is the
cross-entropy plus beta tau^2 times the Kullback-Leibler divergence of the two softmaxes over the other C - 1 classes.

Deviation: the received network is in evaluation mode (BatchNorm, dropout).
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_mr.client import local
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging

EXCLUDED = -1e30  # logit of a class that is excluded from a softmax


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedNTD."""

    beta: float = field(
        1.0, "beta, weight of the distillation; 0 gives FedAvg", low=0, source="configuration of FedNTD's authors"
    )
    temperature: float = field(
        1.0,
        "tau, temperature of both softmaxes",
        low=0,
        open_low=True,
        source="configuration of FedNTD's authors (their class defaults to 3)",
    )


def not_true_divergence(teacher: jax.Array, logits: jax.Array, labels: jax.Array, temperature: float) -> jax.Array:
    """KL divergence [B] of the student's softmax from the teacher's, over all classes but the label's.

    Args:
      teacher: logits of the teacher [B, C].
      logits: logits of the student [B, C].
      labels: [B].
      temperature: tau.
    """
    others = jnp.arange(logits.shape[-1], dtype=labels.dtype)[None, :] != labels[:, None]
    log_shares = lambda z: jax.nn.log_softmax(jnp.where(others, z / temperature, EXCLUDED))
    theirs, ours = log_shares(teacher), log_shares(logits)
    return jnp.sum(jnp.where(others, jnp.exp(theirs) * (theirs - ours), 0.0), axis=-1)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedNTD."""
    network, weight = problem.model, hyper.beta * hyper.temperature**2

    def train(received, data, key):
        def loss(params, state, batch, key):
            logits, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            teacher = network.apply(received, batch.x)

            def losses(batch):
                supervised = network.task.objective(logits, batch.y, batch.mask)
                distilled = not_true_divergence(teacher, logits, batch.y, hyper.temperature)
                return supervised + weight * distilled

            return local.masked_mean(local.mixed(batch, losses), batch.mask), state

        return local.train(network, problem.local, received, data, key, loss=loss)

    return averaging(problem, train=train)
