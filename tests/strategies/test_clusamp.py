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

from fedjax_mr.strategies import Cohort, clusamp
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


@pytest.mark.slow  # quick: the tests by hand
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
    cohorts = jax.jit(jax.vmap(lambda key: strategy.select(state, 0, key)))(keys)
    shares = np.stack([np.bincount(row, minlength=6) for row in np.asarray(cohorts.ids).T]) / 4000
    np.testing.assert_allclose(shares, state.distributions, atol=0.03)
    np.testing.assert_array_equal(cohorts.sizes, np.asarray(problem.sizes)[np.asarray(cohorts.ids)])


def state_of(tiny, *, changes, distances=None, count=4):
    """A state whose model is 0 and whose clients have some last changes."""
    zeros = jnp.zeros((count, count)) if distances is None else jnp.asarray(distances, jnp.float32)
    return clusamp.State(
        {"params": {"w": jnp.zeros(2)}}, {"w": jnp.asarray(changes, jnp.float32)}, zeros, jnp.ones((2, count)) / count
    )


def updated(tiny, hyper, state, ids, models, sizes=(1, 3)):
    strategy = clusamp.build(hyper, tiny.problem((3, 1, 2, 2)))
    uploads = {"model": {"params": {"w": jnp.asarray(models, jnp.float32)}}}
    return strategy.server_update(state, uploads, Cohort(jnp.array(ids), jnp.array(sizes)), 0, None)[0]


def test_the_server_keeps_each_clients_last_change_and_measures_it_against_all_others(tiny):
    """In rows and columns of the clients of the round; a client that has never trained has the change 0."""
    start = state_of(tiny, changes=[[0, 0], [1, 1], [0, 0], [5, 5]], distances=np.full((4, 4), 9.0))
    start = start._replace(model={"params": {"w": jnp.array([10.0, 20.0])}})
    state = updated(tiny, Hyper("L1"), start, [3, 0], [[14, 20], [10, 18]])
    np.testing.assert_array_equal(state.changes["w"], [[0, -2], [1, 1], [0, 0], [4, 0]])
    np.testing.assert_array_equal(state.distances, [[0, 4, 2, 6], [4, 9, 9, 4], [2, 9, 9, 4], [6, 4, 4, 0]])
    np.testing.assert_array_equal(state.model["params"]["w"], [12, 19])  # the plain mean, in spite of the sizes


def test_a_client_that_is_drawn_twice_has_the_mean_of_its_changes(tiny):
    state = updated(tiny, Hyper("L2"), state_of(tiny, changes=np.zeros((4, 2))), [1, 1], [[4, 0], [0, 2]])
    np.testing.assert_array_equal(state.changes["w"], [[0, 0], [2, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(state.distances[1], [5, 0, 5, 5])


def test_the_authors_weight_by_samples_and_fill_one_column_of_the_table(tiny):
    state = updated(tiny, Hyper("L1", "authors"), state_of(tiny, changes=np.zeros((4, 2))), [3, 0], [[4, 0], [0, -2]])
    expected = np.zeros((4, 4))
    expected[3, 0] = 6  # of the first client from the last one
    np.testing.assert_array_equal(state.distances, expected)
    np.testing.assert_array_equal(state.model["params"]["w"], [1, -1.5])


def test_between_rounds_clients_with_similar_changes_share_a_draw(tiny):
    strategy = clusamp.build(Hyper(), tiny.problem((2, 2, 2, 2)))
    apart = 1 - np.kron(np.eye(2), np.ones((2, 2)))[[0, 2, 1, 3]][:, [0, 2, 1, 3]]  # clients 0 and 2, 1 and 3
    state = state_of(tiny, changes=np.zeros((4, 2)), distances=apart)
    new, info = strategy.between_rounds(state, 0, jax.random.key(0), None)
    assert info == {}
    assert sorted(np.asarray(new.distributions).tolist()) == [[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]]


def test_the_order_within_a_group_is_random_and_that_of_the_rounds_key(tiny):
    """The twelve clients fill three draws with groups of their own; the fourth draw and the rest take the others."""
    strategy = clusamp.build(Hyper(), tiny.problem((1,) * 14, 4))
    distances = 10.0 * (1 - np.kron(np.eye(7), np.ones((2, 2))))
    state = state_of(tiny, changes=np.zeros((14, 2)), distances=distances, count=14)
    drawn = [
        np.asarray(strategy.between_rounds(state, 0, jax.random.key(seed), None)[0].distributions)
        for seed in (0, 0, 1, 2, 3)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert len({each.tobytes() for each in drawn}) > 1


def test_each_draw_has_a_distribution_of_its_own(tiny):
    strategy = clusamp.build(Hyper(), tiny.problem((3, 1, 2, 2)))
    state = state_of(tiny, changes=np.zeros((4, 2)))._replace(distributions=jnp.array([[0.0, 0, 1, 0], [0, 1.0, 0, 0]]))
    cohort = strategy.select(state, 0, jax.random.key(0))
    assert (cohort.ids.tolist(), cohort.sizes.tolist()) == ([2, 1], [2, 1])
