"""Gossip-MR: pairs of neighbours swap layers, and every sum over the clients stays."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.errors import UserError
from fedjax_mr.strategies import gossipmr
from fedjax_mr.strategies.graphs import GRAPHS, Hyper, graph_of
from fedjax_mr.strategies.traffic import usual_traffic
from fedjax_mr.testing.federations import first_cohort, random_like

UNDIRECTED = [name for name in GRAPHS if name not in ("exponential", "one_peer")]


def drawn_pairs(graph, count, active):
    """The pairs of neighbours of each of the units [count, N], in one program."""
    draw = jax.jit(lambda active, key: gossipmr.pairs(graph, count, jnp.int32(0), active, key))
    return np.asarray(draw(active, jax.random.key(0)))


@pytest.mark.parametrize("name", UNDIRECTED)
def test_units_are_swapped_by_disjoint_pairs_of_active_neighbours(name):
    graph, active = graph_of(Hyper(graph=name), 8, 5), np.arange(8) != 2
    found = drawn_pairs(graph, 200, active)
    clients = np.arange(8)
    for permutation in found:
        np.testing.assert_array_equal(permutation[permutation], clients)
    moved = found != clients
    assert not moved[:, 2].any() and not (found == 2)[:, active].any()
    assert all(graph.weights[0][i, j] > 0 for row in found for i, j in enumerate(row) if i != j)
    assert len({tuple(row) for row in found}) > 3  # each unit has pairs of its own


def test_all_edges_of_a_ring_are_equally_likely():
    graph = graph_of(Hyper(), 6, 6)
    found = drawn_pairs(graph, 6000, np.ones(6, bool))
    share = (found == (np.arange(6) + 1) % 6).mean(axis=0)
    np.testing.assert_allclose(share, 1 / 3, atol=0.03)  # an edge is the smallest of three


def test_a_round_keeps_the_copies_of_each_tensor_and_says_what_it_sent(engine):
    one = engine("gossipmr", "normed", cohort=6)
    problem, strategy = one.constants.problem, one.strategy
    state = jax.device_get(one.init()).server
    uploads = random_like(jax.tree.map(lambda leaf: leaf + 1, state.models))  # no number is 0
    cohort = first_cohort(problem)
    new, info = jax.jit(strategy.server_update)(state, {"model": uploads}, cohort, jnp.int32(3), jax.random.key(0))
    moved = 0
    for old, mixed in zip(jax.tree.leaves(uploads), jax.tree.leaves(new.models), strict=True):
        rows = lambda leaf: collections.Counter(np.asarray(row).tobytes() for row in leaf)
        assert rows(old) == rows(mixed)
        moved += sum(np.any(a != b) * a.nbytes for a, b in zip(np.asarray(old), np.asarray(mixed), strict=True))

    @jax.jit
    def traffic(state, uploads, round):
        return strategy.traffic(usual_traffic({}, {"model": uploads}), state, {"model": uploads}, cohort, round)

    assert traffic(state, uploads, jnp.int32(3)).num_bytes() == (0, 0, moved) and moved > 0
    spread = lambda models: sum(np.sum(np.var(leaf, axis=0)) for leaf in jax.tree.leaves(models["params"]))
    np.testing.assert_allclose(float(info["consensus"]) ** 2, spread(uploads), rtol=1e-4)


def test_the_pairs_follow_from_the_round_and_the_seed_of_the_graph(federation):
    problem = federation("linear", cohort=6).problem

    def drawn(seed):
        strategy = gossipmr.build(gossipmr.Hyper(graph_seed=seed), problem)
        start = jax.jit(strategy.init)(jax.random.key(0))
        rows = jax.tree.map(lambda leaf: leaf * 0 + np.arange(6.0).reshape(6, *[1] * (leaf.ndim - 1)), start.models)
        update = jax.jit(
            lambda round: strategy.server_update(start, {"model": rows}, first_cohort(problem), round, None)
        )
        return [np.asarray(jax.tree.leaves(update(np.int32(round))[0].models)[0]).tobytes() for round in range(8)]

    zero, one = drawn(0), drawn(1)
    assert len(set(zero)) > 1 and zero == drawn(0) != one


def test_in_expectation_it_averages_like_dpsgd_with_other_weights():
    """The mean of the permutations is a symmetric matrix on the edges of the graph whose rows sum to one."""
    graph = graph_of(Hyper(graph="torus"), 9, 9)
    found = drawn_pairs(graph, 4000, np.ones(9, bool))
    expected = np.eye(9)[found].mean(axis=0)
    np.testing.assert_allclose(expected, expected.T, atol=0.03)
    np.testing.assert_array_equal(expected[~np.eye(9, dtype=bool)] > 0, graph.weights[0][~np.eye(9, dtype=bool)] > 0)


def test_a_directed_graph_is_refused(engine):
    with pytest.raises(UserError, match="is directed"):
        engine("gossipmr", "linear", hyper=gossipmr.Hyper(graph="one_peer"), cohort=6)


def test_the_tensors_of_a_layer_travel_together(engine):
    one = engine("gossipmr", "normed", hyper=gossipmr.Hyper(unit="layer"), cohort=6)
    state = jax.device_get(one.init()).server
    number = lambda leaf: np.arange(6, dtype=np.float32).reshape(-1, *(1,) * (leaf.ndim - 1))
    numbered = jax.tree.map(lambda leaf: np.zeros_like(leaf) + number(leaf), state.models)
    cohort = first_cohort(one.constants.problem)
    new, _ = jax.jit(one.strategy.server_update)(state, {"model": numbered}, cohort, jnp.int32(0), jax.random.key(0))
    norm = jax.tree.leaves(new.models["params"]["body"]), jax.tree.leaves(new.models["batch_stats"]["body"])
    of_client = [np.asarray(leaf).reshape(6, -1)[:, 0] for leaves in norm for leaf in leaves]
    for other in of_client[1:]:
        np.testing.assert_array_equal(of_client[0], other)
