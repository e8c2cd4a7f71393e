"""HierFAVG: clients, edge servers and a cloud; edges average in every round, the cloud in every k-th round.

Liu, Zhang, Song, Letaief: Client-Edge-Cloud Hierarchical Federated Learning, ICC 2020, Algorithm 1 (kappa_1 steps,
kappa_2 rounds of the edges between two of the cloud). Each edge server averages the models of its own clients, weighted
by their numbers of samples. In every ``period``-th round, the cloud averages the models of all edges, weighted by the
numbers of samples of all their clients, and sends the mean back. With one edge it is FedAvg.

The clients of an edge are neighbours: client i of N belongs to edge i E / N, rounded down.

Ours, without a paper: FedMR and FedCross at either level. With ``cloud=recombine`` the cloud permutes the tensors of
the edges' models, as FedMR does with those of clients; with ``cloud=cross`` it mixes each model with another one, as
FedCross. With ``edge=recombine`` or ``edge=cross`` each edge keeps K / E models, one for each of its clients in a
round, and permutes or mixes them among themselves. The cloud then treats the K models of all edges alike. With one edge
this is FedMR or FedCross (``selection=in_order``).

Two truths. In the released code (LuminLiu/HierFL) clients belong to edges at random, and each edge selects a share of
its clients in every round, with probabilities by their numbers of samples. The edges' weights at the cloud are the
numbers of samples of all their clients, as here.

Deviations:
* In the paper all clients take part in every round. Here the clients are selected as in FedAvg. An edge without a
  client in the round keeps its model. An edge that keeps several models selects K / E of its own clients.
* BatchNorm statistics are averaged like the parameters.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.settings import field
from fedjax_mr.strategies import fedcross, fedmr
from fedjax_mr.strategies.interface import Cohort, Problem, Strategy, view
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
    edge: str = field(
        "mean",
        "what an edge does to the models of its clients: average them (mean), or keep K / E models and permute their "
        "tensors as FedMR (recombine), or mix each with another as FedCross (cross)",
        choices=("mean", "recombine", "cross"),
        source="Liu et al. 2020; recombine and cross: ours",
    )
    alpha: float = field(
        0.9, "share of the model itself with edge=cross or cloud=cross", low=0.5, high=1, source="as fedcross_alpha"
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build HierFAVG.

    Raises:
      UserError: there are more edges than clients, the clients of a round cannot be divided among the edges, or some
        clients are absent.
    """
    edges, clients = hyper.edges, problem.num_clients
    if edges > clients:
        raise UserError(f"hierfavg has {edges} edges, but {clients} clients: set hyper.edges= to at most that")
    if problem.present is not None:
        raise UserError(
            "hierfavg divides all clients among its edges; without some, others would belong to other edges"
        )
    slots = edges  # S, models of all edges
    if hyper.edge != "mean":
        per_edge, slots = problem.cohort_size // edges, problem.cohort_size
        if per_edge * edges != slots or per_edge > clients // edges:
            raise UserError(
                f"with hyper.edge={hyper.edge} each edge selects K / E of its clients, but {slots} of {clients} "
                f"clients cannot be divided equally among {edges} edges: change cohort= or hyper.edges="
            )
    units = fedmr.recombination_units(fedmr.Hyper(), problem.layers)
    crossing = fedcross.Hyper(alpha=hyper.alpha, selection="in_order")
    edge_of = lambda ids: ids * edges // clients  # the edges of clients [K]

    def by_edge(ids, sizes):
        """The numbers of samples of clients [K] at each edge [E, K]."""
        return jnp.where(edge_of(ids)[None, :] == jnp.arange(edges)[:, None], sizes[None, :], 0).astype(jnp.float32)

    def shares():
        """The number of samples of all clients of each model's edge [S]."""
        return jnp.repeat(jnp.sum(by_edge(jnp.arange(clients), problem.sizes), axis=1), slots // edges)

    def combined(how, models, turn, key):
        """The models of one level [S, ...] after they have been permuted or mixed."""
        if how == "recombine":
            return fedmr.recombine(models, units, key)
        count = jax.tree.leaves(models)[0].shape[0]
        return trees.mix(models, fedcross.mixing(crossing, jnp.zeros((count, count)), turn))

    def init(key):
        return Models(trees.broadcast(problem.model.init(key), slots))

    def select(state, round, key):
        """K / E clients of each edge, edge after edge."""
        edge = edge_of(jnp.arange(clients))
        order = jnp.lexsort((jax.random.uniform(key, (clients,)), edge))
        first = jnp.searchsorted(edge, jnp.arange(edges))
        ids = order[first[:, None] + jnp.arange(slots // edges)[None, :]].reshape(-1).astype(jnp.int32)
        return Cohort(ids, problem.sizes[ids])

    def dispatch(state, cohort, key):
        return {"model": state.models if hyper.edge != "mean" else trees.mix(state.models, edge_of(cohort.ids))}

    def at_edges(state, models, cohort, round, key):
        if hyper.edge != "mean":
            split = jax.tree.map(lambda leaf: leaf.reshape(edges, -1, *leaf.shape[1:]), models)
            keys = jax.random.split(jax.random.fold_in(key, 1), edges)
            new = jax.vmap(lambda models, key: combined(hyper.edge, models, round, key))(split, keys)
            return jax.tree.map(lambda leaf: leaf.reshape(slots, *leaf.shape[2:]), new)
        weights = by_edge(cohort.ids, cohort.sizes)
        total = jnp.sum(weights, axis=1)
        means = trees.mix(models, weights / jnp.maximum(total, 1.0)[:, None])
        return jax.vmap(trees.where)(total > 0, means, state.models)

    def at_cloud(models, round, key):
        if hyper.cloud == "mean":
            return trees.broadcast(trees.mean(models, weights=shares()), slots)
        return combined(hyper.cloud, models, round // hyper.period, key)

    def server_update(state, uploads, cohort, round, key):
        models = at_edges(state, uploads["model"], cohort, round, key)
        is_turn = (round + 1) % hyper.period == 0
        return Models(jax.lax.cond(is_turn, at_cloud, lambda models, *_: models, models, round, key)), {}

    def traffic(usual, state, uploads, cohort, round):
        """Between edges and the cloud: 2 S models if it is the cloud's turn."""
        size = usual.up[0].size
        return usual._replace(peer=(Parcels.of(jnp.where((round + 1) % hyper.period == 0, 2 * slots, 0), size),))

    return Strategy(
        init,
        dispatch,
        plain_training(problem),
        server_update,
        select=None if hyper.edge == "mean" else select,
        global_model=lambda state: problem.model.mean(state.models, weights=shares()),
        models=view("models", stacked=True),
        traffic=traffic,
    )
