"""CluSamp: one client from each of K groups of clients with similar changes of the model.

Fraboni, Vidal, Kameni, Lorenzi: Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection in
Federated Learning, ICML 2021, Algorithm 2 ("representative gradients"). The server keeps every client's last change of
the model; between rounds it groups the clients by Ward's method, and each of the K drawn clients comes from a
distribution of its own. Client i is expected K n_i / sum n times in a round, so the plain mean of the K models is
unbiased.

Deviations. Before the first round no change is known and the distributions are those of the paper's Algorithm 1, by
numbers of samples; the released code groups the first round too, by a table of zeros, in which groups are an accident
of Ward's method. A client with more than 1/K of all samples fills several distributions (the released code stops). A
client that is drawn twice is represented by the mean of its two changes (there by the last). Groups and weights are
compared in whole numbers, there in units of 1e-10. Groups of equal weight are taken in the order of scipy's numbers for
them, and equal clients in Algorithm 1 by descending id: so does the released code wherever its sort keeps the order of
equals, which numpy's default sort does not promise. ``variant=authors`` is CluSamp as the authors of FedMR ran it:
models weighted by numbers of samples once more, and of the table of distances only the column of the last drawn client
is brought up to date, so that it stays almost empty; they take the L1 distance.
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
from fedjax_mr.strategies.base import Cohort, Problem, Strategy, averaging
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """CluSamp's own settings."""

    distance: str = field(
        "arccos",
        "between two clients' changes: the angle, the sum of absolute differences, the sum of their squares",
        choices=("arccos", "L1", "L2"),
        source="Fraboni et al. 2021; the FedMR authors' code: L1",
    )
    variant: str = field(
        "original",
        "authors: the FedMR authors' code, weighted by samples, with a table of distances that stays almost empty",
        choices=("original", "authors"),
        source="Fraboni et al. 2021",
    )


class State(NamedTuple):
    """The global model and what the next choice of clients rests on."""

    model: Variables
    changes: Any  # each client's last change of the parameters [N, ...], zero before its first
    distances: jax.Array  # between the changes [N, N]
    distributions: jax.Array  # the probability of each client in each of the K draws [K, N]


def distances_to(one: Any, all: Any, *, kind: str) -> jax.Array:
    """The distances [N] of one tree to N stacked ones; the angle to a zero is 0."""
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

    The clients, each with K n_i / sum n, are poured one after the other, largest first, into K vessels that hold 1. Of
    equal clients the last is the first, as released.
    """
    order = jnp.flip(jnp.argsort(sizes))
    poured = jnp.cumsum(sizes[order]).astype(jnp.float32) * (count / jnp.sum(sizes).astype(jnp.float32))
    before = jnp.concatenate([jnp.zeros(1), poured[:-1]])
    bottoms = jnp.arange(count, dtype=jnp.float32)[:, None]
    contents = jnp.clip(poured[None] - bottoms, 0, 1) - jnp.clip(before[None] - bottoms, 0, 1)
    return jnp.zeros_like(contents).at[:, order].set(contents)


def groups(distances: np.ndarray, sizes: np.ndarray, count: int) -> list[list[int]]:
    """The largest sub-trees of Ward's tree that hold at most 1/K of all samples, K = ``count``; host code.

    As in the authors' code, the rows of the table of distances [N, N] are points between which Ward's method measures
    Euclidean distances, and the groups are in the order of scipy's numbers for them. A client that alone holds more is
    a group of its own.
    """
    from scipy.cluster.hierarchy import fcluster, ward
    from scipy.spatial.distance import pdist

    if len(sizes) == 1:
        return [[0]]
    tree, weights = ward(pdist(distances)), sizes.tolist()
    for left, right in tree[:, :2].astype(int):
        weights.append(weights[left] + weights[right])
    tree[:, 2] = weights[len(sizes) :]  # in place of heights; whole numbers, so the cut below is exact
    numbers = fcluster(tree, sizes.sum() // count, criterion="distance")
    return [np.flatnonzero(numbers == number).tolist() for number in range(1, numbers.max() + 1)]


def pour(groups: Sequence[Sequence[int]], sizes: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The distributions [K, N] of K = ``count`` draws for clients in groups; host code.

    In whole numbers: every client brings K n_i and every distribution holds sum n. The K largest groups are poured
    first, each into its own; the others, smallest first and their clients in random order, fill up what is left. Of
    equal groups those are smaller that come first.
    """
    capacity = int(sizes.sum())
    ordered = sorted(groups, key=lambda group: sizes[group].sum())
    contents = np.zeros((count, len(sizes)), np.int64)
    left, room = [count * int(size) for size in sizes], [capacity] * count

    def fill(distribution: int, client: int) -> None:
        amount = min(left[client], room[distribution])
        contents[distribution, client] += amount
        left[client] -= amount
        room[distribution] -= amount

    for distribution, group in enumerate(ordered[-count:]):
        for client in group:
            fill(distribution, client)
    for group in ordered:
        for client in rng.permutation(group):
            for distribution in range(count):
                fill(distribution, client)
    return contents / capacity


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build CluSamp."""

    def init(key):
        model, count = problem.model.init(key), problem.num_clients
        changes = trees.broadcast(trees.zeros_like(model["params"]), count)
        return State(model, changes, jnp.zeros((count, count)), by_size(problem.sizes, problem.cohort_size))

    def select(state, key):
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
        found = groups(np.asarray(state.distances, np.float64), sizes, count)
        return state._replace(distributions=jnp.asarray(pour(found, sizes, count, rng), jnp.float32)), {}

    return averaging(problem)._replace(
        init=init, select=select, server_update=server_update, between_rounds=between_rounds
    )
