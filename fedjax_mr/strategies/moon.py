"""MOON: a contrastive loss pulls representations towards the global model's and away from the previous local model's.

Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1, equation 3. The representation is the output
of the network's ``features``. A client without a previous model trains on the cross-entropy alone.

Deviations. By default there is no projection head, so that all methods train the same network, as in the code of
FedCross's authors. The network setting ``projection=256`` adds the paper's head. Both teachers are in evaluation mode.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_mr.client import local
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import LastModel, averaging, untrained

SMALLEST_NORM = 1e-8  # gives a zero vector cosine 0 with all others (PyTorch's constant)


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of MOON."""

    mu: float = field(
        5.0,
        "mu, weight of the contrastive term",
        low=0,
        source="Li et al. 2021: 5 for CIFAR-10, 1 for CIFAR-100; code of FedCross's authors: 5",
    )
    temperature: float = field(
        0.5, "tau, temperature of the contrastive term", low=0, open_low=True, source="Li et al. 2021"
    )


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """The cosine of each pair of rows [B] of two arrays [B, F]."""
    length = lambda z: jnp.sqrt(jnp.maximum(jnp.sum(z * z, axis=-1), SMALLEST_NORM**2))
    return jnp.sum(a * b, axis=-1) / (length(a) * length(b))


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build MOON."""
    network = problem.model

    def client_update(payload, memory, data, round, key):
        received = payload["model"]

        def loss(params, state, batch, key):
            z, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key, method="features")
            logits, state = network.train_apply(params, state, z, mask=batch.mask, key=key, method="head")
            supervised = local.task_losses(network, logits, batch)

            vectors = lambda z: z.reshape(len(z), -1)  # one per sample, also if it has one per pixel or token
            near = cosine(vectors(z), vectors(network.features(received, batch.x)))
            far = cosine(vectors(z), vectors(network.features(memory.model, batch.x)))
            contrastive = jax.nn.softplus((far - near) / hyper.temperature)  # -log(e^near / (e^near + e^far))
            weight = jnp.where(memory.trained, hyper.mu, 0.0)
            return local.masked_mean(supervised + weight * contrastive, batch.mask), state

        model, metrics = local.train(network, problem.local, received, data, key, loss=loss)
        return {"model": model}, LastModel(model, jnp.ones((), bool)), metrics

    return averaging(problem)._replace(
        client_update=client_update, init_memory=lambda key, client_id: untrained(problem)
    )
