"""FedKEMF: clients with different networks exchange a small knowledge network, trained by mutual learning.

Yu, Qian, Jannesari: Resource-aware Federated Learning using Knowledge Extraction and Multi-model Fusion, arXiv
2208.07978, 2022. A client trains its own network and its copy of the knowledge network together; each also learns from
the outputs of the other. The client uploads the knowledge network. On unlabelled public data, the server distils the
ensemble of the uploaded knowledge networks (the mean of their probabilities) into its own.

Deviations. The paper refers to deep mutual learning for the losses of the pair: cross-entropy + KL in both directions,
with constant targets, and one step of both networks at a time (`mutual`). ``variant=authors`` uses the losses of the
released code: squared differences of logits on clients; on the server, half the cross-entropy of the labels plus 200
times the squared difference of the probabilities (temperature 20, for the student only). Three details of that code are
not reproduced: the client's own network is updated first, the knowledge network also receives the gradient of the other
network's loss, and the learning rate decays in each round.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr.client import local, mutual
from fedjax_mr.client.mutual import Pair, Weights
from fedjax_mr.client.samples import one_client
from fedjax_mr.errors import UserError
from fedjax_mr.models import Variables
from fedjax_mr.settings import LARGEST_BATCH, field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import kept_model, no_targets, nothing, own_start, public_samples, to_all

AUTHORS_TEMPERATURE = 20.0


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedKEMF."""

    knowledge: int = field(
        0,
        "index of the knowledge network among the networks, from 0",
        low=0,
        source="ours: M1 in the setting of pFedHR",
    )
    server_epochs: int = field(
        3,
        "epochs of distillation on the server",
        unit="epochs",
        low=0,
        source="ours, as in pFedHR; the code: as clients",
    )
    server_batch: int = field(
        64, "batch size on the public data", unit="samples", low=1, high=LARGEST_BATCH, source="the authors' code"
    )
    server_lr: float = field(
        1e-3, "learning rate of Adam on the server", low=0, open_low=True, source="ours; the code: SGD, 0.01"
    )
    variant: str = field(
        "original",
        "original: the paper; authors: squared differences in place of divergences, and labels on the server",
        choices=("original", "authors"),
        source="Yu et al. 2022",
    )


class State(NamedTuple):
    """State of the server."""

    knowledge: Variables


class Memory(NamedTuple):
    """Memory of one client."""

    model: Variables


def squared_difference(logits: jax.Array, other: jax.Array) -> jax.Array:
    """The mean squared difference of logits [B, C] for each sample [B]."""
    return jnp.mean(jnp.square(logits - other), axis=-1)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedKEMF.

    Raises:
      UserError: there are no public data, they have no labels although ``variant=authors`` needs them, or ``knowledge``
        is not the index of a network.
    """
    network, authors = problem.model, hyper.variant == "authors"
    public = public_samples(problem, "fedkemf", labelled=authors)
    if hyper.knowledge >= len(network.networks):
        raise UserError(
            f"hyper.knowledge={hyper.knowledge} must be below the number of networks, {len(network.networks)}"
        )
    small, count = network.networks[hyper.knowledge], public.x.shape[0]
    has_logits = "logits" in small.task.provides  # others distil the mean output, which is ours

    def train_both(model, own, knowledge, data, key):
        """Train the two networks of a client together."""
        pair, metrics = mutual.train_pair(
            Pair(model, small),
            problem.local,
            Pair(own, knowledge),
            data,
            key,
            weights=Pair(Weights(), Weights()),
            difference=squared_difference if authors else None,
        )
        return *pair, metrics

    def init(key):
        return State(small.init(key))

    def init_memory(key, client_id):
        return Memory(own_start(problem, key, client_id))

    def client_update(payload, memory, data, round, key):
        def training(number, own_network, own, knowledge):
            own, knowledge, metrics = train_both(own_network, own, knowledge, data, key)
            return network.pack(own, number), knowledge, metrics

        own, knowledge, metrics = network.switch(memory.model, training, payload["knowledge"])
        return {"knowledge": knowledge}, Memory(own), metrics

    def server_update(state, uploads, cohort, round, key):
        rows = jnp.arange(count, dtype=jnp.int32)
        outputs = jax.lax.map(lambda each: local.outputs(small, each, public, rows), uploads["knowledge"])
        ensemble = jnp.mean(jax.nn.softmax(outputs) if has_logits else outputs, axis=0)

        def distil(params, state, batch, key):
            logits, state = small.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            target = ensemble[batch.position]
            if authors and has_logits:
                gap = jnp.mean(jnp.square(jax.nn.softmax(logits / AUTHORS_TEMPERATURE) - target), axis=-1)
                losses = 0.5 * local.task_losses(small, logits, batch) + 0.5 * AUTHORS_TEMPERATURE**2 * gap
            elif has_logits:
                losses = optax.losses.kl_divergence(jax.nn.log_softmax(logits), target)
            else:
                losses = small.task.divergence(logits, target)
            losses = losses.reshape(len(losses), -1).mean(axis=-1) if losses.ndim > 1 else losses
            return local.masked_mean(losses, batch.mask), state

        setting = local.LocalSetting(
            "adam", hyper.server_epochs, min(hyper.server_batch, count), count, lr=hyper.server_lr
        )
        data = one_client(public if public.y is not None else public._replace(y=no_targets(network, count)))
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises floats to integer powers
            knowledge, _ = local.train(small, setting, state.knowledge, data, key, loss=distil)
        return State(knowledge), {}

    return Strategy(
        init,
        to_all(problem, "knowledge"),
        client_update,
        server_update,
        init_memory=init_memory,
        personal_part=nothing,
        personal_model=kept_model,
    )
