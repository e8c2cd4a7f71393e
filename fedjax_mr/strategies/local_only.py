"""Local-only: every client trains its own network on its own samples, and nothing is ever sent.

The baseline of all methods with personal models: Matsuda, Sasaki, Xiao, Onizuka: FedMe: Federated Learning via Model
Exchange, SDM 2022. There every client trains for up to 200 epochs; here for ``rounds`` x ``local_epochs`` if all
clients train in every round (``cohort`` = ``clients``); as in all methods the optimiser starts anew in every round.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import local
from fedjax_mr.strategies.base import Problem, Strategy, own_starts


class State(NamedTuple):
    """The server only counts."""

    rounds: jax.Array


def build(hyper: None, problem: Problem) -> Strategy:
    """Return Local-only."""

    def client_update(payload, memory, data, round, key):
        model, metrics = local.train(problem.model, problem.local, memory, data, key)
        return {}, model, metrics

    return Strategy(
        init=lambda key: State(jnp.zeros((), jnp.int32)),
        init_memory=lambda key: own_starts(problem, key),
        dispatch=lambda state, cohort, key: {},
        client_update=client_update,
        server_update=lambda state, uploads, cohort, round, key: (State(state.rounds + 1), {}),
        personal_model=lambda state, memory, data, key: memory,
    )
