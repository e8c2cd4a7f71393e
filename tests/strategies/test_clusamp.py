"""CluSamp: its distributions, its distances, and three rounds by hand."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster import hierarchy
from scipy.spatial.distance import pdist, squareform

from fedjax_mr.strategies import clusamp
from fedjax_mr.strategies.clusamp import Hyper

by_size = jax.jit(clusamp.by_size, static_argnums=1)
many_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=14).map(np.array)


@settings(max_examples=60, deadline=None)
@given(sizes=many_sizes, data=st.data())
def test_every_draw_and_every_client_gets_its_share(sizes, data):
    """Rows sum to 1 and columns to K n_i / sum n, also where a client has more than 1/K of all samples."""
    count = data.draw(st.integers(1, len(sizes)))
    seed = data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    distances = squareform(pdist(rng.normal(size=(len(sizes), 3)))) if len(sizes) > 1 else np.zeros((1, 1))
    clusters = clusamp.groups(distances, sizes, count)
    assert sorted(client for group in clusters for client in group) == list(range(len(sizes)))
    assert all(len(group) == 1 or count * sizes[group].sum() <= sizes.sum() for group in clusters)
    assert_fair(clusamp.allocate(clusters, sizes, count, rng), sizes, tolerance=1e-12)


@pytest.mark.parametrize("sizes, count", [([5, 1, 30, 2, 9], 4), ([7], 1), ([3] * 8, 8)])
def test_before_the_first_round_too(sizes, count):
    assert_fair(np.asarray(by_size(jnp.asarray(sizes), count)), np.array(sizes), tolerance=1e-5)


def assert_fair(distributions, sizes, *, tolerance):
    assert distributions.min() >= 0
    np.testing.assert_allclose(distributions.sum(axis=1), 1, atol=tolerance)
    np.testing.assert_allclose(distributions.sum(axis=0), len(distributions) * sizes / sizes.sum(), atol=tolerance)


@pytest.mark.parametrize("count", [2, 5, 10])
def test_groups_are_those_of_scipy_with_weights_for_heights(count):
    """As in the authors' code: the square table as observations, heights replaced by weights, cut at 1/K."""
    rng = np.random.default_rng(count)
    sizes = rng.integers(5, 25, size=40)
    distances = squareform(pdist(rng.normal(size=(40, 4)), "cityblock"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hierarchy.ClusterWarning)
        tree = hierarchy.linkage(distances, "ward")
    weights = list(sizes / sizes.sum())
    for left, right in tree[:, :2].astype(int):
        weights.append(weights[left] + weights[right])
    tree[:, 2] = weights[40:]
    labels = hierarchy.fcluster(tree, 1 / count, criterion="distance")
    expected = {frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels)}
    assert {frozenset(group) for group in clusamp.groups(distances, sizes, count)} == expected
    assert len(expected) >= count


def test_the_largest_groups_are_poured_first_and_the_smallest_fill_up():
    sizes = np.array([4, 2, 3, 1, 2])  # each brings twice that, and each of the two distributions holds 12
    distributions = clusamp.allocate([[0], [1, 2], [3], [4]], sizes, 2, np.random.default_rng(0)) * 12
    np.testing.assert_array_equal(
        distributions[:, :3], [[8, 0, 0], [0, 4, 6]]
    )  # the two largest, the smaller one first
    np.testing.assert_array_equal(distributions[:, 3:], [[2, 2], [0, 2]])  # client 3 first; client 4 is split


# 28 clients, many of one size, 64 samples: their shares are whole in the released unit of 1e-10.
TIED = [1] * 8 + [2] * 8 + [3] * 8 + [4] * 4
UNIT = 10**10


def pour_as_released(rows, clients, weights):
    """The released loop, transcribed: clients in turn fill the rows, the next row as soon as one holds a unit."""
    row = 0
    for client in clients:
        left = weights[client]
        while left:
            amount = min(UNIT - rows[row].sum(), left)
            rows[row, client], left = amount, left - amount
            row += rows[row].sum() == UNIT
    return rows / UNIT


@pytest.mark.parametrize("count", [2, 4, 5, 8])
def test_before_the_first_round_as_released(count):
    """The released Algorithm 1, transcribed; its ascending sort, then reversed, is taken to keep equals in order."""
    sizes = np.random.default_rng(count).permutation(TIED)
    order = np.flip(np.argsort(sizes, kind="stable"))
    expected = pour_as_released(np.zeros((count, 28), np.int64), order, sizes * count * UNIT // 64)
    np.testing.assert_allclose(by_size(jnp.asarray(sizes), count), expected, atol=1e-6)


@pytest.mark.parametrize("table", ["points", "equal points", "zeros"])
@pytest.mark.parametrize("count", [4, 5, 8])
def test_distributions_as_released(count, table):
    """The released Algorithm 2, transcribed, with equal clients and equal groups; sorts keep equals in order."""
    rng = np.random.default_rng(count)
    sizes = rng.permutation(TIED)
    points = {"points": rng.normal(size=(28, 3)), "equal points": rng.integers(0, 2, (28, 2)), "zeros": [[0]] * 28}
    distances = squareform(pdist(points[table], "cityblock"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hierarchy.ClusterWarning)
        tree = hierarchy.linkage(distances, "ward")
    shares = (sizes / 64).tolist()
    for left, right in tree[:, :2].astype(int):
        shares.append(shares[left] + shares[right])
    tree[:, 2] = [int(share * UNIT) for share in shares[28:]]
    numbers = hierarchy.fcluster(tree, int(UNIT / count), criterion="distance")
    weights = sizes * count * UNIT // 64
    totals = [weights[numbers == number].sum() for number in range(1, numbers.max() + 1)]
    by_weight = 1 + np.argsort(totals, kind="stable")
    rows = np.zeros((count, 28), np.int64)
    for row, number in zip(rows, by_weight[-count:], strict=True):
        row[numbers == number] = weights[numbers == number]
    shuffle = np.random.default_rng(7)
    others = [shuffle.permutation(np.flatnonzero(numbers == number)) for number in by_weight[:-count]]
    expected = pour_as_released(rows, [client for group in others for client in group], weights)
    assert len(set(totals)) < len(totals)  # there are ties

    clusters = clusamp.groups(distances, sizes, count)
    distributions = clusamp.allocate(clusters, sizes, count, np.random.default_rng(7))
    np.testing.assert_allclose(distributions, expected, atol=1e-9)


@pytest.mark.parametrize("kind", ["L1", "L2", "arccos"])
def test_distances(kind):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(5, 7)).astype(np.float32)
    vectors[2] = 0
    all = {"a": vectors[:, :6].reshape(5, 2, 3), "b": vectors[:, 6]}
    one = jax.tree.map(lambda leaf: leaf[1], all)
    result = np.asarray(jax.jit(functools.partial(clusamp.distances_to, kind=kind))(one, all))
    for i in (0, 2, 3, 4):
        a, b = vectors[1].astype(float), vectors[i].astype(float)
        norms = np.linalg.norm(a) * np.linalg.norm(b)
        angle = np.arccos(a @ b / norms) if norms else 0.0
        expected = {"L1": np.abs(a - b).sum(), "L2": ((a - b) ** 2).sum(), "arccos": angle}[kind]
        assert result[i] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "hyper",
    [pytest.param(Hyper(), id="original"), pytest.param(Hyper("L1", "authors"), id="authors", marks=pytest.mark.slow)],
)
def test_three_rounds_equal_the_equations(transcription, hyper):
    by_hand = transcription("clusamp", hyper)
    kind, sizes = hyper.distance, np.array(by_hand.sizes)
    model = by_hand.read(by_hand.progress.server.model)
    flat = lambda weights: np.concatenate([leaf.numpy().reshape(-1) for leaf in weights])
    changes, distances = np.zeros((4, len(flat(model)))), np.zeros((4, 4))

    def distance(a, b):
        if kind == "L1":
            return np.abs(a - b).sum()
        norms = np.linalg.norm(a) * np.linalg.norm(b)
        return np.arccos(np.clip(a @ b / norms, -1, 1)) if norms else 0.0

    for clients in by_hand.rounds(3):
        trained = {i: by_hand.train(model, i) for i in set(clients)}  # full batches: no key matters
        for i in trained:
            changes[i] = flat(trained[i]) - flat(model)
        if hyper.variant == "original":
            distances = np.array(
                [[0 if i == j else distance(changes[i], changes[j]) for j in range(4)] for i in range(4)]
            )
            model = by_hand.mean([trained[i] for i in clients])
        else:
            for i in trained:
                distances[i, clients[-1]] = 0 if i == clients[-1] else distance(changes[i], changes[clients[-1]])
            model = by_hand.mean([trained[i] for i in clients], by_hand.sizes_of(clients))
        server = by_hand.progress.server
        by_hand.check(server.model, model)
        np.testing.assert_allclose(server.distances, distances, atol=1e-3)
        np.testing.assert_allclose(np.asarray(server.distributions).sum(axis=0), 3 * sizes / sizes.sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_equal_clients_who_all_take_part_are_fedavg(engine, close, network):
    """Every client fills a distribution of its own."""
    federation = dict(sizes=(8, 8, 8, 8), cohort=4)
    clustered, average = engine("clusamp", network, **federation), engine("fedavg", network, **federation)
    close(clustered.run(clustered.init(), 3)[0].server.model, average.run(average.init(), 3)[0].server.model)


def test_draws_follow_the_distributions(federation):
    problem = federation().problem
    strategy = clusamp.build(Hyper(), problem)
    state = jax.jit(strategy.init)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 4000)
    cohorts = jax.jit(jax.vmap(lambda key: strategy.select(state, key)))(keys)
    shares = np.stack([np.bincount(row, minlength=6) for row in np.asarray(cohorts.ids).T]) / 4000
    np.testing.assert_allclose(shares, state.distributions, atol=0.03)
    np.testing.assert_array_equal(cohorts.sizes, np.asarray(problem.sizes)[np.asarray(cohorts.ids)])
