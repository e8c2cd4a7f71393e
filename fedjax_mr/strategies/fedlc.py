"""FedLC: clients train with logits that are lowered for the classes of which they have few samples.

Zhang, Li, Li, Xu, Wu, Ding, Wu: Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022. In
the cross-entropy of client i, which has n_c samples of class c, the logit of c is lowered by tau n_c^(-1/4); a class
that it has none of leaves the softmax. Networks are tested with their own logits.

Deviation from the paper, as in the ports of FedDecorr and FedGuCci (its authors released no code): the softmax is over
all classes; the paper's denominator leaves the label's own term out. A port that writes the margin as tau times
infinity for absent classes gets 0 x infinity at tau = 0; here they leave the softmax at every tau.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fedjax_mr.engine import local
from fedjax_mr.strategies.base import Problem, Strategy, averaging
from fedjax_mr.strategies.hyper import field

OF_ABSENT_CLASSES = 1e30  # the margin of a class that leaves the softmax


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedLC's own setting."""

    tau: float = field(
        0.1,
        "tau, the margin of a class with a single sample; with more it falls with the fourth root of their number",
        low=0,
        source="FedDecorr's and FedGuCci's ports",
    )


def margins(counts: jax.Array, tau: float) -> jax.Array:
    """By how much the logits [C] of a client with ``counts`` [C] samples per class are lowered."""
    of_present = tau * jnp.maximum(counts, 1).astype(jnp.float32) ** -0.25
    return jnp.where(counts > 0, of_present, OF_ABSENT_CLASSES)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedLC."""
    network = problem.model

    def train(received, data, key):
        lowered = margins(problem.label_counts[data.client_id], hyper.tau)

        def loss(params, state, batch, key):
            logits, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits - lowered[None, :], batch.y)
            return local.masked_mean(losses, batch.mask), state

        return local.train(network, problem.local, received, data, key, loss=loss)

    return averaging(problem, train=train)
