"""Ditto: each client trains the global model and a personal model, which is regularised towards the global model.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1. The
global model is trained as in FedAvg. On the same batches a client trains its personal model v on the loss plus
lambda/2 |v - w|^2, where w is the received model. v is tested.

Deviations. Clients are weighted by their numbers of samples, as in our FedAvg; the authors' code weights them equally.
A client's v starts as the first model that the client receives; there it starts as the initial global model. Until a
client has trained, the global model is tested in place of v. v has its own BatchNorm statistics.
"""

import dataclasses

import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.settings import field
from fedjax_mr.strategies.feddyn import pull
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import LastModel, averaging, untrained


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of Ditto."""

    strength: float = field(
        1.0,
        "lambda, weight of the term that pulls the personal model towards the global model; 0 gives local training",
        low=0,
        source="scripts of Ditto's authors, who also select among 0.1, 1 and 2 by validation",
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build Ditto."""
    average = averaging(problem)

    def client_update(payload, memory, data, round, key):
        received = payload["model"]
        upload, _, metrics = average.client_update(payload, None, data, round, key)
        optimizer = optax.chain(pull(received["params"], hyper.strength), problem.local.optimizer)
        start = trees.where(memory.trained, memory.model, received)
        personal, _ = local.train(problem.model, problem.local, start, data, key, optimizer=optimizer)
        return upload, LastModel(personal, jnp.ones((), bool)), metrics

    def personal_model(state, memory, data, key):
        return trees.where(memory.trained, memory.model, state.model)

    return average._replace(
        client_update=client_update,
        init_memory=lambda key, client_id: untrained(problem),
        personal_model=personal_model,
    )
