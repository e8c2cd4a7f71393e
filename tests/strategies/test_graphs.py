"""Graphs of clients: their weights, known spectral gaps, files and users' graphs, and rounds with absent clients."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import GRAPHS, graphs
from fedjax_mr.strategies.graphs import Hyper, graph_of

ALL = [(name, count) for name in GRAPHS for count in (6, 8, 12)]


def graph(name, count, cohort=None, **settings):
    return graph_of(Hyper(graph=name, **settings), count, count if cohort is None else cohort)


def matrix_of(graph, count):
    """The matrix of a round's map, by what it does to the rows of the identity: (round, active [N]) -> [N, N]."""
    mixed = jax.jit(lambda round, active: trees.mix({"w": jnp.eye(count)}, graph.map(round, active))["w"])
    return lambda round=0, active=None: np.asarray(mixed(round, np.ones(count, bool) if active is None else active))


@pytest.mark.parametrize("name, count", ALL)
def test_rows_and_columns_sum_to_one_and_the_map_is_the_matrix(name, count):
    one = graph(name, count)
    np.testing.assert_allclose(one.weights.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(one.weights.sum(axis=2), 1, atol=1e-12)
    matrix = matrix_of(one, count)
    for round in range(len(one.weights) + 1):
        np.testing.assert_allclose(matrix(round), one.weights[round % len(one.weights)], atol=1e-6)


def test_all_clients_of_a_star_are_neighbours_of_the_first_one():
    edges = graph("star", 5).weights[0] * ~np.eye(5, dtype=bool) > 0
    assert edges[0, 1:].all() and edges[1:, 0].all() and not edges[1:, 1:].any()


@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in ("exponential", "one_peer")])
def test_clients_that_do_not_take_part_keep_their_models_and_the_mean_stays(name):
    active = np.arange(8) % 3 != 0
    found = matrix_of(graph(name, 8, cohort=5), 8)(0, active)
    np.testing.assert_allclose(found.sum(axis=0), 1, atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)
    assert found.min() >= -1e-7
    np.testing.assert_array_equal(found[~active], np.eye(8)[~active])


def test_a_dense_graph_is_one_product_and_a_sparse_one_a_few_sums(monkeypatch):
    kind = lambda: type(graph("ring", 6).map(jnp.int32(0), jnp.ones(6, bool)))
    assert kind() is trees.Neighbours
    dense = matrix_of(graph("complete", 6), 6)()
    monkeypatch.setattr(graphs, "MOST_ADDED", 1)
    assert kind() is not trees.Neighbours
    np.testing.assert_allclose(matrix_of(graph("ring", 6), 6)()[0, 1], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(matrix_of(graph("complete", 6), 6)(), dense, atol=1e-6)


def test_the_contraction_is_that_of_the_literature():
    cosine = np.cos(2 * np.pi / 12)
    assert graph("ring", 12).contraction == pytest.approx((1 + 2 * cosine) / 3)
    assert graph("complete", 12).contraction == 0
    assert graph("exponential", 16).contraction == pytest.approx(1 - 2 / (1 + 4))  # Ying et al. 2021, proposition 1
    assert graph("one_peer", 16).contraction == 0  # exact averages after log2 N rounds, lemma 1
    turns = graph("one_peer", 12)
    after_all = np.linalg.norm(np.linalg.multi_dot(turns.weights[::-1]) - 1 / 12, 2)
    assert turns.contraction == pytest.approx(after_all ** (1 / 4)) and 0 < turns.contraction < 1  # of one round
    one = graph("torus", 16).contraction
    assert graph("ring", 16).contraction > one > graph("regular", 16, degree=8).contraction


@pytest.mark.parametrize("count, degree", [*((12, degree) for degree in (2, 3, 4, 5, 7)), (64, 16), (64, 33)])
def test_a_random_regular_graph_has_its_degree_is_connected_and_follows_its_seed(count, degree):
    edges = graph("regular", count, degree=degree).weights[0] > 0
    assert (edges.sum(axis=1) == degree + 1).all() and np.array_equal(edges, edges.T)
    assert (np.linalg.matrix_power(edges.astype(float), count) > 0).all()
    other = graph("regular", count, degree=degree, graph_seed=1).weights[0] > 0
    assert (edges != other).any()


def test_each_possible_degree_has_a_graph():
    for count in (3, 4, 5, 8, 9):
        for degree in range(2, count):
            if degree * count % 2 == 0:
                edges = graphs.regular(count, degree, np.random.default_rng(0))
                assert (edges.sum(axis=1) == degree).all() and not np.diag(edges).any()


def test_a_file_and_graphs_of_users(tmp_path, monkeypatch):
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n1 2\n2 3\n")
    line = graph(str(path), 4)
    np.testing.assert_allclose(line.weights[0, 1], [1 / 3] * 3 + [0], atol=1e-12)
    path.write_text("0 1\n")
    assert graph(str(path), 4).contraction == 1  # a changed file, without a path from 0 to 2
    for made in (np.full((4, 4), 0.25), lambda count, degree, rng: graphs.complete(count, degree, rng)):
        GRAPHS["mine"] = made
        assert graph("mine", 4).contraction == 0
    GRAPHS["mine"] = types.SimpleNamespace(nodes=range(4), edges=[(0, 1), (1, 2), (2, 3)])  # as networkx
    np.testing.assert_array_equal(graph("mine", 4).weights, line.weights)
    del GRAPHS["mine"]


def test_a_graph_of_networkx():
    networkx = pytest.importorskip("networkx")
    GRAPHS["mine"] = networkx.petersen_graph()  # ten nodes with three neighbours each
    found = graph("mine", 10)
    del GRAPHS["mine"]
    neighbours = networkx.to_numpy_array(networkx.petersen_graph())
    np.testing.assert_allclose(found.weights[0], neighbours / 4 + np.eye(10) / 4, atol=1e-12)
    assert found.contraction == pytest.approx(0.5)  # eigenvalues 3, 1 and -2 of the graph: (1 + 1) / 4


@pytest.mark.parametrize(
    "name, count, cohort, words",
    [
        ("rign", 6, 6, "did you mean 'ring'"),
        ("none.txt", 6, 6, "cannot read the graph none.txt"),
        ("torus", 7, 7, "use hyper.graph=ring"),
        ("regular", 5, 5, "degree of at least"),
        ("exponential", 6, 3, "is directed"),
    ],
)
def test_bad_graphs_are_one_line(name, count, cohort, words):
    with pytest.raises(UserError, match=words) as error:
        graph(name, count, cohort, degree=5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "made, words",
    [
        (np.eye(3), "has the shape"),
        (np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]])[:, [0, 1, 2, 0]], "is directed"),
        (np.array([[0.5, 0.5], [0.9, 0.1]]).repeat(2, 0).repeat(2, 1) / 2, "must sum to one"),
        (types.SimpleNamespace(nodes="abcd", edges=[]), "the nodes must be the numbers"),
    ],
)
def test_bad_rows_of_users_are_one_line(made, words):
    GRAPHS["mine"] = made
    with pytest.raises(UserError, match=words):
        graph("mine", 4)
    del GRAPHS["mine"]


def test_a_file_with_wrong_clients_is_one_line(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("0 4\n")
    with pytest.raises(UserError, match="two numbers of clients in 0"):
        graph(str(path), 4)
