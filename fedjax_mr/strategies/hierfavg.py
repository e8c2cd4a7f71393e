"""HierFAVG: clients, edge servers and a cloud; edges average in every round, the cloud in every k-th round.

Liu, Zhang, Song, Letaief: Client-Edge-Cloud Hierarchical Federated Learning, ICC 2020, Algorithm 1 (kappa_1 steps,
kappa_2 rounds of the edges between two of the cloud). Each edge server averages the models of its own clients, weighted
by their numbers of samples. In every ``period``-th round, the cloud averages the models of all edges, weighted by the
numbers of samples of all their clients, and sends the mean back. With one edge it is FedAvg.

The clients of an edge are neighbours: client i of N belongs to edge i E / N, rounded down.

Ours, without a paper: ``cloud=recombine`` and ``cloud=cross``. The cloud then treats the models of the edges as FedMR
treats those of clients, and permutes their tensors, or as FedCross, and mixes each with the next edge's.

Deviations:
* In the paper all clients take part in every round. Here the clients are selected as in FedAvg. An edge without a
  client in the round keeps its model.
* BatchNorm statistics are averaged like the parameters.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.settings import field
from fedjax_mr.strategies import fedmr
from fedjax_mr.strategies.fedcross import in_order
from fedjax_mr.strategies.interface import Problem, Strategy, view
from fedjax_mr.strategies.parts import Models, plain_training
from fedjax_mr.strategies.traffic import Parcels


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of HierFAVG."""

    edges: int = field(2, "E, number of edge servers", low=1, high=1000, source="our choice")
    period: int = field(
        2, "kappa_2, the cloud works in every period-th round", unit="rounds", low=1, source="Liu et al. 2020"
    )
    cloud: str = field(
        "mean",
        "what the cloud does to the models of the edges: average them (mean), permute their tensors as FedMR "
        "(recombine), or mix each with another as FedCross (cross)",
        choices=("mean", "recombine", "cross"),
        source="Liu et al. 2020; recombine and cross: ours",
    )
    alpha: float = field(
        0.9, "share of an edge's own model with cloud=cross", low=0.5, high=1, source="as fedcross_alpha"
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build HierFAVG.

    Raises:
      UserError: there are more edges than clients.
    """
    edges, clients = hyper.edges, problem.num_clients
    if edges > clients:
        raise UserError(f"hierfavg has {edges} edges, but {clients} clients: set hyper.edges= to at most that")
    units = fedmr.recombination_units(fedmr.Hyper(), problem.layers)

    def edge_of(ids):
        """The edges of clients [K]."""
        return ids * edges // clients

    def by_edge(ids, sizes):
        """The numbers of samples of clients [K] at each edge [E, K]."""
        return jnp.where(edge_of(ids)[None, :] == jnp.arange(edges)[:, None], sizes[None, :], 0).astype(jnp.float32)

    def samples():
        """The number of samples of all clients of each edge [E]."""
        return jnp.sum(by_edge(jnp.arange(clients), problem.sizes), axis=1)

    def init(key):
        return Models(trees.broadcast(problem.model.init(key), edges))

    def dispatch(state, cohort, key):
        return {"model": trees.mix(state.models, edge_of(cohort.ids))}

    def at_cloud(models, round, key):
        if hyper.cloud == "recombine":
            return fedmr.recombine(models, units, key)
        if hyper.cloud == "cross":
            other = jax.nn.one_hot(in_order(round // hyper.period, edges), edges)
            return trees.mix(models, hyper.alpha * jnp.eye(edges) + (1 - hyper.alpha) * other)
        return trees.broadcast(trees.mean(models, weights=samples()), edges)

    def server_update(state, uploads, cohort, round, key):
        weights = by_edge(cohort.ids, cohort.sizes)
        total = jnp.sum(weights, axis=1)
        means = trees.mix(uploads["model"], weights / jnp.maximum(total, 1.0)[:, None])
        models = jax.vmap(trees.where)(total > 0, means, state.models)
        is_turn = (round + 1) % hyper.period == 0
        return Models(jax.lax.cond(is_turn, at_cloud, lambda models, *_: models, models, round, key)), {}

    def traffic(usual, state, uploads, cohort, round):
        """Between edges and the cloud: 2 E models if it is the cloud's turn."""
        size = usual.up[0].size
        return usual._replace(peer=(Parcels.of(jnp.where((round + 1) % hyper.period == 0, 2 * edges, 0), size),))

    return Strategy(
        init,
        dispatch,
        plain_training(problem),
        server_update,
        global_model=lambda state: problem.model.mean(state.models, weights=samples()),
        models=view("models", stacked=True),
        traffic=traffic,
    )
