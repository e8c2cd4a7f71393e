"""Ditto: beside the global model every client keeps one of its own, held near the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1. The
global model is FedAvg's. On the same batches a client trains its own model v on the loss plus lambda/2 |v - w|^2, where
w is the model that it received; its v is what is tested.

Deviations. Clients are weighted by their numbers of samples, as in our FedAvg (the authors' code: equally). A client's
v begins as the first model that it receives (there as the first model of all), and until then the global model is
tested in its place. BatchNorm statistics of v are its own.
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
from fedjax_mr.strategies.feddyn import pull
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Ditto's own setting."""

    strength: float = field(
        1.0,
        "lambda, how strongly a client's own model is held at the global one; 0: it trains alone",
        low=0,
        source="the Ditto authors' scripts (they also choose among 0.1, 1 and 2 by validation)",
    )


class Memory(NamedTuple):
    """A client's memory."""

    model: Variables  # v
    trained: jax.Array  # whether it has trained


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return Ditto."""
    average = averaging(problem)

    def init_memory(key):
        unused = Memory(trees.zeros_like(problem.model.init(key)), jnp.zeros((), bool))
        return trees.broadcast(unused, problem.num_clients)

    def client_update(payload, memory, data, round, key):
        received = payload["model"]
        upload, _, metrics = average.client_update(payload, None, data, round, key)
        optimizer = optax.chain(pull(received["params"], hyper.strength), problem.local.optimizer)
        start = trees.where(memory.trained, memory.model, received)
        own, _ = local.train(problem.model, problem.local, start, data, key, optimizer=optimizer)
        return upload, Memory(own, jnp.ones((), bool)), metrics

    def personal_model(state, memory, data, key):
        return trees.where(memory.trained, memory.model, state.model)

    return average._replace(client_update=client_update, init_memory=init_memory, personal_model=personal_model)
