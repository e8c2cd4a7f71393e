"""FedLC: logit calibration subtracts a larger margin from the logits of classes with few samples.

Zhang, Li, Li, Xu, Wu, Ding, Wu: Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022. In
the cross-entropy of a client with n_c samples of class c, the logit of c is lowered by tau n_c^(-1/4). Classes without
samples are excluded from the softmax. Tests use the uncalibrated logits. An attacker that trains on changed labels can
have a sample of such a class. The class is then part of that sample's softmax, with the margin of one sample.

Deviation from the paper, as in the ports of FedDecorr and FedGuCci (the authors released no code): the softmax is over
all classes, where the paper's denominator omits the term of the label. Ports that write the margin of absent classes as
tau times infinity get 0 x infinity at tau = 0; here absent classes are excluded for every tau.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_mr.client import local
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging

ABSENT_MARGIN = 1e30  # excludes a class from the softmax


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedLC."""

    tau: float = field(
        0.1,
        "tau, margin of a class with one sample; it decreases with the fourth root of the number of samples",
        low=0,
        source="ports of FedDecorr and FedGuCci",
    )


def margins(counts: jax.Array, tau: float) -> jax.Array:
    """The margins [C] subtracted from the logits of a client with ``counts`` [C] samples per class."""
    of_present = tau * jnp.maximum(counts, 1).astype(jnp.float32) ** -0.25
    return jnp.where(counts > 0, of_present, ABSENT_MARGIN)


def calibrated(logits: jax.Array, labels: jax.Array, *, margin: jax.Array, tau: float) -> jax.Array:
    """Logits [B, C] less the margins [C] of a client. A label's own margin is at most ``tau``, so no loss is huge."""
    own = jnp.arange(logits.shape[-1], dtype=labels.dtype)[None] == labels[:, None]
    return logits - jnp.where(own, jnp.minimum(margin, tau)[None], margin[None])


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedLC."""
    network = problem.model

    def train(received, data, key):
        margin = margins(problem.label_counts[data.client_id], hyper.tau)

        def loss(params, state, batch, key):
            logits, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)

            def losses(batch):
                lowered = calibrated(logits, batch.y, margin=margin, tau=hyper.tau)
                return network.task.objective(lowered, batch.y, batch.mask)

            return local.masked_mean(local.mixed(batch, losses), batch.mask), state

        return local.train(network, problem.local, received, data, key, loss=loss)

    return averaging(problem, train=train)
