"""FedKEMF: clients with different networks meet in a small knowledge network that all of them train and exchange.

Yu, Qian, Jannesari: Resource-aware Federated Learning using Knowledge Extraction and Multi-model Fusion, arXiv
2208.07978, 2022. A client trains its own network and its copy of the knowledge network together, each also towards the
outputs of the other, and uploads the latter; the server distils the ensemble of the uploaded ones (mean of their
probabilities) into its knowledge network on unlabelled public data.

Deviations. The paper leaves the pair's loss to deep mutual learning, which is `mutual`: cross-entropy + KL both ways,
the other's outputs held constant, both networks stepped at once. ``variant=authors`` has the released code's losses:
squared differences of logits; on the server half the cross-entropy of the labels and 200 times the squared difference
of the probabilities (temperature 20, the student's only). Not taken over from that code: that the own network is
stepped first, that the knowledge network also receives the gradient of the other's loss, and a learning rate that falls
in each round.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.engine import local, mutual
from fedjax_mr.engine.mutual import Pair, Weights
from fedjax_mr.errors import UserError
from fedjax_mr.models import Variables
from fedjax_mr.strategies.base import Problem, Strategy, nothing, own_starts
from fedjax_mr.strategies.hyper import LARGEST_BATCH, field

AUTHORS_TEMPERATURE = 20.0

entropy = optax.softmax_cross_entropy_with_integer_labels


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedKEMF's own settings."""

    knowledge: int = field(
        0, "which of the networks in --model is the knowledge network", low=0, source="ours: M1 in pFedHR's setting"
    )
    server_epochs: int = field(
        3, "epochs of the server's distillation", unit="epochs", low=0, source="ours, as pFedHR's; code: as clients"
    )
    server_batch: int = field(
        64, "batch on the public data", unit="samples", low=1, high=LARGEST_BATCH, source="the authors' code"
    )
    server_lr: float = field(
        1e-3, "Adam's learning rate on the server", low=0, open_low=True, source="ours; the code: SGD, 0.01"
    )
    variant: str = field(
        "original",
        "authors: squared differences in place of divergences, and labels on the server",
        choices=("original", "authors"),
        source="Yu et al. 2022",
    )


class State(NamedTuple):
    """The server's state."""

    knowledge: Variables


class Memory(NamedTuple):
    """A client's memory."""

    model: Variables


def squared_difference(logits: jax.Array, other: jax.Array) -> jax.Array:
    """Return the mean squared difference of the logits [B, C] of each sample."""
    return jnp.mean(jnp.square(logits - other), axis=-1)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return FedKEMF.

    Raises:
      UserError: there are no public data, none with labels for ``variant=authors``, or no such knowledge network.
    """
    network, public, authors = problem.model, problem.public, hyper.variant == "authors"
    if public is None or (authors and public.y is None):
        raise UserError(f"fedkemf wants {'labelled ' if authors else ''}public data: give --public_share")
    if hyper.knowledge >= len(network.networks):
        raise UserError(f"--fedkemf_knowledge={hyper.knowledge}, but --model has {len(network.networks)}, from 0 on")
    small, count = network.networks[hyper.knowledge], public.x.shape[0]

    def train_both(model, own, knowledge, data, key):
        """Train a client's two networks together."""
        pair, metrics = mutual.train_pair(
            Pair(model, small),
            problem.local,
            Pair(own, knowledge),
            data,
            key,
            weights=Pair(Weights(), Weights()),
            difference=squared_difference if authors else mutual.divergence,
        )
        return *pair, metrics

    def init(key):
        return State(small.init(key))

    def init_memory(key):
        return Memory(own_starts(problem, key))

    def dispatch(state, cohort, key):
        return {"knowledge": trees.broadcast(state.knowledge, problem.cohort_size)}

    def client_update(payload, memory, data, round, key):
        def training(number, own_network, own, knowledge):
            own, knowledge, metrics = train_both(own_network, own, knowledge, data, key)
            return network.pack(own, number), knowledge, metrics

        own, knowledge, metrics = network.switch(memory.model, training, payload["knowledge"])
        return {"knowledge": knowledge}, Memory(own), metrics

    def server_update(state, uploads, cohort, round, key):
        rows = jnp.arange(count, dtype=jnp.int32)
        outputs = jax.lax.map(lambda each: local.outputs(small, each, public, rows), uploads["knowledge"])
        ensemble = jnp.mean(jax.nn.softmax(outputs), axis=0)

        def distil(params, state, batch, key):
            logits, state = small.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            target = ensemble[batch.position]
            if authors:
                gap = jnp.mean(jnp.square(jax.nn.softmax(logits / AUTHORS_TEMPERATURE) - target), axis=-1)
                losses = 0.5 * entropy(logits, batch.y) + 0.5 * AUTHORS_TEMPERATURE**2 * gap
            else:
                losses = optax.losses.kl_divergence(jax.nn.log_softmax(logits), target)
            return local.masked_mean(losses, batch.mask), state

        setting = local.LocalSetting(
            local.make_optimizer("adam", lr=hyper.server_lr), hyper.server_epochs, min(hyper.server_batch, count), count
        )
        whole = local.whole(public if public.y is not None else public._replace(y=jnp.zeros(count, jnp.int32)))
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises floats to integer powers
            knowledge, _ = local.train(small, setting, state.knowledge, whole, key, loss=distil)
        return State(knowledge), {}

    return Strategy(
        init,
        dispatch,
        client_update,
        server_update,
        init_memory=init_memory,
        personal_part=nothing,
        personal_model=lambda part, memory, data, key: memory.model,
    )
