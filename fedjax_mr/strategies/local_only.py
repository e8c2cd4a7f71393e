"""Local-only: every client trains its own network on its own samples, and nothing is ever sent.

The baseline of all methods with personal models: Matsuda, Sasaki, Xiao, Onizuka: FedMe: Federated Learning via Model
Exchange, SDM 2022. There every client trains for up to 200 epochs; here for ``rounds`` x ``local_epochs`` if all
clients train in every round (``cohort`` = ``clients``); as in all methods the optimiser starts anew in every round.
The authors' notebooks stop a client early, which the paper does not say; it is the option ``patience``.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr.engine import local
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, nothing, own_starts
from fedjax_mr.strategies.hyper import field

HIGHEST = jnp.finfo(jnp.float32).max  # where the lowest loss starts


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Local-only's own settings."""

    patience: int | None = field(
        None,
        "a client stops for good, with its last model, after more than so many rounds in a row with a loss on its "
        "validation samples (training samples without --validation_share) above its lowest; none: never",
        unit="rounds",
        low=0,
        source="the paper; the FedMe authors' code: 10 epochs (CIFAR-10), 200 (FEMNIST), 100 (Shakespeare)",
    )


class State(NamedTuple):
    """There is no server."""


class Memory(NamedTuple):
    """A client's memory."""

    model: Variables
    lowest: jax.Array  # its lowest validation loss so far, in nats
    above: jax.Array  # rounds in a row that were above it


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return Local-only."""

    def init_memory(key):
        count = problem.num_clients
        return Memory(own_starts(problem, key), jnp.full(count, HIGHEST), jnp.zeros(count, jnp.int32))

    def client_update(payload, memory, data, round, key):
        if hyper.patience is None:
            model, metrics = local.train(problem.model, problem.local, memory.model, data, key)
            return {}, memory._replace(model=model), metrics
        left = jnp.where(memory.above > hyper.patience, 0, data.size)
        model, metrics = local.train(problem.model, problem.local, memory.model, data._replace(size=left), key)
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
        personal_model=lambda part, memory, data, key: memory.model,
    )
