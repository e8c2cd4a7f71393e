"""MOON: representations are drawn to the global model's and away from those of the client's own previous model.

Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1, equation 3. The representation is what the
network's ``features`` return. A client that trains for the first time has no previous model and trains plainly.

Deviations. From the paper: no projection head by default, so that all methods train the same network, as the authors of
FedCross run it; ``--projection=256`` gives the network the paper's. Both teachers are in evaluation mode.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, averaging
from fedjax_mr.strategies.hyper import field

SMALLEST_NORM = 1e-8  # a representation of zeros has cosine 0 with all others (PyTorch's constant)


@dataclasses.dataclass(frozen=True)
class Hyper:
    """MOON's own settings."""

    mu: float = field(
        5.0,
        "mu, the weight of the contrastive term",
        low=0,
        source="Li et al. 2021: 5 for CIFAR-10, 1 for CIFAR-100; the FedCross authors' code: 5",
    )
    temperature: float = field(
        0.5, "tau, the temperature of the contrastive term", low=0, open_low=True, source="Li et al. 2021"
    )


class Memory(NamedTuple):
    """A client's memory."""

    model: Variables  # as it was after its last training
    trained: jax.Array  # whether there was one


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the cosines [B] of the rows of [B, F]."""
    length = lambda z: jnp.sqrt(jnp.maximum(jnp.sum(z * z, axis=-1), SMALLEST_NORM**2))
    return jnp.sum(a * b, axis=-1) / (length(a) * length(b))


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return MOON."""
    network = problem.model

    def init_memory(key):
        unused = Memory(trees.zeros_like(network.init(key)), jnp.zeros((), bool))
        return trees.broadcast(unused, problem.num_clients)

    def client_update(payload, memory, data, round, key):
        received = payload["model"]

        def loss(params, state, batch, key):
            z, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key, method="features")
            logits, state = network.train_apply(params, state, z, mask=batch.mask, key=key, method="head")
            supervised = optax.softmax_cross_entropy_with_integer_labels(logits, batch.y)

            near = cosine(z, network.features(received, batch.x))
            far = cosine(z, network.features(memory.model, batch.x))
            contrastive = jax.nn.softplus((far - near) / hyper.temperature)  # the cross-entropy of ``near`` among both
            weight = jnp.where(memory.trained, hyper.mu, 0.0)
            return local.masked_mean(supervised + weight * contrastive, batch.mask), state

        model, metrics = local.train(network, problem.local, received, data, key, loss=loss)
        return {"model": model}, Memory(model, jnp.ones((), bool)), metrics

    return averaging(problem)._replace(client_update=client_update, init_memory=init_memory)
