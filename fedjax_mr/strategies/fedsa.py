"""FedSA: a semi-asynchronous server that takes the first K' of the models in training and keeps the others' share of w.

Ma, Xu, Xu, Jiang, Huang, Huang: FedSA: A Semi-Asynchronous Federated Learning Mechanism in Heterogeneous Edge
Computing, IEEE JSAC 2021. (Another FedSA is Chen et al., FGCS 2021.) All clients train at the same time. When K' models
have arrived, w becomes sum of q_i theta_i + (1 - sum of q_i) w with q_i = n_i / n, where n counts all clients' samples.
A client that takes part rarely has a larger learning rate, lr / (N f_i), where f_i is its share of the arrivals.

Deviations. The paper adapts K' to a budget; here it is fixed (``cohort``), as in the codes of GitFL's and CaBaFL's
authors. Clients train the model that they received, as in CaBaFL's code; GitFL's code trains the newest model at
arrival. Both codes take for f_i a client's share of all starts, the present one included, and for n the samples of the
clients in flight. Here f_i is the share of the arrivals, and each client counts one arrival more than it had, so that
f_i is positive. Both codes also send the model again to clients that are too late, which is left out. With fewer
clients in flight than there are (not in the paper), the q_i of a version sum to K' / M. If all return for each version,
it is FedAvg except for the learning rates.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedSA."""

    adapt_lr: bool = field(True, "divide the clients' learning rate by N f_i, see the paper", source="paper")


class State(NamedTuple):
    """The global model and the participation of the clients."""

    model: Variables
    arrivals: jax.Array  # [N] float32


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedSA."""
    share = problem.cohort_size / problem.num_branches  # K' / M

    def init(key):
        return State(problem.model.init(key), jnp.zeros(problem.num_clients))

    def dispatch(state, cohort, key):
        frequencies = (state.arrivals + 1) / jnp.sum(state.arrivals + 1)
        factors = 1 / (problem.num_clients * frequencies) if hyper.adapt_lr else jnp.ones(problem.num_clients)
        known = jnp.minimum(cohort.ids, problem.num_clients - 1)  # rows without a client have number N
        return {"model": trees.broadcast(state.model, problem.cohort_size), "lr_factor": factors[known]}

    def client_update(payload, memory, data, round, key):
        optimizer = optax.chain(problem.local.optimizer, optax.scale(payload["lr_factor"]))
        model, metrics = local.train(problem.model, problem.local, payload["model"], data, key, optimizer=optimizer)
        return {"model": model}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        sizes = cohort.sizes.astype(jnp.float32)
        whole = problem.num_branches == problem.num_clients
        total = jnp.sum(problem.sizes.astype(jnp.float32)) if whole else jnp.sum(sizes) / share
        q = sizes / total
        arrived = trees.mix(uploads["model"], q)
        model = jax.tree.map(lambda arrived, old: arrived + (1 - jnp.sum(q)) * old, arrived, state.model)
        return State(model, state.arrivals.at[cohort.ids].add((sizes > 0).astype(jnp.float32))), {}

    return averaging(problem)._replace(
        init=init, dispatch=dispatch, client_update=client_update, server_update=server_update, stale="uploaded"
    )
