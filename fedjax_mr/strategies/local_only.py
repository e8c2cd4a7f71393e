"""Local-only: each client trains its own network on its own samples, and nothing is sent.

The baseline for all methods with personal models, as in Matsuda, Sasaki, Xiao, Onizuka: FedMe: Federated Learning via
Model Exchange, SDM 2022. There each client trains for up to 200 epochs. Here it trains for rounds x local epochs if all
clients train in every round. As in all methods, the optimizer is reset in every round. The authors' notebooks use early
stopping, which the paper does not mention; ``patience`` enables it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr.client import local
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import kept_model, nothing, own_start

HIGHEST = jnp.finfo(jnp.float32).max  # the initial value of the lowest loss


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of Local-only."""

    patience: int | None = field(
        None,
        "early stopping: a client stops training after more than this number of consecutive rounds with a validation "
        "loss (without validation samples: training loss) above its lowest. If omitted, there is no early stopping",
        unit="rounds",
        low=0,
        source="the paper; code of FedMe's authors: 10 epochs (CIFAR-10), 200 (FEMNIST), 100 (Shakespeare)",
    )


class State(NamedTuple):
    """Empty: there is no server."""


class Memory(NamedTuple):
    """Memory of one client."""

    model: Variables
    lowest: jax.Array  # lowest validation loss so far, in nats
    above: jax.Array  # number of consecutive rounds above it


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build Local-only."""

    def init_memory(key, client_id):
        return Memory(own_start(problem, key, client_id), jnp.full((), HIGHEST), jnp.zeros((), jnp.int32))

    def client_update(payload, memory, data, round, key):
        if hyper.patience is None:
            model, metrics = local.train(problem.model, problem.local, memory.model, data, key)
            return {}, memory._replace(model=model), metrics
        size = jnp.where(memory.above > hyper.patience, 0, data.size)  # a stopped client takes no step
        model, metrics = local.train(problem.model, problem.local, memory.model, data._replace(size=size), key)
        loss = local.held_out_loss(problem.model, model, data, batch_size=problem.local.batch_size)
        above = jnp.where(loss > memory.lowest, memory.above + 1, 0)
        return {}, Memory(model, jnp.minimum(loss, memory.lowest), above), metrics

    return Strategy(
        init=lambda key: State(),
        init_memory=init_memory,
        dispatch=lambda state, cohort, key: {},
        client_update=client_update,
        server_update=lambda state, uploads, cohort, round, key: (state, {}),
        personal_part=nothing,
        personal_model=kept_model,
    )
