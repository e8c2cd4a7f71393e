"""CluSamp: clustered sampling selects clients with dissimilar model updates.

Fraboni, Vidal, Kameni, Lorenzi: Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection in
Federated Learning, ICML 2021, Algorithm 2 ("representative gradients"). The server stores the last model update of each
client. Between rounds it clusters the clients with Ward's method, and draws each of the K clients of a round from a
distribution of its own. Client i is drawn K n_i / sum n times per round in expectation, so the plain mean of the
K models is unbiased.

Deviations and choices:
* Before the first round no updates are known. The distributions are then those of the paper's Algorithm 1, by numbers
  of samples. The released code also clusters the first round, on a table of zeros, so that the clusters are arbitrary.
* A client with more than 1/K of all samples fills several distributions; the released code stops with an error.
* A client that is drawn twice is represented by the mean of its two updates; in the released code, by the last one.
* Clusters and weights are compared as integers; in the released code, in units of 1e-10.
* Ties: clusters of equal weight are taken in the order of scipy's cluster numbers, and equal clients in Algorithm 1 by
  descending id. This is the order of the released code if its sort is stable, which numpy's default sort does not
  guarantee.
* ``variant=authors`` is CluSamp as run by FedMR's authors. The models are weighted by numbers of samples once more.
  Only the column of the last drawn client is updated in the distance table, which stays almost empty. They use the L1
  distance.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Cohort, Problem, Strategy
from fedjax_mr.strategies.parts import averaging


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of CluSamp."""

    distance: str = field(
        "arccos",
        "distance between the updates of two clients: their angle (arccos), L1 distance, or squared L2 distance (L2)",
        choices=("arccos", "L1", "L2"),
        source="Fraboni et al. 2021; code of FedMR's authors: L1",
    )
    variant: str = field(
        "original",
        "original: Algorithm 2; authors: code of FedMR's authors, weighted by samples, with a sparse distance table",
        choices=("original", "authors"),
        source="Fraboni et al. 2021",
    )


class State(NamedTuple):
    """The global model and the statistics that select the next clients."""

    model: Variables
    changes: Any  # last parameter update of each client [N, ...]; zero before the first one
    distances: jax.Array  # distances between the updates [N, N]
    distributions: jax.Array  # probability of each client in each of the K draws [K, N]


def distances_to(one: Any, all: Any, *, kind: str) -> jax.Array:
    """The distances [N] of one tree to N stacked trees; the angle to a zero tree is 0."""
    sums = lambda function: functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(function, all, one)))
    rows = lambda leaf: leaf.reshape(leaf.shape[0], -1)
    if kind == "L1":
        return sums(lambda a, b: jnp.sum(rows(jnp.abs(a - b[None])), axis=1))
    if kind == "L2":
        return sums(lambda a, b: jnp.sum(rows(jnp.square(a - b[None])), axis=1))
    exact = jax.lax.Precision.HIGHEST
    product = sums(lambda a, b: jnp.matmul(rows(a), b.reshape(-1), precision=exact))
    scale = jnp.sqrt(jax.vmap(trees.squared_norm)(all) * trees.squared_norm(one))
    cosine = jnp.clip(product / jnp.where(scale > 0, scale, 1.0), -1.0, 1.0)
    return jnp.where(scale > 0, jnp.arccos(cosine), 0.0)


def by_size(sizes: jax.Array, count: int) -> jax.Array:
    """The K = ``count`` distributions [K, N] of the paper's Algorithm 1.

    The clients, each with a mass of K n_i / sum n, fill K distributions of mass 1 one after the other, largest client
    first. In a tie the client with the larger id comes first, as in the released code.
    """
    order = jnp.flip(jnp.argsort(sizes))
    ends = jnp.cumsum(sizes[order]).astype(jnp.float32) * (count / jnp.sum(sizes).astype(jnp.float32))
    starts = jnp.concatenate([jnp.zeros(1), ends[:-1]])
    offsets = jnp.arange(count, dtype=jnp.float32)[:, None]
    shares = jnp.clip(ends[None] - offsets, 0, 1) - jnp.clip(starts[None] - offsets, 0, 1)
    return jnp.zeros_like(shares).at[:, order].set(shares)


def groups(distances: np.ndarray, sizes: np.ndarray, count: int) -> list[list[int]]:
    """The largest sub-trees of Ward's tree with at most 1/K of all samples, K = ``count``; host code.

    As in the authors' code, Ward's method takes the rows of the distance table [N, N] as points of a Euclidean space,
    and the groups are in the order of scipy's cluster numbers. A client with more than 1/K of all samples forms its own
    group.
    """
    from scipy.cluster.hierarchy import fcluster, ward
    from scipy.spatial.distance import pdist

    if len(sizes) == 1:
        return [[0]]
    tree, weights = ward(pdist(distances)), sizes.tolist()
    for left, right in tree[:, :2].astype(int):
        weights.append(weights[left] + weights[right])
    tree[:, 2] = weights[len(sizes) :]  # replaces the heights; integers, so the cut below is exact
    numbers = fcluster(tree, sizes.sum() // count, criterion="distance")
    return [np.flatnonzero(numbers == number).tolist() for number in range(1, numbers.max() + 1)]


def allocate(groups: Sequence[Sequence[int]], sizes: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The distributions [K, N] of K = ``count`` draws, from groups of clients; host code.

    All quantities are integers: client i has a mass of K n_i, and each distribution has a capacity of sum n. The K
    largest groups first fill one distribution each. Then the clients of all groups, smallest group first and in random
    order within a group, fill the remaining capacity. In a tie the earlier group counts as smaller.
    """
    capacity = int(sizes.sum())
    ordered = sorted(groups, key=lambda group: sizes[group].sum())
    masses = np.zeros((count, len(sizes)), np.int64)
    remaining, free = [count * int(size) for size in sizes], [capacity] * count

    def fill(distribution: int, client: int) -> None:
        amount = min(remaining[client], free[distribution])
        masses[distribution, client] += amount
        remaining[client] -= amount
        free[distribution] -= amount

    for distribution, group in enumerate(ordered[-count:]):
        for client in group:
            fill(distribution, client)
    for group in ordered:
        for client in rng.permutation(group):
            for distribution in range(count):
                fill(distribution, client)
    return masses / capacity


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build CluSamp."""

    def init(key):
        model, count = problem.model.init(key), problem.num_clients
        changes = trees.broadcast(trees.zeros_like(model["params"]), count)
        return State(model, changes, jnp.zeros((count, count)), by_size(problem.sizes, problem.cohort_size))

    def select(state, round, key):
        ids = jax.random.categorical(key, jnp.log(state.distributions)).astype(jnp.int32)
        return Cohort(ids, problem.sizes[ids])

    def server_update(state, uploads, cohort, round, key):
        ids, models = cohort.ids, uploads["model"]
        change = lambda params: trees.subtract(params, state.model["params"])
        changes = trees.put(state.changes, ids, jax.vmap(change)(models["params"]))
        rows = jax.lax.map(
            lambda id: distances_to(trees.take(changes, id), changes, kind=hyper.distance).at[id].set(0.0), ids
        )
        if hyper.variant == "authors":
            last = ids[-1]
            distances = state.distances.at[ids, last].set(rows[:, last])
            model = trees.mean(models, weights=cohort.sizes)
        else:
            distances = state.distances.at[ids].set(rows).at[:, ids].set(rows.T)
            model = trees.mean(models)
        return State(model, changes, distances, state.distributions), {}

    def between_rounds(state, round, key, client):
        sizes, count = np.asarray(problem.sizes, np.int64), problem.cohort_size
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        clusters = groups(np.asarray(state.distances, np.float64), sizes, count)
        return state._replace(distributions=jnp.asarray(allocate(clusters, sizes, count, rng), jnp.float32)), {}

    return averaging(problem)._replace(
        init=init, select=select, server_update=server_update, between_rounds=between_rounds
    )
