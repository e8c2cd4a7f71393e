"""Gossip-MR: FedMR without a server; neighbours swap layers instead of averaging models.

Ours, without a paper. In a round each client trains its model. Then, for each unit of recombination (a tensor or a
layer, as in FedMR), disjoint pairs of neighbours are drawn at random, and the two clients of a pair swap their copies
of the unit. So the copies of every unit are permuted, as in FedMR (Hu et al., KDD 2024), which draws the permutation
among all clients. The mean of all models does not change, and in expectation D-PSGD averages what Gossip-MR swaps.

The pairs follow from ``graph_seed`` and the round, which all clients know. So they agree without a message, and send
nothing but layers. Each edge between two active clients draws a random number. A pair is an edge whose number is
smaller than those of all edges that it touches.

Deviation from FedMR: here each client trains the model that it has, while in FedMR the server sends each model to
another client in every round.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.settings import field
from fedjax_mr.strategies import fedmr, graphs
from fedjax_mr.strategies.decentralised import active, consensus, decentralised, only_averages, put_active
from fedjax_mr.strategies.graphs import Graph, graph_of
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.traffic import Parcels, Traffic


@dataclasses.dataclass(frozen=True)
class Hyper(graphs.Hyper):
    """Hyper-parameters of Gossip-MR."""

    unit: str = field(
        "leaf",
        "what neighbours swap: a tensor (leaf), or all tensors of a module (layer)",
        choices=("leaf", "layer"),
        source="as fedmr_unit",
    )


def pairs(graph: Graph, num_units: int, round: jax.Array, active: jax.Array, key: jax.Array) -> jax.Array:
    """Draw disjoint pairs of active neighbours for each unit, as permutations [num_units, N]; consumes ``key``."""
    clients = jnp.arange(graph.num_clients, dtype=jnp.int32)[None]
    ids, edges = graph.turn(graph.ids, round), graph.turn(_edges(graph), round)
    number = jax.random.uniform(key, (num_units, int(_edges(graph).max(initial=0)) + 1))[:, edges]
    number = jnp.where(graph.sent(round, active)[None] > 0, number, 2.0)  # [U, N, S]
    nearest = jnp.argmin(number, axis=2)
    partner = jnp.where(jnp.min(number, axis=2) < 2, ids[clients, nearest], clients)
    return jnp.where(jnp.take_along_axis(partner, partner, axis=1) == clients, partner, clients)


def _edges(graph: Graph) -> np.ndarray:
    """A number for each pair of neighbours, the same on both sides [T, N, S]."""
    own = np.arange(graph.num_clients)[None, :, None]
    low, high = np.minimum(own, graph.ids), np.maximum(own, graph.ids)
    return np.unique(low * graph.num_clients + high, return_inverse=True)[1].reshape(low.shape).astype(np.int32)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build Gossip-MR.

    Raises:
      UserError: the graph is directed.
    """
    graph = graph_of(hyper, problem.num_clients, problem.cohort_size)
    if not graph.undirected:
        raise UserError(f"gossipmr swaps layers between two neighbours, but hyper.graph={hyper.graph} is directed")
    units = fedmr.recombination_units(fedmr.Hyper(unit=hyper.unit), problem.layers)

    def drawn(round, cohort):
        key = jax.random.fold_in(random_key(hyper.graph_seed), round)
        return pairs(graph, len(units), round, active(problem, cohort), key)

    def server_update(state, uploads, cohort, round, key):
        trained = put_active(state.models, uploads["model"], cohort)
        models = trees.mix(trained, drawn(round, cohort), units=units)
        return state._replace(models=models), consensus(problem, models)

    def traffic(usual, state, uploads, cohort, round):
        leaves = jax.tree.leaves(uploads["model"])
        sizes = [sum(leaves[leaf].size * leaves[leaf].dtype.itemsize for leaf in unit) for unit in units]
        swapped = jnp.sum(drawn(round, cohort) != jnp.arange(graph.num_clients)[None], axis=1)
        return Traffic(peer=tuple(Parcels.of(swapped[u], size // len(cohort.ids)) for u, size in enumerate(sizes)))

    return decentralised(problem, graph)._replace(
        server_update=server_update,
        traffic=traffic,
        neighbours=only_averages("it swaps layers between two clients and averages nothing; use dpsgd"),
    )
